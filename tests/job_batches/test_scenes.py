"""Staged scenes of batches, through real slots: what is lost by a look too early, or by one that does not wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import JobBatch, OutboxSession, RelayConfig
from outboxq.config import SlotGroup
from outboxq.events import BatchFinished
from outboxq.postgres import Database
from outboxq.relay.limits import RelayLimits
from outboxq.testing import RelayProcess
from tests.conftest import StartRelay
from tests.job_batches.app import gated, jobs, meeting, note, report
from tests.support.waiting import wait_until

# No sweep comes within the test.
CONFIG = RelayConfig(prune_seconds=86_400, groups=(SlotGroup(("members",), 2), SlotGroup(("reports",), 1)))
# A row waits for the lock in the server.
HOLD = """
CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_advisory_xact_lock({lock}); RETURN NEW; END $$
"""
HOLD_CALLBACK = """
CREATE TRIGGER hold BEFORE INSERT ON outboxq.job FOR EACH ROW WHEN (NEW.kind = 'report') EXECUTE FUNCTION hold()
"""
WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = :locktype AND database = :database"


def names(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT name FROM effect_ledger ORDER BY name")).scalars())


def waiting_for(engine: Engine, locktype: str) -> int:
    """How many backends wait for such a lock."""
    with engine.connect() as connection:
        return int(
            connection.execute(
                text(
                    "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) "
                    "WHERE NOT granted AND locktype = :locktype AND datname = current_database()"
                ),
                {"locktype": locktype},
            ).scalar_one()
        )


@contextmanager
def holding(engine: Engine, lock: int) -> Iterator[Connection]:
    """An advisory lock of the session, which the block may give up earlier by closing the connection."""
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_advisory_lock(:lock)"), {"lock": lock})
        connection.commit()
        yield connection
        connection.execute(text("SELECT pg_advisory_unlock_all()"))
        connection.commit()


def stage(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


@pytest.mark.wide
def test_a_batch_is_looked_at_behind_commit(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Two members that end at the same time see each other before their COMMITs, and neither would be the last."""
    with sessions.begin() as session, jobs.batch(session, on_done=report.job(batch=1)) as batch:
        batch.add_jobs(meeting.job(name=name) for name in ("one", "two"))
    with start_relay(jobs, CONFIG) as relay:
        wait_until(lambda: "report 1 left 0 failed 0" in names(engine), "the callback", 60)
        # Published by another slot than the callback's.
        wait_until(lambda: relay.of(BatchFinished), "the event")
        assert len(relay.of(BatchFinished)) == 1


@pytest.mark.wide
@pytest.mark.relay_limits(RelayLimits(first_prune_seconds=0.2))
def test_a_look_waits_for_another_one_that_may_roll_back(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database, start_relay: StartRelay
) -> None:
    """If it passed over the batch, the callback of one whose last look is undone would not be added."""
    stage(engine, HOLD.format(lock=4712), HOLD_CALLBACK)
    with sessions.begin() as session, jobs.batch(session, on_done=report.job(batch=1)) as batch:
        batch.add_job(note, name="first")
    members = RelayConfig(prune_seconds=86_400, groups=(SlotGroup(("members",), 1),))
    target, url = "tests.job_batches.app:jobs", outboxq_database.url
    with holding(engine, 4712) as lock, RelayProcess(target, url, members) as dying:
        wait_until(lambda: waiting_for(engine, "advisory") == 1, "the look that adds the callback")
        # Its only sweep comes now.
        with start_relay(jobs, CONFIG):
            wait_until(lambda: waiting_for(engine, "transactionid") == 1, "the look that waits for it", 20)
            dying.kill()
            stage(
                engine,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                f"WHERE datname = current_database() AND application_name = '{dying.name}'",
            )
            lock.execute(text("SELECT pg_advisory_unlock_all()"))
            lock.commit()
            wait_until(lambda: "report 1 left 0 failed 0" in names(engine), "the callback", 20)


@pytest.mark.relay_limits(RelayLimits(first_prune_seconds=0.2))
@pytest.mark.parametrize("prune_seconds", [1.0, 0.0])
def test_the_sweep_comes_to_a_batch_whose_last_member_no_relay_has_ended(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, prune_seconds: float
) -> None:
    """After an operator's cancellation, or after a relay that died between its COMMIT and its look; also if no pruning
    is wanted."""
    with sessions.begin() as session, jobs.batch(session, on_done=report.job(batch=1)) as batch:
        batch.add_job(note, name="gone")
    stage(engine, "DELETE FROM outboxq.job WHERE kind = 'note'")
    with start_relay(jobs, RelayConfig(prune_seconds=prune_seconds)) as relay:
        wait_until(lambda: names(engine) == ["report 1 left 0 failed 0"], "the callback")
        assert relay.of(BatchFinished) == []


@pytest.mark.wide
def test_adding_to_a_batch_waits_for_no_member_that_runs(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, tmp_path: Path
) -> None:
    """Nor for one another: members share no row."""
    gate = tmp_path / "gate"
    with sessions.begin() as session, jobs.batch(session, on_done=report.job(batch=1)) as batch:
        batch.add_job(gated, name="held", gate=str(gate))
    with start_relay(jobs, CONFIG) as relay:
        wait_until(lambda: running(engine), "the member that runs")
        for number in range(100):
            with sessions.begin() as session:
                # The member that runs ends after them.
                session.execute(text("SET LOCAL lock_timeout = '10s'"))
                JobBatch(session, batch.id.hex).add_job(note, name=f"added {number}")
        assert relay.of(BatchFinished) == []
        gate.touch()
        wait_until(lambda: "report 1 left 0 failed 0" in names(engine), "the callback")
        assert len(names(engine)) == 102


def running(engine: Engine) -> bool:
    """Whether a transaction has deleted a job's row."""
    with engine.connect() as connection:
        return bool(
            connection.execute(
                text(
                    "SELECT EXISTS (SELECT FROM outboxq.job WHERE xmax IN "
                    "(SELECT backend_xid FROM pg_stat_activity WHERE backend_xid IS NOT NULL))"
                )
            ).scalar_one()
        )
