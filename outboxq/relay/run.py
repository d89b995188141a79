"""One run of a relay, from start to end: its event loop, its lifespan, its services and its slots.

The module also reads the relay's activity for the history tables and metrics.
"""

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from uuid import uuid4

import msgspec
from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.util import greenlet_spawn

from outboxq import __version__
from outboxq.config import RelayConfig, SlotGroup
from outboxq.database.driver import DriverConnection, run_script
from outboxq.database.engines import Engines, listen_connector
from outboxq.emitter import Emitter
from outboxq.errors import RelayStuck
from outboxq.events import JobCrashed, RelayStarted, RelayStopped, RelayStopping
from outboxq.execution.batch_state import BatchReport, BatchState
from outboxq.handlers.handler import Flavour
from outboxq.handlers.options import ClaimMode
from outboxq.handlers.resolved import Registry
from outboxq.observability.aggregate import Counts
from outboxq.observability.flush import Flusher, RelayActivity, RelayIdentity
from outboxq.queue_limits import limits_text
from outboxq.relay.calls import Call
from outboxq.relay.connections import WARM_CONNECTIONS, CallConnections, SlotConnections
from outboxq.relay.deadlines import DeadlineEnforcer, Runner
from outboxq.relay.dispatcher import Dispatcher
from outboxq.relay.effect_runners import EffectRunners
from outboxq.relay.event_loop import LoopThread, enter_lifespan, make_lifespan
from outboxq.relay.flow_settings import FlowSettings
from outboxq.relay.hook_thread import HookThread
from outboxq.relay.idle import UNFLAGGED_PAUSE_SECONDS
from outboxq.relay.lease import RelayLease
from outboxq.relay.limits import RelayLimits
from outboxq.relay.listener import HearingCheck, Listener
from outboxq.relay.maintenance.historian import Historian
from outboxq.relay.maintenance.scheduler import Scheduler
from outboxq.relay.maintenance.service import Maintenance
from outboxq.relay.maintenance.side_connection import SideConnection
from outboxq.relay.maintenance.task import PeriodicTask
from outboxq.relay.poller import SharedPoller
from outboxq.relay.progress import ProgressWriter
from outboxq.relay.slot import Slot
from outboxq.relay.slot_loop import MakeWorker, SlotTask, SlotThread
from outboxq.relay.startup import FlavouredGroup, connections_of, declare_schedules, find_keeper, wait_for_database
from outboxq.relay.state import RelayReport, RelayState
from outboxq.relay.suspects import QuarantineTurns
from outboxq.statements.lease import look_around
from outboxq.statements.relays import MOST_KINDS
from outboxq.statements.transaction import clock_seconds

logger = logging.getLogger("outboxq.relay")

_TRIM_SECONDS = 1.0
_CHECK_SECONDS = 0.1
# Closing resources in the event loop may take this much longer than handlers may.
_CLOSE_SECONDS = 5.0
_LEASE_WAIT_SECONDS = 2.0
# How long the dispatchers of a stopping relay have to settle the last results.
_SETTLE_SECONDS = 5.0
# The most jobs that are named in the relay's activity, and how long they must have run.
_RUNNING_MOST, _LONG_SECONDS = 50, 1.0
# The number of these that are reserved for calls that wait for a connection.
_WAITING_MOST = 25

SLOT_STATES: tuple[str, ...] = ("busy", "idle", "asleep")
CALL_STATES: tuple[str, ...] = ("running", "waiting")


@dataclass(frozen=True, slots=True)
class RelayLook:
    """The counts and the activity of a relay at one moment, for its metrics.

    Args:
        identity: The relay's id, host, version and other facts that do not change.
        totals: The outcomes of the relay's jobs since it began.
        slots: The number of its slots in each of `SLOT_STATES`.
        claimed: For each of its queues, the number of jobs that its slots have claimed and not finished.
        calls: For each of its queues in lease mode (jobs run without an open transaction), the number of jobs that run,
            in each of `CALL_STATES`: those that wait for a connection, and all others.
        free: For each of its queues in lease mode, the number of free slots that serve it, perhaps among other queues.
        connections: The number of connections that handlers in lease mode share: `used` are in use, the others `free`;
            empty without a queue in lease mode.
        kinds: Each queue that the relay works on, with each kind of jobs that it runs there.
        hook_failures: The number of errors that hooks raised.
        flush_failures: The number of rounds in which the relay's state and counts could not be written to the database.
    """

    identity: RelayIdentity
    totals: Counts
    slots: Counter[str]
    claimed: Counter[str]
    calls: Counter[tuple[str, str]]
    free: Counter[str]
    connections: Counter[str]
    kinds: tuple[tuple[str, str], ...]
    hook_failures: int
    flush_failures: int


@dataclass(eq=False)
class RelayRun:
    """One run of a relay, from start to end; `Relay.run` and `Relay.drain` make it.

    Args:
        groups: The groups of slots, each with its flavour and claim mode.
        emit: Emits the relay's events.
        hooks: The thread that calls the registry's hooks.
        stopping: Set when the relay is to stop.
        until_empty: True to end when no job is left (drain).
    """

    engines: Engines
    registry: Registry
    groups: list[FlavouredGroup]
    config: RelayConfig
    emit: Emitter
    hooks: HookThread
    stopping: threading.Event
    limits: RelayLimits
    until_empty: bool

    def __post_init__(self) -> None:
        config, engines, limits = self.config, self.engines, self.limits
        self._slots = sum(group.slots for group, *_ in self.groups)
        self._queues = tuple(dict.fromkeys(name for group, *_ in self.groups for name in group.queues))
        self._loop = LoopThread()
        # The loops of slots, and those of dispatchers, whose calls also count as slots.
        self._runners: list[SlotThread | SlotTask] = []
        self._cut_off: list[Runner] = []
        self._failures: list[BaseException] = []
        self._abandoned = 0
        self._is_aborting = False
        self._trim_at = 0.0
        self._trimming: Future[None] | None = None
        self._trimming_since = 0.0
        # Not by `listen_url`, because a connection through a pooler suffices.
        connect = listen_connector(engines, None, self._loop.get)
        beside = SideConnection(engines, config.schema, self._loop)
        self._scheduler = Scheduler(beside.transact, beside.rest, self.emit, self.stopping, self.until_empty)
        poller = SharedPoller(config.schema, self._queues)
        quarantine, flow = QuarantineTurns(), FlowSettings(self.registry.limits)
        lease = RelayLease(
            connect,
            config,
            uuid4(),
            self._queues,
            quarantine,
            flow,
            running=self._leased_jobs,
            emit=self.emit,
            on_reaped=self._record_reaped,
            wake=self.wake_all,
            expect_schedule=self._scheduler.expect,
        )
        listener = self._make_listener(connect, poller, lease) if config.listen and not self.until_empty else None
        self._state = state = RelayState(
            config=config,
            registry=self.registry,
            until_empty=self.until_empty,
            emit=self.emit,
            stopping=self.stopping,
            listener=listener,
            poller=poller,
            lease=lease,
            quarantine=quarantine,
            flow=flow,
            effect_runners=EffectRunners(engines, config.schema, config.effect_lease_seconds, self.emit),
            progress=ProgressWriter(connect, config.schema, lease.owner),
            limits=limits,
        )
        self._maintenance = Maintenance.from_config(
            config,
            limits,
            partial(listen_connector, engines, loop=self._loop.get),
            self.emit,
            self.stopping,
            self.registry,
            self.until_empty,
        )
        self._identity = self._make_identity(state)
        flusher = Flusher(config.schema, self._identity, state.aggregate, self._activity, state.clock)
        beside = SideConnection(engines, config.schema, self._loop)
        self._historian = Historian(
            flusher, connect, beside, config.schema, self.stopping, limits.history, config.stats_seconds
        )
        self._deadlines = DeadlineEnforcer(
            engines, config.schema, self._loop, self._replace, self._fail, limits, flow.orders
        )
        flavours = {flavour for _, flavour, _ in self.groups}
        by_flavour: dict[Flavour, Engine | AsyncEngine | None] = {"sync": engines.sync, "async": engines.asynchronous}
        # No connection is opened yet.
        self._connections = {
            flavour: SlotConnections(
                engine,
                config.schema,
                kept=0 if self.until_empty else WARM_CONNECTIONS // len(flavours),
                linger_seconds=limits.linger_seconds,
            )
            for flavour, engine in by_flavour.items()
            if engine is not None and flavour in flavours
        }

    def _make_listener(
        self, connect: Callable[[], DriverConnection], poller: SharedPoller, lease: RelayLease
    ) -> Listener:
        config, limits = self.config, self.limits
        # Through the database URL, as producers do, and not through the URL of the listener.
        hearing = HearingCheck(connect, limits.hearing_seconds, min(config.poll_seconds, UNFLAGGED_PAUSE_SECONDS))
        return Listener(
            listen_connector(self.engines, config.listen_url, self._loop.get),
            config.schema,
            poller.record_call,
            limits.probe_seconds,
            hearing,
            is_held=poller.is_held,
            record_settings=lease.look_soon,
        )

    def _make_identity(self, state: RelayState) -> RelayIdentity:
        return RelayIdentity(
            id=state.lease.owner,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            queues=self._queues,
            kinds=tuple(sorted(self.registry.handlers))[:MOST_KINDS],
            slots=self._slots,
            listens=state.listener is not None,
            limits=limits_text(self.registry.limits),
        )

    def _activity(self) -> RelayActivity:
        """Return what the slots are doing, for the history tables, as far as it can be read while they work."""
        workers = [runner.slot for runner in list(self._runners)]
        state = "stopping" if self.stopping.is_set() else "draining" if self.until_empty else "serving"
        busy = sum(worker.busy for worker in workers)
        free = dict.fromkeys(queue for worker in workers if worker.busy < worker.slots for queue in worker.queues)
        running = msgspec.json.encode(list(islice(self._long_jobs(), _RUNNING_MOST))).decode()
        return RelayActivity(state, busy, tuple(free), running)

    def _long_jobs(self) -> Iterator[dict[str, object]]:
        """Yield descriptions of the jobs that have run for a second or longer.

        The jobs of slots come first, then those of calls that wait for a connection, then those of other calls.
        """
        for runner in list(self._runners):
            if runner.batch is not None:
                yield from _running_in(runner.batch)
        calls = [(call, each.connections.most) for each in self._dispatchers() for call in each.calls.copy()]
        waiting = [each for each in calls if each[0].is_waiting]
        waits = {id(call): {"calls": len(waiting), "connections": most} for call, most in waiting}
        first = waiting[:_WAITING_MOST]
        named = {id(call) for call, _ in first}
        for call, _ in [*first, *(each for each in calls if id(each[0]) not in named)]:
            for job in _running_in(call.batch):
                yield job | {"waits": waits[id(call)]} if id(call) in waits else job

    def _dispatchers(self) -> list[Dispatcher]:
        return [runner.slot for runner in list(self._runners) if isinstance(runner.slot, Dispatcher)]

    def _calls(self) -> list[Call]:
        """Return the running calls (jobs in lease mode) of all dispatchers."""
        return [call for each in self._dispatchers() for call in each.calls.copy()]

    def _batches(self) -> list[BatchState]:
        """Return the batches of jobs that run in slots and in calls."""
        batches = [runner.batch for runner in list(self._runners)]
        return [batch for batch in [*batches, *(call.batch for call in self._calls())] if batch is not None]

    def look(self) -> RelayLook:
        """Return the relay's counts and activity, from any thread, as far as they can be read while its slots work."""
        state, queues = self._state, self._queues
        states, claimed = Counter(dict.fromkeys(SLOT_STATES, 0)), Counter(dict.fromkeys(queues, 0))
        for worker in [runner.slot for runner in list(self._runners)]:
            busy = worker.busy
            states["busy"] += busy
            states["asleep" if worker.sleep.is_asleep else "idle"] += worker.slots - busy
        for batch in self._batches():
            claimed[batch.queue] += len(batch.jobs)
        dispatchers, leased = self._dispatchers(), [name for name in queues if self.registry.claims[name] == "lease"]
        calls = Counter({(name, state): 0 for name in leased for state in CALL_STATES})
        free, connections = Counter(dict.fromkeys(leased, 0)), Counter[str]()
        for each in dispatchers:
            for call in each.calls.copy():
                state_of_jobs = "waiting" if call.is_waiting or each.waits(call) else "running"
                calls[call.queue, state_of_jobs] += len(call.batch.jobs)
            for name in each.queues:
                free[name] += each.slots - each.busy
            used = each.connections.used
            connections.update(used=used, free=each.connections.most - used)
        handlers = self.registry.handlers.values()
        kinds = tuple(dict.fromkeys((each.queue, each.kind) for each in handlers if each.queue in queues))
        totals, hooks, history = state.aggregate.totals(), self.hooks.failures, self._historian.failures
        return RelayLook(self._identity, totals, states, claimed, calls, free, connections, kinds, hooks, history)

    def work(self) -> RelayReport:
        """Open all connections and threads, work until the relay stops or no job is left, and close all.

        Returns the counts.
        """
        try:
            report = self._work()
        except BaseException as error:
            # Slots must not continue to claim without a relay.
            self.stopping.set()
            self.wake_all()
            if not self._failures or not isinstance(error, Exception):
                raise
            # An error while a stuck relay closes is a consequence of the first failure.
            raise self._failures[0] from error
        if self._failures:
            raise self._failures[0]
        return report

    def _work(self) -> RelayReport:
        lifespan = make_lifespan(self.registry.lifespan)
        with ExitStack() as stack:
            self.hooks.start()
            stack.callback(self.hooks.finish)
            if (
                any(flavour == "async" for _, flavour, _ in self.groups)
                or isinstance(lifespan, AbstractAsyncContextManager)
                or self.engines.sync is None
            ):
                stack.enter_context(self._loop.run())
                stack.push(self._abandon_tasks)
            wait_for_database(
                self.engines, self.config, self._loop, self.emit, self.stopping, self._look_around, self._state.login
            )
            if self.stopping.is_set():
                return self._state.report(self.hooks)
            exit_seconds = self.config.drain_seconds + _CLOSE_SECONDS
            close_in_loop = partial(self._loop.call_unless_blocked, timeout_seconds=exit_seconds)
            stack.callback(self._state.effect_runners.dispose, close_in_loop)
            stack.callback(self._close_connections, close_in_loop)
            self._state.lifespan_state = enter_lifespan(stack, lifespan, self._loop, exit_seconds)
            # Before the lifespan is exited, because hooks may use its resources.
            stack.callback(self.hooks.finish)
            self._start_services(stack)
            self._serve_to_the_end()
        return self._state.report(self.hooks)

    def _look_around(self, connection: Connection) -> None:
        """Prepare the relay's state on its first connection, before the first claim.

        Stores the registry's schedules, finds out if finished jobs can be kept, compares the clocks, and reads the
        operators' settings, whose limits apply from the first claim.
        """
        if self.config.declare_schedules:
            declare_schedules(connection, self.config.schema, self.registry)
        self._state.keeper = find_keeper(connection, self.config.schema, self.registry, self._state.lease.owner)
        asked_at = time.time()
        ((database_seconds,),) = run_script(connection, clock_seconds())
        self._state.clock.compare(float(str(database_seconds)), asked_at, time.time())
        flow = self._state.flow
        flow.record(run_script(connection, look_around(self.config.schema, self._queues)))
        for queue, limits in sorted(flow.limits.items()):
            logger.info("queue %r is limited: %s", queue, limits)
        flow.on_limits = self._state.admission.changed

    def _abandon_tasks(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Cancel the tasks of async slots if the relay ends with an error, without counting a failure of their jobs."""
        if error is not None:
            for runner in self._runners:
                if runner.slot.flavour == "async":
                    runner.abandon()

    def _start_services(self, stack: ExitStack) -> None:
        # Started first, so that it is stopped last, and counts the work of the others until then.
        services: list[Historian | Listener | RelayLease | PeriodicTask] = [self._historian, self._state.lease]
        services += self._maintenance.periodic
        if self._state.listener is not None:
            services.insert(1, self._state.listener)
        for service in services:
            service.start()
            stack.callback(service.stop)
        stack.callback(self._state.progress.stop)
        stack.callback(self._scheduler.stop)
        if self.until_empty and self._state.flow.seen.schedule_seconds <= 0:
            self._scheduler.fire_all_due()
        if any(self.registry.claims[name] == "lease" for name in self._queues):
            self._state.lease.wait(_LEASE_WAIT_SECONDS)

    def _close_connections(self, close_in_loop: Callable[[Awaitable[None]], object]) -> None:
        if "sync" in self._connections:
            self._connections["sync"].close()
        if "async" in self._connections:
            close_in_loop(greenlet_spawn(self._connections["async"].close))

    def wake_all(self) -> None:
        """Wake every slot, so that it notices that the relay is stopping."""
        for runner in list(self._runners):
            runner.slot.sleep.idle_slot.wake()

    def _leased_jobs(self) -> set[tuple[str, int]] | None:
        """Return the ids and lease tokens of the jobs that this relay has claimed under its lease.

        None while they are not known: the answer to a claim is lost, or jobs are being made claimable again.
        """
        workers = [runner.slot for runner in list(self._runners)]
        of_calls = [each.leased() for each in workers if isinstance(each, Dispatcher)]
        # This includes slots that were cut off: their job has started, and counts a crash if it ends the process. They
        # come after the serving ones, because a slot that is just being replaced is in both.
        batches = [*(worker.batch for worker in workers), *(each.batch for each in self._cut_off if each.is_alive())]
        jobs = [job for batch in batches if batch is not None for job in batch.jobs]
        leased = {(str(job.id), job.lease_token) for job in jobs if job.lease_token is not None}
        return (
            None
            if None in of_calls or self._is_aborting
            else leased.union(*(each for each in of_calls if each is not None))
        )

    def _record_reaped(self, event: JobCrashed) -> None:
        self._state.aggregate.add((event,))
        self.emit(event)

    def _serve_to_the_end(self) -> None:
        # The connections of the slots, one for the lease, and one for the listener.
        connections = sum(connections_of(group, claim, self.config) for group, _, claim in self.groups)
        connections += 1 + (self._state.listener is not None)
        of_calls = [group.slots for group, _, claim in self.groups if claim == "lease"]
        shared = sum(map(self.config.call_connections_of, of_calls))
        self.emit(RelayStarted(self._queues, self._slots, connections, sum(of_calls), shared))
        counters = self._state.aggregate.counters
        is_over = False
        # Sent in any case, so that a relay that is already stopping emits the same events.
        while not is_over:
            before = counters.claimed, self._deadlines.cuts
            self._serve()
            # Draining: one slot may have ended while another's handler enqueued a job for it, so serve again.
            is_drained = self.until_empty and (counters.claimed, self._deadlines.cuts) == before
            is_over = is_drained or self.stopping.is_set()
        if not self.stopping.is_set():
            for task in self._maintenance.at_end:
                task.run_once()
        hooks = self.hooks
        hooks.settle()
        self.emit(
            RelayStopped(counters.done, counters.failed, counters.died, self._abandoned, hooks.failures, hooks.dropped)
        )

    def _serve(self) -> None:
        self._runners = [runner for each in self.groups for runner in self._start(*each)]
        while not self.stopping.is_set() and self._wait_a_moment():
            self._deadlines.check([*self._runners, *self._calls()])
            self._trim()
        if self.stopping.is_set():
            self._let_finish()
        else:
            # Drained; only jobs that were cut off may still need to be settled.
            self._deadlines.finish(self.limits.abort_seconds)
        for runner in self._runners:
            # The last claims, which took no jobs.
            runner.slot.publish(BatchReport(0, ()))
            runner.slot.close()

    def _start(self, group: SlotGroup, flavour: Flavour, claim: ClaimMode) -> list[SlotThread | SlotTask]:
        """Start the slots of a group or, in lease mode, the dispatcher that runs their calls; return the loops."""
        if claim == "lease":
            return [self._start_worker(flavour, partial(self._make_dispatcher, group, flavour))]
        make = partial(Slot, self._state, flavour, group.queues, group.in_turns)
        return [self._start_worker(flavour, make) for _ in range(group.slots)]

    def _start_worker(self, flavour: Flavour, make: MakeWorker) -> SlotThread | SlotTask:
        connections = self._connections[flavour]
        if flavour == "sync":
            return SlotThread(self._state, make, connections, self._fail)
        loop = self._loop.get()
        assert loop is not None
        return SlotTask(self._state, make, connections, loop, self._fail)

    def _make_dispatcher(self, group: SlotGroup, flavour: Flavour, wake: Callable[[], None]) -> Dispatcher:
        connections, most = self._connections[flavour], self.config.call_connections_of(group.slots)
        lent = CallConnections(connections, most, ", ".join(map(repr, group.queues)))
        loop = self._loop.get() if flavour == "async" else None
        return Dispatcher(self._state, group, flavour, lent, wake, self._fail, loop)

    def _replace(self, runner: Runner) -> None:
        """Free the slot of a runner whose handler did not end in time.

        Start a new runner in that slot, unless the relay stops.
        """
        self._cut_off = [other for other in self._cut_off if other.is_alive()] + [runner]
        if isinstance(runner, Call):
            runner.cut_off()
        elif runner in self._runners:
            self._runners.remove(runner)
            slot = runner.slot
            if not self.stopping.is_set() and isinstance(slot, Slot):
                make = partial(Slot, self._state, slot.flavour, slot.queues, slot.in_turns)
                self._runners.append(self._start_worker(slot.flavour, make))

    def _fail(self, error: BaseException) -> None:
        """Stop the relay, and make it raise this error.

        Called if a slot is stuck, or met an error that the database did not cause.
        """
        self._failures.append(error)
        self.stopping.set()

    def _wait_a_moment(self) -> bool:
        """Wait up to 0.1 s for slots to end; return False if all have ended.

        The short time lets signals and deadlines be noticed.
        """
        alive = next((runner for runner in self._runners if self._may_end(runner)), None)
        if alive is not None:
            alive.join(_CHECK_SECONDS)
        return alive is not None

    def _may_end(self, runner: Runner) -> bool:
        return runner.is_alive() and not (self._loop.is_blocked and runner.flavour == "async")

    def _trim(self) -> None:
        """Close connections that were unused for `linger_seconds`, once a second at most.

        Never waits for the event loop.
        """
        now = time.monotonic()
        if now < self._trim_at:
            return
        self._trim_at = now + _TRIM_SECONDS
        if "sync" in self._connections:
            self._connections["sync"].trim()
        self._state.effect_runners.trim()
        if self._loop.get() is None:
            return
        if self._trimming is None or self._trimming.done():
            self._trimming, self._trimming_since = self._loop.submit(self._trim_in_loop()), now
        elif now > self._trimming_since + self.limits.loop_patience_seconds:
            self._end_if_loop_is_stuck()

    async def _trim_in_loop(self) -> None:
        if "async" in self._connections:
            await greenlet_spawn(self._connections["async"].trim)
        await self._state.effect_runners.trim_in_loop()

    def _end_if_loop_is_stuck(self) -> None:
        """End the relay if the event loop is blocked while no handler runs, because then no deadline detects it.

        A callback that a handler left may block it.
        """
        runners = [*self._runners, *self._calls()]
        runs = any(runner.flavour == "async" and runner.batch is not None for runner in runners)
        if not runs and not self._loop.answers():
            self._fail(RelayStuck("the event loop is blocked, and not by a handler: this process must be replaced"))

    def _let_finish(self) -> None:
        """Wait for the running handlers, `drain_seconds` at most; then take away the jobs of those that still run."""
        self._loop.is_blocked = bool(self._failures) and not self._loop.answers()
        running = sum(len(batch.jobs) for batch in self._batches())
        self.emit(RelayStopping(running, self.config.drain_seconds))
        self.wake_all()
        deadline = time.monotonic() + self.config.drain_seconds
        while time.monotonic() < deadline and self._wait_a_moment():
            self._deadlines.check([*self._runners, *self._calls()])
        slots = [runner for runner in self._runners if isinstance(runner.slot, Slot)]
        late: list[Runner] = [runner for runner in slots if self._may_end(runner) or runner.batch is not None]
        # Slots that met an error have ended as if their relay had died: their jobs keep their marks and crash counts.
        late = [runner for runner in [*late, *self._calls()] if not runner.has_failed]
        # Jobs that are being put back are no orphans.
        self._is_aborting = True
        self._abandoned = self._deadlines.abort(late)
        # A window that failed in this moment has made a call for each of its jobs.
        while rest := [call for call in self._calls() if not (call in late or call.has_failed)]:
            self._abandoned += self._deadlines.abort([*rest])
            late += rest
        for runner in late:
            runner.abandon()
        ends_at = time.monotonic() + _SETTLE_SECONDS
        for runner in self._runners:
            if isinstance(runner.slot, Dispatcher):
                runner.slot.stop()
                if self._may_end(runner):
                    runner.join(max(0.0, ends_at - time.monotonic()))
                    runner.abandon()
        # An abandoned handler may block the loop: then nothing can be closed in it.
        self._loop.is_blocked = self._loop.is_blocked or not self._loop.answers()


def _running_in(batch: BatchState) -> list[dict[str, object]]:
    """Return descriptions of a batch's running jobs if they have run for a second or longer, else an empty list."""
    seconds = batch.running.seconds_now
    if seconds is None or seconds < _LONG_SECONDS:
        return []
    pid = None if batch.transaction is None else batch.transaction.pid
    return [
        {"id": job.id, "queue": job.queue, "kind": job.kind, "attempt": job.attempt, "seconds": seconds, "pid": pid}
        for job in batch.running_jobs
    ]
