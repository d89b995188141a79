"""A window: jobs in lease mode that one call of a batch handler runs together, outside any transaction.

The handler has no session. It returns an outcome for each job, and the dispatcher writes these. If the call fails, its
jobs run again, each in a window of its own.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from outboxq.emitter import drop_tracebacks
from outboxq.execution.batch_state import BatchState
from outboxq.execution.chain import follower_of
from outboxq.execution.errors import Abandoned
from outboxq.execution.families import ended_meanwhile
from outboxq.execution.invoke import Args, AsyncInvoker, HandlerEnd, Run
from outboxq.execution.runtime import CancelledResult, Result, Runtime
from outboxq.execution.settle import Settlement, settlement_of
from outboxq.execution.surround import Surrounded
from outboxq.fault_points import fault_point
from outboxq.handlers.context import NO_SESSION, BatchItem
from outboxq.handlers.handler import BatchHandler
from outboxq.job import THEN_HEADER, Job
from outboxq.outcomes import Discard, Done, Outcome

# The parts of a handler's context, and its arguments.
_Prepared: TypeAlias = tuple[Run, Args]


@dataclass(frozen=True, slots=True)
class WindowEnd:
    """The end of a window's call. The dispatcher writes the changes, and starts the jobs that are to run again.

    Attributes:
        changes: The jobs that ended, each with the change that settles it, or with its result if the change needs
            statements of its own.
        alone: The jobs of a call that failed: each is to run again by itself, which shows the faulty one.
        handler: The batch handler.
        seconds: The time that the call took, divided by the number of its jobs.
    """

    changes: Sequence[tuple[Job, Settlement | Result]]
    alone: Sequence[Job]
    handler: BatchHandler[Any, Any]
    seconds: float


class LeasedWindow:
    """The run of a window's jobs, from the call of their batch handler to their results.

    Args:
        batch: The jobs of the window.
    """

    def __init__(self, batch: BatchState, handler: BatchHandler[Any, Any], runtime: Runtime) -> None:
        self.batch = batch
        self._handler = handler
        self._runtime = runtime
        self._results: list[tuple[Job, Result]] = []
        # The jobs of the call, whose arguments could be read.
        self._called: Sequence[Job] = ()
        self._ended: list[HandlerEnd] = []
        self._has_started = False

    def start(self) -> Coroutine[Any, Any, None] | None:
        """Begin the run of an async handler; return its coroutine, for a separate task. After that ends, call `run`.

        Return None if there is nothing to await: `run` may be called at once.
        """
        invoker = self._runtime.invoker
        assert isinstance(invoker, AsyncInvoker)
        try:
            prepared = self._prepare()
        except Abandoned:
            # `run` raises the error again.
            return None
        self._has_started = True
        if prepared is None:
            return None
        return invoker.begin(self._handler.together, lambda: NO_SESSION, *prepared, self._ended)

    def needs_connection(self) -> bool:
        """Return False: the dispatcher sends the statements that follow, such as adding the next job of a chain."""
        return False

    def run(self) -> WindowEnd:
        """Call the handler, unless `start` did; return the results.

        Raises:
            Abandoned: the relay has taken the jobs away.
        """
        if not self._has_started:
            prepared = self._prepare()
            if prepared is not None:
                self._runtime.invoker.apart()(self._call, *prepared)
        running = self.batch.running
        seconds = running.end() / len(self.batch.jobs)
        running.end_call()
        alone = self._judge() if self._called else ()
        # From here on the relay cannot take the jobs away.
        self.batch.owner.begin_commit()
        # An error's traceback may refer to this object: without the cycle both are freed at once.
        results, self._results, runtime = self._results, [], self._runtime
        changes = [(job, settlement_of(job, result, runtime, seconds) or result) for job, result in results]
        return WindowEnd(changes, alone, self._handler, seconds)

    def _prepare(self) -> _Prepared | None:
        """Return the arguments of the call; None if no job is left to call the handler for.

        A job whose arguments cannot be read fails by itself, and the others run.
        """
        batch, running, handler, runtime = self.batch, self.batch.running, self._handler, self._runtime
        if batch.owner.is_seized:
            raise Abandoned("the relay has given the jobs back before their handler began")
        running.begin_together(len(batch.jobs), handler.timeout_seconds)
        items = list[BatchItem[Any]]()
        for job in batch.jobs:
            # The job may have waited for others of its claim.
            ended = ended_meanwhile(batch, job, runtime)
            if ended is not None:
                self._results.append((job, ended))
                continue
            try:
                if THEN_HEADER in job.headers:
                    # A next job that cannot be added must not be found after the handler's work is done.
                    follower_of(job)
                values = runtime.registry.signatures[job.kind].decode(job.args)
                items.append(BatchItem(handler.arguments(**values), job))
            except BaseException as error:
                # Users' own types may raise anything.
                if not runtime.is_failure(error):
                    raise
                self._results.append((job, runtime.describe(error, job)))
        if not items:
            return None
        self._called = called = tuple(item.job for item in items)
        call = running.begin_call(called, runtime.notes)
        call.goes_on = True
        run = Run(items[0].job, runtime.state, lambda: None, [], call)
        arounds = runtime.registry.arounds.get(handler.kind)
        fault_point("before-handler")
        running.begin_deadline()
        args: dict[str, object] = {"items": items}
        return run, args if arounds is None else Surrounded(arounds.all, lambda: args, called)

    def _call(self, run: Run, args: Args) -> None:
        try:
            returned = self._runtime.invoker.call(self._handler.together, lambda: NO_SESSION, run, args)
        except BaseException as error:  # noqa: BLE001  # judged by `_judge`
            self._ended.append((None, error))
        else:
            self._ended.append((returned, None))

    def _judge(self) -> Sequence[Job]:
        """Record the results of the called jobs; return those that run again alone, which are all or none.

        Raises:
            BaseException: the error is the relay's own interruption, and not the handler's.
        """
        jobs, runtime, call = self._called, self._runtime, self.batch.running.call
        assert call is not None
        # A task that was cancelled before its first step has appended nothing.
        returned, error = self._ended.pop() if self._ended else (None, asyncio.CancelledError())
        outcomes: Sequence[Outcome] = ()
        if error is None:
            try:
                # An around that returned an outcome instead of calling the handler did so for all jobs.
                is_list = isinstance(returned, list)
                outcomes = (
                    cast("list[Outcome]", returned)
                    if is_list
                    else [self._handler.returned.outcome(returned)] * len(jobs)
                )
            except BaseException as raised:  # noqa: BLE001  # the text of users' objects may raise anything
                error = raised
        if error is None:
            fault_point("after-handler")
            cancelled = runtime.orders.cancelled
            for job, outcome in zip(jobs, outcomes, strict=True):
                # What is done stays done: the handler's work outside the database cannot be undone.
                stays = job.id not in cancelled or isinstance(outcome, Done | Discard)
                self._results.append((job, outcome if stays else CancelledResult()))
            return ()
        if not runtime.is_failure(error):
            raise error
        if len(jobs) > 1:
            # The error will come again when the faulty job runs alone.
            drop_tracebacks(error)
            return jobs
        self._results.append((jobs[0], CancelledResult() if call.is_cancelled else runtime.describe(error, jobs[0])))
        return ()
