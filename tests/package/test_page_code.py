"""The Python of the documents: all of it is Python, names what there is, and that of the guides is run."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from outboxq.postgres import Database
from tests.support import cli
from tests.support.pages import PAGES, README, ROOT, blocks, python_of, write_application

DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *PAGES]

# What a page takes for granted before its first block, and what is done behind its last one to have everything run.
START = """
from myapp.models import Base, Order, Price, Session, engine
from sqlalchemy import update
Base.metadata.create_all(engine)
with Session.begin() as session:
    session.merge(Price(product="apple", cents=120))
    session.merge(Price(product="pear", cents=90))
    session.add(Order(product="apple"))
"""
DRAIN = """
from outboxq import Relay
from outboxq.events import JobDied, JobRetried
def tell_failures(event):
    if isinstance(event, JobDied | JobRetried):
        print(event, event.where)
def finish(jobs, **expected):
    report = Relay(engine, jobs, async_engine=globals().get("async_engine"), hooks=[tell_failures]).drain()
    found = {name: getattr(report, name) for name in expected}
    assert found == expected, report
"""
JOBS = """
from outboxq import Context, Jobs
from myapp.models import Invoice
jobs = Jobs()
"""
BEFORE = {
    "cancelling.md": "def write_month(session, month): ...\n",
    "claim-modes.md": """
from sqlalchemy.orm import Mapped, mapped_column
class Account(Base):
    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]
Base.metadata.create_all(engine)
with Session.begin() as session:
    session.add(Account(id=1, balance=0))
""",
    "groups.md": JOBS
    + """
from sqlalchemy import update
from sqlalchemy.orm import Mapped, mapped_column
class Account(Base):
    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]
Base.metadata.create_all(engine)
session = Session()
session.add(Account(id=7, balance=0))
session.commit()
""",
    "results.md": """
import threading
from outboxq import Relay
def run_the_job():
    while not ("handle" in globals() and Relay(engine, jobs).drain().done):
        pass
threading.Thread(target=run_the_job).start()
""",
    "metrics.md": "from myapp.jobs import jobs\nURL = engine.url\n",
    "coalescing.md": JOBS
    + """
from datetime import timedelta
from sqlalchemy import text
from sqlalchemy.orm import Mapped, mapped_column
class Account(Base):
    __tablename__ = "customer"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
class SearchEntry(Base):
    __tablename__ = "search_entry"
    account_id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str]
Base.metadata.create_all(engine)
session = Session()
session.add_all([Account(id=7, name="Ada"), Account(id=8, name="Bob")])
""",
    "job-batches.md": JOBS
    + """
session = Session()
@jobs.handler(queue="pages")
def fetch(ctx: Context, url: str) -> None: ...
@jobs.handler(queue="pages")
def parse(ctx: Context) -> None: ...
@jobs.handler(queue="pages")
def index(ctx: Context) -> None: ...
""",
    "several-databases.md": "tenant_id = 7\n",
    "once.md": """
from sqlalchemy.orm import Mapped, mapped_column
class stripe:
    charge = staticmethod(lambda cents, idempotency_key: {"id": "ch_1"})
class cards:
    class NotConnected(Exception): ...
    class answer:
        status, id = 200, "card_1"
    charge = staticmethod(lambda cents, idempotency_key: cards.answer)
    find = staticmethod(lambda provider_key: None)
class Order(Base):
    __tablename__ = "paid_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    receipt: Mapped[str | None]
Base.metadata.create_all(engine)
""",
    "inbox.md": """
from types import SimpleNamespace
from sqlalchemy.orm import Mapped, mapped_column
class Payment(Base):
    __tablename__ = "payment"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int]
    cents: Mapped[int]
Base.metadata.create_all(engine)
event, body, event_id = {"id": "evt_1", "order": 1, "cents": 5}, b"{}", "evt_2"
polled = [SimpleNamespace(id="m1", body=b"1"), SimpleNamespace(id="m2", body=b"2")]
session = Session()
""",
    # Django is no extra: its two names, on a connection of psycopg.
    "frameworks.md": """
import sys
from types import ModuleType, SimpleNamespace
of_django = engine.raw_connection()
sys.modules["django"] = ModuleType("django")
sys.modules["django.db"] = SimpleNamespace(
    connection=of_django, transaction=SimpleNamespace(atomic=of_django.driver_connection.transaction)
)
""",
    # A mail server that takes each mail, and a provider that remembers the keys of its charges.
    "recipes.md": """
import asyncio, json, os, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from aiosmtpd.smtp import SMTP
class Mailbox:
    mails = []
    async def handle_DATA(self, server, session, envelope):
        self.mails.append(envelope)
        return "250 OK"
loop = asyncio.new_event_loop()
mail_server = loop.run_until_complete(loop.create_server(lambda: SMTP(Mailbox(), loop=loop), "127.0.0.1", 0))
threading.Thread(target=loop.run_forever, daemon=True).start()
os.environ["SMTP_SERVER"] = "127.0.0.1:%d" % mail_server.sockets[0].getsockname()[1]
charges = {}
class Provider(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"id": charges.setdefault(self.headers["Idempotency-Key"], f"ch_{asked['order']}")}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
provider = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
threading.Thread(target=provider.serve_forever, daemon=True).start()
os.environ["PAYMENTS_URL"] = f"http://127.0.0.1:{provider.server_port}"
""",
    "operating.md": JOBS + "from datetime import timedelta\n",
    "reference/errors.md": JOBS,
    "reference/tables.md": "session = Session()\n",
}
BEHIND = {
    "audit.md": "assert (found.count, total.changed, total.held) == (0, 0, [])\n",
    "cancelling.md": "finish(jobs, done=1, failed=0)\n",
    "enqueueing.md": "from myapp.jobs import jobs\nfinish(jobs, done=1_002, failed=0)\n",
    "explain.md": "assert found.verdict.code == 'queue-empty'\n",
    "progress.md": "finish(jobs, done=1)\n",
    "results.md": """
from outboxq import find_job
assert report == {"file": "reports/2026-01.pdf"}
with Session() as session:
    found = find_job(session, handle)
assert (found.state, found.result) == ("done", '{"file": "reports/2026-01.pdf"}')
""",
    "dashboard.md": """
from starlette.testclient import TestClient
with TestClient(app) as client:
    assert client.get("/ops/").status_code == 401
    assert "anna" in client.get("/ops/", headers={"x-forwarded-user": "anna"}).text
""",
    "top.md": "assert not_served == []\n",
    "history.md": "assert slow == [] and alive == [] and late == []\n",
    "metrics.md": """
from prometheus_client import REGISTRY
relay.drain()
producer.dispose()
labels = {"database": ""}
assert REGISTRY.get_sample_value("outboxq_relay_database_lost", labels) == 0
""",
    "limits.md": "assert jobs.resolve().limits['mail'].running == 5\n",
    "unique-jobs.md": "finish(jobs, done=3, failed=0)\n",
    "handlers.md": """
from sqlalchemy.ext.asyncio import create_async_engine
async_engine = create_async_engine(engine.url)
everything.include(Jobs())
with Session.begin() as session:
    order = session.get_one(Order, 1)
    invoice = Invoice(order_id=1, cents=1)
    session.add(invoice)
    session.add_job(write_invoice, order=order, cents=5)
    session.add_job(greet, order=order)
    session.add_job(raise_price, invoice=invoice, cents=1)
    session.add_job(raise_in_sql, invoice=invoice, cents=1)
finish(everything, done=4, failed=0)
with Session.begin() as session:
    session.add_job(show)
finish(with_state, done=1, failed=0)
""",
    "errors-and-retries.md": """
with Session.begin() as session:
    order = session.get_one(Order, 1)
    session.add_job(fetch_price, product="apple")
    session.add_job(check_price, order=order, day="2026-01-01")
    session.add_job(check_price, order=order, day="")
finish(jobs, done=1, failed=2, died=1)
""",
    "groups.md": """
session.commit()
finish(jobs, done=2, failed=0)
assert session.get_one(Account, 7).balance == 60
""",
    "coalescing.md": """
# Beside the plain job of the same key it might run at the same time.
session.flush()
session.execute(text("DELETE FROM outboxq.job WHERE state = 'scheduled'"))
once = rebuild.options(every=timedelta(days=300))
session.add_job(once, account_id=8)
session.add_job(once, account_id=8)
session.commit()
session.execute(text("UPDATE outboxq.job SET run_at = clock_timestamp()"))
session.commit()
finish(jobs, done=2, failed=0)
assert [session.get_one(SearchEntry, id_).text for id_ in (7, 8)] == ["ada", "bob"]
""",
    "job-batches.md": """
session.commit()
with Session.begin() as session:
    with jobs.batch(session, on_done=report.job(run=10)) as batch:
        batch.add_job(load_page, page=1)
finish(jobs, done=1_000 + 1 + 2 + 2 + 3 + 3 + 1, failed=0)
""",
    "several-databases.md": "assert chosen is engine\n",
    "claim-modes.md": """
with Session.begin() as session:
    session.add_job(send_out, order_id=1)
    session.add_job(credit, account=session.get_one(Account, 1), cents=5)
    session.add_job(credit_later, account_id=1, cents=5)
finish(jobs, done=4, failed=0)
with Session() as session:
    assert session.get_one(Order, 1).product == "apple (sent)"
    assert session.get_one(Account, 1).balance == 15
""",
    "frameworks.md": """
from sqlalchemy import func
from tests.support.waiting import wait_until
test_an_order_leads_to_an_invoice()
with TestClient(app) as client:
    assert client.post("/orders", json={"product": "pear"}).status_code == 201
assert flask.test_client().post("/orders/pear").status_code == 200
place_order_by_django(1)
def has_three_invoices():
    with engine.connect() as looker:
        return looker.scalar(select(func.count()).select_from(Invoice)) == 3
with TestClient(FastAPI(lifespan=lifespan_with_relay)):
    wait_until(has_three_invoices, "the invoices that the relay of the lifespan writes")
finish(jobs, done=0, failed=0)
""",
    "recipes.md": """
with Session.begin() as session:
    session.add_job(send_welcome, user_id=7, address="ada@example.org")
    session.add_job(charge, order_id=7, cents=500)
finish(jobs, done=2, failed=0)
(mail,), (key,) = Mailbox.mails, charges
assert mail.rcpt_tos == ["ada@example.org"] and b"Message-ID: <" in mail.content
with Session() as session:
    assert session.query(Invoice.cents).filter_by(order_id=7).all() == [(500,)]
""",
    "once.md": """
with Session.begin() as session:
    session.add(Order(id=7))
    session.add_job(charge, order_id=7, cents=500)
    session.add_job(charge_by_card, order_id=7)
finish(jobs, done=2, failed=0)
with Session() as session:
    assert session.get_one(Order, 7).receipt == "ch_1"
""",
    "inbox.md": """
assert batch.accepted == ("m1", "m2")
assert handle is not None
session.commit()
finish(jobs, done=1)
""",
    "schedules.md": """
finish(jobs, done=2, failed=0)
with Session() as session:
    assert [found.name for found in schedules.list_schedules(session)] == [
        "nightly", "poll-bank", "report-north", "report-south", "tenant-7"
    ]
""",
    "publishing.md": """
from sqlalchemy.ext.asyncio import create_async_engine
async_engine = create_async_engine(engine.url)
finish(jobs, done=1, failed=0)
assert [topic for topic, _ in broker.sent] == ["orders"]
""",
    "rolling-deploys.md": """
from outboxq import external
with Session.begin() as session:
    session.add_job(external("write_invoice", queue="invoices"), order_id=7)
finish(jobs, done=1, failed=0)
""",
    "relays.md": "",
    "configuration.md": "",
    "tracing.md": """
from outboxq import Context
@jobs.handler
def traced(ctx: Context) -> None: ...
with Session.begin() as session:
    session.add_job(traced)
finish(jobs, done=1, failed=0)
""",
    "operating.md": """
with Session.begin() as session:
    session.add_job(book.options(max_attempts=1), name="Ada Lovelace")
    session.add_job(charge.options(max_attempts=1), number="4242")
stored = []
Relay(engine, jobs, hooks=[lambda event: stored.append(getattr(event, "record", None))]).drain()
text = next(record.traceback() for record in stored if record)
assert text.startswith("Traceback (most recent call last):\\n  File ") and text.endswith(
    ", in book\\nValueError: no room for <name>"
), text
""",
    "reference/errors.md": "jobs.resolve()\n",
    "reference/events.md": "relay.drain()\n",
    "reference/tables.md": "assert waiting == 0\n",
}
# Pages whose Python is not run here, and why. All of it is compiled, and its imports are looked up.
NOT_RUN = {
    "README.md": "a program that tests/package/test_readme.py runs",
    "database-trouble.md": "an engine with settings for another host",
    "deploying.md": "an engine that asks a provider for its password",
    "hooks.md": "tests/observability/test_hooks_page.py checks it",
    "http.md": "parts of one application, as tests/http and examples/shop_fastapi have it",
    "migrations.md": "revisions and an env.py of Alembic, which tests/migrations/test_users_project.py runs",
    "recipes-observability.md": "tests/observability/test_recipes.py runs it",
    "ten-minutes.md": "its files are those of the application that tests/package/test_readme.py runs",
    "testing.md": "a file of tests: test_the_tests_of_the_guide_pass",
}


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix().removeprefix("docs/")


with_python = [document for document in DOCUMENTS if any(block.language == "python" for block in blocks(document))]


@pytest.mark.parametrize("document", with_python, ids=name_of)
def test_every_page_with_python_is_run_or_says_why_not(document: Path) -> None:
    """A new page with code joins one of the lists."""
    assert (name_of(document) in BEHIND) is not (name_of(document) in NOT_RUN)


@pytest.mark.parametrize("document", with_python, ids=name_of)
def test_every_block_is_python_and_imports_what_there_is(document: Path) -> None:
    """A name that a sample imports from outboxq can be imported."""
    tree = ast.parse(python_of(document), document.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "outboxq":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                found = hasattr(module, alias.name)
                assert found or importlib.import_module(f"{node.module}.{alias.name}"), alias.name


RUN_FILE = "import runpy; runpy.run_path('guide.py', run_name='__main__')"


def run_python(code: str, database: Database, directory: Path) -> None:
    """Run code beside the application of ten minutes."""
    write_application(directory)
    (directory / "guide.py").write_text(code)
    environment = cli.environment(database.url, SHOP_DATABASE_URL=database.url)
    environment["PYTHONPATH"] = f"{directory}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.program", RUN_FILE],
        stdin=subprocess.DEVNULL,
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2_000:]}\n{done.stderr[-4_000:]}"


@pytest.mark.large
@pytest.mark.parametrize("page", BEHIND)
def test_the_python_of_a_guide_runs(page: str, outboxq_database: Database, tmp_path: Path) -> None:
    """Its blocks, one after the other, run without an error, and their jobs come to the ends that are expected."""
    shown = python_of(ROOT / "docs" / page)
    code = "\n".join((START, DRAIN, BEFORE.get(page, ""), shown, BEHIND[page]))
    run_python(code, outboxq_database, tmp_path)


# What the file starts by `python -m` is forked, as in our own tests.
FORKING = """\
import pytest

from tests.support.fork_server import forking


@pytest.fixture(scope="session", autouse=True)
def forked():
    with forking():
        yield
"""


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_the_tests_of_the_guide_pass(tmp_path: Path) -> None:
    """The file of tests that docs/testing.md shows passes as it stands there, crashes included."""
    write_application(tmp_path)
    (tmp_path / "conftest.py").write_text(FORKING)
    (tmp_path / "test_guide.py").write_text(python_of(ROOT / "docs" / "testing.md"))
    environment = cli.environment(SHOP_DATABASE_URL="postgresql+psycopg://127.0.0.1:1/unused")
    environment["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "4 passed" in done.stdout
