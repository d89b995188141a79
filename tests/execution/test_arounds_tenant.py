"""A tenant that an around sets by SET LOCAL is in force when the handler's rows are loaded, locked and written."""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Engine, make_url, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, make_transient_to_detached, mapped_column, sessionmaker

from outboxq import (
    AsyncBatchContext,
    AsyncContext,
    Backoff,
    BatchContext,
    BatchItem,
    Context,
    Jobs,
    Locked,
    OutboxSession,
    Relay,
    RelayConfig,
)
from outboxq.events import JobDied, JobDone
from outboxq.postgres import Database
from outboxq.testing import drain, sync_context
from tests.support.limits import many_at_once
from tests.support.shared_app import statements

TENANTS = {1: "one", 2: "two", 3: "one", 4: "two"}
SET = text("SELECT set_config('app.tenant', :tenant, true)")
ONCE = Backoff(max_attempts=1)


class TenantBase(DeclarativeBase):
    pass


class Purse(TenantBase):
    __tablename__ = "purse"
    id: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    cents: Mapped[int] = mapped_column(default=0)


@dataclass
class Pay:
    purse: Locked[Purse]


@pytest.fixture(params=["'app.tenant', true", "'app.tenant'"], ids=["no tenant sees nothing", "no tenant is an error"])
def role_url(request: pytest.FixtureRequest, outboxq_database: Database, engine: Engine) -> Iterator[str]:
    """The URL of a role that sees the purses of its tenant alone."""
    TenantBase.metadata.create_all(engine)
    name = f"tenant_{secrets.token_hex(4)}"
    with engine.begin() as connection:
        for statement in (
            f"CREATE ROLE {name} LOGIN PASSWORD '{name}'",
            f"GRANT USAGE ON SCHEMA outboxq TO {name}",
            f"GRANT ALL ON ALL TABLES IN SCHEMA outboxq, public TO {name}",
            f"GRANT ALL ON ALL SEQUENCES IN SCHEMA outboxq, public TO {name}",
            "ALTER TABLE purse ENABLE ROW LEVEL SECURITY",
            f"CREATE POLICY own ON purse USING (tenant = current_setting({request.param}))",
        ):
            connection.execute(text(statement))
        connection.execute(text("INSERT INTO purse VALUES (1, 'one', 0), (2, 'two', 0), (3, 'one', 0), (4, 'two', 0)"))
    yield make_url(outboxq_database.url).set(username=name, password=name).render_as_string(hide_password=False)
    with engine.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {name}"))
        connection.execute(text(f"DROP ROLE {name}"))


def make_jobs(flavour: str, way: str) -> tuple[Jobs, Any]:
    """A registry whose handler raises what is in a purse, and sees no other tenant's."""
    jobs = Jobs()
    options: dict[str, Any] = {"queue": "q", "retry": ONCE}
    single = {**options, "batchable": way == "shared", "claim": "lease" if way == "lease" else "transaction"}
    if flavour == "sync":

        @jobs.around
        def tenant(ctx: Context | BatchContext) -> None:
            ctx.session.execute(SET, {"tenant": of(ctx)})

        if way == "batch":

            @jobs.batch_handler(Pay, **options)
            def pay_all(ctx: BatchContext, items: Sequence[BatchItem[Pay]]) -> None:
                for item in items:
                    item.args.purse.cents += 1

            return jobs, pay_all

        @jobs.handler(**single)
        def pay(ctx: Context, purse: Locked[Purse]) -> None:
            assert ctx.session.query(Purse).count() == 2
            purse.cents += 1

        return jobs, pay

    @jobs.around
    async def tenant_async(ctx: AsyncContext | AsyncBatchContext) -> None:
        await ctx.session.execute(SET, {"tenant": of(ctx)})

    if way == "batch":

        @jobs.batch_handler(Pay, **options)
        async def pay_all_async(ctx: AsyncBatchContext, items: Sequence[BatchItem[Pay]]) -> None:
            for item in items:
                item.args.purse.cents += 1

        return jobs, pay_all_async

    @jobs.handler(**single)
    async def pay_async(ctx: AsyncContext, purse: Locked[Purse]) -> None:
        assert await ctx.session.run_sync(lambda session: session.query(Purse).count()) == 2
        purse.cents += 1

    return jobs, pay_async


def of(ctx: Any) -> str:
    """The tenant that the producer wrote beside the arguments."""
    (tenant,) = {job.headers for job in ctx.jobs}
    return tenant.split('"')[3]


def enqueue(session: OutboxSession, handler: Any, ids: Sequence[int]) -> None:
    for id_ in ids:
        purse = Purse(id=id_)
        make_transient_to_detached(purse)
        session.add_job(handler.options(headers={"tenant": TENANTS[id_]}), purse=purse)


def cents(engine: Engine) -> dict[int, int]:
    with Session(engine) as session:
        return {purse.id: purse.cents for purse in session.query(Purse).order_by(Purse.id)}


@pytest.mark.first_and_last
@pytest.mark.parametrize("flavour", ["sync", "async"])
@pytest.mark.parametrize("way", ["alone", "savepoints", "shared", "batch", "lease"])
def test_rows_are_loaded_and_locked_under_their_tenant(
    way: str, flavour: str, role_url: str, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """With row level security, in every way in which jobs run: each job finds its own row, locked, and no other's."""
    jobs, handler = make_jobs(flavour, way)
    size = 1 if way in ("alone", "lease") else 50
    events = list[Any]()
    # A batch handler's jobs are of one tenant: there is one call for all.
    ids = (1, 3) if way == "batch" else (1, 2, 3, 4)
    with statements() as seen:
        for _ in range(2):
            with sessions.begin() as session:
                enqueue(session, handler, ids)
            config = RelayConfig(slots_per_queue=1, batch_size=size)
            Relay(role_url, jobs, config, hooks=(events.append,)).drain()
    assert [event for event in events if isinstance(event, JobDied)] == []
    assert sum(isinstance(event, JobDone) for event in events) == 2 * len(ids)
    assert cents(engine) == {id_: 2 * (id_ in ids) for id_ in TENANTS}
    loads = [statement for statement, _ in seen if statement.startswith("SELECT purse")]
    assert sum("FOR NO KEY UPDATE" in statement for statement in loads) >= (2 if way == "batch" else 2 * len(ids))


def test_a_row_of_another_tenant_is_not_found(
    role_url: str, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """The handler is not called with it: its job fails, and nothing of it stands."""
    jobs, handler = make_jobs("sync", "shared")
    events = list[Any]()
    with sessions.begin() as session:
        enqueue(session, handler, (1, 3))
        purse = Purse(id=2)
        make_transient_to_detached(purse)
        session.add_job(handler.options(headers={"tenant": "one"}), purse=purse)
    config = many_at_once(jobs, RelayConfig(slots_per_queue=1, batch_size=50))
    Relay(role_url, jobs, config, hooks=(events.append,)).drain()
    (died,) = [event for event in events if isinstance(event, JobDied)]
    assert died.error_type.endswith("EntityGone")
    assert cents(engine) == {1: 1, 2: 0, 3: 1, 4: 0}


def test_drain_goes_through_the_arounds_and_a_plain_call_does_not(engine: Engine) -> None:
    """In the tests of an application: jobs run as under a relay, and a handler that is called is a plain function."""
    jobs, seen = Jobs(), list[str]()

    @jobs.around
    def note(ctx: Context) -> Iterator[None]:
        seen.append(ctx.job.kind)
        yield

    @jobs.handler(queue="q")
    def act(ctx: Context) -> None: ...

    with engine.connect() as connection, OutboxSession(connection) as session:
        act(sync_context(session))
        assert seen == []
        session.add_job(act)
        assert drain(session, jobs).done == 1
        assert seen == ["act"]
