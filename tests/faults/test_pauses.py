"""Relays that stand still: stopped past their lease or past the server's patience, and woken when it is too late."""

import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, RelayConfig, SlotGroup
from outboxq.events import JobCrashed, JobDone
from outboxq.postgres import Database
from outboxq.testing import CommitProxy, RelayProcess
from outboxq.testing.crashes import COMMIT_SCRIPT
from tests.conftest import StartRelay
from tests.support import faulty
from tests.support.aftermath import assert_nothing_left
from tests.support.ledger import ledger, waiting
from tests.support.matrices import sampled
from tests.support.waiting import PATIENCE, wait_until

LOST = "lease was lost while the job ran"


def config(queue: str) -> RelayConfig:
    return RelayConfig(groups=(SlotGroup((queue,)),), lease_seconds=1, poll_seconds=0.05)


def enqueue_held(sessions: sessionmaker[OutboxSession], kind: object, marker: Path) -> None:
    with sessions.begin() as session:
        session.add_job(kind, name="held", fault="hold", marker=str(marker))


def open_gate(marker: Path) -> None:
    marker.with_name(marker.name + ".open").touch()


def does_one_more(engine: Engine, sessions: sessionmaker[OutboxSession], kind: object) -> None:
    with sessions.begin() as session:
        session.add_job(kind, name="afterwards")
    wait_until(lambda: faulty.trace("afterwards") in ledger(engine), "another job of the relay that was woken")


@pytest.mark.large
@pytest.mark.parametrize("kind", [faulty.work_leased, faulty.work_leased_async], ids=["sync", "async"])
def test_a_relay_stopped_past_its_lease_commits_nothing_when_it_wakes(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    start_relay: StartRelay,
    tmp_path: Path,
    kind,
) -> None:
    """Another relay has done its job by then: zero rows at its completion, which it says; then it works on."""
    marker = tmp_path / "held"
    enqueue_held(sessions, kind, marker)
    with RelayProcess("tests.support.faulty:jobs", outboxq_database.url, config(kind.queue)) as stalled:
        wait_until(marker.exists, "the handler to run")
        stalled.pause()
        with start_relay(faulty.jobs, config(kind.queue)) as running:
            wait_until(lambda: running.of(JobDone), "the other relay to do it")
        assert [(event.crashes, event.dead_letter) for event in running.of(JobCrashed)] == [(0, False)]
        open_gate(marker)
        stalled.resume()
        wait_until(lambda: LOST in stalled.log, "the loss to be noticed")
        does_one_more(engine, sessions, kind)
        assert stalled.stop() == 0
    assert ledger(engine) == {faulty.trace("held"): 1, faulty.trace("afterwards"): 1}
    assert_nothing_left(engine)


@pytest.mark.large
def test_a_job_taken_from_a_stopped_relay_is_not_its_any_more_even_if_nobody_runs_it(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    start_relay: StartRelay,
    tmp_path: Path,
) -> None:
    """The reaper gives a new token: who wakes up before the next claim has lost the lease all the same."""
    marker = tmp_path / "held"
    enqueue_held(sessions, faulty.work_leased, marker)
    with RelayProcess("tests.support.faulty:jobs", outboxq_database.url, config("lease")) as stalled:
        wait_until(marker.exists, "the handler to run")
        stalled.pause()
        # A relay that serves other queues reaps for all.
        with start_relay(faulty.jobs, config("tx")) as running:
            wait_until(lambda: running.of(JobCrashed), "the job to be reaped")
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO outboxq.queue (name, paused_at) VALUES ('lease', now())"))
        open_gate(marker)
        stalled.resume()
        wait_until(lambda: LOST in stalled.log, "the loss to be noticed")
        assert ledger(engine) == {}
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM outboxq.queue"))
        wait_until(lambda: waiting(engine) == 0, "the job to run again")
        assert stalled.stop() == 0
    assert ledger(engine) == {faulty.trace("held"): 1}
    assert_nothing_left(engine)


@pytest.mark.large
def test_the_server_frees_a_job_of_a_stopped_relay_in_transaction_mode(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    start_relay: StartRelay,
    tmp_path: Path,
) -> None:
    """Its idle transaction is ended, another relay does the job once; the one that wakes commits nothing, and works."""
    marker = tmp_path / "held"
    enqueue_held(sessions, faulty.work_hastily, marker)
    with RelayProcess("tests.support.faulty_impatient:jobs", outboxq_database.url, config("tx-hasty")) as stalled:
        wait_until(marker.exists, "the handler to run")
        stalled.pause()
        with start_relay(faulty.jobs, config("tx-hasty")):
            assert ledger(engine) == {}, "the job is held"
            wait_until(lambda: waiting(engine) == 0 and ledger(engine), "the other relay to do it")
        open_gate(marker)
        stalled.resume()
        does_one_more(engine, sessions, faulty.work_hastily)
        assert stalled.stop() == 0
    assert ledger(engine) == {faulty.trace("held"): 1, faulty.trace("afterwards"): 1}
    assert_nothing_left(engine)


@pytest.mark.large
def test_the_server_frees_a_leased_job_whose_completion_stands_still_before_its_commit(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    start_relay: StartRelay,
) -> None:
    """A reaper passes the row that is just being completed; once the server has undone that, it is another's."""
    with sessions.begin() as session:
        session.add_job(faulty.work_leased_hastily, name="held")
    with CommitProxy(outboxq_database.url) as proxy:
        trap = proxy.freeze_at_commit(containing=COMMIT_SCRIPT)
        with RelayProcess("tests.support.faulty_impatient:jobs", proxy.url, config("lease-hasty")) as stalled:
            assert trap.reached.wait(PATIENCE), stalled.log
            stalled.pause()
            with start_relay(faulty.jobs, config("lease-hasty")):
                wait_until(lambda: waiting(engine) == 0, "the other relay to do it")
            trap.release()
            stalled.resume()
            does_one_more(engine, sessions, faulty.work_leased_hastily)
            assert stalled.stop() == 0
    assert ledger(engine) == {faulty.trace("held"): 1, faulty.trace("afterwards"): 1}
    assert_nothing_left(engine)


@pytest.mark.large
def test_an_answer_in_pieces_holds_up_no_other_thread(outboxq_database: Database) -> None:
    """The lease's thread never waits inside libpq, where it would keep the interpreter's lock from everybody."""
    script = (
        "import sys, psycopg\n"
        "from outboxq.database.driver import run_on_libpq\n"
        "from outboxq.testing import CommitProxy\n"
        # The proxy's threads, of this same interpreter, hand each message on by itself.
        "with CommitProxy(sys.argv[1]) as proxy:\n"
        "    with psycopg.connect(proxy.url.replace('+psycopg', '')) as connection:\n"
        "        for number in range(300):\n"
        "            run_on_libpq(connection.pgconn, 'SELECT 1')\n"
    )
    command = [sys.executable, "-c", script, outboxq_database.url]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.first_and_last
@pytest.mark.parametrize("held_by", ["DELETE FROM", "SELECT FROM"])
@pytest.mark.parametrize("kind", [faulty.work, faulty.work_leased], ids=["transaction", "lease"])
def test_an_orphaned_prepared_transaction_holds_up_its_own_job_alone(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, kind, held_by: str
) -> None:
    """The others go on; rolled back, its job is done once, uncharged."""
    with engine.connect() as connection:
        if connection.execute(text("SHOW max_prepared_transactions")).scalar_one() == "0":
            pytest.skip("this server has max_prepared_transactions = 0")
    names = [f"job {number}" for number in range(6)]
    with sessions.begin() as session:
        for name in names:
            session.add_job(kind, name=name)
    lock = "" if held_by.startswith("DELETE") else " FOR UPDATE"
    orphan = f"test_{engine.url.database}"
    with engine.connect() as connection, connection.begin():
        connection.execute(text(f"{held_by} outboxq.job WHERE args->>'name' = 'job 2'{lock}"))
        connection.execute(text(f"PREPARE TRANSACTION '{orphan}'"))
    try:
        with start_relay(faulty.jobs, config(kind.queue)) as running:
            wait_until(lambda: len(running.of(JobDone)) == 5, "the others")
            assert faulty.trace("job 2") not in ledger(engine)
            rollback_prepared(engine, orphan)
            wait_until(lambda: len(running.of(JobDone)) == 6, "the job that was held")
    finally:
        rollback_prepared(engine, orphan)
    assert ledger(engine) == {faulty.trace(name): 1 for name in names}
    assert_nothing_left(engine)


def rollback_prepared(engine: Engine, name: str) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if connection.execute(text("SELECT gid FROM pg_prepared_xacts WHERE gid = :name"), {"name": name}).first():
            connection.execute(text(f"ROLLBACK PREPARED '{name}'"))


@pytest.mark.large
@pytest.mark.parametrize("kind", sampled([faulty.work, faulty.work_leased_async]), ids=["transaction", "lease"])
def test_a_pinned_snapshot_changes_nothing_that_a_claim_takes(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, kind
) -> None:
    """While no dead row can be removed, two relays do every job once."""
    names = [f"job {number}" for number in range(300)]
    # In lease mode a claim takes as many jobs as there are free slots.
    size = {"batch_size": 7} if kind is faulty.work else {}
    settings = RelayConfig(groups=(SlotGroup((kind.queue,), 3),), lease_seconds=1, poll_seconds=0.05, **size)
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as pin:
        pin.execute(text("SELECT count(*) FROM outboxq.job"))
        with start_relay(faulty.jobs, settings), start_relay(faulty.jobs, settings):
            for begin in range(0, len(names), 50):
                with sessions.begin() as session:
                    session.add_jobs(kind.job(name=name) for name in names[begin : begin + 50])
            wait_until(lambda: sum(ledger(engine).values()) >= len(names) and not waiting(engine), "every job")
        assert pin.execute(text("SELECT count(*) FROM outboxq.job")).scalar_one() == 0
    assert ledger(engine) == {faulty.trace(name): 1 for name in names}
    assert_nothing_left(engine)
