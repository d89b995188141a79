"""One run of a relay: its threads, its event loop and its lifespan, from start to end."""

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Iterator
from concurrent.futures import Future
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from typing import TypeAlias, TypeVar
from uuid import uuid4

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from outboxq.config import RelayConfig, SlotGroup
from outboxq.database.engines import Engines, listen_connector
from outboxq.database.errors import NoConnection, describe_error, is_database_unavailable, opening
from outboxq.errors import ConfigError, RelayStuck, SchemaError
from outboxq.events import DatabaseLost, Emitter, JobCrashed, RelayStarted, RelayStopped, RelayStopping
from outboxq.execution.batch_state import BatchReport
from outboxq.handlers.handler import Flavour
from outboxq.handlers.registry import Lifespan, Registry
from outboxq.migrations.server import check_server, refusing_bytes
from outboxq.relay.connections import AsyncSlotConnections, SlotConnections
from outboxq.relay.cursors import SweepSchedule
from outboxq.relay.deadlines import DeadlineEnforcer, Runner
from outboxq.relay.effect_runners import make_callers
from outboxq.relay.lease import QuarantineTurns, RelayLease
from outboxq.relay.listener import Listener
from outboxq.relay.maintenance.pruner import Pruner
from outboxq.relay.maintenance.reindexer import Reindexer
from outboxq.relay.poller import SharedPoller
from outboxq.relay.runners import SlotTask, SlotThread
from outboxq.relay.startup import check_durability
from outboxq.relay.state import RelayCounters, RelayState
from outboxq.statements.version import NEEDED_VERSION, schema_version

# Slots that all sleep keep so many connections for the next job: with the listener's and the lease's four.
_WARM_LINES = 2
_TRIM_SECONDS = 1.0
_LOOP_STOP_SECONDS = 5.0
_LOOK_SECONDS = 0.1
# An event loop that stands still for so long, while no handler runs, is stuck.
_LOOP_PATIENCE_SECONDS = 60.0
# An event loop that does not answer within so long is blocked by a handler.
_ANSWER_SECONDS = 1.0

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
        self._loop_is_blocked = False
        self._runners: list[Runner] = []
        self._cut_off: list[Runner] = []
        self._failures: list[BaseException] = []
        self._abandoned = 0
        self._trim_at = 0.0
        self._trimming: Future[None] | None = None
        self._trimming_since = 0.0
        listens = config.listen and not until_empty
        self._queues = tuple(dict.fromkeys(name for group, _ in groups for name in group.queues))
        lookout = SharedPoller(config.schema, self._queues)
        connect = listen_connector(engines, config.listen_url, lambda: self._loop)
        listener = Listener(connect, config.schema, lookout.called) if listens else None
        suspects = QuarantineTurns()
        lease = RelayLease(
            # Not by `listen_url`: through a pooler is as good.
            listen_connector(engines, None, lambda: self._loop),
            config.schema,
            uuid4(),
            self._queues,
            suspects,
            self._leased,
            emit,
            self._reaped,
            self.wake_all,
            lease_seconds=config.lease_seconds,
            beat_seconds=config.beat_seconds,
            max_crashes=config.max_crashes,
        )
        self._pruner = (
            Pruner(
                listen_connector(engines, None, lambda: self._loop),
                config.schema,
                emit,
                stopping,
                prune_seconds=config.prune_seconds,
            )
            if config.prune_seconds
            else None
        )
        self._upkeep = (
            # By `listen_url`, which leads past a pooler.
            Reindexer(listen_connector(engines, config.listen_url, lambda: self._loop), config.schema, emit, stopping)
            if config.reindex and not until_empty
            else None
        )
        self._watch = DeadlineEnforcer(engines, config.schema, lambda: self._loop, self._replace, self._failed)
        self._shared = RelayState(
            registry=registry,
            state=None,
            schema=config.schema,
            batch_size=config.batch_size,
            poll_seconds=config.poll_seconds,
            until_empty=until_empty,
            emit=emit,
            listener=listener,
            poller=lookout,
            lease=lease,
            quarantine=suspects,
            sweep_schedule=SweepSchedule(),
            max_crashes=config.max_crashes,
            effect_runners=make_callers(engines, config.schema, config.effect_lease_seconds),
            stopping=stopping,
            counters=RelayCounters(),
            lock=threading.Lock(),
        )
        flavours = {flavour for _, flavour in groups}
        harmless = self._shared.called_functions.harmless
        kept = 0 if until_empty else _WARM_LINES // len(flavours)
        sync, asynchronous = engines.sync, engines.asynchronous
        self._lines = (
            SlotConnections(sync, config.schema, kept, harmless) if sync is not None and "sync" in flavours else None
        )
        self._async_lines = (
            AsyncSlotConnections(asynchronous, config.schema, kept, harmless)
            if asynchronous is not None and "async" in flavours
            else None
        )

    def work(self) -> RelayReport:
        """Open everything, serve, and close everything in the opposite order."""
        try:
            report = self._work()
        except BaseException as error:
            # Slots that are left without a relay must not go on claiming.
            self._stopping.set()
            self.wake_all()
            if not self._failures or not isinstance(error, Exception):
                raise
            # What fails while a stuck relay is closed is a consequence.
            raise self._failures[0] from error
        if self._failures:
            raise self._failures[0]
        return report

    def _work(self) -> RelayReport:
        lifespan = _open_lifespan(self._shared.registry.lifespan)
        with ExitStack() as stack:
            if self._needs_loop(lifespan):
                stack.enter_context(self._running_loop())
            self._wait_for_database()
            if self._stopping.is_set():
                return RelayReport(0, 0, 0)
            stack.callback(self._shared.effect_runners.dispose, self._finish_in_loop)
            stack.callback(self._close_lines)
            self._shared.state = self._enter_lifespan(stack, lifespan)
            if self._shared.listener is not None:
                self._shared.listener.start()
                stack.callback(self._shared.listener.stop)
            self._shared.lease.start()
            stack.callback(self._shared.lease.stop)
            if self._pruner is not None and not self._shared.until_empty:
                self._pruner.start()
                stack.callback(self._pruner.stop)
            if self._upkeep is not None:
                self._upkeep.start()
                stack.callback(self._upkeep.stop)
            if any(self._shared.registry.claims[name] == "lease" for name in self._queues):
                self._shared.lease.wait(2.0)
            self._serve_to_the_end()
        tally = self._shared.counters
        return RelayReport(tally.done, tally.failed, tally.died, tally.leases_lost)

    def _close_lines(self) -> None:
        if self._lines is not None:
            self._lines.close()
        if self._async_lines is not None:
            self._finish_in_loop(self._async_lines.close())

    def wake_all(self) -> None:
        """Ring every slot, so that it sees that the relay is stopping."""
        for runner in list(self._runners):
            runner.slot.sleep.idle_slot.wake()

    def _leased(self) -> set[tuple[str, int]]:
        """The jobs that run here under the lease, or wait for their turn, with their tokens."""
        # One that was cut off, and could not be settled, has started: it is charged if it takes the process with it.
        serving = list(self._runners)
        hanging = [runner for runner in self._cut_off if runner.is_alive()]
        slots = [runner.slot for runner in [*serving, *hanging]]
        jobs = [progress.job for slot in slots if (progress := slot.batch) is not None]
        # All that were claimed: one that is settled is not looked for.
        jobs += [job for slot in slots if (held := slot.leased_batch) is not None for job in held.jobs]
        return {(str(job.id), job.lease_token) for job in jobs if job.lease_token is not None}

    def _reaped(self, event: JobCrashed) -> None:
        with self._shared.lock:
            self._shared.counters.add(BatchReport(0, (event,)))
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
        started, ends = Future[asyncio.AbstractEventLoop](), threading.Event()
        thread = threading.Thread(target=_run_loop, args=(started, ends), name="outboxq-loop", daemon=True)
        thread.start()
        self._loop = started.result()
        try:
            yield
        except BaseException:
            # A loop that ends cancels what is left in it: that is no failure of the jobs.
            for runner in self._runners:
                if runner.slot.flavour == "async":
                    runner.abandon()
            raise
        finally:
            ends.set()
            self._loop.call_soon_threadsafe(self._loop.stop)
            # A handler that blocks the loop must not keep the relay: its thread is a daemon.
            thread.join(0.0 if self._loop_is_blocked else _LOOP_STOP_SECONDS)

    def _enter_lifespan(self, stack: ExitStack, lifespan: AnyLifespan) -> object:
        if isinstance(lifespan, AbstractContextManager):
            return stack.enter_context(lifespan)
        state = self._in_loop(lifespan.__aenter__())
        stack.callback(self._leave_lifespan, lifespan)
        return state

    def _leave_lifespan(self, lifespan: AbstractAsyncContextManager[object]) -> None:
        self._finish_in_loop(lifespan.__aexit__(None, None, None))

    def _finish_in_loop(self, awaitable: Awaitable[object]) -> None:
        # Nobody is there to run it in a blocked loop.
        if not self._loop_is_blocked:
            self._in_loop(awaitable, self._config.drain_seconds + 5)
        elif inspect.iscoroutine(awaitable):
            awaitable.close()

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
            except (DBAPIError, NoConnection, OSError) as error:
                if not is_database_unavailable(error):
                    raise
                self._emit(DatabaseLost(describe_error(error), pause_seconds))
                self._stopping.wait(pause_seconds)
                pause_seconds = min(pause_seconds * 2, 10.0)
                continue
            check_version(version, self._config.schema)
            return

    def _read_version(self) -> int | None:
        if self._engines.sync is not None:
            with opening(), refusing_bytes(self._engines.sync):
                opened = self._engines.sync.connect()
            with opened as connection:
                return self._examine(connection)
        return self._in_loop(self._read_version_async())

    def _examine(self, connection: Connection) -> int | None:
        check_server(connection)
        check_durability(connection, allowed=self._config.allow_asynchronous_commit)
        return schema_version(connection, self._config.schema)

    async def _read_version_async(self) -> int | None:
        assert self._engines.asynchronous is not None
        async with AsyncExitStack() as stack:
            with opening(), refusing_bytes(self._engines.asynchronous.sync_engine):
                connection = await stack.enter_async_context(self._engines.asynchronous.connect())
            return await connection.run_sync(self._examine)

    def _serve_to_the_end(self) -> None:
        slots = sum(group.slots for group, _ in self._groups)
        # Each slot's, the lease's and the listener's.
        connections = slots + 1 + (self._shared.listener is not None)
        self._emit(RelayStarted(self._queues, slots, connections))
        tally = self._shared.counters
        is_over = False
        # Once in any case: told to stop meanwhile, it says so as it would later.
        while not is_over:
            before = tally.claimed, self._watch.cuts
            self._serve()
            # Draining: one slot may have ended while another's handler enqueued for it, so look once more.
            is_drained = self._shared.until_empty and (tally.claimed, self._watch.cuts) == before
            is_over = is_drained or self._stopping.is_set()
        # The drain of a cron job may be the only relay there is.
        if self._pruner is not None and self._shared.until_empty and not self._stopping.is_set():
            self._pruner.do()
        self._emit(RelayStopped(tally.done, tally.failed, self._abandoned))

    def _serve(self) -> None:
        self._runners = [
            self._start_slot(group, flavour) for group, flavour in self._groups for _ in range(group.slots)
        ]
        while not self._stopping.is_set() and self._wait_a_moment():
            self._watch.check(self._runners)
            self._trim()
        self._let_finish()

    def _trim(self) -> None:
        """Now and then close the connections that nobody has needed for a while. Never waits for the event loop."""
        if time.monotonic() < self._trim_at:
            return
        self._trim_at = time.monotonic() + _TRIM_SECONDS
        if self._lines is not None:
            self._lines.trim()
        self._shared.effect_runners.trim()
        if self._loop is not None and (self._trimming is None or self._trimming.done()):
            self._trimming = asyncio.run_coroutine_threadsafe(self._trim_in_loop(), self._loop)
            self._trimming_since = time.monotonic()
        elif self._loop is not None and time.monotonic() > self._trimming_since + _LOOP_PATIENCE_SECONDS:
            self._end_if_loop_is_stuck()

    def _end_if_loop_is_stuck(self) -> None:
        """By a callback that a handler left in it: while none runs, no deadline finds that."""
        runs = any(runner.slot.flavour == "async" and runner.slot.batch is not None for runner in self._runners)
        if not runs and not self._loop_answers():
            self._failed(RelayStuck("the event loop is blocked, and not by a handler: this process must be replaced"))

    async def _trim_in_loop(self) -> None:
        if self._async_lines is not None:
            await self._async_lines.trim()
        await self._shared.effect_runners.trim_async()

    def _wait_a_moment(self) -> bool:
        """Wait for a slot, in slices, so that signals and deadlines are seen; False where all have ended."""
        alive = next((runner for runner in self._runners if self._may_end(runner)), None)
        if alive is not None:
            alive.join(_LOOK_SECONDS)
        return alive is not None

    def _may_end(self, runner: Runner) -> bool:
        return runner.is_alive() and not (self._loop_is_blocked and runner.slot.flavour == "async")

    def _start_slot(self, group: SlotGroup, flavour: Flavour) -> Runner:
        if flavour == "sync":
            assert self._lines is not None
            return SlotThread(self._shared, group, self._lines, self._failed)
        assert self._engines.asynchronous is not None
        assert self._async_lines is not None
        assert self._loop is not None
        return SlotTask(self._shared, group, self._engines.asynchronous, self._async_lines, self._loop, self._failed)

    def _replace(self, runner: Runner) -> None:
        """Start another in the place of a slot that was cut off."""
        self._cut_off = [other for other in self._cut_off if other.is_alive()] + [runner]
        if runner not in self._runners:
            return
        self._runners.remove(runner)
        if not self._stopping.is_set():
            slot = runner.slot
            self._runners.append(self._start_slot(SlotGroup(slot.queues, in_turns=slot.in_turns), slot.flavour))

    def _failed(self, error: BaseException) -> None:
        """A slot met an error that is none of the database's, or is stuck: end the relay instead of limping on."""
        self._failures.append(error)
        self._stopping.set()

    def _let_finish(self) -> None:
        if not self._stopping.is_set():
            # Drained, up to what the watch still has to say of a job.
            self._watch.finish()
            return
        self._loop_is_blocked = bool(self._failures) and not self._loop_answers()
        running = sum(runner.slot.running for runner in self._runners)
        self._emit(RelayStopping(running, self._config.drain_seconds))
        self.wake_all()
        deadline = time.monotonic() + self._config.drain_seconds
        while time.monotonic() < deadline and self._wait_a_moment():
            self._watch.check(self._runners)
        # Whoever is not done by now is rolled back.
        late = [runner for runner in self._runners if self._may_end(runner) or runner.slot.running]
        # The ones that met an error have ended as if their relay had died: their jobs' marks and crash counts stand.
        self._watch.release_waiting([runner for runner in late if runner.has_failed])
        late = [runner for runner in late if not runner.has_failed]
        self._abandoned = self._watch.abort(late)
        for runner in late:
            runner.abandon()
        # By a handler that is not waited for any longer: closing what is left would wait for it.
        self._loop_is_blocked = self._loop_is_blocked or not self._loop_answers()

    def _loop_answers(self) -> bool:
        if self._loop is None:
            return True
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        return answered.wait(_ANSWER_SECONDS)


def _run_loop(started: Future[asyncio.AbstractEventLoop], ends: threading.Event) -> None:
    """Run an event loop until it is to end: no task of it is ours, for a handler to cancel.

    Handlers end it by a KeyboardInterrupt, a SystemExit, or its stop(). Who awaits such a task, if anything does, meets
    its error there. Signals reach the main thread alone.
    """
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        started.set_result(loop)
        while not ends.is_set():
            with suppress(KeyboardInterrupt, SystemExit):
                loop.run_forever()


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
