"""Jobs in lease mode that do what a test has put under their names, and the dispatchers that run them."""

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

from outboxq import AsyncContext, Context, Jobs, OutboxSession, RelayConfig
from outboxq.database.driver import Answer, Script, driver_connection
from outboxq.execution.claim import Claimed
from outboxq.relay.connections import CallConnections
from outboxq.relay.dispatcher import Dispatcher
from outboxq.relay.planner import Planner
from outboxq.statements.lease import RELAY_DIED
from tests.support.waiting import PATIENCE


class Gate:
    """What handlers of both flavours wait for, until the test opens it."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._lock = threading.Lock()

    def open(self) -> None:
        with self._lock:
            self._is_open.set()
            waiters, self._waiters = self._waiters, []
        for loop, event in waiters:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    def wait(self) -> None:
        assert self._is_open.wait(PATIENCE)

    async def wait_async(self) -> None:
        event = asyncio.Event()
        with self._lock:
            if self._is_open.is_set():
                return
            self._waiters.append((asyncio.get_running_loop(), event))
        await asyncio.wait_for(event.wait(), PATIENCE)

    def pass_in(self, flavour: str) -> Any:
        """Wait, in a task of either flavour."""
        return self.wait_async() if flavour == "async" else self.wait()


class Calls:
    """A queue in lease mode; each job is in `began` from its start, and in `ended` from its handler's orderly end."""

    def __init__(self, flavour: str = "sync", **options: Any) -> None:
        self.flavour = flavour
        self.jobs = Jobs()
        self.tasks: dict[str, Callable[[Any], Any]] = {}
        self.began: list[str] = []
        self.ended: list[str] = []
        self._options: dict[str, Any] = {"queue": "held", "claim": "lease", "kind": "work"} | options
        self.work = self._async_kind() if flavour == "async" else self._sync_kind()

    def _sync_kind(self) -> Any:
        @self.jobs.handler(**self._options)
        def work(ctx: Context, name: str) -> Any:
            self.began.append(name)
            task = self.tasks.get(name)
            outcome = None if task is None else task(ctx)
            self.ended.append(name)
            return outcome

        return work

    def _async_kind(self) -> Any:
        @self.jobs.handler(**self._options)
        async def work(ctx: AsyncContext, name: str) -> Any:
            self.began.append(name)
            task = self.tasks.get(name)
            outcome = None if task is None else task(ctx)
            if inspect.isawaitable(outcome):
                outcome = await outcome
            self.ended.append(name)
            return outcome

        return work

    def all_wait_for(self, gate: Gate, *names: str) -> None:
        for name in names:
            self.tasks[name] = lambda _ctx: gate.pass_in(self.flavour)

    def enqueue(self, engine: Engine, *names: str) -> None:
        with OutboxSession(engine) as session, session.begin():
            session.add_jobs(self.work.job(name=name) for name in names)


def config(slots: int, **settings: Any) -> RelayConfig:
    """One group of so many slots, and no agents with connections of their own."""
    return RelayConfig(**{"slots_per_queue": slots, "prune_seconds": 0, "stats_seconds": 0, **settings})


def rows(engine: Engine, what: str = "args->>'name', state, attempt, crashes") -> list[tuple[object, ...]]:
    """The jobs in the table, in their order."""
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(f"SELECT {what} FROM outboxq.job ORDER BY seq"))]


def note_dispatchers(monkeypatch: pytest.MonkeyPatch) -> list[Dispatcher]:
    """A list to which each dispatcher is appended as it is made."""
    made: list[Dispatcher] = []
    init = Dispatcher.__init__

    def noting(self: Dispatcher, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(Dispatcher, "__init__", noting)
    return made


def lent_by(made: list[Dispatcher]) -> CallConnections:
    """The connections that the calls of the only dispatcher share."""
    (dispatcher,) = made
    return dispatcher.connections


def note_claims(monkeypatch: pytest.MonkeyPatch, note: Callable[[Claimed], object]) -> None:
    """Have `note` called with each claim that took jobs, before they start."""
    record = Planner.record_claim

    def noting(planner: Planner, claimed: Claimed, *, is_called: bool) -> bool:
        if claimed.jobs:
            note(claimed)
        return record(planner, claimed, is_called=is_called)

    monkeypatch.setattr(Planner, "record_claim", noting)


def owners_of(script: Script) -> set[str]:
    """What a string is made of."""
    return {owner for owner, _ in script.parts}


@contextmanager
def answer_lost(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, chosen: Callable[[Script, Answer], bool]
) -> Iterator[list[Script]]:
    """Lose the first answer that is chosen: its string was executed, and its backend has ended; a list of it."""
    original, lost = Script.send, list[Script]()

    def losing(script: Script, connection: Connection) -> Answer:
        answer = original(script, connection)
        if lost or answer.error is not None or not chosen(script, answer):
            return answer
        lost.append(script)
        pid = driver_connection(connection).info.backend_pid
        with engine.connect() as other:
            assert other.scalar(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid})
        # By the driver, as it finds the connection closed: the server receives nothing more.
        return original(script, connection)

    with monkeypatch.context() as patched:
        patched.setattr(Script, "send", losing)
        yield lost


def add_suspects(engine: Engine, calls: Calls, deaths: int, *names: str) -> None:
    """As jobs that so many relays left when they died."""
    errors = json.dumps([{"type": RELAY_DIED, "message": "its relay died"}] * deaths)
    change = text("UPDATE outboxq.job SET state = 'suspect', errors = CAST(:errors AS jsonb) WHERE id = :id")
    with OutboxSession(engine) as session, session.begin():
        for name in names:
            handle = session.add_job(calls.work, name=name)
            session.flush()
            session.execute(change, {"errors": errors, "id": handle.id})
