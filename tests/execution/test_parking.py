"""Jobs of kinds that have no handler here: errors on their way back to the queue end no relay."""

from collections.abc import Callable

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Context, Jobs, OutboxSession, external
from outboxq.events import Event
from tests.support.app import Effect
from tests.support.ledger import ledger

Drain = Callable[..., list[Event]]
# A trigger of the user's, or anything else that makes the statement fail that parks a job.
PARKS_NOTHING = """
CREATE FUNCTION refuses() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no parking'; END $$;
CREATE TRIGGER refuses BEFORE INSERT OR UPDATE ON outboxq.job FOR EACH ROW WHEN (NEW.parked > 0)
  EXECUTE FUNCTION refuses();
"""


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["unknown", "of the other flavour"])
@pytest.mark.parametrize("claim", ["transaction", "lease"])
@pytest.mark.parametrize("batch_size", [1, 10])
def test_a_job_of_an_unknown_kind_that_cannot_be_parked_is_put_off(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, claim: str, batch_size: int, kind: str
) -> None:
    """It has had no attempt, and the jobs behind it run."""
    jobs = Jobs()

    @jobs.handler(queue="q", claim=claim, kind="known")
    def write(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))

    @jobs.handler(queue="async", claim=claim, kind="of the other flavour")
    async def write_async(ctx: AsyncContext, name: str) -> None: ...

    with engine.begin() as connection:
        connection.exec_driver_sql(PARKS_NOTHING)
    with sessions.begin() as session:
        session.add_job(external(kind, queue="q"), name="nobody's")
        session.add_job(write, name="behind it")
    drain(jobs, slots_per_queue=1, batch_size=batch_size)
    assert ledger(engine) == {"behind it": 1}
    with engine.connect() as connection:
        waits = "SELECT state, attempt, crashes, parked, run_at > clock_timestamp() FROM outboxq.job"
        assert connection.execute(text(waits)).all() == [("scheduled", 0, 0, 0, True)]


def test_jobs_of_unknown_kinds_of_which_one_refuses_are_put_off_one_by_one(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, caplog: pytest.LogCaptureFixture
) -> None:
    """The statement for the head of the queue fails for all of them: their claims park each, and no slot pauses."""
    jobs = Jobs()

    @jobs.handler(queue="q", kind="known")
    def write(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))

    with sessions.begin() as session:
        session.add_jobs(external("unknown", queue="q").job(name=str(number)) for number in range(10))
        session.add_job(write, name="behind them")
    with engine.begin() as connection:
        connection.exec_driver_sql(
            PARKS_NOTHING.replace("INSERT OR UPDATE", "UPDATE").replace("NEW.parked > 0", "OLD.args->>'name' = '5'")
        )
    drain(jobs, slots_per_queue=1)
    assert ledger(engine) == {"behind them": 1}
    with engine.connect() as connection:
        parked = "SELECT DISTINCT state, attempt, parked FROM outboxq.job"
        assert connection.execute(text(parked)).all() == [("scheduled", 0, 1)]
    assert "are put off one by one: RaiseException (P0001)" in caplog.text
    assert "trying again" not in caplog.text
