"""Deadlines: end a handler that exceeds its deadline, or the time that a stopping relay gives it.

A handler whose job an operator has cancelled is ended in the same way, with another outcome.

First the handler's SQL statement is cancelled (an async handler is cancelled by its own event loop). If the handler
does not end, it is cut off: the relay seizes its batch (the slot or call may not commit these jobs any more),
terminates the server's process for the connection, so that no late write succeeds, records the attempt, and replaces
the slot. If the thread or event loop is still not free `free_after_seconds` later, the relay ends, so that a supervisor
replaces the process.

Statements run in short-lived threads, one for each handler that is past its deadline, so that neither the relay nor the
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
# The most connections that deadlines use at a time, in addition to the slots' own.
_CONNECTIONS = 4
# The most jobs that are named for a handler that cannot be freed.
_NAMED = 3

Runner: TypeAlias = SlotThread | SlotTask | Call
Action: TypeAlias = Callable[[Connection], BatchReport | None]


@dataclass(eq=False)
class DeadlineEnforcer:
    """Ends the handlers that are past their deadline or whose job was cancelled. The relay's own thread calls it.

    A runner is the loop of a slot, or a call of a dispatcher. `cuts` counts the handlers that did not end when they
    were cancelled, so that their jobs were taken away from them.

    Args:
        replace: Starts another runner in place of the given one, from which the jobs were taken away.
        stuck: Ends the relay with the given error.
        orders: Holds the ids of the jobs that operators have cancelled.
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
        # Runners that were cut off and are not free yet, each with the jobs of the faulty handler.
        self._ended: list[tuple[Runner, Sequence[Job]]] = []
        self._cut: list[tuple[Runner, float, Sequence[Job]]] = []
        self.cuts = 0
        self._connections = threading.BoundedSemaphore(_CONNECTIONS)

    def check(self, runners: list[Runner]) -> None:
        """Start a thread to end each handler that is past its deadline or whose job was cancelled.

        Never waits. Also replaces runners whose jobs were taken away, and ends the relay if the thread or task of such
        a runner does not end in time.
        """
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
                # First, because from here on the handler's end does not count as a success.
                call.is_cancelled = True
                if call.goes_on:
                    # The handler's outcomes say which of its jobs are done.
                    continue
                runner.watch.cancel(call)
                self._start(runner, partial(self._end_cancelled, runner, batch, call))
        while self._ended:
            runner, jobs = self._ended.pop()
            self._cut.append((runner, now + self.limits.free_after_seconds, jobs))
            self.replace(runner)
        self._cut = [cut for cut in self._cut if cut[0].is_alive()]
        if any(now > until for _, until, _ in self._cut):
            # Name all jobs: the first one past its time may only be held up by another job's handler.
            cut, self._cut = self._cut, []
            self.stuck(_stuck_in([job for *_, jobs in cut for job in jobs]))

    def abort(self, runners: list[Runner]) -> int:
        """Take jobs away from runners for which a stopping relay no longer waits; return the number of these jobs.

        The jobs are then made claimable again. Waits for COMMITs in progress. All waits together take `abort_seconds`
        at most, however many runners there are.
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
        """Wait until the threads that end handlers have finished, for `seconds` at most."""
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
        # An earlier thread of this runner ends by itself when it finds the batch seized or the claim released.
        self._acting[runner] = thread
        thread.start()

    def _enforce(self, runner: Runner, batch: BatchState, deadline: float) -> None:
        """End a handler that is past its deadline: cancel it; if it goes on, seize its batch and write the outcome.

        After the seizure the slot or call may not commit the batch any more.
        """
        runner.watch.ask()
        cancel = partial(self._cancel, batch, deadline)
        if not self._cut_off(runner, batch, cancel, lambda: batch.running.deadline != deadline):
            return
        # Only now is it certain which job ran: one that has just ended, or is held up, is not to blame. `together` is
        # read before the deadline, which a returning call clears first.
        is_several = batch.running.together > 1
        is_over = batch.running.deadline == deadline and not runner.watch.is_held_up()
        blamed = batch.running_jobs if is_over else ()
        try:
            stack = runner.watch.stack() if is_over and not is_several else None
            # The loop is blocked, but not by a handler: perhaps by a task that this one started.
            is_blocked = runner.watch.is_held_up() and not any(other.watch.is_running() for other in self._runners)
            # If one of several jobs of a call hangs, it is unknown which. As suspects they run alone, which shows it.
            self._end(runner, batch, stack, is_crash=is_blocked or (is_over and is_several))
        finally:
            self._ended.append((runner, blamed))

    def _cancel(self, batch: BatchState, deadline: float) -> None:
        """Cancel the statement of a job that has a transaction to itself; do nothing if its batch has several jobs.

        In a batch with several jobs, a late cancellation could hit the statement of the next job. The server process of
        such a batch is terminated later instead.
        """
        if not batch.is_lone:
            return

        def cancel(connection: Connection) -> None:
            # The batch is held in RUNNING, so that the cancellation cannot hit the COMMIT.
            with batch.owner.held() as may_be_cancelled:
                if may_be_cancelled and batch.running.deadline == deadline:
                    end_other_transaction(connection, batch, terminate=False)

        self._on_connection(cancel)

    def _end_cancelled(self, runner: Runner, batch: BatchState, call: HandlerCall) -> None:
        """End the handler of a job that an operator cancelled.

        Cancels the handler's statement. If the handler goes on, takes its batch away and writes the outcome.
        """

        def cancel(connection: Connection) -> None:
            # Cancels the backend's statement even if the batch has other jobs: the call is kept from ending until the
            # server has answered. The backend receives the cancellation before it reads anything later, so it cannot
            # hit a statement of the relay or of the next job.
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
        """Cancel a handler's statement; if the handler goes on, take its batch away and return True.

        Returns False if the handler has ended, or if the batch cannot be taken away: its COMMIT is being sent, for
        example.

        Args:
            cancel: Cancels the statement; not called for an async handler, which its own event loop cancels.
            has_ended: Returns True if the handler has ended.
        """
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
        """Make the jobs of these runners claimable again, all on one connection.

        A stopping relay no longer waits for these runners, and has taken their jobs away. None of them has a
        transaction open.
        """

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
        """Roll back a seized batch, write its jobs' outcome on another connection, and free the runner's connection.

        Args:
            stack: The call stack of a handler that exceeded its deadline, for the job's error; None if no handler is to
                blame.
            is_crash: True to treat the jobs as if their relay had died, so that each runs alone the next time.
            cancelled: The jobs that end because operators cancelled them; the others of the batch wait again. None if
                the reason is not a cancellation.
        """

        def settle(connection: Connection) -> BatchReport:
            # The runtime first: after that transaction has ended, other relays find its marks.
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
        """Run `action` on a separate connection and return its result.

        If that fails, log the error and return None: the jobs are settled later, because their rows still show that
        they ran.
        """
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
    """Make the error with which the relay ends if the handler of these jobs does not end.

    `jobs` is empty if it is not known which job ran.
    """
    named = ", ".join(f"{job.kind!r} (job {job.id})" for job in jobs[:_NAMED])
    others = f" and {len(jobs) - _NAMED} more" if len(jobs) > _NAMED else ""
    handler = f"the handler of {named}{others}" if named else "a handler"
    return RelayStuck(
        f"{handler} could not be freed after its deadline, or after a cancellation: this process must be replaced"
    )
