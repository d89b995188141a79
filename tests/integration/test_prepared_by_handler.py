"""A handler that ends its transaction by PREPARE TRANSACTION, on the driver's own cursor: undone, and its job pays."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Engine, text
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
)
from outboxq.events import DatabaseLost, Event
from outboxq.recover import COMMITTED_BY_HANDLER
from tests.integration.test_raised import dead_letters
from tests.support.app import Effect
from tests.support.ledger import ledger, waiting

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


def prepare(ctx: Context | _OneOf, how: str) -> None:
    ctx.session.add(Effect(name=how))
    ctx.session.flush()
    # An async one of SQLAlchemy 2.0 cannot be entered.
    with closing(ctx.session.connection().connection.cursor()) as cursor:
        cursor.execute(f"PREPARE TRANSACTION '{ctx.job.id}-{ctx.job.attempt}'")
        if how == "commit":
            cursor.connection.autocommit = True
            cursor.execute(f"COMMIT PREPARED '{ctx.job.id}-{ctx.job.attempt}'")
            cursor.connection.autocommit = False
    if how == "raise":
        raise ValueError
    if how == "go on":
        ctx.session.add(Effect(name=how))


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
    events = drain(jobs, slots_per_queue=1, batch_size=batch_size)
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
