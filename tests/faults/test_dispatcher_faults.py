"""Lease mode when answers are lost, backends and servers end, and relays are killed: calls run once, and count once."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outboxq import OutboxSession, RelayConfig, SlotGroup
from outboxq.database.driver import Answer, Script
from outboxq.events import DatabaseLost, JobCrashed, JobDone, JobLeaseLost
from outboxq.postgres import Database
from outboxq.relay.dispatcher import Dispatcher
from outboxq.testing import FAULT_POINTS, CommitProxy, FaultPoint, RelayProcess
from tests.conftest import RunningRelay, StartRelay
from tests.support import leased_app
from tests.support.aftermath import assert_nothing_left, expire_leases
from tests.support.app import Effect
from tests.support.calls import Calls, Gate, answer_lost, config, owners_of, rows
from tests.support.ledger import dead, effects, waiting
from tests.support.own_server import own_database, own_server, stop_fast
from tests.support.waiting import PATIENCE, wait_until

FLAVOURS = pytest.mark.parametrize("flavour", ["sync", "async"])
TARGET = "tests.support.leased_app:jobs"
END_OTHERS = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


def is_claim(_script: Script, answer: Answer) -> bool:
    """Jobs were claimed: a claim that took none has a row without an id."""
    return any(row[1] is not None for row in answer.rows.get("claim", ()))


def claims_named(name: str) -> Callable[[Script, Answer], bool]:
    """Return the condition that a claim took a job of this name."""
    return lambda script, answer: is_claim(script, answer) and f'"name": "{name}"' in str(answer.rows["claim"])


def is_settlement(script: Script, _answer: Answer) -> bool:
    return "finished" in owners_of(script)


def is_both(script: Script, answer: Answer) -> bool:
    return is_claim(script, answer) and is_settlement(script, answer)


def assert_each_once(calls: Calls, running: RunningRelay, names: list[str]) -> None:
    """Each ran once, and was reported once, as done at its first attempt; none was taken for lost or dead."""
    assert Counter(calls.began) == dict.fromkeys(names, 1)
    done = [event.job for event in running.of(JobDone)]
    assert sorted(job.args for job in done) == sorted(f'{{"name": "{name}"}}' for name in names)
    assert {(job.attempt, job.crashes) for job in done} == {(1, 0)}
    assert not running.of(JobCrashed)
    assert not running.of(JobLeaseLost)


@FLAVOURS
@pytest.mark.parametrize("chosen", [is_claim, is_settlement, is_both])
def test_a_lost_answer_costs_no_job_and_runs_none_twice(
    engine: Engine,
    start_relay: StartRelay,
    monkeypatch: pytest.MonkeyPatch,
    flavour: str,
    chosen: Callable[[Script, Answer], bool],
) -> None:
    """Claimed jobs are found by their leases, and begin; settled ones are reported. Also those of one string."""
    calls, names = Calls(flavour), [f"job {number}" for number in range(12)]
    calls.enqueue(engine, *names)
    settings = config(3, lease_seconds=2, heartbeat_seconds=0.2, poll_seconds=0.2)
    with answer_lost(monkeypatch, engine, chosen) as lost, start_relay(calls.jobs, settings) as running:
        wait_until(lambda: len(running.of(JobDone)) >= 12 and not waiting(engine), "every job")
        calls.enqueue(engine, "afterwards")
        wait_until(lambda: "afterwards" in calls.ended and not waiting(engine), "another one")
    assert len(lost) == 1
    assert_each_once(calls, running, [*names, "afterwards"])


@FLAVOURS
def test_a_claim_whose_answer_was_lost_begins_no_call_again(
    engine: Engine, start_relay: StartRelay, gate: Gate, monkeypatch: pytest.MonkeyPatch, flavour: str
) -> None:
    """Its jobs are adopted; calls that were claimed before, and still run, are not."""
    calls = Calls(flavour)
    calls.all_wait_for(gate, "runs", "runs too")
    calls.enqueue(engine, "runs", "runs too")
    settings = config(4, lease_seconds=2, heartbeat_seconds=0.2, poll_seconds=0.2)
    # The trap is set from the start: a claim that is under way when jobs are added may take them.
    chosen = claims_named("claimed")
    with answer_lost(monkeypatch, engine, chosen) as lost, start_relay(calls.jobs, settings) as running:
        wait_until(lambda: len(calls.began) == 2, "the first two")
        calls.enqueue(engine, "claimed", "claimed too")
        wait_until(lambda: len(running.of(JobDone)) == 2, "the jobs of the lost answer")
        assert lost
        gate.open()
        wait_until(lambda: len(running.of(JobDone)) == 4 and not waiting(engine), "all")
    assert_each_once(calls, running, ["runs", "runs too", "claimed", "claimed too"])


def test_a_claim_whose_answer_was_lost_begins_no_job_that_its_session_settles(
    engine: Engine, start_relay: StartRelay, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is there while COMMIT is on its way: a look at the leases finds it, and its call has no connection's."""
    calls, commits, original, adopt = Calls(), threading.Event(), Script.send, Dispatcher._adopt
    adopted = threading.Event()
    calls.tasks["writes"] = lambda ctx: ctx.session.add(Effect(name="written"))

    def holding(script: Script, connection: Any) -> Answer:
        if not commits.is_set() and "commit" in owners_of(script) and "outboxq-call" in threading.current_thread().name:
            commits.set()
            assert adopted.wait(PATIENCE)
        return original(script, connection)

    def noting(self: Dispatcher, *arguments: Any) -> None:
        adopt(self, *arguments)
        adopted.set()

    monkeypatch.setattr(Script, "send", holding)
    monkeypatch.setattr(Dispatcher, "_adopt", noting)
    calls.enqueue(engine, "writes")
    settings = config(4, lease_seconds=2, heartbeat_seconds=0.2, poll_seconds=0.2)
    chosen = claims_named("claimed")
    with answer_lost(monkeypatch, engine, chosen) as lost, start_relay(calls.jobs, settings) as running:
        assert commits.wait(PATIENCE)
        calls.enqueue(engine, "claimed")
        wait_until(lambda: len(running.of(JobDone)) == 2 and not waiting(engine), "both")
    assert lost
    assert_each_once(calls, running, ["writes", "claimed"])
    assert effects(engine) == ["written"]


def test_jobs_of_a_lost_answer_are_no_orphans_before_they_are_adopted(
    engine: Engine, start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many beats come first: the relay's own look for jobs that no slot has waits for the adoption."""
    calls, adopt = Calls(), Dispatcher._adopt

    def adopt_later(self: Dispatcher, *arguments: Any) -> None:
        seen = set[object]()
        wait_until(lambda: len(seen.update(beats(engine)) or seen) > 5, "some beats")
        adopt(self, *arguments)

    monkeypatch.setattr(Dispatcher, "_adopt", adopt_later)
    calls.enqueue(engine, "first", "second")
    settings = config(2, lease_seconds=5, heartbeat_seconds=0.05, poll_seconds=0.2)
    with answer_lost(monkeypatch, engine, is_claim) as lost, start_relay(calls.jobs, settings) as running:
        wait_until(lambda: len(running.of(JobDone)) >= 2 and not waiting(engine), "both")
    assert lost
    assert_each_once(calls, running, ["first", "second"])


def beats(engine: Engine) -> list[object]:
    """The end of the relay's lease, as its last beat has set it."""
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT alive_until FROM outboxq.relay")).scalars())


@FLAVOURS
@pytest.mark.parametrize("cut", ["before", "after", "thrice"])
def test_a_relay_cut_off_while_it_settles_reports_each_job_once(
    engine: Engine, outboxq_database: Database, start_relay: StartRelay, flavour: str, cut: str
) -> None:
    """By a network that loses COMMIT, or its answer, once or again and again."""
    calls, names = Calls(flavour), [f"job {number}" for number in range(20)]
    calls.enqueue(engine, *names)
    with CommitProxy(outboxq_database.url) as proxy:
        times = 3 if cut == "thrice" else 1
        set_trap = proxy.cut_before_commit if cut == "before" else proxy.cut_after_commit
        trap = set_trap(times, containing="WITH oq_held")
        settings = config(4, lease_seconds=2, heartbeat_seconds=0.2, poll_seconds=0.2)
        with start_relay(calls.jobs, settings, engine=proxy.url) as running:
            assert trap.reached.wait(PATIENCE)
            wait_until(lambda: len(running.of(JobDone)) >= 20 and not waiting(engine), "every job")
    assert trap.count == times
    assert_each_once(calls, running, names)
    assert_nothing_left(engine)


@FLAVOURS
def test_calls_go_on_while_every_backend_ends(
    engine: Engine, start_relay: StartRelay, gate: Gate, flavour: str
) -> None:
    """A call that waits outside has no connection to lose: all are settled when the relay has one again."""
    calls, names = Calls(flavour), [f"job {number}" for number in range(8)]
    calls.all_wait_for(gate, *names)
    calls.enqueue(engine, *names)
    with start_relay(calls.jobs, config(8, poll_seconds=0.2)) as running:
        try:
            wait_until(lambda: len(calls.began) == 8, "all calls to run")
            with engine.connect() as connection:
                connection.execute(END_OTHERS)
        finally:
            gate.open()
        wait_until(lambda: len(running.of(JobDone)) == 8 and not waiting(engine), "all")
    assert_each_once(calls, running, names)


@FLAVOURS
def test_calls_go_on_while_the_server_is_away(start_relay: StartRelay, gate: Gate, flavour: str) -> None:
    """Calls that end meanwhile are settled when it is back, and the others when they end."""
    calls, second, names = Calls(flavour), Gate(), [f"job {number}" for number in range(4)]
    calls.all_wait_for(gate, *names)
    calls.all_wait_for(second, "ends later")
    with own_server() as server, own_database(server) as (database, engine):
        calls.enqueue(engine, *names, "ends later")
        settings = config(5, poll_seconds=0.2, lease_seconds=60)
        with start_relay(calls.jobs, settings, engine=database.url) as running:
            try:
                wait_until(lambda: len(calls.began) == 5, "all calls to run")
                engine.dispose()
                stop_fast(server)
                gate.open()
                wait_until(lambda: len(calls.ended) == 4, "calls to end without it")
                wait_until(lambda: running.of(DatabaseLost), "the relay to notice")
                server.start_again()
                wait_until(lambda: len(running.of(JobDone)) == 4, "those that ended")
            finally:
                gate.open()
                second.open()
            wait_until(lambda: len(running.of(JobDone)) == 5, "the last one")
            assert rows(engine) == []
    assert_each_once(calls, running, [*names, "ends later"])


# Relays in processes of their own, that are killed and stopped.


def settings_of(queue: str = "held", slots: int = 8, **settings: object) -> RelayConfig:
    defaults = {"lease_seconds": 1, "poll_seconds": 0.05, "max_crashes": 2}
    return RelayConfig(groups=(SlotGroup((queue,), slots),), **(defaults | settings))


def enqueue(engine: Engine, directory: Path, kind: object, **faults: str) -> list[str]:
    with OutboxSession(engine) as session, session.begin():
        for name, fault in faults.items():
            session.add_job(kind, name=name, directory=str(directory), fault=fault)
    return list(faults)


def runs(directory: Path) -> dict[str, list[str]]:
    """The attempt, and the number of crashes before it, of each run."""
    found: dict[str, list[str]] = {}
    lines = directory / "lines"
    for line in lines.read_text().splitlines() if lines.exists() else []:
        name, charged = line.rsplit(" ", 2)[0], " ".join(line.rsplit(" ", 2)[1:])
        found.setdefault(name, []).append(charged)
    return found


def assert_uncharged(directory: Path, names: list[str]) -> None:
    """Each has run, as its first attempt and after no crash, however often that was."""
    assert {name: set(what) for name, what in runs(directory).items()} == {name: {"1 0"} for name in names}


def kill_a_relay(
    url: str, queue: str = "held", slots: int = 8, kill_at: FaultPoint | None = None, passing: int = 1
) -> None:
    with RelayProcess(TARGET, url, settings_of(queue, slots), kill_at=kill_at, passing=passing) as victim:
        assert victim.wait(PATIENCE) == -9, victim.log


@pytest.mark.parametrize("kind", [leased_app.call, leased_app.call_async], ids=["sync", "async"])
def test_a_relay_killed_by_one_of_its_calls_charges_no_other(
    engine: Engine, outboxq_database: Database, start_relay: StartRelay, tmp_path: Path, kind: Any
) -> None:
    """All that ran with it run again, in company: uncounted, as it is not known which of them is to blame."""
    faults = {"first": "hold", "second": "hold", "killer": "kill", "behind": "", "last": ""}
    names = enqueue(engine, tmp_path, kind, **faults)
    kill_a_relay(outboxq_database.url, kind.queue)
    (tmp_path / "gate").touch()
    expire_leases(engine)
    with start_relay(leased_app.jobs, settings_of(kind.queue)) as running:
        wait_until(lambda: waiting(engine) == 0, "the jobs to be done")
    assert {event.crashes for event in running.of(JobCrashed)} <= {0}
    assert_uncharged(tmp_path, names)
    assert_nothing_left(engine, dead_relays=1)


def test_only_the_poisonous_job_of_a_claim_is_dead_in_the_end(
    engine: Engine, outboxq_database: Database, tmp_path: Path
) -> None:
    """It kills its relay in company, then alone until its crashes bury it; the others are done, uncharged."""
    names = enqueue(engine, tmp_path, leased_app.call, first="", poison="poison", behind="", last="")
    relays = 0
    while waiting(engine):
        with RelayProcess(TARGET, outboxq_database.url, settings_of()) as relay:
            relays += 1
            wait_until(lambda relay=relay: relay.returncode is not None or not waiting(engine), "its end")
        expire_leases(engine)
    with engine.connect() as connection:
        letters = connection.execute(text("SELECT args->>'name', attempt, crashes FROM outboxq.dead_job")).all()
    assert [tuple(row) for row in letters] == [("poison", 0, 2)]
    # Among others, in company, twice alone; the last one buries it.
    assert relays <= 5
    found = runs(tmp_path)
    assert found.pop("poison") == ["1 0", "1 0", "1 0", "1 1"]
    assert {name: set(what) for name, what in found.items()} == {name: {"1 0"} for name in names if name != "poison"}


@pytest.mark.each_value
@pytest.mark.parametrize("passing", [1, 9])
@pytest.mark.parametrize("moment", FAULT_POINTS)
def test_a_relay_killed_at_any_moment_runs_again_no_more_than_its_slots_held(
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
    with engine.connect() as connection:
        left = set(connection.execute(text("SELECT args->>'name' FROM outboxq.job")).scalars())
    gone, before = set(names) - left, runs(tmp_path)
    with start_relay(leased_app.jobs, settings_of()):
        wait_until(lambda: waiting(engine) == 0, "the jobs to be done")
    found = runs(tmp_path)
    assert_uncharged(tmp_path, names)
    assert all(len(found[name]) == 1 for name in gone)
    # Eight that ran, and eight that had ended and were not settled.
    assert sum(len(what) for what in found.values()) <= len(names) + 16
    assert {name for name, what in found.items() if len(what) > 1} == set(before) - gone
    assert_nothing_left(engine, dead_relays=1)


def test_a_call_that_counts_once_is_made_once_though_its_job_runs_again(
    engine: Engine, outboxq_database: Database, start_relay: StartRelay, tmp_path: Path
) -> None:
    """Its result was recorded at once, and not when its job was to be removed with others."""
    names = [f"job {number}" for number in range(8)]
    with OutboxSession(engine) as session, session.begin():
        for name in names:
            session.add_job(leased_app.call_once, name=name, directory=str(tmp_path))
    # One slot: no call of another one is under way, and in doubt.
    kill_a_relay(outboxq_database.url, slots=1, kill_at="after-handler", passing=5)
    assert set(runs(tmp_path)) == set(names[:5])
    assert waiting(engine) >= 4
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.effect SET locked_until = clock_timestamp()"))
    expire_leases(engine)
    with start_relay(leased_app.jobs, settings_of()):
        wait_until(lambda: waiting(engine) == 0, "the jobs to be done")
    assert {name: len(what) for name, what in runs(tmp_path).items()} == dict.fromkeys(names, 1)
    assert dead(engine) == 0


def test_a_relay_stopped_past_its_lease_settles_nothing_that_is_anothers(
    engine: Engine, outboxq_database: Database, start_relay: StartRelay, tmp_path: Path
) -> None:
    """Another relay has run all of it by then; what the stopped one was at is reported as lost, and it goes on."""
    names = enqueue(engine, tmp_path, leased_app.call, stands="hold", stays="hold")
    with RelayProcess(TARGET, outboxq_database.url, settings_of()) as stalled:
        wait_until(lambda: all((tmp_path / f"met {name}").exists() for name in names), "the handlers to run")
        stalled.pause()
        # Its own lease lasts longer: on a busy machine it must not run out.
        with start_relay(leased_app.jobs, settings_of(lease_seconds=10)) as running:
            wait_until(lambda: waiting(engine) == 0, "the other relay to do it")
        assert {event.crashes for event in running.of(JobCrashed)} <= {0}
        (tmp_path / "gate").touch()
        stalled.resume()
        enqueue(engine, tmp_path, leased_app.call, afterwards="")
        wait_until(lambda: "afterwards" in runs(tmp_path) and not waiting(engine), "another job")
        wait_until(lambda: stalled.log.count("lease was lost while the job ran") == 2, "the loss to be reported")
        assert stalled.stop() == 0
    assert {name: len(what) for name, what in runs(tmp_path).items()} == {"stands": 2, "stays": 2, "afterwards": 1}
    assert dead(engine) == 0
    assert_nothing_left(engine)
