"""Jobs of several tenants, in transactions of their own and in shared ones: each sees its own rows, and no others."""

from collections.abc import Iterator

import pytest
from psycopg.errors import InsufficientPrivilege
from sqlalchemy import Engine, create_engine, select, text, update
from sqlalchemy.exc import NoResultFound

from documents.__main__ import add_document
from documents.jobs import count_words, jobs
from documents.models import Activity, Document
from documents.tenancy import HEADER, NotSeparated, for_tenant, of_tenant, tenant_session
from outboxq import Backoff, Context, Jobs, OutboxSession, Relay, RelayConfig, RelayReport, SlotGroup
from outboxq.postgres import Database

# In one transaction each, or all in one.
BATCHES = pytest.mark.parametrize("batch_size", [1, 20])

# What the handlers of `spies` saw, in the order in which they ran.
seen: list[tuple[str, set[str]]] = []
spies = Jobs()
spies.include(jobs)
ONCE = Backoff(max_attempts=1)


@spies.handler(queue="documents", retry=ONCE)
@of_tenant
def look(ctx: Context) -> None:
    """Note whose documents there are, and the setting."""
    seen.append((ctx.headers[HEADER], tenants_seen(ctx)))


@spies.handler(queue="documents", retry=ONCE)
@of_tenant
def write_and_fail(ctx: Context, document_id: int) -> None:
    """Write a row, and fail."""
    ctx.session.add(Activity(document_id=document_id, what="failed"))
    ctx.session.flush()
    raise RuntimeError("after a write")


@spies.handler(queue="documents", retry=ONCE)
@of_tenant
def leave_a_row_unsent(ctx: Context, document_id: int) -> None:
    """Add a row, and leave it to the relay to send it."""
    ctx.session.add(Activity(document_id=document_id, what="unsent"))


@spies.handler(queue="documents", retry=ONCE)
@of_tenant
def look_later(ctx: Context) -> None:
    """Enqueue another job."""
    ctx.session.add_job(for_tenant(look.options(headers={"trace": "1"}), ctx.headers[HEADER]))


@spies.handler(queue="documents", retry=ONCE)
def look_undecorated(ctx: Context) -> None:
    """A handler without the decorator."""
    seen.append(("", tenants_seen(ctx)))


@spies.handler(queue="documents", retry=ONCE)
@of_tenant
def overwrite_all(ctx: Context, title: str) -> None:
    """Change every document that there is."""
    ctx.session.execute(update(Document).values(title=title))


@spies.handler(queue="documents", retry=ONCE)
@of_tenant
def write_for(ctx: Context, tenant: str) -> None:
    """Write a row of another tenant."""
    ctx.session.add(Document(tenant=tenant, title="forged", body=""))


def tenants_seen(ctx: Context) -> set[str]:
    """The tenants of all rows of both tables, by SQL that names none."""
    return set(ctx.session.scalars(text("SELECT tenant FROM document UNION SELECT tenant FROM activity")))


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    seen.clear()
    yield
    seen.clear()


@pytest.fixture
def ids(engine: Engine) -> dict[str, int]:
    """A document of each tenant, without its job; their ids."""
    made = {}
    for tenant in ("acme", "bolt"):
        with tenant_session(engine, tenant) as session:
            document = Document(title=f"plan of {tenant}", body="one two three")
            session.add(document)
            session.commit()
            made[tenant] = document.id
    return made


@BATCHES
def test_each_job_sees_the_rows_of_its_tenant_alone(
    engine: Engine, database_url: str, ids: dict[str, int], batch_size: int
) -> None:
    """Jobs of two tenants in turn, failed and undecorated ones between them, in one transaction or in many."""
    order = ["acme", "bolt", "bolt", "acme", "acme", "bolt"]
    for tenant in order:
        with tenant_session(engine, tenant) as session:
            session.add_job(look)
            session.add_job(write_and_fail, document_id=ids[tenant])
            session.add_job(leave_a_row_unsent, document_id=ids[tenant])
            session.commit()
        with OutboxSession(engine) as session:
            session.add_job(look_undecorated)
            session.commit()
    report = drain(database_url, spies, batch_size)

    assert (report.done, report.died) == (3 * len(order), len(order))
    assert [tenant for tenant, _ in seen if tenant] == order
    assert {tenant: saw for tenant, saw in seen if tenant} == {"acme": {"acme"}, "bolt": {"bolt"}}
    assert all(saw == ({tenant} if tenant else set()) for tenant, saw in seen)
    for tenant in ("acme", "bolt"):
        assert activities(engine, tenant) == ["unsent"] * 3


@BATCHES
def test_a_job_reaches_no_other_tenant_s_rows(
    engine: Engine, database_url: str, ids: dict[str, int], batch_size: int
) -> None:
    """It neither finds a document by the other's id, nor changes one, nor writes one in the other's name."""
    with tenant_session(engine, "acme") as session:
        session.add_job(count_words.options(max_attempts=1), document_id=ids["bolt"])
        session.add_job(overwrite_all, title="taken over")
        session.add_job(write_for, tenant="bolt")
        session.commit()
    report = drain(database_url, spies, batch_size)

    assert (report.done, report.died) == (1, 2)
    assert titles(engine, "acme") == ["taken over"]
    assert titles(engine, "bolt") == ["plan of bolt"]
    assert sorted(errors(engine)) == [InsufficientPrivilege.__name__, NoResultFound.__name__]
    with tenant_session(engine, "bolt") as session:
        assert session.get_one(Document, ids["bolt"]).words is None


@BATCHES
def test_the_words_of_all_documents_are_counted(engine: Engine, database_url: str, batch_size: int) -> None:
    """Documents of three tenants, in turn: each is counted, and its activity is its tenant's."""
    for number in range(4):
        for tenant in ("acme", "bolt", "core"):
            with tenant_session(engine, tenant) as session:
                add_document(session, f"{tenant} {number}", "word " * number)
                session.commit()
    drain(database_url, jobs, batch_size)

    for tenant in ("acme", "bolt", "core"):
        with tenant_session(engine, tenant) as session:
            assert list(session.scalars(select(Document.words).order_by(Document.id))) == [0, 1, 2, 3]
        assert activities(engine, tenant) == ["words counted"] * 4


def test_a_job_without_a_tenant_is_a_dead_letter_at_once(engine: Engine, database_url: str) -> None:
    """It was added by a plain session. Nothing could be right about it at a later attempt."""
    with OutboxSession(engine) as session:
        session.add_job(count_words, document_id=1)
        session.commit()
    report = drain(database_url, jobs, batch_size=1)

    assert (report.done, report.died) == (0, 1)
    assert errors(engine) == ["NoTenant"]


def test_a_job_s_next_job_is_of_the_same_tenant(engine: Engine, database_url: str, ids: dict[str, int]) -> None:
    """The tenant is handed on beside other headers."""
    with tenant_session(engine, "bolt") as session:
        session.add_job(look_later)
        session.commit()
    drain(database_url, spies, batch_size=1)

    assert seen == [("bolt", {"bolt"})]
    assert ids.keys() == {"acme", "bolt"}


def test_a_session_is_the_tenant_s_in_each_of_its_transactions(engine: Engine, ids: dict[str, int]) -> None:
    """Also after a commit and a rollback; the connection goes back to its pool without a tenant."""
    with tenant_session(engine, "acme") as session:
        for end in (session.commit, session.rollback, session.commit):
            assert list(session.scalars(select(Document.id))) == [ids["acme"]]
            end()
    with OutboxSession(engine) as session:
        assert list(session.scalars(select(Document.id))) == []


@pytest.mark.usefixtures("ids")
def test_a_role_that_sees_all_tenants_is_refused(superuser_database: Database, engine: Engine) -> None:
    """A superuser passes by every policy: neither sessions nor handlers work for it."""
    with tenant_session(engine, "acme") as session:
        session.add_job(look)
        session.commit()
    superuser = create_engine(superuser_database.url)
    with pytest.raises(NotSeparated, match="no superuser"), tenant_session(superuser, "acme") as session:
        session.scalars(select(Document)).all()
    superuser.dispose()

    report = drain(superuser_database.url, spies, batch_size=1)

    assert report.died == 1
    assert seen == []


def drain(url: str, registry: Jobs, batch_size: int) -> RelayReport:
    """Let a relay with one slot do all that is there, in its order."""
    return Relay(url, registry, RelayConfig(batch_size=batch_size, groups=(SlotGroup(("*",), 1),))).drain()


def titles(engine: Engine, tenant: str) -> list[str]:
    with tenant_session(engine, tenant) as session:
        return list(session.scalars(select(Document.title).order_by(Document.id)))


def activities(engine: Engine, tenant: str) -> list[str]:
    with tenant_session(engine, tenant) as session:
        return list(session.scalars(select(Activity.what).order_by(Activity.id)))


def errors(engine: Engine) -> list[str]:
    """The types of the errors that made dead letters."""
    with engine.connect() as connection:
        found = connection.scalars(text("SELECT errors -> -1 ->> 'type' FROM outboxq.dead_job"))
        return [str(name).rpartition(".")[2] for name in found]
