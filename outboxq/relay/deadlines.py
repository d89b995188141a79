"""Deadlines: end a handler that does not end within its deadline, or within the time to drain.

A handler whose job was cancelled ends in the same way, with another outcome.

In this order: its statement is cancelled (an async handler is cancelled by its own loop); its backend is terminated, so
that no late write lands, the attempt is recorded, and its slot is replaced; if its thread or the event loop is still
not free a little later, the relay ends, so that the process is replaced.

Statements run in short-lived threads, one for each slot that is past its deadline, so that neither the relay nor the
other slots wait for the database.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from sqlalchemy import Connection, Engine
from sqlalchemy.util import greenlet_spawn

from outboxq.database.engines import Engines
from outboxq.database.errors import describe_error
from outboxq.errors import HandlerTimedOut, RelayStuck
from outboxq.execution.batch_state import BatchReport, BatchState
from outboxq.execution.failure import Frame
from outboxq.execution.invoke import SyncInvoker
from outboxq.execution.runtime import Orders
from outboxq.execution.seized import end_other_transaction, give_back, settle_aborted, settle_cancelled
from outboxq.handlers.call import HandlerCall
from outboxq.job import Job
from outboxq.relay.calls import Call
from outboxq.relay.connections import connection_options, make_slot_connection
from outboxq.relay.event_loop import LoopThread
from outboxq.relay.limits import RelayLimits
from outboxq.relay.slot_loop import SlotTask, SlotThread
from outboxq.relay.threads import BoundedStart

logger = logging.getLogger("outboxq.relay")

_LOOP_SECONDS = 2.0
_STEP_SECONDS = 0.05
# The connections that deadlines may use at a time, besides those of the slots.
_CONNECTIONS = 4
# The most jobs that are named of a handler that cannot be freed.
_NAMED = 3

Runner: TypeAlias = SlotThread | SlotTask | Call
Action: TypeAlias = Callable[[Connection], BatchReport | None]


@dataclass(eq=False)
class DeadlineEnforcer:
    """Checks the runners of a relay, from the relay's own thread.

    `cuts` counts the handlers that were cut off.

    Args:
        replace: Starts another runner in the place of one that was cut off.
        stuck: Ends the relay.
        orders: The jobs that were cancelled.
    """

    engines: Engines
    schema: str
    loop: LoopThread
    replace: Callable[[Runner], None]
    stuck: Callable[[BaseException], None]
    limits: RelayLimits
    orders: Orders

    def __post_init__(self) -> None:
        self._acting: dict[Runner, threading.Thread] = {}
        self._runners: list[Runner] = []
        # Runners that were cut off, and then, until they are free, each with the jobs of the handler that is to blame.
        self._ended: list[tuple[Runner, Sequence[Job]]] = []
        self._cut: list[tuple[Runner, float, Sequence[Job]]] = []
        self.cuts = 0
        self._connections = threading.BoundedSemaphore(_CONNECTIONS)

    def check(self, runners: list[Runner]) -> None:
        """Act on slots that are past a deadline. Never waits."""
        now = time.monotonic()
        self._runners = list(runners)
        self._acting = {runner: thread for runner, thread in self._acting.items() if thread.is_alive()}
        for runner in list(runners):
            batch = runner.batch
            if batch is None or runner in self._acting:
                continue
            deadline = batch.running.deadline
            if deadline is not None and now >= deadline:
                self._start(runner, partial(self._enforce, runner, batch, deadline))
                continue
            call, cancelled = batch.running.call, self.orders.cancelled
            if call is not None and cancelled and not call.is_over and any(job.id in cancelled for job in call.jobs):
                # First: from here on the handler's end does not count as a success.
                call.is_cancelled = True
                runner.watch.cancel(call)
                self._start(runner, partial(self._end_cancelled, runner, batch, call))
        while self._ended:
            runner, jobs = self._ended.pop()
            self._cut.append((runner, now + self.limits.free_after_seconds, jobs))
            self.replace(runner)
        self._cut = [cut for cut in self._cut if cut[0].is_alive()]
        if any(now > until for _, until, _ in self._cut):
            # Name the jobs of all: the first one past its time may be held up by another one's handler.
            cut, self._cut = self._cut, []
            self.stuck(_stuck_in([job for *_, jobs in cut for job in jobs]))

    def abort(self, runners: list[Runner]) -> int:
        """Take the jobs from slots that a stopping relay no longer waits for; returns how many jobs it took.

        Waits for a COMMIT that is under way. Takes no longer than `abort_seconds`, however many slots there are.
        """
        deadline = time.monotonic() + self.limits.abort_seconds
        pending, taken = list(runners), 0
        while pending and time.monotonic() < deadline:
            idle: list[tuple[Runner, BatchState]] = []
            for runner in list(pending):
                batch = runner.batch
                if batch is not None and batch.owner.seize():
                    taken += len(batch.jobs)
                    pending.remove(runner)
                    if batch.transaction is None:
                        idle.append((runner, batch))
                    else:
                        self._start(runner, partial(self._end, runner, batch))
                elif not runner.is_alive() or runner.is_seized():
                    pending.remove(runner)
            if idle:
                self._start(idle[0][0], partial(self._give_back, idle))
            if pending:
                pending[0].join(_STEP_SECONDS)
        self.finish(max(0.0, deadline - time.monotonic()))
        return taken

    def finish(self, seconds: float) -> None:
        """Wait for the threads under way, for `seconds` at most."""
        deadline = time.monotonic() + seconds
        for thread in list(self._acting.values()):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self, runner: Runner, action: Callable[[], None]) -> None:
        def act() -> None:
            try:
                action()
            except Exception:
                logger.exception("a handler past its time could not be dealt with")

        thread = BoundedStart(act, "outboxq-watch")
        # An earlier thread of this runner ends by itself: it finds the batch seized or the claim released.
        self._acting[runner] = thread
        thread.start()

    def _enforce(self, runner: Runner, batch: BatchState, deadline: float) -> None:
        """Cancel, then cut off, unless the job ends by itself."""
        runner.watch.ask()
        cancel = partial(self._cancel, batch, deadline)
        if not self._cut_off(runner, batch, cancel, lambda: batch.running.deadline != deadline):
            return
        # Only now is it certain which job ran: one that has just ended, or is held up, is not to blame.
        # `together` is read before the deadline, which a returning call clears first.
        is_several = batch.running.together > 1
        is_over = batch.running.deadline == deadline and not runner.watch.is_held_up()
        blamed = batch.running_jobs if is_over else ()
        try:
            stack = runner.watch.stack() if is_over and not is_several else None
            # The loop is blocked, but by no handler: perhaps by a task that this one started.
            is_blocked = runner.watch.is_held_up() and not any(other.watch.is_running() for other in self._runners)
            # If one of several jobs of a call hangs, which one is unknown. As suspects they run alone, which shows it.
            self._end(runner, batch, stack, is_crash=is_blocked or (is_over and is_several))
        finally:
            self._ended.append((runner, blamed))

    def _cancel(self, batch: BatchState, deadline: float) -> None:
        """Cancel the statement of a job that is alone in its transaction.

        In a batch of several jobs a late cancellation would hit the next job's statement: there the backend is
        terminated.
        """
        if not batch.is_lone:
            return

        def cancel(connection: Connection) -> None:
            # The batch is held as running, so that the cancellation cannot hit the COMMIT either.
            with batch.owner.held() as may_be_cancelled:
                if may_be_cancelled and batch.running.deadline == deadline:
                    end_other_transaction(connection, batch, terminate=False)

        self._on_connection(cancel)

    def _end_cancelled(self, runner: Runner, batch: BatchState, call: HandlerCall) -> None:
        """Cancel what a handler sends, then cut it off, unless it ends by itself."""

        def cancel(connection: Connection) -> None:
            # What the backend runs, even if its batch has other jobs: the call is kept from ending until the server has
            # answered. The backend receives the cancellation before it reads anything later, so it cannot hit a
            # statement of the relay or of the next job.
            with call.while_running() as runs:
                if runs:
                    end_other_transaction(connection, batch, terminate=False)

        if not self._cut_off(runner, batch, partial(self._on_connection, cancel), lambda: call.is_over):
            return
        # However the call has ended since, nothing of the batch was committed, and its cancelled jobs end here.
        cancelled = tuple(job for job in call.jobs if job.id in self.orders.cancelled)
        try:
            self._end(runner, batch, cancelled=cancelled)
        finally:
            self._ended.append((runner, call.jobs))

    def _cut_off(
        self, runner: Runner, batch: BatchState, cancel: Callable[[], object], has_ended: Callable[[], bool]
    ) -> bool:
        """Cancel a handler's statement, and take the batch from its slot if the handler does not end; False if not."""
        cut_after_seconds = self.limits.cut_after_seconds
        until = time.monotonic() + cut_after_seconds
        # An async handler is cancelled by its own loop, together with the query that it awaits.
        if runner.flavour == "sync":
            cancel()
        while time.monotonic() < until:
            time.sleep(min(_STEP_SECONDS, cut_after_seconds))
            if has_ended() or batch.owner.is_seized:
                return False
        if not batch.owner.seize():
            return False
        self.cuts += 1
        return True

    def _give_back(self, idle: list[tuple[Runner, BatchState]]) -> None:
        """Give back the jobs of calls without a transaction, which may be many, on one connection."""

        def settle(connection: Connection) -> BatchReport:
            connected = make_slot_connection(connection, SyncInvoker())
            try:
                runtime = idle[0][0].runtime_on(connected)
                return BatchReport(0, give_back(connection, [batch for _, batch in idle], runtime))
            finally:
                connected.guard.remove()

        report = self._on_connection(settle)
        for runner, _ in idle:
            runner.end_turn()
            runner.abandon()
        if report is not None:
            idle[0][0].publish(report)

    def _end(
        self,
        runner: Runner,
        batch: BatchState,
        stack: list[Frame] | None = None,
        *,
        is_crash: bool = False,
        cancelled: tuple[Job, ...] | None = None,
    ) -> None:
        """Settle a batch that was taken from its slot, and free what the slot holds.

        Args:
            stack: That of a handler that was cut off.
            cancelled: The jobs to end, if jobs were cancelled; the others wait again.
        """

        def settle(connection: Connection) -> BatchReport:
            # The runtime first: once that transaction has ended, other relays find its marks.
            runtime = runner.runtime_on(make_slot_connection(connection, SyncInvoker()))
            timed_out = HandlerTimedOut(batch.running.timeout_seconds or 0.0)
            failed = None if stack is None else runtime.describe(timed_out, batch.job, stack=stack)
            try:
                end_other_transaction(connection, batch, terminate=True)
                if cancelled is not None:
                    return settle_cancelled(connection, batch, cancelled, runtime)
                return settle_aborted(connection, batch, runtime, failed, is_crash=is_crash)
            finally:
                runtime.guard.remove()

        try:
            report = self._on_connection(settle)
        finally:
            runner.end_turn()
            runner.abandon()
        if report is not None:
            runner.publish(report)

    def _on_connection(self, action: Action) -> BatchReport | None:
        """Run `action` on its own connection; None if that fails: then the claim's mark stays."""
        try:
            with self._connections:
                if self.engines.sync is not None:
                    return _run_on(self.engines.sync, self.schema, action)
                assert self.engines.asynchronous is not None
                engine = self.engines.asynchronous.sync_engine
                future = self.loop.submit(greenlet_spawn(_run_on, engine, self.schema, action))
                try:
                    return future.result(_LOOP_SECONDS)
                except TimeoutError:
                    future.cancel()
                    raise
        except Exception as error:  # noqa: BLE001  # users' engines raise what they like
            logger.warning(
                "the jobs of a handler past its time were not settled: %s",
                describe_error(error),
                extra={"error_type": type(error).__name__},
            )
            return None


def _run_on(engine: Engine, schema: str, action: Action) -> BatchReport | None:
    with engine.connect().execution_options(**connection_options(engine, schema)) as connection:
        return action(connection)


def _stuck_in(jobs: Sequence[Job]) -> RelayStuck:
    """The error of a relay that could not free the handler of these jobs, as far as they are known."""
    named = ", ".join(f"{job.kind!r} (job {job.id})" for job in jobs[:_NAMED])
    others = f" and {len(jobs) - _NAMED} more" if len(jobs) > _NAMED else ""
    handler = f"the handler of {named}{others}" if named else "a handler"
    return RelayStuck(
        f"{handler} could not be freed after its deadline, or after a cancellation: this process must be replaced"
    )
