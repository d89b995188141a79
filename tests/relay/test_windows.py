"""Windows: the jobs of a claim in lease mode that one call of a batch handler runs, outside any transaction."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text

from outboxq import (
    AsyncBatchContext,
    Backoff,
    BatchContext,
    BatchItem,
    Context,
    DeadLetter,
    Discard,
    Jobs,
    OutboxSession,
    Retry,
    Snooze,
    cancel,
)
from outboxq.errors import RegistryError
from outboxq.events import (
    Event,
    JobCancelled,
    JobCrashed,
    JobDied,
    JobDiscarded,
    JobDone,
    JobInterrupted,
    JobRetried,
    JobSnoozed,
)
from outboxq.relay.dispatcher import Dispatcher
from outboxq.relay.limits import RelayLimits
from outboxq.statements.lease import RELAY_DIED
from tests.conftest import StartRelay
from tests.support.app import Account
from tests.support.calls import Gate, config, rows
from tests.support.ledger import of
from tests.support.waiting import wait_until

FLAVOURS = pytest.mark.parametrize("flavour", ["sync", "async"])
Drain = Callable[..., list[Event]]
LATER = Backoff(max_attempts=3, first_seconds=3600)


@dataclass(frozen=True)
class Named:
    name: str


class Windows:
    """A batch handler in lease mode; `calls` has the names of each call, `act` makes what it returns."""

    def __init__(self, flavour: str, act: Callable[..., Any] = lambda ctx, names: None, **options: Any) -> None:
        self.jobs = Jobs()
        self.calls: list[list[str]] = []
        self.act = act
        self.flavour = flavour
        given = {"queue": "windows", "claim": "lease", "kind": "window", "retry": LATER} | options
        self.kind = self.jobs.batch_handler(Named, **given)(self._async if flavour == "async" else self._sync)

    @property
    def _sync(self) -> Callable[..., Any]:
        def handle(ctx: BatchContext, items: Sequence[BatchItem[Named]]) -> Any:
            return self._act(ctx, items)

        return handle

    @property
    def _async(self) -> Callable[..., Any]:
        async def handle(ctx: AsyncBatchContext, items: Sequence[BatchItem[Named]]) -> Any:
            acted = self._act(ctx, items)
            return await acted if hasattr(acted, "__await__") else acted

        return handle

    def _act(self, ctx: Any, items: Sequence[BatchItem[Named]]) -> Any:
        names = [item.args.name for item in items]
        assert [job.id for job in ctx.jobs] == [item.job.id for item in items]
        self.calls.append(names)
        return self.act(ctx, names)

    def enqueue(self, engine: Engine, *names: str) -> None:
        with OutboxSession(engine) as session, session.begin():
            session.add_jobs(self.kind.job(name=name) for name in names)


def names_of(events: list[Event], kind: type[Any]) -> list[str]:
    return sorted(event.job.args.split('"')[3] for event in events if isinstance(event, kind))


def alphabet(number: int) -> list[str]:
    return [f"{n:02}" for n in range(number)]


@FLAVOURS
def test_the_jobs_of_a_claim_are_one_call_outside_of_any_transaction(
    engine: Engine, drain: Drain, flavour: str
) -> None:
    """In windows of the declared size, while the rows are leased; None means that all are done."""
    states: list[list[object]] = []

    def act(ctx: Any, names: list[str]) -> None:
        states.append([(row[0], row[1]) for row in rows(engine) if row[0] in names])
        with engine.connect() as connection:
            open_now = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
            assert connection.scalar(text(f"{open_now} AND datname = current_database()")) == 0

    windows = Windows(flavour, act, max_size=10)
    windows.enqueue(engine, *alphabet(25))
    events = drain(windows.jobs)
    assert windows.calls == [alphabet(25)[:10], alphabet(25)[10:20], alphabet(25)[20:]]
    assert states == [[(name, "leased") for name in names] for names in windows.calls]
    assert (names_of(events, JobDone), rows(engine)) == (alphabet(25), [])


@FLAVOURS
def test_each_job_has_its_outcome(engine: Engine, drain: Drain, flavour: str) -> None:
    """Of a list, in the order of the items."""
    outcomes = [None, Retry(timedelta(hours=1)), Snooze(timedelta(hours=1)), DeadLetter("no"), Discard("old")]
    windows = Windows(flavour, lambda ctx, names: outcomes)
    windows.enqueue(engine, *"abcde")
    events = drain(windows.jobs)
    assert windows.calls == [list("abcde")]
    kinds = (JobDone, JobRetried, JobSnoozed, JobDied, JobDiscarded)
    assert [names_of(events, kind) for kind in kinds] == [["a"], ["b"], ["c"], ["d"], ["e"]]
    assert rows(engine) == [("b", "scheduled", 1, 0), ("c", "scheduled", 0, 0)]


@FLAVOURS
@pytest.mark.parametrize("how", ["raises", "returns too few"])
def test_the_jobs_of_a_failed_call_run_again_each_alone(engine: Engine, drain: Drain, flavour: str, how: str) -> None:
    """The failed call charges no attempt; the faulty job's own call does."""

    def act(ctx: Any, names: list[str]) -> Any:
        if "c" in names and how == "raises":
            raise ValueError("c cannot be sent")
        return [None] if "c" in names and len(names) > 1 else [DeadLetter("it is c")] if names == ["c"] else None

    windows = Windows(flavour, act)
    windows.enqueue(engine, *"abcd")
    events = drain(windows.jobs)
    assert [windows.calls[0], *sorted(windows.calls[1:])] == [list("abcd"), ["a"], ["b"], ["c"], ["d"]]
    assert names_of(events, JobDone) == ["a", "b", "d"]
    if how == "raises":
        assert (names_of(events, JobRetried), rows(engine)) == (["c"], [("c", "scheduled", 1, 0)])
    else:
        assert (names_of(events, JobDied), rows(engine)) == (["c"], [])


@FLAVOURS
def test_a_failed_windows_jobs_run_in_its_slot(
    engine: Engine, start_relay: StartRelay, made: list[Dispatcher], flavour: str
) -> None:
    """One at a time if that is the only one; another call waits until a slot is free."""
    busy: list[int] = []

    def act(ctx: Any, names: list[str]) -> None:
        busy.append(made[0].busy)
        if len(names) > 1:
            raise ValueError

    windows = Windows(flavour, act, max_size=4)
    windows.enqueue(engine, *alphabet(12))
    with start_relay(windows.jobs, config(1)) as relay:
        wait_until(lambda: len(relay.of(JobDone)) == 12, "all jobs")
    assert set(busy) == {1}
    assert sorted(map(len, windows.calls)) == [1] * 12 + [4] * 3


@FLAVOURS
def test_a_job_whose_arguments_cannot_be_read_fails_alone(engine: Engine, drain: Drain, flavour: str) -> None:
    """And the others are one call."""
    windows = Windows(flavour)
    windows.enqueue(engine, *"abc")
    with engine.begin() as connection:
        connection.execute(text("""UPDATE outboxq.job SET args = '{"other": 1}' WHERE args->>'name' = 'b'"""))
    events = drain(windows.jobs)
    assert (windows.calls, names_of(events, JobDone)) == ([["a", "c"]], ["a", "c"])
    assert sum(isinstance(event, JobRetried | JobDied) for event in events) == 1


@FLAVOURS
def test_a_session_is_refused_with_what_to_do(engine: Engine, drain: Drain, flavour: str) -> None:
    """At its first use, and not before."""
    windows = Windows(flavour, lambda ctx, names: ctx.session.execute(text("SELECT 1")), retry=Backoff(max_attempts=1))
    windows.enqueue(engine, "a")
    (died,) = of(drain(windows.jobs), JobDied)
    assert died.error_type == "outboxq.errors.SessionRefused"
    assert "open one of your own" in died.message


def test_mapped_objects_are_refused_where_the_handler_is_registered() -> None:
    """No session could load them."""

    @dataclass
    class OfAccount:
        account: Account

    jobs = Jobs()

    @jobs.batch_handler(OfAccount, claim="lease")
    def act(ctx: BatchContext, items: Sequence[BatchItem[OfAccount]]) -> None: ...

    with pytest.raises(RegistryError, match="take their keys"):
        jobs.resolve()


@FLAVOURS
def test_a_cancelled_job_of_a_window_is_done_if_its_outcome_says_so(
    engine: Engine, start_relay: StartRelay, gate: Gate, flavour: str
) -> None:
    """The handler sees the cancellation and goes on; what it has not done ends as cancelled."""
    outcomes = [None, Retry(timedelta(hours=1)), None]

    async def act_async(ctx: Any) -> Any:
        while not ctx.cancelled:  # noqa: ASYNC110  # no event is set when the relay finds the cancellation
            await asyncio.sleep(0.01)
        return outcomes

    def act(ctx: Any, names: list[str]) -> Any:
        if flavour == "async":
            return act_async(ctx)
        wait_until(lambda: ctx.cancelled, "the cancellation")
        return outcomes

    windows = Windows(flavour, act)
    windows.enqueue(engine, *"abc")
    limits = RelayLimits(cut_after_seconds=0.1)
    with start_relay(windows.jobs, config(1, heartbeat_seconds=0.05), limits=limits) as relay:
        wait_until(lambda: windows.calls, "the call")
        with OutboxSession(engine) as session, session.begin():
            ids = session.scalars(text("SELECT id FROM outboxq.job ORDER BY seq")).all()
            assert [cancel(session, job_id) for job_id in ids[:2]] == ["requested"] * 2
        wait_until(lambda: not rows(engine), "all to end")
    assert (names_of(relay.events, JobDone), names_of(relay.events, JobCancelled)) == (["a", "c"], ["b"])
    assert windows.calls == [list("abc")]


@FLAVOURS
def test_a_window_past_its_deadline_charges_no_job_that_does_not_hang(
    engine: Engine, start_relay: StartRelay, gate: Gate, flavour: str
) -> None:
    """Each job runs alone then; the one that hangs is charged with its own attempt."""

    async def wait_async() -> None:
        await gate.wait_async()

    def act(ctx: Any, names: list[str]) -> Any:
        if "b" not in names:
            return None
        if flavour == "async":
            return wait_async()
        gate.wait()
        return None

    windows = Windows(flavour, act, timeout_seconds=0.3, retry=LATER)
    windows.enqueue(engine, *"abc")
    limits = RelayLimits(cut_after_seconds=0.1)
    with start_relay(windows.jobs, config(1, heartbeat_seconds=0.05), limits=limits) as relay:
        try:
            wait_until(lambda: relay.of(JobRetried), "the one that hangs to be charged")
            wait_until(lambda: len(relay.of(JobDone)) == 2, "the others")
        finally:
            gate.open()
    assert names_of(relay.events, JobDone) == ["a", "c"]
    (retried,) = relay.of(JobRetried)
    assert (retried.job.attempt, retried.error_type) == (1, "outboxq.errors.HandlerTimedOut")
    assert rows(engine) == [("b", "scheduled", 1, 0)]


@FLAVOURS
def test_a_window_outlives_its_connections_and_is_settled_once(
    engine: Engine, start_relay: StartRelay, gate: Gate, flavour: str
) -> None:
    """Every session of the relay is ended during the call; no job runs again, and each ends as its outcome says."""

    async def act_async() -> Any:
        await gate.wait_async()
        return [None, Snooze(timedelta(hours=1)), None]

    def act(ctx: Any, names: list[str]) -> Any:
        if flavour == "async":
            return act_async()
        gate.wait()
        return [None, Snooze(timedelta(hours=1)), None]

    windows = Windows(flavour, act)
    windows.enqueue(engine, *"abc")
    ending = text(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
        "AND datname = current_database() AND application_name LIKE 'outboxq relay%'"
    )
    with start_relay(windows.jobs, config(1)) as relay:
        try:
            wait_until(lambda: windows.calls, "the call")
            with engine.connect() as connection:
                assert connection.scalar(ending)
        finally:
            gate.open()
        wait_until(lambda: rows(engine) == [("b", "scheduled", 0, 0)], "the outcomes")
    assert windows.calls == [list("abc")]
    assert (names_of(relay.events, JobDone), names_of(relay.events, JobSnoozed)) == (["a", "c"], ["b"])
    assert not relay.of(JobCrashed)


@FLAVOURS
def test_a_window_may_take_longer_than_its_lease(
    engine: Engine, start_relay: StartRelay, gate: Gate, flavour: str
) -> None:
    """The relay extends the lease of all its jobs: no other relay takes one."""

    async def act_async() -> None:
        await gate.wait_async()

    windows = Windows(flavour, lambda ctx, names: act_async() if flavour == "async" else gate.wait())
    windows.enqueue(engine, *"abc")
    settings = config(1, lease_seconds=1, heartbeat_seconds=0.05)
    with start_relay(windows.jobs, settings) as relay, start_relay(windows.jobs, settings) as other:
        try:
            wait_until(lambda: windows.calls, "the call")
            until = time.monotonic() + 2.5
            wait_until(lambda: time.monotonic() > until, "the first lease's end")
            assert [row[1] for row in rows(engine)] == ["leased"] * 3
        finally:
            gate.open()
        wait_until(lambda: not rows(engine), "the end")
    assert windows.calls == [list("abc")]
    assert not [*relay.of(JobCrashed), *other.of(JobCrashed)]


@FLAVOURS
@pytest.mark.parametrize("alone", [False, True])
def test_a_relay_that_does_not_wait_for_a_window_gives_all_its_jobs_back(
    engine: Engine, start_relay: StartRelay, gate: Gate, flavour: str, alone: bool
) -> None:
    """Uncharged, also those that wait to run alone."""

    async def act_async() -> None:
        await gate.wait_async()

    def act(ctx: Any, names: list[str]) -> Any:
        if alone and len(names) > 1:
            raise ValueError
        return act_async() if flavour == "async" else gate.wait()

    windows = Windows(flavour, act)
    windows.enqueue(engine, *"abc")
    limits = RelayLimits(abort_seconds=20, free_after_seconds=60)
    try:
        with start_relay(windows.jobs, config(1, drain_seconds=0.1), limits=limits) as relay:
            wait_until(lambda: len(windows.calls) == 1 + alone, "the call that hangs")
    finally:
        gate.open()
    assert sorted(rows(engine)) == [(name, "ready", 0, 0) for name in "abc"]
    # The others had not begun.
    assert names_of(relay.events, JobInterrupted) == windows.calls[-1]


@FLAVOURS
def test_a_claim_of_several_kinds_is_a_call_of_each_and_takes_one_slot(
    engine: Engine, start_relay: StartRelay, made: list[Dispatcher], flavour: str
) -> None:
    """A chain's next job, kept rows and a callback come as for single jobs."""
    busy: list[int] = []

    def act(ctx: Any, names: list[str]) -> None:
        # A call that has a slot counts from before its handler begins.
        busy.append(made[0].busy)

    windows = Windows(flavour, act, max_size=50, keep=timedelta(days=1))
    others: list[list[str]] = []

    if flavour == "async":

        @windows.jobs.batch_handler(Named, queue="windows", claim="lease", max_size=50)
        async def other(ctx: AsyncBatchContext, items: Sequence[BatchItem[Named]]) -> None:
            others.append([item.args.name for item in items])
            act(ctx, [])
    else:

        @windows.jobs.batch_handler(Named, queue="windows", claim="lease", max_size=50)
        def other(ctx: BatchContext, items: Sequence[BatchItem[Named]]) -> None:
            others.append([item.args.name for item in items])
            act(ctx, [])

    with OutboxSession(engine) as session, session.begin():
        for number in range(10):
            kind = (windows.kind, other)[number % 2]
            session.add_jobs([kind.job(name=f"{number}").then(windows.kind.job(name=f"after {number}"))])
    with start_relay(windows.jobs, config(1)) as relay:
        wait_until(lambda: len(relay.of(JobDone)) == 20, "all")
    assert set(busy) == {1}
    assert others == [["1", "3", "5", "7", "9"]]
    assert windows.calls[0] == ["0", "2", "4", "6", "8"]
    assert sorted(name for call in windows.calls[1:] for name in call) == [f"after {n}" for n in range(10)]
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM outboxq.done_job")) == 15


def test_a_queue_with_a_handler_of_one_job_claims_a_job_for_each_free_slot(
    engine: Engine, start_relay: StartRelay, gate: Gate
) -> None:
    """A claimed job must not wait under its lease for a slot."""
    windows = Windows("sync", max_size=50)

    @windows.jobs.handler(queue="windows", claim="lease")
    def one(ctx: Context, name: str) -> None:
        gate.wait()

    with OutboxSession(engine) as session, session.begin():
        session.add_jobs(one.job(name=name) for name in "abcdef")
    with start_relay(windows.jobs, config(2)):
        try:
            wait_until(lambda: sum(row[1] == "leased" for row in rows(engine)) == 2, "both slots to be taken")
            assert [row[1] for row in rows(engine)] == ["leased"] * 2 + ["ready"] * 4
        finally:
            gate.open()
        wait_until(lambda: not rows(engine), "the end")


@FLAVOURS
def test_groups_keep_their_order_and_a_key_function_may_return_none(
    engine: Engine, start_relay: StartRelay, flavour: str
) -> None:
    """A window has one job of each group, and any number of jobs without a key."""
    windows = Windows(flavour, group=lambda name: None if name.startswith("-") else name[0])
    names = ["a1", "-1", "b1", "a2", "-2", "b2", "-3", "a3"]
    windows.enqueue(engine, *names)
    with start_relay(windows.jobs, config(2)) as relay:
        wait_until(lambda: len(relay.of(JobDone)) == len(names), "all")
    for call in windows.calls:
        keys = [name[0] for name in call if name[0] != "-"]
        assert len(keys) == len(set(keys))
    sent = [name for call in windows.calls for name in call]
    assert [name for name in sent if name[0] == "a"] == ["a1", "a2", "a3"]
    assert [name for name in sent if name[0] == "b"] == ["b1", "b2"]
    assert ["-1", "-2", "-3"] in windows.calls


def test_a_slow_call_makes_no_window_smaller(engine: Engine, drain: Drain) -> None:
    """A window is as large as declared, however long a call takes: its time says nothing about fewer jobs."""
    windows = Windows("sync", lambda ctx, names: time.sleep(0.4), max_size=20)
    windows.enqueue(engine, *alphabet(60))
    drain(windows.jobs)
    assert list(map(len, windows.calls)) == [20, 20, 20]


@FLAVOURS
def test_an_around_gets_all_jobs_and_its_outcome_is_that_of_each(engine: Engine, drain: Drain, flavour: str) -> None:
    """As around a batch handler in transaction mode, without a session."""
    windows = Windows(flavour)
    seen: list[int] = []

    @windows.jobs.around
    def hold(ctx: Any) -> Any:
        seen.append(len(ctx.jobs))
        return Snooze(timedelta(hours=1))

    windows.enqueue(engine, *"abc")
    events = drain(windows.jobs)
    assert (windows.calls, seen, names_of(events, JobSnoozed)) == ([], [3], list("abc"))


def test_a_call_that_is_cut_off_frees_its_slot_once(engine: Engine, start_relay: StartRelay, gate: Gate) -> None:
    """Also when its thread ends at last: no more calls run than there are slots."""
    running, most, lock = 0, 0, threading.Lock()
    hangs = Gate()

    def act(ctx: Any, names: list[str]) -> None:
        nonlocal running, most
        if len(names) > 1:
            raise ValueError
        if names == ["a"]:
            hangs.wait()
            return
        with lock:
            running += 1
            most = max(most, running)
        gate.wait()
        with lock:
            running -= 1

    windows = Windows("sync", act, timeout_seconds=0.3)
    windows.enqueue(engine, *"abcd")
    limits = RelayLimits(cut_after_seconds=0.1)
    with start_relay(windows.jobs, config(1, drain_seconds=30), limits=limits) as relay:
        try:
            wait_until(lambda: ["b"] in windows.calls, "the next call in the slot of the one that was cut off")
            hangs.open()
            wait_until(lambda: relay.of(JobRetried), "the charge")
        finally:
            hangs.open()
            gate.open()
        wait_until(lambda: len(relay.of(JobDone)) == 3, "the others")
    assert most == 1


@FLAVOURS
def test_the_suspects_of_a_hanging_window_have_a_call_each(
    engine: Engine, start_relay: StartRelay, gate: Gate, flavour: str
) -> None:
    """With several slots too; else the one that hangs would take the others along again."""
    windows = Windows(flavour, max_size=10)
    add_suspects_of(engine, windows, *"abcdef")
    with start_relay(windows.jobs, config(8)) as relay:
        wait_until(lambda: len(relay.of(JobDone)) == 6, "all")
    assert sorted(windows.calls) == [[name] for name in "abcdef"]


@FLAVOURS
def test_a_next_job_that_cannot_be_added_fails_its_own_alone(engine: Engine, drain: Drain, flavour: str) -> None:
    """Before the handler is called for it: the others are done, and their next jobs are added."""
    windows = Windows(flavour)
    with OutboxSession(engine) as session, session.begin():
        session.add_jobs([windows.kind.job(name=name).then(windows.kind.job(name=f"after {name}")) for name in "ab"])
        session.flush()
        broken = """UPDATE outboxq.job SET headers = headers || '{"outboxq.then": "[]"}' WHERE args->>'name' = 'a'"""
        session.execute(text(broken))
    events = drain(windows.jobs)
    assert windows.calls == [["b"], ["after b"]]
    assert names_of(events, JobDone) == ["after b", "b"]
    assert sum(isinstance(event, JobRetried | JobDied) for event in events) == 1


def add_suspects_of(engine: Engine, windows: Windows, *names: str) -> None:
    """As jobs that a relay left when it died."""
    errors = json.dumps([{"type": RELAY_DIED, "message": "its relay died"}])
    windows.enqueue(engine, *names)
    with engine.begin() as connection:
        change = "UPDATE outboxq.job SET state = 'suspect', errors = CAST(:errors AS jsonb)"
        connection.execute(text(change), {"errors": errors})
