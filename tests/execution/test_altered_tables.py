"""An ALTER TABLE, or a session that lost its prepared statements, costs no job an attempt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from sqlalchemy import Engine, text

from outboxq import AsyncContext, Backoff, BatchContext, BatchItem, Context, Jobs, OutboxSession, external
from outboxq.events import Event, JobDied, JobDone, JobRetried
from outboxq.handlers.options import ClaimMode
from tests.support.ledger import effects
from tests.support.matrices import diagonal

ONCE = Backoff(max_attempts=1)
_ENDS = JobDone | JobDied | JobRetried
Drain = Callable[..., list[Event]]
CLAIMS = pytest.mark.parametrize("claim", ["transaction", "lease"])
FLAVOURS = pytest.mark.parametrize("flavour", ["sync", "async"])
# By another session, or by the handler's own: psycopg does not see what a block does.
CAUSES = pytest.mark.parametrize("cause", ["altered", "deallocated"])
# psycopg prepares a statement at its sixth execution.
JOBS, CHANGED_AT = 12, 8
READ = text("SELECT * FROM read_by_handlers")
WRITE = text("INSERT INTO effect_ledger (name) SELECT name FROM read_by_handlers LIMIT 1")


@dataclass
class Number:
    """What a job takes."""

    number: int


@pytest.fixture(autouse=True)
def _table(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE read_by_handlers (name text)"))
        connection.execute(text("INSERT INTO read_by_handlers VALUES ('x')"))


def add(engine: Engine) -> None:
    kind = external("it", queue="q")
    with OutboxSession(engine) as session, session.begin():
        session.add_jobs(kind.job(number=number) for number in range(JOBS))


def change(engine: Engine, cause: str, done: list[int], number: int) -> str:
    """Alter the table once; returns what the handler is to send first."""
    is_due = number == CHANGED_AT and number not in done
    done.append(number)
    if is_due and cause == "altered":
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE read_by_handlers ADD COLUMN more int"))
    return "DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$" if is_due and cause == "deallocated" else "SELECT 1"


@diagonal(CLAIMS, FLAVOURS, CAUSES)
def test_a_statement_that_was_prepared_before_costs_no_attempt(
    claim: ClaimMode, flavour: str, cause: str, engine: Engine, drain: Drain
) -> None:
    """Not even that of a job that has one; and it is called no more than once more."""
    jobs, called = Jobs(), list[int]()
    if flavour == "sync":

        @jobs.handler(kind="it", queue="q", retry=ONCE, claim=claim)
        def it(ctx: Context, number: int) -> None:
            ctx.session.execute(text(change(engine, cause, called, number)))
            ctx.session.execute(READ).all()
            ctx.session.execute(WRITE)

    else:

        @jobs.handler(kind="it", queue="q", retry=ONCE, claim=claim)
        async def it_too(ctx: AsyncContext, number: int) -> None:
            await ctx.session.execute(text(change(engine, cause, called, number)))
            (await ctx.session.execute(READ)).all()
            await ctx.session.execute(WRITE)

    add(engine)
    events = drain(jobs, slots_per_queue=1)
    assert [type(each) for each in events if isinstance(each, _ENDS)] == [JobDone] * JOBS
    assert effects(engine) == ["x"] * JOBS
    assert len(called) == JOBS + 1


@CAUSES
def test_a_batch_handler_is_called_again_too(cause: str, engine: Engine, drain: Drain) -> None:
    """Each of its jobs is done once."""
    jobs, called = Jobs(), list[int]()

    @jobs.batch_handler(Number, kind="it", queue="q", retry=ONCE, max_size=1)
    def it(ctx: BatchContext, items: Sequence[BatchItem[Number]]) -> None:
        for item in items:
            ctx.session.execute(text(change(engine, cause, called, item.args.number)))
            ctx.session.execute(READ).all()
            ctx.session.execute(WRITE)

    add(engine)
    events = drain(jobs, slots_per_queue=1)
    assert [type(each) for each in events if isinstance(each, _ENDS)] == [JobDone] * JOBS
    assert effects(engine) == ["x"] * JOBS


def test_an_error_of_that_sqlstate_that_a_handler_raises_itself_counts(engine: Engine, drain: Drain) -> None:
    """What PostgreSQL does not support is not supported at the next try either: the handler is called once."""
    jobs, called = Jobs(), list[int]()

    @jobs.handler(kind="it", queue="q", retry=ONCE)
    def it(ctx: Context, number: int) -> None:
        called.append(number)
        ctx.session.execute(text("SELECT count(*) FROM effect_ledger FOR UPDATE"))

    add(engine)
    events = drain(jobs, slots_per_queue=1)
    assert [type(each) for each in events if isinstance(each, _ENDS)] == [JobDied] * JOBS
    assert len(called) == JOBS
