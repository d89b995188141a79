"""One run of a relay: its threads, its event loop and its lifespan, from start to end."""

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass
from typing import TypeAlias, TypeVar
from uuid import uuid4

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from outboxq.batch import BatchReport
from outboxq.config import RelayConfig, SlotGroup
from outboxq.engines import Engines, check_durability, listen_connector
from outboxq.errors import ConfigError, SchemaError
from outboxq.events import DatabaseLost, Emitter, JobCrashed, RelayStarted, RelayStopped, RelayStopping
from outboxq.handlers import Flavour, Lifespan, Registry
from outboxq.lease import Lease, Suspects
from outboxq.listener import Listener
from outboxq.serve import serve_in_loop, serve_in_thread
from outboxq.slot import Shared, Slot, Tally, describe_error, is_outage
from outboxq.statements.version import NEEDED_VERSION, schema_version
from outboxq.watch import Runner, Watch

_LOOP_STOP_SECONDS = 5.0
_LOOK_SECONDS = 0.1

T = TypeVar("T")
AnyLifespan: TypeAlias = AbstractContextManager[object] | AbstractAsyncContextManager[object]


@dataclass(frozen=True, slots=True)
class RelayReport:
    """What a relay did: jobs done, attempts that failed, and jobs that moved to the dead letters (failed too).

    `leases_lost` counts handlers that ended after another relay had taken their job: their rows were rolled back.
    """

    done: int
    failed: int
    died: int
    leases_lost: int = 0


class RelayRun:
    """One run of a relay: its threads, its event loop and its lifespan, from start to end."""

    def __init__(
        self,
        engines: Engines,
        registry: Registry,
        groups: list[tuple[SlotGroup, Flavour]],
        config: RelayConfig,
        emit: Emitter,
        stopping: threading.Event,
        *,
        until_empty: bool,
    ) -> None:
        self._engines = engines
        self._groups = groups
        self._config = config
        self._emit = emit
        self._stopping = stopping
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_ends: asyncio.Event | None = None
        self._runners: list[Runner] = []
        self._failures: list[BaseException] = []
        self._abandoned = 0
        listens = config.listen and not until_empty
        listener = (
            Listener(listen_connector(engines, config.listen_url, lambda: self._loop), config.schema)
            if listens
            else None
        )
        self._queues = tuple(dict.fromkeys(name for group, _ in groups for name in group.queues))
        suspects = Suspects()
        lease = Lease(
            # Not by `listen_url`: through a pooler is as good.
            listen_connector(engines, None, lambda: self._loop),
            config.schema,
            uuid4(),
            self._queues,
            suspects,
            self._leased,
            emit,
            self._reaped,
            lease_seconds=config.lease_seconds,
            beat_seconds=config.beat_seconds,
            max_crashes=config.max_crashes,
        )
        self._watch = Watch(engines, config.schema, lambda: self._loop, self._replace, self._failed)
        self._shared = Shared(
            registry=registry,
            state=None,
            schema=config.schema,
            batch_size=config.batch_size,
            poll_seconds=config.poll_seconds,
            until_empty=until_empty,
            emit=emit,
            listener=listener,
            lease=lease,
            suspects=suspects,
            max_crashes=config.max_crashes,
            stopping=stopping,
            tally=Tally(),
            lock=threading.Lock(),
        )

    def work(self) -> RelayReport:
        """Open everything, serve, and close everything in the opposite order."""
        lifespan = _open_lifespan(self._shared.registry.lifespan)
        with ExitStack() as stack:
            if self._needs_loop(lifespan):
                stack.enter_context(self._running_loop())
            self._wait_for_database()
            if self._stopping.is_set():
                return RelayReport(0, 0, 0)
            self._shared.state = self._enter_lifespan(stack, lifespan)
            if self._shared.listener is not None:
                self._shared.listener.start()
                stack.callback(self._shared.listener.stop)
            self._shared.lease.start()
            stack.callback(self._shared.lease.stop)
            if any(self._shared.registry.claims[name] == "lease" for name in self._queues):
                self._shared.lease.ensure()
            self._serve_to_the_end()
        tally = self._shared.tally
        if self._failures:
            raise self._failures[0]
        return RelayReport(tally.done, tally.failed, tally.died, tally.leases_lost)

    def wake_all(self) -> None:
        """Ring every slot, so that it sees that the relay is stopping."""
        for runner in list(self._runners):
            runner.slot.sleeper.wake()

    def _leased(self) -> set[tuple[str, int]]:
        """The jobs that run here under the lease, with their tokens."""
        progresses = [runner.slot.progress for runner in list(self._runners)]
        jobs = [progress.job for progress in progresses if progress is not None]
        return {(str(job.id), job.lease_token) for job in jobs if job.lease_token is not None}

    def _reaped(self, event: JobCrashed) -> None:
        with self._shared.lock:
            self._shared.tally.add(BatchReport(0, (event,)))
        self._emit(event)

    def _needs_loop(self, lifespan: object) -> bool:
        return (
            any(flavour == "async" for _, flavour in self._groups)
            or isinstance(lifespan, AbstractAsyncContextManager)
            or self._engines.sync is None
        )

    @contextmanager
    def _running_loop(self) -> Iterator[None]:
        """An event loop in a thread of its own: blocking sync handlers never delay async ones."""
        started: Future[None] = Future()

        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._loop_ends = asyncio.Event()
            started.set_result(None)
            await self._loop_ends.wait()

        thread = threading.Thread(target=asyncio.run, args=(main(),), name="outboxq-loop", daemon=True)
        thread.start()
        started.result()
        try:
            yield
        finally:
            assert self._loop is not None
            assert self._loop_ends is not None
            self._loop.call_soon_threadsafe(self._loop_ends.set)
            # A handler that blocks the loop must not keep the relay: its thread is a daemon.
            thread.join(_LOOP_STOP_SECONDS)

    def _enter_lifespan(self, stack: ExitStack, lifespan: AnyLifespan) -> object:
        if isinstance(lifespan, AbstractContextManager):
            return stack.enter_context(lifespan)
        state = self._in_loop(lifespan.__aenter__())
        stack.callback(lambda: self._in_loop(lifespan.__aexit__(None, None, None), self._config.drain_seconds + 5))
        return state

    def _in_loop(self, awaitable: Awaitable[T], seconds: float | None = None) -> T:
        assert self._loop is not None

        async def run() -> T:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(seconds)

    def _wait_for_database(self) -> None:
        """Check the tables; while the database is down, say so and try again."""
        pause_seconds = 0.5
        while not self._stopping.is_set():
            try:
                version = self._read_version()
            except (DBAPIError, OSError) as error:
                if not is_outage(error):
                    raise
                self._emit(DatabaseLost(describe_error(error), pause_seconds))
                self._stopping.wait(pause_seconds)
                pause_seconds = min(pause_seconds * 2, 10.0)
                continue
            check_version(version, self._config.schema)
            return

    def _read_version(self) -> int | None:
        if self._engines.sync is not None:
            with self._engines.sync.connect() as connection:
                return self._examine(connection)
        return self._in_loop(self._read_version_async())

    def _examine(self, connection: Connection) -> int | None:
        check_durability(connection, allowed=self._config.allow_asynchronous_commit)
        return schema_version(connection, self._config.schema)

    async def _read_version_async(self) -> int | None:
        assert self._engines.asynchronous is not None
        async with self._engines.asynchronous.connect() as connection:
            return await connection.run_sync(self._examine)

    def _serve_to_the_end(self) -> None:
        self._emit(RelayStarted(self._queues, sum(group.slots for group, _ in self._groups)))
        tally = self._shared.tally
        while not self._stopping.is_set():
            before = tally.claimed
            self._serve()
            # Draining: one slot may have ended while another's handler enqueued for it, so look once more.
            if tally.claimed == before:
                break
        self._emit(RelayStopped(tally.done, tally.failed, self._abandoned))

    def _serve(self) -> None:
        self._runners = [
            self._start_slot(group, flavour) for group, flavour in self._groups for _ in range(group.slots)
        ]
        while not self._stopping.is_set() and self._wait_a_moment():
            self._watch.look(self._runners)
        self._let_finish()

    def _wait_a_moment(self) -> bool:
        """Wait for a slot, in slices, so that signals and deadlines are seen; False where all have ended."""
        alive = next((runner for runner in self._runners if runner.is_alive()), None)
        if alive is not None:
            alive.join(_LOOK_SECONDS)
        return alive is not None

    def _start_slot(self, group: SlotGroup, flavour: Flavour) -> "_SlotThread | _SlotTask":
        if flavour == "sync":
            assert self._engines.sync is not None
            runner: _SlotThread | _SlotTask = _SlotThread(self._shared, group, self._engines.sync, self._failed)
        else:
            assert self._engines.asynchronous is not None
            assert self._loop is not None
            runner = _SlotTask(self._shared, group, self._engines.asynchronous, self._loop, self._failed)
        return runner

    def _replace(self, runner: Runner) -> None:
        """Start another in the place of a slot that was cut off."""
        self._runners.remove(runner)
        if not self._stopping.is_set():
            self._runners.append(self._start_slot(SlotGroup(runner.slot.queues), runner.slot.flavour))

    def _failed(self, error: BaseException) -> None:
        """A slot met an error that is none of the database's, or is stuck: end the relay instead of limping on."""
        self._failures.append(error)
        self._stopping.set()

    def _let_finish(self) -> None:
        if not self._stopping.is_set():
            return
        running = sum(runner.slot.running for runner in self._runners)
        self._emit(RelayStopping(running, self._config.drain_seconds))
        self.wake_all()
        deadline = time.monotonic() + self._config.drain_seconds
        while time.monotonic() < deadline and self._wait_a_moment():
            self._watch.look(self._runners)
        # Whoever is not done by now is rolled back.
        late = [runner for runner in self._runners if runner.is_alive()]
        self._abandoned = sum(self._watch.interrupt(runner) for runner in late)
        for runner in late:
            runner.abandon()


class _SlotThread:
    """A slot with sync handlers, in a thread of its own."""

    def __init__(
        self, shared: Shared, group: SlotGroup, engine: Engine, failed: Callable[[BaseException], None]
    ) -> None:
        bell = threading.Event()
        self.slot = Slot(shared, "sync", group.queues, bell.set)
        self._failed = failed
        # A daemon: a handler that outlives the time to drain must not keep the process alive.
        self._thread = threading.Thread(target=self._run, args=(engine, bell), name="outboxq-slot", daemon=True)
        self._thread.start()

    def _run(self, engine: Engine, bell: threading.Event) -> None:
        try:
            serve_in_thread(self.slot, engine, bell)
        except BaseException as error:  # noqa: BLE001  # raised again by the relay
            self._failed(error)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_seconds: float) -> None:
        self._thread.join(timeout_seconds)

    def abandon(self) -> None:
        """Nothing can stop a thread; it cannot commit."""

    def stands_at(self) -> int | None:
        return self._thread.ident


class _SlotTask:
    """A slot with async handlers, a task in the relay's event loop."""

    def __init__(
        self,
        shared: Shared,
        group: SlotGroup,
        engine: AsyncEngine,
        loop: asyncio.AbstractEventLoop,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._bell = asyncio.Event()
        self._loop = loop
        self._loop_thread: int | None = None
        self._failed = failed
        self.slot = Slot(shared, "async", group.queues, self._wake)
        self._future = asyncio.run_coroutine_threadsafe(self._run(engine), loop)

    async def _run(self, engine: AsyncEngine) -> None:
        self._loop_thread = threading.get_ident()
        try:
            await serve_in_loop(self.slot, engine, self._bell)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  # raised again by the relay
            self._failed(error)

    def _wake(self) -> None:
        # A closed loop has no one left to wake.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._bell.set)

    def is_alive(self) -> bool:
        return not self._future.done()

    def join(self, timeout_seconds: float) -> None:
        concurrent.futures.wait([self._future], timeout_seconds)

    def abandon(self) -> None:
        """Cancel the handler; its transaction is rolled back as the task ends."""
        self._future.cancel()

    def stands_at(self) -> int | None:
        return self._loop_thread


def check_version(version: int | None, schema: str) -> None:
    """Refuse tables that this version of the code cannot work on.

    Raises:
        SchemaError: missing or older; the message gives the command.
    """
    if version is None or version < NEEDED_VERSION:
        found = f"no outboxq tables in schema {schema!r}" if not version else f"outboxq tables at step {version}"
        raise SchemaError(
            f"found {found}, and step {NEEDED_VERSION} is needed: run `outboxq migrate`, or call "
            f"`outboxq.migrations.upgrade(op, to={NEEDED_VERSION})` in a revision of your Alembic history"
        )


def _open_lifespan(lifespan: Lifespan | None) -> AnyLifespan:
    if lifespan is None:
        return nullcontext()
    if inspect.isasyncgenfunction(lifespan):
        return asynccontextmanager(lifespan)()
    if inspect.isgeneratorfunction(lifespan):
        return contextmanager(lifespan)()
    opened = lifespan()
    if isinstance(opened, AbstractContextManager | AbstractAsyncContextManager):
        return opened
    raise ConfigError(
        "a lifespan returns a context manager, sync or async, or is a generator function that yields the state once, "
        f"got {type(opened).__name__}"
    )
