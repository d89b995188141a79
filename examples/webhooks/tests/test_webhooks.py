"""The application at work: a server, signed requests over HTTP, relays, and the server's process killed in between."""

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Engine, func, select, text
from sqlalchemy.orm import Session
from standardwebhooks import Webhook

from outboxq import Backoff, Context, Jobs, Relay, RelayConfig
from outboxq.errors import RegistryError
from outboxq.postgres import Database
from outboxq.testing import CommitProxy, RelayProcess, Trap
from webhooks.app import MAX_BODY_BYTES
from webhooks.jobs import jobs
from webhooks.models import Change, Invoice
from webhooks.sender import Message, deliver, invoice_changed

PROJECT = Path(__file__).parents[1]
LIMIT_SECONDS = 60
SECRET = "whsec_c2lnbmVkIHdpdGggdGhpcyBpbiB0ZXN0cyBvbmx5"
WEBHOOK = Webhook(SECRET)
OLDER_SECRET = "whsec_" + "dGhpcyBpcyB0aGUgb25lIGJlZm9yZSBpdA=="


def test_a_redelivered_message_is_answered_alike_and_applied_once(outboxq_database: Database, engine: Engine) -> None:
    """However often a message is delivered, before and after its job has run, it is applied once."""
    message = invoice_changed("msg_1", "INV-1", version=1, status="open")
    with serve(outboxq_database.url) as server:
        assert answer_to(server, message) == (200, {"status": "accepted"})
        assert answer_to(server, message) == (200, {"status": "duplicate"})
        drain(outboxq_database.url)
        # Signed at another time, and the same message all the same.
        late = deliver(server.address, WEBHOOK, message, at=datetime.now(UTC) - timedelta(minutes=2))
        assert (late.status_code, late.json()) == (200, {"status": "duplicate"})
        drain(outboxq_database.url)

    assert invoices(engine) == {"INV-1": (1, "open")}
    assert changes(engine) == {("INV-1", 1): 1}


def test_a_message_that_is_not_signed_as_it_should_be_leaves_nothing(
    outboxq_database: Database, engine: Engine
) -> None:
    """401 for a wrong secret, another body or id than was signed, an old signature, a broken one, and none."""
    message = invoice_changed("msg_1", "INV-1", version=1, status="open")
    now = datetime.now(UTC)
    good = message.headers(WEBHOOK)
    forged = {
        "another secret": message.headers(Webhook("whsec_" + "MfKQ9r8GKYqrTwjU")),
        "another body": replace(message, body=message.body.replace("open", "paid")).headers(WEBHOOK),
        "another id": good | {"webhook-id": "msg_2"},
        "too old": message.headers(WEBHOOK, at=now - timedelta(minutes=6)),
        "from the future": message.headers(WEBHOOK, at=now + timedelta(minutes=6)),
        "no base64": good | {"webhook-signature": "v1,?"},
        "no version": good | {"webhook-signature": "?"},
        "none": {},
    }
    with serve(outboxq_database.url) as server:
        statuses = {
            name: httpx.post(
                f"{server.address}/webhooks", content=message.body, headers=headers, timeout=60
            ).status_code
            for name, headers in forged.items()
        }
        not_text = httpx.post(f"{server.address}/webhooks", content=b"\xff", headers=good, timeout=60)

    assert statuses == dict.fromkeys(forged, 401)
    assert not_text.status_code == 401
    assert count(engine, "SELECT count(*) FROM outboxq.inbox") == 0
    assert count(engine, "SELECT count(*) FROM outboxq.job") == 0


def test_while_the_secret_is_changed_both_are_good(outboxq_database: Database, engine: Engine) -> None:
    """A message is accepted whether it was signed with the new secret or the old one, and is the same message."""
    first = invoice_changed("msg_1", "INV-1", version=1, status="open")
    second = invoice_changed("msg_2", "INV-1", version=2, status="paid")
    with serve(outboxq_database.url) as server:
        by_the_old_one = [deliver(server.address, Webhook(OLDER_SECRET), message) for message in (first, second)]
        assert answer_to(server, second) == (200, {"status": "duplicate"})

    assert [answer.json() for answer in by_the_old_one] == [{"status": "accepted"}] * 2
    assert count(engine, "SELECT count(*) FROM outboxq.job") == 2


def test_a_body_that_is_too_long_is_refused_before_its_end(outboxq_database: Database, engine: Engine) -> None:
    """413 for what no event can be: by its length, or, if none is announced, as soon as too much has come."""
    message = invoice_changed("msg_1", "INV-1", version=1, status="open")
    longest = replace(message, body=message.body + " " * (MAX_BODY_BYTES - len(message.body)))
    too_long = replace(message, id="msg_2", body=longest.body + " ")
    with serve(outboxq_database.url) as server:
        assert answer_to(server, longest) == (200, {"status": "accepted"})
        assert deliver(server.address, WEBHOOK, too_long).status_code == 413
        with closing(HTTPConnection(server.address.removeprefix("http://"), timeout=LIMIT_SECONDS)) as connection:
            connection.putrequest("POST", "/webhooks")
            connection.putheader("Transfer-Encoding", "chunked")
            connection.endheaders()
            # One chunk, and no end behind it.
            connection.send(b"%x\r\n" % (MAX_BODY_BYTES + 1) + b" " * (MAX_BODY_BYTES + 1) + b"\r\n")
            assert connection.getresponse().status == 413

    assert count(engine, "SELECT count(*) FROM outboxq.inbox") == 1


def test_a_handler_that_retries_for_longer_than_messages_are_remembered_is_refused() -> None:
    """A relay does not start with it: the registry holds the inbox against its handlers."""
    grown = Jobs()
    grown.include(jobs)

    @grown.handler(queue="webhooks", retry=Backoff(first_seconds=86_400, cap_seconds=86_400, max_attempts=60))
    def refund(ctx: Context) -> None:
        """Patient."""

    with pytest.raises(RegistryError, match="invoice-webhooks"):
        grown.resolve()
    assert jobs.resolve()


def test_signed_nonsense_is_refused_and_other_events_are_let_pass(outboxq_database: Database, engine: Engine) -> None:
    """400 for what is not an event as its type promises; 200, and nothing stored, for types of no interest."""
    no_version = Message("msg_1", '{"type": "invoice.changed", "data": {"id": "INV-1", "status": "open"}}')
    unreadable = Message("msg_2", "no JSON")
    other = Message("msg_3", '{"type": "customer.changed", "data": {}}')
    too_long = invoice_changed("m" * 600, "INV-1", version=1, status="open")
    with serve(outboxq_database.url) as server:
        assert deliver(server.address, WEBHOOK, no_version).status_code == 400
        assert deliver(server.address, WEBHOOK, unreadable).status_code == 400
        assert deliver(server.address, WEBHOOK, too_long).status_code == 400
        assert answer_to(server, other) == (200, {"status": "ignored"})

    assert count(engine, "SELECT count(*) FROM outboxq.inbox") == 0
    assert count(engine, "SELECT count(*) FROM outboxq.job") == 0


def test_an_id_that_comes_with_other_content_is_a_conflict(outboxq_database: Database, engine: Engine) -> None:
    """409, and what was accepted first stands: neither message is taken for the other."""
    first = invoice_changed("msg_1", "INV-1", version=1, status="open")
    second = invoice_changed("msg_1", "INV-1", version=2, status="paid")
    with serve(outboxq_database.url) as server:
        assert answer_to(server, first) == (200, {"status": "accepted"})
        conflict = deliver(server.address, WEBHOOK, second)
        assert answer_to(server, first) == (200, {"status": "duplicate"})
    drain(outboxq_database.url)

    assert conflict.status_code == 409
    assert "'msg_1'" in conflict.json()["detail"]
    assert changes(engine) == {("INV-1", 1): 1}


def test_an_older_version_does_not_overwrite_a_newer_one(outboxq_database: Database, engine: Engine) -> None:
    """Events that come out of order leave the newest state, and each is in the history."""
    versions = {3: "void", 1: "draft", 4: "paid", 2: "open"}
    with serve(outboxq_database.url) as server:
        for version, status in versions.items():
            answer_to(server, invoice_changed(f"msg_{version}", "INV-1", version, status))
    drain(outboxq_database.url)

    assert invoices(engine) == {"INV-1": (4, "paid")}
    with Session(engine) as session:
        history = session.execute(select(Change.version, Change.is_newest).order_by(Change.id)).all()
    assert [tuple(line) for line in history] == [(3, True), (1, False), (4, True), (2, False)]


def test_deliveries_in_parallel_are_applied_once_each(outboxq_database: Database, engine: Engine) -> None:
    """16 threads deliver every event three times in any order, two relays work: one line each, the newest state."""
    events = [
        invoice_changed(f"msg_{invoice}_{version}", f"INV-{invoice}", version, "paid" if version == 6 else "open")
        for invoice in range(8)
        for version in range(1, 7)
    ]
    deliveries = events * 3
    random.shuffle(deliveries)
    config = RelayConfig(slots_per_queue=3)
    with (
        serve(outboxq_database.url) as server,
        RelayProcess("webhooks.jobs:jobs", outboxq_database.url, config),
        RelayProcess("webhooks.jobs:jobs", outboxq_database.url, config),
    ):
        with ThreadPoolExecutor(16) as threads:
            answers = list(threads.map(lambda message: answer_to(server, message), deliveries))
        wait_until(lambda: count(engine, "SELECT count(*) FROM outboxq.job") == 0)

    statuses = [answer["status"] for code, answer in answers if code == 200]
    assert (statuses.count("accepted"), statuses.count("duplicate")) == (len(events), 2 * len(events))
    assert changes(engine) == {(f"INV-{invoice}", version): 1 for invoice in range(8) for version in range(1, 7)}
    assert invoices(engine) == {f"INV-{invoice}": (6, "paid") for invoice in range(8)}


@pytest.mark.parametrize(
    ("trap_it", "second_answer"),
    [
        pytest.param(lambda proxy: proxy.freeze_at_commit(), "accepted", id="before-commit"),
        pytest.param(lambda proxy: proxy.hold_reply(), "duplicate", id="after-commit"),
    ],
)
def test_a_server_killed_between_receive_and_reply_loses_and_doubles_nothing(
    outboxq_database: Database, engine: Engine, trap_it: Callable[[CommitProxy], Trap], second_answer: str
) -> None:
    """Killed before its COMMIT arrived, it has taken nothing in; killed after it, everything. Redelivery mends both."""
    message = invoice_changed("msg_1", "INV-1", version=1, status="open")
    with CommitProxy(outboxq_database.url) as proxy, ThreadPoolExecutor(1) as thread:
        trap = trap_it(proxy)
        with serve(proxy.url) as server:
            delivery = thread.submit(deliver, server.address, WEBHOOK, message)
            assert trap.reached.wait(LIMIT_SECONDS)
            server.process.kill()
            server.process.wait()
        with pytest.raises(httpx.TransportError):
            delivery.result(LIMIT_SECONDS)

    with serve(outboxq_database.url) as server:
        assert answer_to(server, message) == (200, {"status": second_answer})
        assert answer_to(server, message) == (200, {"status": "duplicate"})
    drain(outboxq_database.url)

    assert invoices(engine) == {"INV-1": (1, "open")}
    assert changes(engine) == {("INV-1", 1): 1}


class RunningServer:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.process = process
        self.address = address


@contextmanager
def serve(url: str) -> Iterator[RunningServer]:
    """The application as users start it, on a free port."""
    command = [sys.executable, "-m", "uvicorn", "--factory", "webhooks.app:create_app", "--port", "0"]
    environment = {**os.environ, "WEBHOOKS_DATABASE_URL": url, "WEBHOOKS_SECRETS": f"{SECRET} {OLDER_SECRET}"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=environment, cwd=PROJECT, stderr=log)  # noqa: S603  # our own command line

        def read_address() -> str | None:
            log.seek(0)
            written = log.read()
            assert process.poll() is None, written
            found = re.search(r"running on (http://\S+:\d+)", written)
            return found and found[1]

        try:
            wait_until(read_address)
            yield RunningServer(process, str(read_address()))
        finally:
            process.terminate()
            process.wait(LIMIT_SECONDS)


def answer_to(server: RunningServer, message: Message) -> tuple[int, dict[str, str]]:
    """Deliver a message; the status and the body of the answer."""
    answer = deliver(server.address, WEBHOOK, message)
    return answer.status_code, answer.json()


def drain(url: str) -> None:
    """Let a relay do all that waits, one after the other."""
    Relay(url, jobs, RelayConfig(slots_per_queue=1)).drain()


def invoices(engine: Engine) -> dict[str, tuple[int, str]]:
    with Session(engine) as session:
        return {invoice.id: (invoice.version, invoice.status) for invoice in session.scalars(select(Invoice))}


def changes(engine: Engine) -> dict[tuple[str, int], int]:
    """How often each version of each invoice was applied."""
    columns = (Change.invoice_id, Change.version)
    with Session(engine) as session:
        lines = session.execute(select(*columns, func.count()).group_by(*columns))
        return {(invoice_id, version): lines_of_it for invoice_id, version, lines_of_it in lines}


def count(engine: Engine, statement: str) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text(statement)).scalar_one())


def wait_until(reached: Callable[[], object]) -> None:
    """Look again until it is so."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not reached():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)
