"""The databases of a dashboard: the connections that pages read through, and that actions change the database through.

Pages and actions are functions of a sync SQLAlchemy connection, with sync and async engines alike. Four run at a time
for each database: with a sync engine in threads; with an async one in greenlets of the event loop, as `run_sync` does.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

from outboxq.admin.sections import BY_INDEX
from outboxq.dashboard.errors import Refused
from outboxq.dashboard.segments import as_segment
from outboxq.database.driver import run_script
from outboxq.database.errors import describe_error
from outboxq.database.settings import SET_OURS
from outboxq.doctor import Finding, run_checks
from outboxq.errors import ConfigError
from outboxq.tables import SCHEMA

Found = TypeVar("Found")
AnyEngine: TypeAlias = Engine | AsyncEngine
Connect: TypeAlias = Callable[[], AbstractContextManager[Connection]]

_AT_ONCE, _MOST_WAITING = 4, 50
FINDINGS_SECONDS = 60.0
_READING = (
    f"SET TRANSACTION READ ONLY; {SET_OURS}SET LOCAL statement_timeout = '2s'; SET LOCAL lock_timeout = '200ms'; "
    f"{BY_INDEX}"
)
_CHANGING = f"{SET_OURS}SET LOCAL statement_timeout = '10s'; SET LOCAL lock_timeout = '5s'"
# Finding the next rows of a filter that matches few rows may take long: no user waits for that page.
_CHANGING_PATIENTLY = f"{SET_OURS}SET LOCAL statement_timeout = '5min'; SET LOCAL lock_timeout = '5s'"


@dataclass(frozen=True, slots=True)
class Way:
    """Opens connections to one database for a page or an action, which runs in a thread or a greenlet.

    Attributes:
        engine: The engine for changes.
        schema: The schema of outboxq's tables.
        findings: The doctor's last findings in this database; None if it has not run.
        replica: The engine that pages read from; if None, they read from `engine`.
    """

    engine: Engine
    schema: str
    findings: Sequence[Finding] | None = None
    replica: Engine | None = None

    @property
    def to_primary(self) -> "Way":
        """A copy of this `Way` that reads from the primary, not from the replica.

        For pages that lead to a change or follow one: a replica may not have the latest changes yet.
        """
        return replace(self, replica=None)

    def connect(self) -> AbstractContextManager[Connection]:
        """Open a connection to the primary that is in no transaction yet."""
        return self._connect(self.engine)

    @contextmanager
    def _connect(self, engine: Engine) -> Iterator[Connection]:
        with engine.connect() as plain:
            yield plain.execution_options(isolation_level="READ COMMITTED", schema_translate_map={SCHEMA: self.schema})

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Begin a READ ONLY transaction on the replica, or on the primary without one.

        A statement that takes two seconds, or waits 0.2 seconds for a lock, is cancelled.

        Raises:
            Refused: the replica does not answer.
        """
        with ExitStack() as stack:
            try:
                connection = stack.enter_context(self._connect(self.replica or self.engine))
            except DBAPIError as error:
                if self.replica is None:
                    raise
                raise Refused(
                    503,
                    f"The replica that pages are read at does not answer: {describe_error(error)}. Start it, or serve "
                    "the dashboard without a URL to read at.",
                ) from error
            stack.enter_context(connection.begin())
            run_script(connection, _READING)
            yield connection

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """Begin a transaction on the primary, for a change. It is committed at the end of the `with` block."""
        with self.connect() as connection, connection.begin():
            run_script(connection, _CHANGING)
            yield connection

    @contextmanager
    def begin_patiently(self) -> Iterator[Connection]:
        """Begin a transaction as `begin` does, but with a limit of 5 minutes for each statement instead of 10 seconds.

        For changes that run in the background.
        """
        with self.connect() as connection, connection.begin():
            run_script(connection, _CHANGING_PATIENTLY)
            yield connection


class Database:
    """One database of a dashboard: its engines, and a limit of four pages or actions that use them at a time.

    Args:
        engine: The engine for changes, and for pages if there is no replica.
        replica: The engine that pages read from.

    Raises:
        ConfigError: an engine uses another driver than psycopg 3, or only one of the two is async.
    """

    def __init__(self, name: str, engine: AnyEngine, schema: str, replica: AnyEngine | None = None) -> None:
        for each in (engine, replica):
            if each is not None and each.dialect.driver not in ("psycopg", "psycopg_async"):
                raise ConfigError(
                    f"the dashboard works with psycopg 3, and the engine of {name!r} with {each.dialect.driver}: make "
                    "it by create_engine or create_async_engine with postgresql+psycopg://..."
                )
        if replica is not None and isinstance(replica, AsyncEngine) != isinstance(engine, AsyncEngine):
            raise ConfigError(f"both engines of {name!r} are async, or neither is")
        self.name = name
        self.segment = as_segment(name)
        self._engine = engine
        self._replica = replica
        self._schema = schema
        self._limiter: CapacityLimiter | None = None
        self._under_way = 0
        # The last findings of the doctor; None if it has not run.
        self.findings: Sequence[Finding] | None = None
        self._examined_at = -math.inf
        self._examining = asyncio.Lock()

    async def run(self, work: Callable[[Way], Found]) -> Found:
        """Call `work` with a `Way` to the database, and return the result.

        Four calls run at a time, and further ones wait.

        Raises:
            Refused: four calls run, and 50 more wait.
        """
        if self._limiter is None:
            self._limiter = CapacityLimiter(_AT_ONCE)
        if self._under_way >= _AT_ONCE + _MOST_WAITING:
            raise Refused(503, "Too many pages are looked at here at this moment. Try again in some seconds.")
        self._under_way += 1
        try:
            return await self._run(work, self._limiter)
        finally:
            self._under_way -= 1

    async def examine(self) -> Sequence[Finding]:
        """Return the findings of the doctor, which looks for conditions that keep jobs from running.

        The doctor runs again if its last findings are older than a minute; concurrent callers wait for the same run.
        """
        async with self._examining:
            if self.findings is None or time.monotonic() > self._examined_at + FINDINGS_SECONDS:
                # A thread apart from the pages, which do not wait for it.
                self.findings = await self._run(_examine, CapacityLimiter(1))
                self._examined_at = time.monotonic()
            return self.findings

    async def run_aside(self, work: Callable[[Way], Found]) -> Found:
        """Call a long function with a `Way` to the database, as `run` does, but outside the limit of four calls.

        With a sync engine, cancelling the task does not end the function's thread: the caller has to make the function
        end.
        """
        return await self._run(work, CapacityLimiter(1), waits=False)

    async def _run(self, work: Callable[[Way], Found], limiter: CapacityLimiter, *, waits: bool = True) -> Found:
        if isinstance(self._engine, AsyncEngine):
            # The pool belongs to the application: pages take few of its connections.
            async with limiter:
                return await greenlet_spawn(work, self._way)
        way = self._way
        if waits:
            return await _run_to_end(partial(work, way), limiter)
        return await anyio.to_thread.run_sync(partial(work, way), limiter=limiter)

    @property
    def _way(self) -> Way:
        engine, replica = (
            each.sync_engine if isinstance(each, AsyncEngine) else each for each in (self._engine, self._replica)
        )
        assert engine is not None
        return Way(engine, self._schema, self.findings, replica)


async def _run_to_end(work: Callable[[], Found], limiter: CapacityLimiter) -> Found:
    """Call a function in a thread, and return its result. If the task is cancelled, wait until the function has ended.

    Otherwise its thread, which cannot be cancelled, could use a connection of an engine that was closed.
    """
    done: Future[Found] = Future()

    def run() -> None:
        if done.set_running_or_notify_cancel():
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001  # raised by the await
                done.set_exception(error)

    try:
        await anyio.to_thread.run_sync(run, limiter=limiter)
    except asyncio.CancelledError:
        if not done.cancel():
            await asyncio.gather(asyncio.wrap_future(done), return_exceptions=True)
        raise
    return done.result()


def _examine(way: Way) -> Sequence[Finding]:
    return run_checks(way.connect, schema=way.schema, use="reader")


def name_engines(
    given: AnyEngine | Mapping[str, AnyEngine], schema: str, replicas: AnyEngine | Mapping[str, AnyEngine] | None = None
) -> dict[str, Database]:
    """Return a `Database` for each engine, by the database's name as paths contain it (`Database.segment`).

    A single engine without a name is named after its PostgreSQL database. Pages read from `replicas`.

    Raises:
        ConfigError: no engine, one that cannot be used, or an invalid name.
    """
    named = given if isinstance(given, Mapping) else {given.url.database or "database": given}
    if not named:
        raise ConfigError("a dashboard takes one engine at least")
    read_at = replicas if isinstance(replicas, Mapping) else {} if replicas is None else dict.fromkeys(named, replicas)
    unknown = read_at.keys() - named.keys()
    if unknown:
        raise ConfigError(f"read_engine names databases that the dashboard does not have: {', '.join(sorted(unknown))}")
    for name, engine in (*named.items(), *read_at.items()):
        if not isinstance(name, str) or not 1 <= len(name) <= 63 or not name.isprintable():
            raise ConfigError(f"a database's name is a text of 1 to 63 printable characters, got {name!r}")
        if not isinstance(engine, Engine | AsyncEngine):
            raise ConfigError(f"a dashboard takes SQLAlchemy engines, got {type(engine).__name__}")
    made = [Database(name, engine, schema, read_at.get(name)) for name, engine in named.items()]
    found = {each.segment: each for each in made}
    reserved = {"login", "logout", "static", "token"} & found.keys()
    if reserved:
        raise ConfigError(f"the dashboard has pages of its own at {', '.join(sorted(reserved))}: name it otherwise")
    return found
