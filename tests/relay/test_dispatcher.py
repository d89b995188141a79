"""The dispatcher of lease mode: a slot for each call, a connection for none that waits, and settling in common."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, insert, select, text
from sqlalchemy.exc import InvalidRequestError

import outboxq.relay.dispatcher as dispatcher_module
from outboxq import Backoff, DeadLetter, Discard, OutboxSession, Relay, Retry, SlotGroup, Snooze
from outboxq.config import RelayConfig
from outboxq.database.driver import Answer, Script
from outboxq.events import (
    Event,
    JobCrashed,
    JobDied,
    JobDiscarded,
    JobDone,
    JobInterrupted,
    JobLeaseLost,
    JobRetried,
    JobSnoozed,
    JobsParked,
)
from outboxq.execution.leased_call import LeasedCall
from outboxq.relay.dispatcher import Dispatcher
from outboxq.relay.limits import RelayLimits
from outboxq.relay.slot import SlotWaits
from outboxq.relay.suspects import QuarantineTurns
from tests.conftest import RunningRelay, StartRelay
from tests.support.app import Child, Effect
from tests.support.calls import (
    Calls,
    Gate,
    add_suspects,
    config,
    lent_by,
    note_claims,
    owners_of,
    rows,
)
from tests.support.ledger import effects
from tests.support.scripts import change_scripts
from tests.support.waiting import PATIENCE, wait_until

FLAVOURS = pytest.mark.parametrize("flavour", ["sync", "async"])
# The longest wait for something that must come without a poll.
SOON = 20.0
LATER = Backoff(max_attempts=3, first_seconds=3600)
# Of the relay's own, whoever they are for.
CONNECTIONS = text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'outboxq relay'"
)


@contextmanager
def running_calls(
    start_relay: StartRelay, calls: Calls, settings: RelayConfig, *gates: Gate, **options: Any
) -> Iterator[RunningRelay]:
    """A relay whose calls all end when the block does."""
    with start_relay(calls.jobs, settings, **options) as running:
        try:
            yield running
        finally:
            for each in gates:
                each.open()


def names_of(events: list[Event], kind: type[Any]) -> list[str]:
    return sorted(each.job.args for each in events if isinstance(each, kind))


def use_session(ctx: Any, flavour: str) -> Any:
    """Execute a statement in the handler's session."""
    return ctx.session.execute(select(1))


# Connections.


@pytest.mark.parametrize(("flavour", "number"), [("async", 40), ("sync", 20)])
def test_calls_that_wait_hold_no_connection(
    engine: Engine, start_relay: StartRelay, gate: Gate, flavour: str, number: int
) -> None:
    """All at once: the relay has the connections of its lease and its listener, and one that settles."""
    calls = Calls(flavour)
    names = [f"waits {n}" for n in range(number)]
    calls.all_wait_for(gate, *names)
    calls.enqueue(engine, *names)
    with running_calls(start_relay, calls, config(number), gate) as running, engine.connect() as looking:
        wait_until(lambda: len(calls.began) == number, "all calls to run")
        assert looking.scalar(CONNECTIONS) <= 4
        assert [row[1] for row in rows(engine)] == ["leased"] * number
        gate.open()
        wait_until(lambda: len(running.of(JobDone)) == number, "all to be done")
    assert (rows(engine), Counter(calls.began)) == ([], dict.fromkeys(names, 1))


@FLAVOURS
def test_as_many_connections_as_are_set_are_lent_in_the_order_of_the_first_uses(
    engine: Engine, start_relay: StartRelay, made: list[Dispatcher], flavour: str
) -> None:
    """The others wait, each for its turn; all are done, and none is held longer than its COMMIT."""
    calls, got = Calls(flavour), list[int]()
    comes, goes = [Gate() for _ in range(6)], [Gate() for _ in range(6)]

    async def use_async(ctx: Any, number: int) -> None:
        await comes[number].wait_async()
        await ctx.session.execute(select(1))
        got.append(number)
        await goes[number].wait_async()
        ctx.session.add(Effect(name=str(number)))

    def use(ctx: Any, number: int) -> None:
        comes[number].wait()
        ctx.session.execute(select(1))
        got.append(number)
        goes[number].wait()
        ctx.session.add(Effect(name=str(number)))

    for number in range(6):
        calls.tasks[str(number)] = lambda ctx, n=number: (use_async if flavour == "async" else use)(ctx, n)
    calls.enqueue(engine, *map(str, range(6)))
    order = [3, 1, 5, 0, 4, 2]
    with running_calls(start_relay, calls, config(6, call_connections=2), *comes, *goes) as running:
        wait_until(lambda: len(calls.began) == 6, "all calls to run")
        lent = lent_by(made)
        for place, number in enumerate(order):
            comes[number].open()
            wait_until(lambda p=place: (lent.used, lent.waiting) == (min(2, p + 1), max(0, p - 1)), "the next to come")
        for place, number in enumerate(order):
            wait_until(lambda p=place: len(got) >= min(6, p + 2), "the next to have its turn")
            assert lent.used <= 2
            goes[number].open()
            wait_until(lambda p=place: len(effects(engine)) == p + 1, "its COMMIT")
        wait_until(lambda: len(running.of(JobDone)) == 6, "all to be done")
        wait_until(lambda: (lent.used, lent.waiting) == (0, 0), "all connections to be free")
    # The first two have theirs at once, in any order.
    assert (sorted(got[:2]), got[2:]) == (sorted(order[:2]), order[2:])


def holds(calls: Calls, gate: Gate, held: threading.Event) -> Callable[[Any], Any]:
    """A task that uses its session, and keeps it in use."""

    async def hold_async(ctx: Any) -> None:
        await ctx.session.execute(select(1))
        held.set()
        await gate.wait_async()

    def hold(ctx: Any) -> None:
        ctx.session.execute(select(1))
        held.set()
        gate.wait()

    return hold_async if calls.flavour == "async" else hold


@FLAVOURS
def test_the_wait_for_a_connection_counts_within_the_deadline(
    engine: Engine, start_relay: StartRelay, gate: Gate, made: list[Dispatcher], flavour: str
) -> None:
    """The handler ends as one that was too slow, its connection is lent to no one, and others go on."""
    calls, held = Calls(flavour), threading.Event()
    late = Calls(flavour, kind="late", timeout_seconds=0.2, retry=LATER)
    calls.jobs.include(late.jobs)
    calls.tasks["holds"] = holds(calls, gate, held)
    late.tasks["late"] = calls.tasks["uses"] = lambda ctx: use_session(ctx, flavour)
    calls.enqueue(engine, "holds")
    limits = RelayLimits(cut_after_seconds=0.1)
    with running_calls(start_relay, calls, config(2, call_connections=1), gate, limits=limits) as running:
        assert held.wait(PATIENCE)
        late.enqueue(engine, "late")
        (retried,) = wait_until(lambda: running.of(JobRetried), "the deadline", SOON)
        assert retried.error_type == "outboxq.errors.HandlerTimedOut"
        assert rows(engine) == [("holds", "leased", 1, 0), ("late", "scheduled", 1, 0)]
        gate.open()
        calls.enqueue(engine, "uses")
        wait_until(lambda: len(running.of(JobDone)) == 2, "the others")
        lent = lent_by(made)
        wait_until(lambda: (lent.used, lent.waiting) == (0, 0), "no connection to be taken")


@FLAVOURS
def test_a_session_that_waits_for_its_connection_serves_one_user_at_a_time(
    engine: Engine, start_relay: StartRelay, gate: Gate, made: list[Dispatcher], flavour: str
) -> None:
    """Another task or thread of the handler is refused, which fails the attempt; the one left behind is, too."""
    calls, held, late = Calls(flavour, retry=LATER), threading.Event(), list[BaseException]()
    calls.tasks["holds"] = holds(calls, gate, held)

    async def twice_async(ctx: Any) -> None:
        async def first() -> None:
            try:
                await ctx.session.execute(select(1))
            except BaseException as error:
                late.append(error)
                raise

        calls.task = asyncio.create_task(first())  # type: ignore[attr-defined]  # kept from the garbage collector
        await asyncio.to_thread(wait_until, lambda: lent_by(made).waiting, "the task to wait")
        await ctx.session.execute(select(1))

    def twice(ctx: Any) -> None:
        def first() -> None:
            try:
                ctx.session.execute(select(1))
            except BaseException as error:  # noqa: BLE001  # the test looks at it
                late.append(error)

        threading.Thread(target=first, daemon=True).start()
        wait_until(lambda: lent_by(made).waiting, "the thread to wait")
        ctx.session.execute(select(1))

    calls.tasks["twice"] = twice_async if flavour == "async" else twice
    calls.tasks["uses"] = lambda ctx: use_session(ctx, flavour)
    calls.enqueue(engine, "holds")
    with running_calls(start_relay, calls, config(2, call_connections=1), gate) as running:
        assert held.wait(PATIENCE)
        calls.enqueue(engine, "twice")
        (retried,) = wait_until(lambda: running.of(JobRetried), "the attempt to fail", SOON)
        assert retried.error_type == "sqlalchemy.exc.InvalidRequestError"
        assert "another task or thread" in retried.message
        wait_until(lambda: ("twice", "scheduled", 1, 0) in rows(engine), "its retry")
        assert not late
        gate.open()
        wait_until(lambda: late, "the one left behind to have its turn")
        calls.enqueue(engine, "uses")
        wait_until(lambda: len(running.of(JobDone)) == 2, "the others")
        lent = lent_by(made)
        wait_until(lambda: (lent.used, lent.waiting) == (0, 0), "no connection to be taken")
    assert [type(error) for error in late] == [InvalidRequestError]


@pytest.mark.first_and_last
@FLAVOURS
@pytest.mark.parametrize("before", ["used", "named", "nothing"])
def test_what_a_handler_left_behind_gets_no_connection(
    engine: Engine, start_relay: StartRelay, gate: Gate, made: list[Dispatcher], flavour: str, before: str
) -> None:
    """Its task or thread uses the session when the job is done: an error, and no connection is taken."""
    calls, late = Calls(flavour), list[BaseException | None]()

    async def leave_async(ctx: Any) -> None:
        async def behind() -> None:
            await gate.wait_async()
            try:
                await (session or ctx.session).execute(select(1))
                late.append(None)
            except Exception as error:  # noqa: BLE001  # the test looks at it
                late.append(error)

        session = None if before == "nothing" else ctx.session
        if before == "used":
            await session.execute(select(1))
        calls.task = asyncio.create_task(behind())  # type: ignore[attr-defined]  # kept from the garbage collector

    def leave(ctx: Any) -> None:
        def behind() -> None:
            gate.wait()
            try:
                (session or ctx.session).execute(select(1))
                late.append(None)
            except Exception as error:  # noqa: BLE001  # the test looks at it
                late.append(error)

        session = None if before == "nothing" else ctx.session
        if before == "used":
            session.execute(select(1))
        threading.Thread(target=behind, daemon=True).start()

    calls.tasks["leaves"] = leave_async if flavour == "async" else leave
    calls.tasks["uses"] = lambda ctx: use_session(ctx, flavour)
    calls.enqueue(engine, "leaves")
    with running_calls(start_relay, calls, config(2, call_connections=1), gate) as running:
        wait_until(lambda: running.of(JobDone), "the job")
        gate.open()
        wait_until(lambda: late, "what it left behind")
        calls.enqueue(engine, "uses")
        wait_until(lambda: len(running.of(JobDone)) == 2, "another job with the only connection")
        assert lent_by(made).waiting == 0
    assert [type(error) for error in late] == [InvalidRequestError]


# Slots.


@FLAVOURS
def test_a_fast_job_behind_slow_ones_of_its_claim_starts_at_once(
    engine: Engine, start_relay: StartRelay, gate: Gate, monkeypatch: pytest.MonkeyPatch, flavour: str
) -> None:
    """Each has a slot of its own, and the fast one is settled while the slow ones run."""
    calls, claimed = Calls(flavour), list[int]()
    note_claims(monkeypatch, lambda each: claimed.append(len(each.jobs)))
    calls.all_wait_for(gate, "slow", "slow too")
    calls.enqueue(engine, "slow", "slow too", "fast")
    with running_calls(start_relay, calls, config(6), gate) as running:
        wait_until(lambda: running.of(JobDone), "the fast one")
        assert claimed[0] == 3
        assert names_of(running.events, JobDone) == ['{"name": "fast"}']
        wait_until(lambda: rows(engine) == [("slow", "leased", 1, 0), ("slow too", "leased", 1, 0)], "its removal")
        calls.enqueue(engine, "fast too")
        wait_until(lambda: len(running.of(JobDone)) == 2, "another one in the free slot")
        gate.open()
        wait_until(lambda: len(running.of(JobDone)) == 4, "all")


@FLAVOURS
def test_a_claim_takes_no_more_jobs_than_slots_are_free(
    engine: Engine,
    start_relay: StartRelay,
    gate: Gate,
    made: list[Dispatcher],
    monkeypatch: pytest.MonkeyPatch,
    flavour: str,
) -> None:
    """So many run at most, however the calls end, and a slot that is free is used at once.

    It takes half of the slots at a time, so that calls run while the next string is under way.
    """
    calls, taken, most = Calls(flavour), list[tuple[int, int]](), list[int]()
    note_claims(monkeypatch, lambda each: taken.append((len(each.jobs), made[0].busy)))
    names = [f"job {number}" for number in range(20)]
    calls.tasks = dict.fromkeys(names, lambda _: most.append(len(calls.began) - len(calls.ended)))
    calls.all_wait_for(gate, "stays", "stays too")
    calls.enqueue(engine, "stays", "stays too", *names)
    with running_calls(start_relay, calls, config(3), gate) as running:
        wait_until(lambda: len(running.of(JobDone)) == 20, "all that one slot runs")
        assert len(calls.began) == 22
        gate.open()
        wait_until(lambda: len(running.of(JobDone)) == 22, "all")
    assert taken[:2] == [(2, 0), (1, 2)]
    assert [each for each in taken if sum(each) > 3] == []
    assert max(most) <= 3
    assert Counter(calls.began) == dict.fromkeys([*names, "stays", "stays too"], 1)


# Settling.


def test_calls_that_end_while_a_string_is_under_way_are_settled_together(
    engine: Engine, start_relay: StartRelay, gate: Gate, made: list[Dispatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One string for the first of eleven jobs, and one for the ten that end meanwhile."""
    calls, sent, original = Calls(), list[Script](), Script.send
    names = [f"job {number}" for number in range(10)]

    def holding(script: Script, connection: Connection) -> Answer:
        if "finished" in owners_of(script):
            sent.append(script)
            if len(sent) == 1:
                gate.open()
                wait_until(lambda: made[0].busy == 0, "the others to end")
        return original(script, connection)

    monkeypatch.setattr(Script, "send", holding)
    calls.all_wait_for(gate, *names)
    calls.tasks["first"] = lambda _: wait_until(lambda: len(calls.began) == 11, "all to run") and None
    calls.enqueue(engine, "first", *names)
    with running_calls(start_relay, calls, config(11), gate) as running:
        wait_until(lambda: len(running.of(JobDone)) == 11, "all")
        assert rows(engine) == []
    assert len(sent) == 2


def test_async_calls_that_end_together_cost_fewer_strings_than_jobs(
    engine: Engine, start_relay: StartRelay, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one event loop, with the claims of those behind them."""
    calls, sent, original = Calls("async"), list[Script](), Script.send

    def noting(script: Script, connection: Connection) -> Answer:
        if "finished" in owners_of(script):
            sent.append(script)
        return original(script, connection)

    monkeypatch.setattr(Script, "send", noting)
    names = [f"job {number}" for number in range(60)]
    calls.all_wait_for(gate, *names)
    calls.enqueue(engine, *names)
    with running_calls(start_relay, calls, config(20), gate) as running:
        wait_until(lambda: len(calls.began) == 20, "all slots to be busy")
        gate.open()
        wait_until(lambda: len(running.of(JobDone)) == 60, "all")
        assert rows(engine) == []
    assert len(sent) <= 30


OUTCOMES: dict[str, Any] = {
    "done": None,
    "discard": Discard("no"),
    "raise": ValueError("no"),
    "retry": Retry(timedelta(hours=1)),
    "snooze": Snooze(timedelta(hours=1)),
    "dead letter": DeadLetter("no"),
    "orphan": None,
}


@FLAVOURS
def test_each_outcome_is_settled_with_and_without_a_session(
    engine: Engine, drain: Callable[..., list[Event]], flavour: str
) -> None:
    """Its event comes once, rows stand only with a job that is done, and nobody has anything left under the lease."""
    calls = Calls(flavour, retry=LATER)
    tokens = dict[str, int]()

    def end(ctx: Any, name: str) -> Any:
        tokens[name] = ctx.job.lease_token
        outcome = OUTCOMES[name.removesuffix(" with rows")]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def write_async(ctx: Any, name: str) -> Any:
        ctx.session.add(Child(parent_id=-1) if name == "orphan" else Effect(name=name))
        if name != "orphan":
            await ctx.session.flush()
        return end(ctx, name)

    def write(ctx: Any, name: str) -> Any:
        ctx.session.add(Child(parent_id=-1) if name == "orphan" else Effect(name=name))
        if name != "orphan":
            ctx.session.flush()
        return end(ctx, name)

    for name in OUTCOMES:
        if name == "orphan":
            # A deferred constraint refuses it at COMMIT.
            calls.tasks[name] = lambda ctx: (write_async if flavour == "async" else write)(ctx, "orphan")
            continue
        calls.tasks[name] = lambda ctx, n=name: end(ctx, n)
        calls.tasks[f"{name} with rows"] = lambda ctx, n=f"{name} with rows": (
            write_async if flavour == "async" else write
        )(ctx, n)
    names = list(calls.tasks)
    calls.enqueue(engine, *names)
    events = drain(calls.jobs, slots_per_queue=5)
    assert sorted(rows(engine)) == sorted(
        (name, "scheduled", 0 if name.startswith("snooze") else 1, 0)
        for name in names
        if name.split()[0] in ("raise", "retry", "snooze", "orphan")
    )
    with engine.connect() as connection:
        dead = connection.execute(text("SELECT args->>'name', attempt, crashes FROM outboxq.dead_job")).all()
    assert sorted(map(tuple, dead)) == [("dead letter", 1, 0), ("dead letter with rows", 1, 0)]
    assert effects(engine) == ["done with rows"]
    counted = Counter(type(event) for event in events if hasattr(event, "job"))
    assert counted == {JobDone: 2, JobDiscarded: 2, JobRetried: 5, JobSnoozed: 2, JobDied: 2}
    assert {row[0] for row in rows(engine, "lease_owner")} == {None}
    assert all(token > tokens[name] for name, token in rows(engine, "args->>'name', lease_token"))
    assert Counter(calls.began) == dict.fromkeys(names, 1)


@FLAVOURS
def test_what_follows_a_call_that_left_its_session_alone_has_a_connection(
    engine: Engine, drain: Callable[..., list[Event]], flavour: str
) -> None:
    """The job after it is added, and what it deferred is sent, in the transaction that removes it."""
    calls = Calls(flavour)
    calls.tasks["defers"] = lambda ctx: ctx.defer(insert(Effect), {"name": "deferred"})
    with OutboxSession(engine) as session, session.begin():
        first, then = calls.work.job(name="first"), calls.work.job(name="then")
        session.add_jobs([first.then(then), calls.work.job(name="defers")])
    events = drain(calls.jobs, slots_per_queue=2)
    assert Counter(calls.ended) == dict.fromkeys(["first", "then", "defers"], 1)
    assert effects(engine) == ["deferred"]
    assert [type(event) for event in events if hasattr(event, "job")] == [JobDone] * 3
    assert not rows(engine)


def test_a_cancellation_that_comes_when_no_connection_is_needed_is_too_late(
    engine: Engine, drain: Callable[..., list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the end of an async handler, and before the job is settled: the job is done."""
    calls, needs, cancelled = Calls("async"), LeasedCall.needs_connection, list[bool]()

    def cancel_behind(leased: LeasedCall) -> bool:
        is_needed, call = needs(leased), leased.batch.running.call
        assert call is not None
        call.is_cancelled = True
        cancelled.append(is_needed)
        return is_needed

    monkeypatch.setattr(LeasedCall, "needs_connection", cancel_behind)
    calls.enqueue(engine, "late")
    events = drain(calls.jobs)
    assert cancelled == [False]
    assert [type(event) for event in events if hasattr(event, "job")] == [JobDone]
    assert not rows(engine)


# The end of a relay.


@pytest.mark.first_and_last
@FLAVOURS
@pytest.mark.parametrize("how", ["in time", "cut off"])
def test_a_relay_that_stops_with_many_calls_lets_them_end_or_gives_them_back(
    engine: Engine, start_relay: StartRelay, gate: Gate, flavour: str, how: str
) -> None:
    """Those that end within the time to drain are done; the others wait again, uncounted, and no other one begins."""
    calls, names = Calls(flavour), [f"job {number}" for number in range(20)]
    calls.all_wait_for(gate, *names)
    calls.enqueue(engine, *names, "waits behind")
    settings = config(20, drain_seconds=PATIENCE if how == "in time" else 0.1)
    with running_calls(start_relay, calls, settings, gate) as running:
        wait_until(lambda: len(calls.began) == 20, "all calls to run")
        running.relay.stop()
        if how == "in time":
            gate.open()
            wait_until(lambda: len(running.of(JobDone)) == 20, "all to be done")
        else:
            wait_until(lambda: len(running.of(JobInterrupted)) == 20, "all to be interrupted")
    left = ["waits behind"] if how == "in time" else [*names, "waits behind"]
    found = sorted(rows(engine, "args->>'name', state, attempt, crashes, lease_owner"))
    assert found == sorted((name, "ready", 0, 0, None) for name in left)
    assert not running.of(JobCrashed)
    assert Counter(calls.began) == dict.fromkeys(names, 1)


def test_a_call_past_its_deadline_gives_its_slot_to_the_next_job(
    engine: Engine, start_relay: StartRelay, gate: Gate, made: list[Dispatcher]
) -> None:
    """It has no connection to end: the attempt counts, and its thread's late end changes nothing."""
    calls, threads, late = Calls(timeout_seconds=0.2, retry=LATER), list[threading.Thread](), list[BaseException]()

    def hang(ctx: Any) -> None:
        threads.append(threading.current_thread())
        gate.wait()
        try:
            ctx.session.add(Effect(name="late"))
            ctx.session.flush()
        except BaseException as error:
            late.append(error)
            raise

    calls.tasks["hangs"] = hang
    calls.enqueue(engine, "hangs", "next", "last")
    limits = RelayLimits(cut_after_seconds=0.1, free_after_seconds=PATIENCE)
    with running_calls(start_relay, calls, config(1), gate, limits=limits) as running:
        wait_until(lambda: len(running.of(JobDone)) == 2, "the jobs behind it")
        (retried,) = running.of(JobRetried)
        assert retried.error_type == "outboxq.errors.HandlerTimedOut"
        assert any("wait" in frame for frame in retried.where)
        before = rows(engine, "args->>'name', state, attempt, crashes, lease_token")
        assert threads[0].is_alive()
        gate.open()
        threads[0].join(PATIENCE)
        assert not threads[0].is_alive()
        calls.enqueue(engine, "afterwards")
        wait_until(lambda: len(running.of(JobDone)) == 3, "another job")
        assert rows(engine, "args->>'name', state, attempt, crashes, lease_token") == before
        assert lent_by(made).used == 0
    assert late
    assert [row[:4] for row in before] == [("hangs", "scheduled", 1, 0)]
    assert effects(engine) == []
    assert not running.of(JobLeaseLost)
    assert "hangs" not in calls.ended


# Suspects.


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Waits until each dispatcher has looked once more, and found nothing to do; suspects have as long as they like."""
    monkeypatch.setattr(dispatcher_module, "_ALONE_SECONDS", 3600.0)
    counted = Counter[Dispatcher]()
    rest = Dispatcher.rest

    def counting(self: Dispatcher, loop: SlotWaits) -> None:
        counted[self] += 1
        rest(self, loop)

    monkeypatch.setattr(Dispatcher, "rest", counting)

    def wait() -> None:
        # Once more: the first rest may have begun before the call.
        for _ in range(2):
            seen = Counter(counted)
            for each in seen:
                each.may_wait()
            wait_until(lambda seen=seen: all(counted[each] > seen[each] for each in seen), "the dispatchers to look")

    return wait


@FLAVOURS
def test_while_a_suspect_runs_no_other_call_of_its_queue_starts(
    engine: Engine,
    start_relay: StartRelay,
    gate: Gate,
    made: list[Dispatcher],
    rests: Callable[[], None],
    flavour: str,
) -> None:
    """They begin when it has ended."""
    calls = Calls(flavour)
    calls.all_wait_for(gate, "suspect")
    add_suspects(engine, calls, 2, "suspect")
    with running_calls(start_relay, calls, config(4), gate) as running:
        wait_until(lambda: calls.began == ["suspect"], "the suspect")
        calls.enqueue(engine, "first", "second")
        rests()
        # A thread's call may have a slot, and not have begun yet.
        assert (calls.began, made[0].busy) == (["suspect"], 1)
        gate.open()
        wait_until(lambda: len(running.of(JobDone)) == 3, "all", SOON)
    assert Counter(calls.began) == dict.fromkeys(["suspect", "first", "second"], 1)


@FLAVOURS
def test_while_a_suspect_runs_no_call_of_another_group_starts(
    engine: Engine,
    start_relay: StartRelay,
    gate: Gate,
    rests: Callable[[], None],
    flavour: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They begin when it has ended; also where the clock has not moved since it began."""
    taken_seconds = QuarantineTurns.taken_seconds
    monkeypatch.setattr(QuarantineTurns, "taken_seconds", lambda it: None if taken_seconds(it) is None else 0.0)
    calls, others = Calls(flavour), Calls(queue="elsewhere", kind="other")
    calls.jobs.include(others.jobs)
    calls.all_wait_for(gate, "suspect")
    add_suspects(engine, calls, 2, "suspect")
    settings = replace(config(1), groups=(SlotGroup(("held",), 2), SlotGroup(("elsewhere",), 2)))
    with running_calls(start_relay, calls, settings, gate) as running:
        wait_until(lambda: calls.began == ["suspect"], "the suspect")
        # A claim of the other group that was decided before the suspect's is over then.
        rests()
        others.enqueue(engine, "other")
        rests()
        assert others.began == []
        gate.open()
        wait_until(lambda: len(running.of(JobDone)) == 2, "both", SOON)


@FLAVOURS
def test_a_suspect_that_takes_long_keeps_others_for_a_while_only(
    engine: Engine, start_relay: StartRelay, gate: Gate, monkeypatch: pytest.MonkeyPatch, flavour: str
) -> None:
    """Calls may take hours: then the others begin while it runs."""
    monkeypatch.setattr(dispatcher_module, "_ALONE_SECONDS", 0.3)
    calls = Calls(flavour)
    calls.all_wait_for(gate, "suspect")
    add_suspects(engine, calls, 2, "suspect")
    with running_calls(start_relay, calls, config(4), gate) as running:
        wait_until(lambda: calls.began == ["suspect"], "the suspect")
        calls.enqueue(engine, "first", "second")
        wait_until(lambda: len(running.of(JobDone)) == 2, "the others")
        assert sorted(calls.ended) == ["first", "second"]
        gate.open()
        wait_until(lambda: len(running.of(JobDone)) == 3, "the suspect")


@FLAVOURS
def test_a_suspect_starts_when_no_other_call_runs(
    engine: Engine,
    start_relay: StartRelay,
    gate: Gate,
    made: list[Dispatcher],
    rests: Callable[[], None],
    flavour: str,
) -> None:
    """It waits for those that run, and no other one starts before it."""
    calls, second = Calls(flavour), Gate()
    calls.all_wait_for(gate, "runs")
    calls.all_wait_for(second, "suspect")
    calls.enqueue(engine, "runs")
    with running_calls(start_relay, calls, config(4, poll_seconds=0.05), gate, second) as running:
        wait_until(lambda: calls.began == ["runs"], "the first call")
        add_suspects(engine, calls, 2, "suspect")
        wait_until(lambda: made[0].state.quarantine.taken_seconds() is not None, "the turn to run suspects")
        calls.enqueue(engine, "behind")
        rests()
        assert calls.began == ["runs"]
        gate.open()
        wait_until(lambda: calls.began == ["runs", "suspect"], "the suspect")
        rests()
        second.open()
        wait_until(lambda: len(running.of(JobDone)) == 3, "all")
    assert calls.began == ["runs", "suspect", "behind"]


@FLAVOURS
def test_suspects_whose_relay_died_once_run_in_company(
    engine: Engine, start_relay: StartRelay, gate: Gate, rests: Callable[[], None], flavour: str
) -> None:
    """Sixteen at a time and no other call beside them, one that died in company alone; no crash is counted for it."""
    calls, alone = Calls(flavour), Gate()
    names = [f"suspect {number}" for number in range(20)]
    calls.all_wait_for(gate, *names)
    calls.all_wait_for(alone, "twice")
    add_suspects(engine, calls, 2, "twice")
    add_suspects(engine, calls, 1, *names)
    with running_calls(start_relay, calls, config(30), gate, alone) as running:
        wait_until(lambda: len(calls.began) == 16, "the first sixteen")
        calls.enqueue(engine, "ready")
        rests()
        assert sorted(calls.began) == sorted(names[:16])
        assert {row[3] for row in rows(engine)} == {0}
        gate.open()
        wait_until(lambda: "twice" in calls.began, "the one that runs alone")
        wait_until(lambda: len(running.of(JobDone)) == 20, "those in company")
        rests()
        assert "ready" not in calls.began
        assert rows(engine)[0] == ("twice", "leased", 1, 1)
        alone.open()
        wait_until(lambda: len(running.of(JobDone)) == 22, "all")
    assert Counter(calls.began) == dict.fromkeys([*names, "twice", "ready"], 1)


# One job among others.


@pytest.mark.first_and_last
@FLAVOURS
@pytest.mark.parametrize("meanwhile", ["cancelled", "reaped"])
@pytest.mark.parametrize("which", ["plain", "writes"])
def test_a_lost_lease_of_one_job_costs_the_others_nothing(
    engine: Engine, start_relay: StartRelay, gate: Gate, flavour: str, which: str, meanwhile: str
) -> None:
    """Each is fenced by its own token, and only the one whose row is another's is reported as lost."""
    calls, names = Calls(flavour), ["first", "plain", "writes", "last"]

    async def write_async(ctx: Any) -> None:
        await gate.wait_async()
        ctx.session.add(Effect(name="written"))

    def write(ctx: Any) -> None:
        gate.wait()
        ctx.session.add(Effect(name="written"))

    calls.all_wait_for(gate, *names)
    calls.tasks["writes"] = write_async if flavour == "async" else write
    calls.enqueue(engine, *names)
    with running_calls(start_relay, calls, config(4), gate) as running:
        wait_until(lambda: len(calls.began) == 4, "all calls to run")
        change = "DELETE FROM outboxq.job" if meanwhile == "cancelled" else "UPDATE outboxq.job SET lease_token = 9"
        with engine.begin() as connection:
            connection.execute(text(f"{change} WHERE args->>'name' = :name"), {"name": which})
        gate.open()
        wait_until(lambda: len(running.of(JobDone)) == 3 and running.of(JobLeaseLost), "all to end")
        assert rows(engine, "args->>'name', lease_token") == ([] if meanwhile == "cancelled" else [(which, 9)])
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM outboxq.job"))
    assert names_of(running.events, JobLeaseLost) == [f'{{"name": "{which}"}}']
    assert names_of(running.events, JobDone) == sorted(f'{{"name": "{name}"}}' for name in names if name != which)
    assert effects(engine) == ([] if which == "writes" else ["written"])


@FLAVOURS
def test_a_kind_that_no_handler_has_is_parked_uncounted_and_others_run(
    engine: Engine, drain: Callable[..., list[Event]], flavour: str
) -> None:
    """Those of its claim are done, and the rest of its kind is parked with it."""
    calls = Calls(flavour)
    insert = (
        "INSERT INTO outboxq.job (id, queue, kind, args) SELECT gen_random_uuid(), 'held', 'unheard of', "
        '\'{"name": "unknown"}\' FROM generate_series(1, 12)'
    )
    with engine.begin() as connection:
        connection.execute(text(insert))
    calls.enqueue(engine, "known")
    events = drain(calls.jobs, slots_per_queue=4)
    assert names_of(events, JobDone) == ['{"name": "known"}']
    assert set(rows(engine)) == {("unknown", "scheduled", 0, 0)}
    assert sum(event.count for event in events if isinstance(event, JobsParked)) == 12


def test_a_call_whose_connection_is_lost_is_the_only_suspect(engine: Engine, start_relay: StartRelay) -> None:
    """Its session's backend ends while it runs: it runs again, uncounted, and the others are done at once."""
    calls = Calls()

    def end_own_backend(ctx: Any) -> None:
        if calls.began.count("ends") == 1:
            ctx.session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    calls.tasks["ends"] = end_own_backend
    calls.tasks["writes"] = lambda ctx: ctx.session.add(Effect(name="written"))
    calls.enqueue(engine, "first", "ends", "writes", "last")
    with start_relay(calls.jobs, config(4, poll_seconds=0.1)) as running:
        wait_until(lambda: len(running.of(JobDone)) == 4, "every job")
    assert Counter(calls.began) == {"first": 1, "ends": 2, "writes": 1, "last": 1}
    assert [event.crashes for event in running.of(JobCrashed)] == [0]
    assert {event.job.attempt for event in running.of(JobDone)} == {1}
    assert effects(engine) == ["written"]


@pytest.mark.parametrize("statement", ["SELECT 1 / 0", "SELECT pg_terminate_backend(pg_backend_pid())"])
def test_a_claim_that_fails_behind_a_settlement_undoes_nothing(
    engine: Engine, start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    """They are one transaction, and then two: each job is reported once, and none runs again."""
    calls, names, statements = Calls(), [f"job {number}" for number in range(8)], [statement]

    def breaking(script: Script) -> None:
        owners = [owner for owner, _ in script.parts]
        if statements and {"finished", "claim"} <= set(owners):
            script.parts.insert(owners.index("claim"), ("settings", statements.pop()))

    change_scripts(monkeypatch, breaking)
    calls.enqueue(engine, *names)
    with start_relay(calls.jobs, config(2, poll_seconds=0.1)) as running:
        wait_until(lambda: len(running.of(JobDone)) >= 8 and not rows(engine), "every job")
    assert not statements
    assert Counter(calls.began) == dict.fromkeys(names, 1)
    assert len(running.of(JobDone)) == 8
    assert not running.of(JobLeaseLost)


def test_results_and_the_next_claim_are_one_transaction(
    engine: Engine, start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one flush to the disk, by statements that the connection has prepared; a lost one costs another string."""
    calls, names, commits, lost = Calls(), [f"job {number}" for number in range(12)], list[int](), list[Script]()

    def count(script: Script) -> None:
        owners = [owner for owner, _ in script.parts]
        if {"finished", "claim"} <= set(owners):
            commits.append(sum(statement == "COMMIT" for _, statement in script.parts))
        if "finished" in owners and not any("PREPARE" in statement for _, statement in script.parts) and not lost:
            lost.append(script)
            script.parts.insert(0, ("settings", "DEALLOCATE ALL"))

    change_scripts(monkeypatch, count)
    calls.enqueue(engine, *names)
    with start_relay(calls.jobs, config(1, poll_seconds=0.1)) as running:
        wait_until(lambda: len(running.of(JobDone)) >= len(names) and not rows(engine), "every job")
    assert lost
    assert commits
    assert set(commits) == {1}
    assert Counter(calls.began) == dict.fromkeys(names, 1)
    assert len(running.of(JobDone)) == len(names)


def test_a_claim_that_cannot_be_read_hides_no_job_that_was_settled_with_it(
    engine: Engine, start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was committed before it is reported, and the slots go on."""
    calls, names, unread = Calls(), [f"job {number}" for number in range(8)], list[Script]()

    def make_unreadable(script: Script) -> None:
        owners = [owner for owner, _ in script.parts]
        if not unread and {"finished", "claim"} <= set(owners):
            unread.append(script)
            script.parts[owners.index("claim")] = "claim", "SELECT 'infinity'::timestamptz"

    change_scripts(monkeypatch, make_unreadable)
    calls.enqueue(engine, *names)
    with start_relay(calls.jobs, config(2, poll_seconds=0.1)) as running:
        wait_until(lambda: len(running.of(JobDone)) >= 8 and not rows(engine), "every job")
    assert unread
    assert Counter(calls.began) == dict.fromkeys(names, 1)
    assert len(running.of(JobDone)) == 8


@FLAVOURS
def test_calls_that_run_through_many_beats_are_no_orphans(
    engine: Engine, start_relay: StartRelay, gate: Gate, flavour: str
) -> None:
    """The relay's own look for jobs that none of its slots has leaves them alone, and those that have just ended."""
    calls, names = Calls(flavour), [f"waits {number}" for number in range(4)]
    calls.all_wait_for(gate, *names)
    calls.enqueue(engine, *names)
    settings = config(6, lease_seconds=1, heartbeat_seconds=0.05)
    alive = text("SELECT alive_until FROM outboxq.relay")
    with running_calls(start_relay, calls, settings, gate) as running:
        wait_until(lambda: len(calls.began) == 4, "all calls to run")
        seen = set[object]()

        def beats() -> bool:
            calls.enqueue(engine, f"quick {len(seen)}")
            with engine.connect() as connection:
                seen.add(connection.execute(alive).scalar_one())
            return len(seen) > 6

        wait_until(beats, "some beats")
        gate.open()
        wait_until(lambda: not rows(engine), "every job")
    assert not running.of(JobCrashed)
    assert len(calls.began) == len(running.of(JobDone))
    assert {event.job.crashes for event in running.of(JobDone)} == {0}


@pytest.mark.parametrize("writes", [True, False])
def test_users_listeners_see_each_transaction_of_leased_jobs_begin(engine: Engine, writes: bool) -> None:
    """A listener that sets a role or a tenant must not miss a transaction that a string of ours began."""
    calls, begun, tenants = Calls(), list[Connection](), list[str]()
    listened = create_engine(engine.url)

    @event.listens_for(listened, "begin")
    def begins(connection: Connection) -> None:
        begun.append(connection)
        connection.exec_driver_sql(f"SET LOCAL outboxq.tenant = 'number {len(begun)}'")

    def look(ctx: Any) -> None:
        if writes:
            tenants.append(ctx.session.execute(text("SELECT current_setting('outboxq.tenant', true)")).scalar_one())
            ctx.session.add(Effect(name="looked"))

    names = [f"look {number}" for number in range(5)]
    calls.tasks = dict.fromkeys(names, look)
    calls.enqueue(engine, *names)
    events: list[Event] = []
    Relay(listened, calls.jobs, config(1), hooks=[events.append]).drain()
    listened.dispose()
    assert len([each for each in events if isinstance(each, JobDone)]) == 5
    assert all(tenant.startswith("number ") for tenant in tenants)
    assert (len(set(tenants)), effects(engine), rows(engine)) == ((5, ["looked"] * 5, []) if writes else (0, [], []))
    # The claim of each job, at least, and its settlement.
    assert len(begun) >= 10
