"""Leased claims that the relay relieves beside a handler, where that fails or takes longer than the handler."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, NullPool, text
from sqlalchemy.ext.asyncio import create_async_engine

from outboxq import AsyncContext, Context, Jobs, OutboxSession, Relay, RelayConfig
from outboxq.events import Event, JobCrashed, JobDone
from outboxq.fault_points import FaultPoint, fault_action
from tests.conftest import StartRelay
from tests.support.limits import FOLLOW_ON, GROWING, with_limits
from tests.support.waiting import PATIENCE, wait_until

# A slot's claims take 1, 2 and 4 jobs before they may take 8: then "first", "slow" and "third" are claimed together.
NAMES = [*(f"quick {number}" for number in range(7)), "first", "slow", "third"]
LOCK = text("SELECT FROM outboxq.job WHERE args->>'name' = 'first' FOR UPDATE")
RELIEFS = text(
    "SELECT pid FROM pg_stat_activity WHERE query LIKE '%WITH oq_held%' AND wait_event_type = 'Lock' "
    "AND datname = current_database()"
)


# Claims grow however slow the machine is, and slots go on with one sort of jobs for as long as there are any.
LIMITS = replace(FOLLOW_ON, lease_mode=GROWING)
pytestmark = pytest.mark.relay_limits(LIMITS)


class Scene:
    """While "slow" runs, an operator's transaction stands on "first", which is done and whose removal waits for it."""

    def __init__(self, operator: Connection, observer: Connection) -> None:
        self.jobs = Jobs()
        self.ran: list[str] = []
        self.leave, self.left = threading.Event(), threading.Event()
        self._operator, self._observer = operator, observer

    def enqueue(self, engine: Engine, *, asynchronous: bool = False) -> None:
        work = self._async_kind() if asynchronous else self._sync_kind()
        with OutboxSession(engine) as session, session.begin():
            session.add_jobs(work.job(name=name) for name in NAMES)

    def _sync_kind(self) -> Any:
        @self.jobs.handler(queue="held", claim="lease")
        def work(_ctx: Context, name: str) -> None:
            self.ran.append(name)
            if name == "slow":
                self._operator.execute(LOCK)
                self.leave.wait(PATIENCE)
                self.left.set()

        return work

    def _async_kind(self) -> Any:
        @self.jobs.handler(queue="held", claim="lease")
        async def work(_ctx: AsyncContext, name: str) -> None:
            self.ran.append(name)
            if name == "slow":
                self._operator.execute(LOCK)
                await asyncio.to_thread(self.leave.wait, 30)

        return work

    def names_left(self) -> list[str]:
        rows = self._observer.execute(text("SELECT args->>'name' FROM outboxq.job ORDER BY seq"))
        return list(rows.scalars())

    def reliefs(self) -> list[int]:
        return list(self._observer.execute(RELIEFS).scalars())

    def end_relief(self) -> None:
        (pid,) = wait_until(self.reliefs, "the relief to wait for the operator")
        self._observer.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})

    def let_go(self) -> None:
        self._operator.rollback()


@pytest.fixture
def scene(engine: Engine) -> Iterator[Scene]:
    observer = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as operator, observer:
        yield Scene(operator, observer)


@contextmanager
def leaving(scene: Scene) -> Iterator[None]:
    try:
        yield
    finally:
        scene.leave.set()
        scene.let_go()


def config(**settings: Any) -> RelayConfig:
    defaults = {"slots_per_queue": 1, "batch_size": 8, "lease_seconds": 1, "heartbeat_seconds": 0.1}
    return RelayConfig(poll_seconds=0.1, **(defaults | settings))


def assert_all_ran_once(scene: Scene, events: list[Event]) -> None:
    assert Counter(scene.ran) == dict.fromkeys(NAMES, 1)
    assert len([event for event in events if isinstance(event, JobDone)]) == len(NAMES)
    assert not [event for event in events if isinstance(event, JobCrashed)]


def test_a_relief_that_fails_when_its_handler_has_ended_loses_nothing(
    engine: Engine, scene: Scene, start_relay: StartRelay
) -> None:
    """What it had in hand comes back to the slot, which waits for it, and no handler runs again."""
    scene.enqueue(engine)
    with start_relay(scene.jobs, config(), engine=engine) as running, leaving(scene):
        wait_until(scene.reliefs, "the relief to wait for the operator")
        scene.leave.set()
        assert scene.left.wait(PATIENCE)
        scene.end_relief()
        scene.let_go()
        wait_until(lambda: not scene.names_left(), "every job")
    assert_all_ran_once(scene, running.events)


def test_a_relief_that_the_loop_cancels_loses_nothing(engine: Engine, scene: Scene, start_relay: StartRelay) -> None:
    """With an async engine alone it has two seconds; what it had in hand comes back to the slot."""
    scene.enqueue(engine, asynchronous=True)
    asynchronous = create_async_engine(engine.url, poolclass=NullPool)
    with start_relay(scene.jobs, config(), engine=asynchronous) as running, leaving(scene):
        wait_until(scene.reliefs, "the relief to wait for the operator")
        wait_until(lambda: not scene.reliefs(), "the loop to lose patience")
        scene.leave.set()
        scene.let_go()
        wait_until(lambda: not scene.names_left(), "every job")
    assert_all_ran_once(scene, running.events)


def test_a_drain_waits_for_a_relief_that_outlasts_its_handler(engine: Engine, scene: Scene) -> None:
    """What it gives back is run, and what it removes is told, before the drain ends."""
    scene.enqueue(engine)
    events: list[Event] = []
    relay = with_limits(Relay(engine, scene.jobs, config(), hooks=[events.append]), LIMITS)
    drain = threading.Thread(target=relay.drain)
    drain.start()
    with leaving(scene):
        wait_until(scene.reliefs, "the relief to wait for the operator")
        scene.leave.set()
        assert scene.left.wait(PATIENCE)
        drain.join(0.5)
        assert drain.is_alive()
        scene.let_go()
        drain.join(PATIENCE)
    assert scene.names_left() == []
    assert_all_ran_once(scene, events)


def test_a_relief_that_failed_is_tried_again(engine: Engine, scene: Scene, start_relay: StartRelay) -> None:
    """A slow handler holds up what was claimed with it no longer than until the next look that succeeds."""
    scene.enqueue(engine)
    with start_relay(scene.jobs, config(), engine=engine) as running, leaving(scene):
        scene.end_relief()
        scene.let_go()
        wait_until(lambda: scene.names_left() == ["slow", "third"], "what is done to be removed")
        scene.leave.set()
        wait_until(lambda: not scene.names_left(), "every job")
    assert_all_ran_once(scene, running.events)


def test_a_suspect_is_not_charged_before_it_begins(engine: Engine, scene: Scene, start_relay: StartRelay) -> None:
    """However long its slot stood still behind the claim: nobody relieves what has not begun of it."""
    scene.enqueue(engine)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM outboxq.job WHERE args->>'name' <> 'first'"))
        connection.execute(text("UPDATE outboxq.job SET state = 'suspect'"))
    held: list[object] = []

    def stand_still(point: FaultPoint) -> None:
        if point == "after-claim" and not held:
            with engine.connect() as connection:
                held.append(connection.execute(text("SELECT lease_token FROM outboxq.job")).scalar_one())
            # Five looks of the relay's.
            threading.Event().wait(0.7)

    with fault_action(stand_still), start_relay(scene.jobs, config(), engine=engine) as running:
        wait_until(lambda: running.of(JobDone), "the suspect")
    (done,) = (event for event in running.events if isinstance(event, JobDone))
    assert (done.job.attempt, done.job.crashes, held) == (1, 0, [done.job.lease_token])
