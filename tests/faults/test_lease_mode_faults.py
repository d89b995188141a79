"""Claims of many leased jobs that are killed, stopped or cut off: nobody is charged for another's death."""

from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from outboxq import OutboxSession, RelayConfig, SlotGroup
from outboxq.events import JobCrashed, JobDone, JobLeaseLost
from outboxq.postgres import Database
from outboxq.relay.limits import RelayLimits
from outboxq.testing import FAULT_POINTS, CommitProxy, FaultPoint, RelayProcess
from tests.conftest import StartRelay
from tests.support import leased_app
from tests.support.aftermath import assert_nothing_left, expire_leases
from tests.support.ledger import dead, waiting
from tests.support.limits import HELD
from tests.support.waiting import PATIENCE, wait_until

TARGET = "tests.support.leased_app_patient:jobs"
# Claims of one slot take 1, 2 and 4 jobs before they may take 8.
QUICK = [f"quick {number}" for number in range(7)]
COMPLETION = "WITH oq_held"


# The relays of this process have those of `tests/support/leased_app_patient.py`.
pytestmark = pytest.mark.relay_limits(RelayLimits(lease_mode=HELD))


def config(queue: str = "held", **settings: object) -> RelayConfig:
    defaults = {"batch_size": 8, "lease_seconds": 1, "poll_seconds": 0.05, "max_crashes": 2}
    return RelayConfig(groups=(SlotGroup((queue,)),), **(defaults | settings))


def enqueue(engine: Engine, directory: Path, kind: object, **faults: str) -> list[str]:
    """After as many quick ones as bring a slot's claims to eight; all their names."""
    names = [*QUICK, *faults]
    with OutboxSession(engine) as session, session.begin():
        for name in names:
            session.add_job(kind, name=name, directory=str(directory), fault=faults.get(name, ""))
    return names


def runs(directory: Path) -> dict[str, list[str]]:
    """Under which attempt, and after how many crashes, each was run."""
    found: dict[str, list[str]] = {}
    lines = directory / "lines"
    for line in lines.read_text().splitlines() if lines.exists() else []:
        name, charged = line.rsplit(" ", 2)[0], " ".join(line.rsplit(" ", 2)[1:])
        found.setdefault(name, []).append(charged)
    return found


def assert_uncharged(directory: Path, names: list[str]) -> None:
    """Each has run, as its first attempt and after no crash, however often that was."""
    assert {name: set(what) for name, what in runs(directory).items()} == {name: {"1 0"} for name in names}


def kill_a_relay(url: str, queue: str = "held", kill_at: FaultPoint | None = None, passing: int = 1) -> None:
    with RelayProcess(TARGET, url, config(queue), kill_at=kill_at, passing=passing) as victim:
        assert victim.wait(PATIENCE) == -9, victim.log


@pytest.mark.parametrize("kind", [leased_app.call, leased_app.call_async], ids=["sync", "async"])
def test_a_relay_killed_in_a_claim_charges_nobody_who_did_not_run_alone(
    engine: Engine, outboxq_database: Database, start_relay: StartRelay, tmp_path: Path, kind
) -> None:
    """All that it held run alone: again what was done and not removed, and for the first time what had not begun."""
    names = enqueue(engine, tmp_path, kind, first="", second="", killer="kill", behind="", last="")
    kill_a_relay(outboxq_database.url, kind.queue)
    assert {name: ["1 0"] for name in QUICK}.items() <= runs(tmp_path).items()
    expire_leases(engine)
    with start_relay(leased_app.jobs, config(kind.queue)) as running:
        wait_until(lambda: waiting(engine) == 0, "the jobs to be done")
    assert [event.crashes for event in running.of(JobCrashed)] in ([0] * 5, [0] * 3)
    assert_uncharged(tmp_path, names)
    assert all(len(runs(tmp_path)[name]) == 1 for name in [*QUICK, "behind", "last"])
    assert_nothing_left(engine, dead_relays=1)


def test_only_the_poisonous_job_of_a_claim_is_dead_in_the_end(
    engine: Engine, outboxq_database: Database, tmp_path: Path
) -> None:
    """It kills with its batch, then twice alone; the others are done, uncharged."""
    names = enqueue(engine, tmp_path, leased_app.call, first="", poison="poison", behind="", last="")
    relays = 0
    while waiting(engine):
        with RelayProcess(TARGET, outboxq_database.url, config()) as relay:
            relays += 1
            wait_until(lambda relay=relay: relay.returncode is not None or not waiting(engine), "its end")
        expire_leases(engine)
    with engine.connect() as connection:
        letters = connection.execute(text("SELECT args->>'name', attempt, crashes FROM outboxq.dead_job")).all()
    assert [tuple(row) for row in letters] == [("poison", 0, 2)]
    assert relays == 4
    found = runs(tmp_path)
    assert found.pop("poison") == ["1 0", "1 0", "1 1"]
    assert {name: set(what) for name, what in found.items()} == {name: {"1 0"} for name in names if name != "poison"}


@pytest.mark.each_value
@pytest.mark.parametrize("passing", [1, 9])
@pytest.mark.parametrize("moment", FAULT_POINTS)
def test_a_relay_killed_at_any_moment_of_a_claim_runs_a_job_twice_at_most(
    engine: Engine,
    outboxq_database: Database,
    start_relay: StartRelay,
    tmp_path: Path,
    moment: FaultPoint,
    passing: int,
) -> None:
    """At least once, uncharged, and what was removed never again."""
    names = enqueue(engine, tmp_path, leased_app.call, **{f"job {number}": "" for number in range(80)})
    kill_a_relay(outboxq_database.url, kill_at=moment, passing=passing)
    expire_leases(engine)
    gone = set(names) - names_left(engine)
    before = runs(tmp_path)
    with start_relay(leased_app.jobs, config()):
        wait_until(lambda: waiting(engine) == 0, "the jobs to be done")
    found = runs(tmp_path)
    assert_uncharged(tmp_path, names)
    assert all(len(found[name]) == 1 for name in gone)
    assert sum(len(what) for what in found.values()) <= len(names) + 8
    assert {name for name, what in found.items() if len(what) > 1} == set(before) - gone
    assert_nothing_left(engine, dead_relays=1)


def names_left(engine: Engine) -> set[str]:
    with engine.connect() as connection:
        return set(connection.execute(text("SELECT args->>'name' FROM outboxq.job")).scalars())


def test_a_call_that_counts_once_is_made_once_though_its_job_runs_again(
    engine: Engine, outboxq_database: Database, start_relay: StartRelay, tmp_path: Path
) -> None:
    """Its result was recorded at once, and not when its job was to be removed with others."""
    names = [f"job {number}" for number in range(8)]
    with OutboxSession(engine) as session, session.begin():
        for name in [*QUICK, *names]:
            session.add_job(leased_app.call_once, name=name, directory=str(tmp_path))
        session.add_job(leased_app.call, name="killer", directory=str(tmp_path), fault="kill")
    # The sixth job of a claim: five are done, and not removed.
    kill_a_relay(outboxq_database.url, kill_at="after-handler", passing=len(QUICK) + 5)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.effect SET locked_until = clock_timestamp()"))
        connection.execute(text("UPDATE outboxq.job SET args = args || '{\"fault\": \"\"}' WHERE kind = 'call'"))
    expire_leases(engine)
    with start_relay(leased_app.jobs, config()):
        wait_until(lambda: waiting(engine) == 0, "the jobs to be done")
    assert {name: len(what) for name, what in runs(tmp_path).items()} == dict.fromkeys([*QUICK, *names, "killer"], 1)


def test_a_relay_stopped_past_its_lease_begins_nothing_more_of_its_claim(
    engine: Engine, outboxq_database: Database, start_relay: StartRelay, tmp_path: Path
) -> None:
    """Another relay has run it all by then; what the stopped one was at is told as lost, and the rest is not begun."""
    names = enqueue(engine, tmp_path, leased_app.call, first="", stands="hold", behind="", last="")
    with RelayProcess(TARGET, outboxq_database.url, config()) as stalled:
        wait_until((tmp_path / "met stands").exists, "the handler to run")
        stalled.pause()
        # Its own lease lasts longer: on a busy machine it must not run out.
        with start_relay(leased_app.jobs, config(lease_seconds=10)) as running:
            wait_until(lambda: waiting(engine) == 0, "the other relay to do it")
        assert {event.crashes for event in running.of(JobCrashed)} <= {0}
        (tmp_path / "gate").touch()
        stalled.resume()
        enqueue(engine, tmp_path, leased_app.call, afterwards="")
        wait_until(lambda: "afterwards" in runs(tmp_path) and not waiting(engine), "another job")
        assert "lease was lost while the job ran" in stalled.log
        assert stalled.stop() == 0
    found = {name: len(what) for name, what in runs(tmp_path).items() if name not in QUICK}
    assert found.pop("stands") == 2
    assert found.pop("first") in (1, 2)
    assert found == {"behind": 1, "last": 1, "afterwards": 1}
    assert set(runs(tmp_path)) == {*names, "afterwards"}
    assert_nothing_left(engine)


@pytest.mark.parametrize("cut", ["before", "after", "thrice"])
def test_a_relay_cut_off_while_it_removes_jobs_finds_out_what_stands(
    engine: Engine, outboxq_database: Database, start_relay: StartRelay, tmp_path: Path, cut: str
) -> None:
    """Removed or not, every handler ran once, and each job is told as done, once."""
    names = enqueue(engine, tmp_path, leased_app.call, **{f"job {number}": "" for number in range(20)})
    with CommitProxy(outboxq_database.url) as proxy:
        times = 3 if cut == "thrice" else 1
        traps = {"before": proxy.cut_before_commit, "after": proxy.cut_after_commit, "thrice": proxy.cut_after_commit}
        trap = traps[cut](times, containing=COMPLETION)
        with start_relay(leased_app.jobs, config(lease_seconds=2), engine=proxy.url) as running:
            assert trap.reached.wait(PATIENCE)
            wait_until(lambda: len(running.of(JobDone)) >= len(names) and not waiting(engine), "every job")
    assert_uncharged(tmp_path, names)
    assert Counter(len(what) for what in runs(tmp_path).values()) == {1: len(names)}
    assert len(running.of(JobDone)) == len(names)
    assert not running.of(JobLeaseLost)
    assert dead(engine) == 0
    assert_nothing_left(engine)
