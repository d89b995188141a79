"""What a handler sets in its transaction does not keep our own statements behind it from being executed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text

from outboxq import AsyncContext, Backoff, BatchContext, BatchItem, Context, Jobs, OutboxSession, Retry, external
from outboxq.events import Event, JobDied, JobDone, JobRetried
from outboxq.handlers.options import ClaimMode
from tests.support.app import Effect
from tests.support.ledger import effects
from tests.support.matrices import diagonal

ONCE = Backoff(max_attempts=1)
TWICE = Backoff(max_attempts=2, first_seconds=0.0, jitter=0.0)
_ENDS = JobDone | JobDied | JobRetried
Drain = Callable[..., list[Event]]
LEAVINGS = {
    "role": "SET ROLE {role}",
    "role of the transaction": "SET LOCAL ROLE {role}",
    "role by a function": "SELECT set_config('role', '{role}', false)",
    "session authorization": "SET SESSION AUTHORIZATION {role}",
    "read only": "SET TRANSACTION READ ONLY",
    "read only by default": "SET default_transaction_read_only = on",
    "search path": "SET search_path = pg_temp",
    "patience": "SET lock_timeout = 1",
    "replica": "SET session_replication_role = replica",
    "DateStyle": "SET datestyle = German",
}


@pytest.fixture
def role(engine: Engine) -> Iterator[str]:
    """A role that may do nothing at all with our tables."""
    with engine.begin() as connection:
        name = f"poor_{connection.execute(text('SELECT current_database()')).scalar_one()}"
        connection.execute(text(f'CREATE ROLE "{name}"'))
    yield name
    with engine.begin() as connection:
        connection.execute(text(f'DROP ROLE "{name}"'))


@dataclass
class Statement:
    """What a job of the batch handler takes."""

    statement: str


LEFT = pytest.mark.parametrize("left", LEAVINGS)
CLAIMS = pytest.mark.parametrize("claim", ["transaction", "lease"])
FLAVOURS = pytest.mark.parametrize("flavour", ["sync", "async"])


@pytest.mark.first_and_last
@diagonal(LEFT, CLAIMS, FLAVOURS)
def test_a_job_is_done_whatever_its_handler_has_set(
    left: str, claim: ClaimMode, flavour: str, role: str, engine: Engine, drain: Drain
) -> None:
    """Under a lease as in transaction mode, at its first attempt, and what is kept of it is written."""
    jobs = Jobs()
    kept = timedelta(hours=1)
    if flavour == "sync":

        @jobs.handler(kind="it", queue="q", retry=ONCE, claim=claim, keep=kept)
        def it(ctx: Context, statement: str) -> None:
            ctx.session.add(Effect(name="x"))
            ctx.session.flush()
            ctx.session.execute(text(statement))

    else:

        @jobs.handler(kind="it", queue="q", retry=ONCE, claim=claim, keep=kept)
        async def it_too(ctx: AsyncContext, statement: str) -> None:
            ctx.session.add(Effect(name="x"))
            await ctx.session.flush()
            await ctx.session.execute(text(statement))

    kind = external("it", queue="q")
    with OutboxSession(engine) as session, session.begin():
        for _ in range(2):
            session.add_job(kind, statement=LEAVINGS[left].format(role=role))
    assert [type(each) for each in drain(jobs) if isinstance(each, _ENDS)] == [JobDone, JobDone]
    assert effects(engine) == ["x", "x"]
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM outboxq.done_job")).scalar_one() == 2


@pytest.mark.parametrize("left", ["role", "read only"])
def test_what_one_handler_of_a_batch_has_set_does_not_fail_the_next_ones_retry(
    left: str, role: str, engine: Engine, drain: Drain
) -> None:
    """Its row in the queue is written by the relay, behind both."""
    jobs = Jobs()

    @jobs.handler(queue="q", retry=TWICE)
    def sets(ctx: Context, statement: str) -> None:
        ctx.session.add(Effect(name="x"))
        ctx.session.flush()
        ctx.session.execute(text(statement))

    @jobs.handler(queue="q", retry=TWICE)
    def fails(ctx: Context) -> None:
        if ctx.job.attempt == 1:
            raise ValueError

    with OutboxSession(engine) as session, session.begin():
        session.add_job(sets, statement=LEAVINGS[left].format(role=role))
        session.add_job(fails)
    ends = [type(each) for each in drain(jobs, batch_size=10) if isinstance(each, _ENDS)]
    assert ends == [JobDone, JobRetried, JobDone]


def test_a_batch_handler_may_set_something_too(role: str, engine: Engine, drain: Drain) -> None:
    """The outcomes of its jobs are written behind it."""
    jobs = Jobs()

    @jobs.batch_handler(Statement, queue="q", retry=TWICE)
    def many(ctx: BatchContext, items: Sequence[BatchItem[Statement]]) -> list[Retry | None]:
        ctx.session.execute(text(items[0].args.statement))
        return [Retry(delay=timedelta(0)) if item.job.attempt == 1 and n else None for n, item in enumerate(items)]

    with OutboxSession(engine) as session, session.begin():
        for _ in range(2):
            session.add_job(many, statement=LEAVINGS["role"].format(role=role))
    ends = [type(each) for each in drain(jobs, batch_size=10) if isinstance(each, _ENDS)]
    assert ends == [JobDone, JobRetried, JobDone]


# A handler's own time-out of a millisecond would fail the statement that resets it, on a machine that is busy enough.
_NOTING = """
CREATE TABLE noted (timeout text);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
  $$ BEGIN INSERT INTO noted VALUES (current_setting('statement_timeout')); RETURN NULL; END $$;
CREATE TRIGGER note AFTER INSERT ON outboxq.done_job FOR EACH ROW EXECUTE FUNCTION note();
"""


@pytest.mark.first_and_last
@pytest.mark.parametrize("way", ["transaction", "lease", "batch handler"])
def test_our_statements_are_not_under_the_time_out_of_a_handler(way: str, engine: Engine, drain: Drain) -> None:
    """What is kept of a job is written under the relay's own."""
    jobs, kept = Jobs(), timedelta(hours=1)
    with engine.begin() as connection:
        connection.exec_driver_sql(_NOTING)

    if way == "batch handler":

        @jobs.batch_handler(Statement, kind="it", queue="q", retry=ONCE, keep=kept)
        def many(ctx: BatchContext, items: Sequence[BatchItem[Statement]]) -> None:
            ctx.session.execute(text(items[0].args.statement))

    else:

        @jobs.handler(kind="it", queue="q", retry=ONCE, claim="lease" if way == "lease" else "transaction", keep=kept)
        def it(ctx: Context, statement: str) -> None:
            ctx.session.execute(text(statement))

    with OutboxSession(engine) as session, session.begin():
        for _ in range(2):
            session.add_job(external("it", queue="q"), statement="SET statement_timeout = '7h'")
    # Under a lease one job after the other on one connection.
    settings = {"slots_per_queue": 1} if way == "lease" else {"batch_size": 10}
    ends = [type(each) for each in drain(jobs, **settings) if isinstance(each, _ENDS)]
    assert ends == [JobDone, JobDone]
    with engine.connect() as connection:
        noted = connection.execute(text("SELECT timeout FROM noted")).scalars().all()
    assert len(noted) == 2
    assert "7h" not in noted
