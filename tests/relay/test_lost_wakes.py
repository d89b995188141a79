"""Two slots of one queue, one falling asleep while the other goes to work: no job is left to a slot that sleeps on.

Every relay here polls once in ten minutes, so what happens sooner happened by waking.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

import psycopg
import pytest
from psycopg.pq.abc import PGconn
from sqlalchemy import Engine, make_url, text
from sqlalchemy.orm import sessionmaker

from outboxq import Context, Jobs, OutboxSession, RelayConfig, SlotGroup
from outboxq.postgres import Database
from outboxq.relay.idle import FIRST_PAUSE_SECONDS, UNFLAGGED_PAUSE_SECONDS, SlotSleep
from outboxq.relay.listener import IdleSlot, Listener
from outboxq.relay.poller import Poll, SharedPoller
from outboxq.relay.state import RelayState
from tests.conftest import StartRelay
from tests.support import app
from tests.support.slots import make_slot, slot_connection_on
from tests.support.waiting import PATIENCE

FOUND = [("ledger", True, None, None, None)]


def test_a_slot_that_falls_asleep_behind_a_call_polls_for_it(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slot that takes one of two jobs calls the other slot, also if that one is not asleep yet."""
    jobs, release, found = Jobs(), threading.Event(), queue.SimpleQueue[str]()
    fall_asleep, remove_idle, pause_seconds = Listener.fall_asleep, Listener._remove_idle, SlotSleep.pause_seconds
    seen, both_are_here = list[IdleSlot](), threading.Barrier(2)
    first_works, second_asks = threading.Event(), threading.Event()

    @jobs.handler(queue="ledger")
    def block(ctx: Context) -> None:
        first_works.set()
        found.put("a job")
        # No slot takes both.
        release.wait()

    def fall_asleep_one_by_one(listener: Listener, slot: IdleSlot) -> "Future[float | None]":
        if slot in seen:
            return fall_asleep(listener, slot)
        seen.append(slot)
        # Neither of them is in a poll any more, which could find the jobs.
        both_are_here.wait(PATIENCE)
        is_first = slot is seen[0]
        if is_first:
            with sessions.begin() as session:
                session.add_jobs(block.job() for _ in range(2))
        else:
            # The first one has taken a job, and called in vain.
            assert first_works.wait(PATIENCE)

        request = fall_asleep(listener, slot)
        if not is_first:
            second_asks.set()
        while request.result(PATIENCE) is None:
            # The listener does not hear yet.
            request = fall_asleep(listener, slot)
        return request

    def remove_late(listener: Listener, slot: IdleSlot, connection: PGconn | None) -> None:
        # The second slot finds the first one's flag, which would go down in a moment without it.
        second_asks.wait(PATIENCE)
        remove_idle(listener, slot, connection)

    def sleep_on(sleep: SlotSleep, *, flagged: bool) -> float:
        found.put("a pause")
        return pause_seconds(sleep, flagged=flagged)

    monkeypatch.setattr(Listener, "fall_asleep", fall_asleep_one_by_one)
    monkeypatch.setattr(Listener, "_remove_idle", remove_late)
    monkeypatch.setattr(SlotSleep, "pause_seconds", sleep_on)
    with start_relay(jobs, RelayConfig(groups=(SlotGroup(("ledger",), 2),), poll_seconds=600)):
        try:
            assert [found.get(timeout=PATIENCE) for _ in range(2)] == ["a job", "a job"]
        finally:
            release.set()


def test_a_slot_that_waits_for_a_poll_does_not_sleep_over_what_it_finds(
    make_state: Callable[..., RelayState],
) -> None:
    """That poll may come back at any moment between two looks at it."""
    state = make_state("ledger")
    slot = make_slot(state)
    poll = state.poller.begin_shared("ledger", state.poller.latest)
    assert poll is not None
    assert not slot.sleep.needs_connection()
    state.poller.record(poll, FOUND)
    state.poller.end_shared(poll)
    assert slot.sleep.pause_seconds(flagged=True) == FIRST_PAUSE_SECONDS
    assert slot.sleep.needs_connection()


def test_a_slot_that_waits_for_a_poll_begins_its_own_if_that_one_fails(
    make_state: Callable[..., RelayState],
) -> None:
    """A poll that has ended without a result is no reason to sleep."""
    state = make_state("ledger")
    slot = make_slot(state)
    poll = state.poller.begin_shared("ledger", state.poller.latest)
    assert poll is not None
    assert not slot.sleep.needs_connection()
    state.poller.end_shared(poll)
    assert slot.sleep.pause_seconds(flagged=True) == FIRST_PAUSE_SECONDS
    assert slot.sleep.needs_connection()


def test_a_poll_that_comes_back_while_a_slot_asks_for_it_is_not_taken_for_an_empty_one(
    make_state: Callable[..., RelayState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a slot knows of its queues is not older than the poll that it relies on."""
    state = make_state("ledger")
    slot = make_slot(state)
    waiting, poll = SharedPoller.waiting, state.poller.begin_shared("ledger", state.poller.latest)

    def come_back_behind(poller: SharedPoller) -> set[str]:
        known = waiting(poller)
        come_back(poller, poll)
        return known

    def come_back(poller: SharedPoller, begun: Poll | None) -> None:
        assert begun is not None
        poller.record(begun, FOUND)
        poller.end_shared(begun)

    with monkeypatch.context() as patch:
        patch.setattr(SharedPoller, "waiting", come_back_behind)
        needs_one = slot.sleep.needs_connection()
    assert needs_one or slot.sleep.pause_seconds(flagged=True) == FIRST_PAUSE_SECONDS


def test_a_slot_that_never_slept_calls_another_where_a_poll_saw_jobs(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    make_state: Callable[..., RelayState],
) -> None:
    """No other slot goes there on account of that poll; one that sleeps would sleep on."""
    url = make_url(outboxq_database.url).set(drivername="postgresql").render_as_string(hide_password=False)
    state, woken = make_state("ledger"), threading.Event()
    state.listener = Listener(
        lambda: psycopg.connect(url, autocommit=True), "outboxq", state.poller.record_call, probe_seconds=10.0
    )
    state.listener.start()
    try:
        assert state.listener.fall_asleep(IdleSlot(frozenset(("ledger",)), woken.set)).result(PATIENCE)
        woken.clear()
        slot = make_slot(state)
        with sessions.begin() as session:
            session.execute(text("SET LOCAL outboxq.notify = 'off'"))
            session.add_jobs(app.record.job(name=f"job {number}") for number in range(2))
        state.poller.record(state.poller.begin(), FOUND)
        with engine.connect() as connection:
            assert slot.work(slot_connection_on(connection))
        assert woken.wait(PATIENCE)
    finally:
        state.listener.stop()


def test_a_slot_does_not_sleep_over_a_suspect_whose_queue_is_held(make_state: Callable[..., RelayState]) -> None:
    """It looks again soon, whether the hold is over by then or not: a poll that finds no ready job changes nothing."""
    state = make_state("ledger")
    slot = make_slot(state)
    state.quarantine.queues.add("ledger")
    state.poller.hold("ledger", 60.0)
    poll = state.poller.begin_shared("ledger", state.poller.latest)
    assert poll is not None
    state.poller.record(poll, [("ledger", False, None, True, None, None)])
    state.poller.end_shared(poll)
    slot.sleep.begin_claims()
    assert not slot.sleep.has_work()
    assert slot.sleep.pause_seconds(flagged=True) <= UNFLAGGED_PAUSE_SECONDS
    state.poller.hold("ledger", 0.0)
    assert slot.sleep.has_work()
