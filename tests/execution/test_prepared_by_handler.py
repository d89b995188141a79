"""A handler that ends its transaction by PREPARE TRANSACTION, on the driver's own cursor: undone, and its job pays."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Engine, make_url, text
from sqlalchemy.orm import Session, sessionmaker

from outboxq import (
    AsyncBatchContext,
    AsyncContext,
    Backoff,
    BatchContext,
    BatchItem,
    Context,
    Jobs,
    OutboxSession,
    Relay,
    RelayConfig,
)
from outboxq.events import BatchRolledBack, DatabaseLost, Event, JobDied
from outboxq.execution.find_outcome import COMMITTED_BY_HANDLER
from outboxq.postgres import Database
from tests.execution.test_raised import dead_letters
from tests.support.app import Effect
from tests.support.ledger import ledger, waiting
from tests.support.together import together

Drain = Callable[..., list[Event]]
ONCE = Backoff(max_attempts=1)
TWICE = Backoff(max_attempts=2, first_seconds=0.0, jitter=0.0)


@pytest.fixture(autouse=True)
def _two_phase(engine: Engine) -> Iterator[None]:
    """Needs a server that has it; what a failing test leaves prepared is rolled back."""
    with engine.connect() as connection:
        if connection.execute(text("SHOW max_prepared_transactions")).scalar_one() == "0":
            pytest.skip("this server has max_prepared_transactions = 0")
    yield
    roll_back_prepared(engine)


def roll_back_prepared(engine: Engine) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for gid in prepared(engine):
            connection.exec_driver_sql(f"ROLLBACK PREPARED '{gid}'")


def prepared(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        found = text("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
        return list(connection.execute(found).scalars())


@dataclass
class Named:
    name: str


class _OneOf(NamedTuple):
    """What `prepare` needs of a context."""

    session: Session
    job: Any


def prepare(ctx: Context | _OneOf, how: str, role: str | None = None) -> None:
    ctx.session.add(Effect(name=how))
    ctx.session.flush()
    # An async one of SQLAlchemy 2.0 cannot be entered.
    with closing(ctx.session.connection().connection.cursor()) as cursor:
        if role is not None:
            cursor.execute(f"SET ROLE {role}")
        cursor.execute(f"PREPARE TRANSACTION '{ctx.job.id}-{ctx.job.attempt}'")
        if role is not None:
            cursor.execute("RESET ROLE")
            cursor.execute("COMMIT")
        if how == "commit":
            cursor.connection.autocommit = True
            cursor.execute(f"COMMIT PREPARED '{ctx.job.id}-{ctx.job.attempt}'")
            cursor.connection.autocommit = False
    if how == "raise":
        raise ValueError
    if how == "go on":
        ctx.session.add(Effect(name=how))


@pytest.mark.first_and_last
@pytest.mark.timeout(60)
@pytest.mark.parametrize("batch_size", [1, 10])
@pytest.mark.parametrize("claim", ["transaction", "lease"])
@pytest.mark.parametrize("how", ["return", "raise", "go on", "commit"])
def test_a_transaction_that_a_handler_prepares_is_rolled_back_and_its_attempts_count(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, how: str, claim: str, batch_size: int
) -> None:
    """It would hold the job for ever. None of its rows stand, unless it committed them; neighbours are done once."""
    jobs = Jobs()

    @jobs.handler(queue="q", retry=TWICE, claim=claim)  # type: ignore[arg-type]  # one of the two modes
    def write(ctx: Context, name: str) -> None:
        if name == how:
            prepare(ctx, how)
        else:
            ctx.session.add(Effect(name=name))

    with sessions.begin() as session:
        session.add_jobs(write.job(name=name) for name in ("before", how, "behind"))
    events = drain(jobs, **together(claim, batch_size))
    assert prepared(engine) == []
    assert waiting(engine) == 0
    committed = {"commit": 1} if how == "commit" else {}
    assert ledger(engine) == {"before": 1, "behind": 1, **committed}
    attempt, reason = (
        (1, COMMITTED_BY_HANDLER)
        if how == "commit"
        else (2, "gave up after 2 of 2 attempts: outboxq.errors.TransactionEndedByHandler")
    )
    assert dead_letters(engine) == [(how, attempt, reason)]
    assert not [event for event in events if isinstance(event, DatabaseLost)]


@pytest.mark.each_value
@pytest.mark.timeout(60)
@pytest.mark.parametrize("flavour", ["sync", "async"])
@pytest.mark.parametrize("together", ["shared", "group"])
@pytest.mark.parametrize("how", ["return", "raise"])
def test_a_transaction_that_one_of_several_prepares_costs_the_others_nothing(
    how: str, together: str, flavour: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Each runs alone then, and the one that prepared is charged, also of one call of a batch handler."""
    jobs = Jobs()

    def act(ctx: Any, name: str) -> None:
        if name == how:
            prepare(ctx, how)
        else:
            ctx.session.add(Effect(name=name))

    def act_on_all(ctx: Any, items: Sequence[BatchItem[Named]]) -> None:
        for item in items:
            act(_OneOf(getattr(ctx.session, "sync_session", ctx.session), item.job), item.args.name)

    if together == "group" and flavour == "sync":

        @jobs.batch_handler(Named, queue="q", retry=ONCE)
        def write(ctx: BatchContext, items: Sequence[BatchItem[Named]]) -> None:
            act_on_all(ctx, items)
    elif together == "group":

        @jobs.batch_handler(Named, queue="q", retry=ONCE)
        async def write(ctx: AsyncBatchContext, items: Sequence[BatchItem[Named]]) -> None:
            await ctx.session.run_sync(lambda _: act_on_all(ctx, items))
    elif flavour == "sync":

        @jobs.handler(queue="q", retry=ONCE, batchable=True)
        def write(ctx: Context, name: str) -> None:
            act(ctx, name)
    else:

        @jobs.handler(queue="q", retry=ONCE, batchable=True)
        async def write(ctx: AsyncContext, name: str) -> None:
            await ctx.session.run_sync(lambda session: act(_OneOf(session, ctx.job), name))

    with sessions.begin() as session:
        session.add_jobs(write.job(name=name) for name in ("before", how, "behind"))
    drain(jobs, slots_per_queue=1, batch_size=10)
    assert prepared(engine) == []
    assert waiting(engine) == 0
    assert ledger(engine) == {"before": 1, "behind": 1}
    reason = "gave up after 1 of 1 attempts: outboxq.errors.TransactionEndedByHandler"
    assert dead_letters(engine) == [(how, 1, reason)]


# Where the relay may not roll it back


@dataclass(frozen=True)
class Humble:
    """A relay's login that is no superuser, and a role that it may take, whose prepared transactions it may not end."""

    url: str
    other: str


@pytest.fixture
def humble(outboxq_database: Database, engine: Engine) -> Iterator[Humble]:
    login, other, password = (f"oq_{name}_{secrets.token_hex(4)}" for name in ("relay", "other", "word"))
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {other}"))
        connection.execute(text(f"CREATE ROLE {login} LOGIN PASSWORD '{password}' IN ROLE {other}"))
        for schema in ("outboxq", "public"):
            connection.execute(text(f"GRANT USAGE ON SCHEMA {schema} TO {login}"))
            for objects in ("TABLES", "SEQUENCES", "FUNCTIONS"):
                connection.execute(text(f"GRANT ALL ON ALL {objects} IN SCHEMA {schema} TO {login}"))
    url = make_url(outboxq_database.url).set(username=login, password=password)
    yield Humble(url.render_as_string(hide_password=False), other)
    roll_back_prepared(engine)
    with engine.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {login}"))
        connection.execute(text(f"DROP ROLE {login}, {other}"))


@pytest.mark.first_and_last
@pytest.mark.timeout(60)
@pytest.mark.parametrize("flavour", ["sync", "async"])
@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_transaction_that_the_relay_may_not_end_frees_its_slot(
    humble: Humble,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    caplog: pytest.LogCaptureFixture,
    claim: str,
    flavour: str,
) -> None:
    """Its job never runs beside it: it is held by it, or, where it was leased, a dead letter that names it."""
    jobs, runs = Jobs(), []

    def act(ctx: Any, name: str) -> None:
        runs.append(name)
        if name == "prepares":
            prepare(ctx, name, humble.other)
        else:
            ctx.session.add(Effect(name=name))

    if flavour == "sync":

        @jobs.handler(queue="q", retry=TWICE, claim=claim)  # type: ignore[arg-type]  # one of the two modes
        def write(ctx: Context, name: str) -> None:
            act(ctx, name)
    else:

        @jobs.handler(queue="q", retry=TWICE, claim=claim)  # type: ignore[arg-type]  # one of the two modes
        async def write(ctx: AsyncContext, name: str) -> None:
            await ctx.session.run_sync(lambda session: act(_OneOf(session, ctx.job), name))

    with sessions.begin() as session:
        first, _ = session.add_jobs(write.job(name=name) for name in ("prepares", "behind"))
    events: list[Event] = []
    Relay(humble.url, jobs, RelayConfig(slots_per_queue=1), hooks=[events.append]).drain()
    (gid,) = prepared(engine)
    assert sorted(runs) == ["behind", "prepares"]
    assert ledger(engine) == {"behind": 1}
    assert f"as '{gid}'" in caplog.text
    assert not [event for event in events if isinstance(event, DatabaseLost)]
    if claim == "lease":
        ((name, attempt, reason),) = dead_letters(engine)
        assert (name, attempt) == ("prepares", 1)
        assert f"as '{gid}'" in reason
        assert waiting(engine) == 0
        assert [event.job.id for event in events if isinstance(event, JobDied)] == [first.id]
    else:
        assert dead_letters(engine) == []
        assert waiting(engine) == 1


@pytest.mark.timeout(60)
def test_a_leased_job_whose_row_is_prepared_too_holds_no_slot(
    humble: Humble, engine: Engine, sessions: sessionmaker[OutboxSession], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing can be written about it before that transaction ends: the slot goes on, and it does not run again."""
    jobs, runs = Jobs(), []

    @jobs.handler(queue="q", retry=TWICE, claim="lease")
    def write(ctx: Context, name: str) -> None:
        runs.append(name)
        if name == "prepares":
            ctx.session.execute(text("SELECT FROM outboxq.job WHERE id = :id FOR UPDATE"), {"id": ctx.job.id})
            prepare(ctx, name, humble.other)

    with sessions.begin() as session:
        session.add_jobs(write.job(name=name) for name in ("prepares", "behind"))
    events: list[Event] = []
    Relay(humble.url, jobs, RelayConfig(slots_per_queue=1), hooks=[events.append]).drain()
    assert sorted(runs) == ["behind", "prepares"]
    assert f"as '{prepared(engine)[0]}'" in caplog.text
    assert not [event for event in events if isinstance(event, BatchRolledBack | DatabaseLost)]
