"""A worker that dies: the page's wrong queues lose its job or keep it for ever; outboxq does it, once."""

from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, RelayConfig, SlotGroup
from outboxq.postgres import Database
from outboxq.testing import RelayProcess
from tests.queues_that_look_right.scene import Crew, kill_a_worker_with_a_job, one, page_sql
from tests.support import app, leased_app
from tests.support.ledger import ledger, rows, waiting
from tests.support.waiting import wait_until

ONE_SLOT = RelayConfig(groups=(SlotGroup(("held",), 1),), lease_seconds=1)


def test_a_job_that_is_done_before_it_is_done_is_lost(crew: Crew) -> None:
    """After the kill nothing says that there ever was a job."""
    (delete,) = page_sql("Done before it is done")
    crew.add(1)
    assert kill_a_worker_with_a_job(crew.conninfo, delete) == 1
    assert crew.states() == []


@pytest.mark.large
def test_a_killed_relays_job_is_done_by_the_next(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database, tmp_path: Path
) -> None:
    """Ours, in transaction mode: killed while the handler works, and done once."""
    gate = tmp_path / "gate"
    with sessions.begin() as session:
        session.add_job(app.record_at_gate, name="job", gate=str(gate))
    holding = (
        "SELECT 1 FROM pg_locks JOIN pg_class ON pg_class.oid = relation "
        "WHERE relname = 'effect_ledger' AND mode = 'RowExclusiveLock'"
    )
    with RelayProcess("tests.support.app:jobs", outboxq_database.url) as relay:
        wait_until(lambda: rows(engine, holding), "the handler at its gate")
        relay.kill()
    assert (waiting(engine), ledger(engine)) == (1, {})
    gate.touch()
    with RelayProcess("tests.support.app:jobs", outboxq_database.url):
        wait_until(lambda: waiting(engine) == 0, "the job")
    assert ledger(engine) == {"job": 1}


def test_a_running_flag_outlives_its_worker(crew: Crew) -> None:
    """The job is neither done nor ever handed out again."""
    claim, _ = page_sql("A running flag without an owner")
    crew.add(1)
    assert kill_a_worker_with_a_job(crew.conninfo, claim) == 1
    assert crew.states() == ["running"]
    with crew.worker() as next_worker:
        assert one(next_worker, claim) is None


def test_a_reset_of_running_flags_starts_a_job_twice(crew: Crew) -> None:
    """A worker that starts takes the job of one that lives."""
    claim, reset = page_sql("A running flag without an owner")
    crew.add(1)
    with crew.worker(autocommit=True) as first, crew.worker(autocommit=True) as second:
        assert one(first, claim) == (1,)
        second.execute(reset)
        assert one(second, claim) == (1,)


def test_a_leased_job_outlives_its_relay(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database, tmp_path: Path
) -> None:
    """Ours, in lease mode: the relay's own row ends the lease, and another relay does the job."""
    with sessions.begin() as session:
        session.add_job(leased_app.call, name="job", directory=str(tmp_path), fault="kill")
    with RelayProcess("tests.support.leased_app:jobs", outboxq_database.url, ONE_SLOT) as killed:
        wait_until(lambda: killed.returncode == -9, "the relay's death")
    with RelayProcess("tests.support.leased_app:jobs", outboxq_database.url, ONE_SLOT):
        wait_until(lambda: waiting(engine) == 0, "the job")
    assert len((tmp_path / "lines").read_text().splitlines()) == 2


@pytest.mark.large
def test_a_relay_that_starts_leaves_the_jobs_of_the_living_alone(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database, tmp_path: Path
) -> None:
    """Ours, in lease mode: a second relay works beside the first, for longer than a lease, and takes nothing of it."""
    lines = tmp_path / "lines"
    with sessions.begin() as session:
        session.add_job(leased_app.call, name="long", directory=str(tmp_path), fault="stay")
    with RelayProcess("tests.support.leased_app:jobs", outboxq_database.url, ONE_SLOT):
        wait_until(lines.exists, "the handler")
        until = rows(engine, "SELECT clock_timestamp() + interval '2 seconds'")[0][0]
        with RelayProcess("tests.support.leased_app:jobs", outboxq_database.url, ONE_SLOT):
            wait_until(lambda: rows(engine, f"SELECT WHERE clock_timestamp() > '{until}'"), "two lengths of a lease")
            with sessions.begin() as session:
                session.add_job(leased_app.call, name="short", directory=str(tmp_path))
            wait_until(lambda: "short" in lines.read_text(), "the second relay's job")
            assert lines.read_text().count("long") == 1
            (tmp_path / "gate").touch()
            wait_until(lambda: waiting(engine) == 0, "the first relay's job")
    assert lines.read_text().count("long") == 1
