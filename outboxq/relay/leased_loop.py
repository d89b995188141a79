"""The loop of a slot in lease mode: each job runs by itself, and those that wrote nothing are settled together.

A slot of a queue in transaction mode runs suspects this way.
"""

from dataclasses import replace
from typing import Protocol

from sqlalchemy import Connection

from outboxq.database.driver import is_listened_to
from outboxq.execution import lease_mode
from outboxq.execution.batch_state import BatchReport, BatchState, Ended
from outboxq.execution.claim import Claimed, ClaimRequest
from outboxq.execution.coalesce import coalesce_leased
from outboxq.execution.commit import commit
from outboxq.execution.families import decide
from outboxq.execution.lease_mode import LeasedBatch, return_suspect, take_slot
from outboxq.execution.run import run
from outboxq.execution.runtime import Runtime
from outboxq.execution.step import Step
from outboxq.fault_points import fault_point
from outboxq.relay.planner import Planner
from outboxq.relay.state import RelayState


class LeasedSlot(Protocol):
    """The part of a slot that the loop needs."""

    state: RelayState
    batch: BatchState | None
    left: list[Step]

    def claim(self, connection: Connection, request: ClaimRequest) -> Claimed: ...

    def received(self, claimed: Claimed) -> Claimed: ...

    def committed(self, ended: Ended) -> None: ...

    def publish(self, report: BatchReport) -> None: ...


class LeasedLoop:
    """The claims of one slot under the lease.

    Attributes:
        batch: The claim whose jobs are not all settled yet.
        request: The last claim requested, to be sent by itself or with a COMMIT.
    """

    def __init__(self, slot: LeasedSlot, planner: Planner) -> None:
        self.batch: LeasedBatch | None = None
        self.request: ClaimRequest | None = None
        self._slot = slot
        self._planner = planner
        # The lease's term at the time of `request`.
        self._term = 0

    def run(self, connection: Connection, request: ClaimRequest, runtime: Runtime) -> Ended | None:
        """Run claims for as long as each COMMIT brings the next; None if nothing waited.

        After any error `release` settles the claimed jobs besides the one that ran.
        """
        fault_point("before-claim")
        self._ask(request)
        slot, ended = self._slot, None
        with connection.begin():
            claimed = slot.claim(connection, request)
        leased = self._hold(connection, claimed)
        # BEGIN goes with the first statement, so no transaction is open while handlers work outside the database.
        with connection.begin():
            if leased is not None and not self._has_slot(connection, claimed):
                self.batch = None
                return None
            while leased is not None:
                following, term = None, self._term
                # If a handler leaves something on the connection, no other job runs there: the others wait again.
                while (job := leased.begin(allowed=not runtime.guard.left and self._may_begin(term))) is not None:
                    batch = BatchState(leased.claimed, (job,), stands_for=leased.stands_for)
                    slot.batch = batch
                    handlers, of_job = decide(connection, batch, runtime), None
                    while of_job is None:
                        run(connection, batch, runtime, handlers, shared=False)
                        of_job = commit(connection, batch, runtime, self._after(connection, leased, batch, runtime))
                    following = of_job.claimed and slot.received(of_job.claimed)
                    self._job_ended(leased, batch, of_job)
                slot.batch = None
                if not leased.is_worked_off:
                    settled = self._settle(connection, leased, runtime)
                    following = settled.claimed and slot.received(settled.claimed)
                    slot.left += settled.left
                    # Now: if the connection is lost already, leaving this block raises.
                    slot.committed(settled)
                # What a handler left sends the jobs back that have not begun.
                has_returned = bool(runtime.guard.left)
                ended = Ended(BatchReport(len(leased.jobs), leased.parked()), following, was_too_large=has_returned)
                self._planner.record(leased.claimed.request, ended)
                self.batch = None
                if following is not None and following.jobs:
                    slot.committed(ended)
                leased = None if following is None else self._hold(connection, following)
        return ended

    def _ask(self, request: ClaimRequest | None) -> ClaimRequest | None:
        if request is not None:
            self.request, self._term = request, self._slot.state.lease.term
        return request

    def _hold(self, connection: Connection, claimed: Claimed) -> LeasedBatch | None:
        """Hold the jobs of a committed claim, and those that they coalesce; None without any.

        If COMMIT's answer is lost, the lease's beats find the jobs.
        """
        if not claimed.jobs:
            return None
        state = self._slot.state
        leased = self.batch = LeasedBatch(claimed, claimed.jobs, state.limits.lease_mode, keeper=state.keeper)
        events = coalesce_leased(connection, leased, state.config.schema)
        if events:
            self._slot.publish(BatchReport(0, events))
        fault_point("after-claim")
        return leased

    def _has_slot(self, connection: Connection, claimed: Claimed) -> bool:
        """Take a slot of the limit again for a suspect of a queue in transaction mode, or give the suspect back.

        The claim's COMMIT gave up the claim's own slot. The transaction of the job itself begins here, and holds the
        slot to its end.
        """
        request, script, schema = claimed.request, claimed.request.script, self._slot.state.config.schema
        if script.most is None or script.lock or take_slot(connection, schema, request):
            return True
        return_suspect(connection, schema, claimed.jobs[0])
        self._planner.record_claim(Claimed(request, is_full=True), is_called=False)
        return False

    def _may_begin(self, term: int) -> bool:
        """Return True if the lease is held without a break since the claim, and the relay is not stopping."""
        state = self._slot.state
        return not state.stopping.is_set() and state.lease.want() and state.lease.term == term

    def _after(
        self, connection: Connection, leased: LeasedBatch, batch: BatchState, runtime: Runtime
    ) -> ClaimRequest | None:
        """The claim that goes with a job's COMMIT, if the job is the last one of its claim."""
        if batch.transaction is None or is_listened_to(connection) or runtime.guard.left:
            return None
        is_last = leased.is_worked_off and not batch.has_parked
        return self._ask(self._planner.after(leased)) if is_last else None

    def _job_ended(self, leased: LeasedBatch, batch: BatchState, ended: Ended) -> None:
        self._slot.left += ended.left
        if batch.transaction is None:
            leased.finish(batch.events[0])
        elif batch.has_parked:
            # Published later, with the other parked jobs.
            leased.unknown.append(batch.job)
        elif ended.report is not None:
            self._slot.batch = None
            self._slot.committed(replace(ended, report=replace(ended.report, claimed=0)))

    def _settle(self, connection: Connection, leased: LeasedBatch, runtime: Runtime) -> Ended:
        # If users' code listens to the connection, each job has its own transaction: then claims do not grow.
        ends_here = runtime.guard.left or is_listened_to(connection)
        next_claim = None if ends_here else self._ask(self._planner.after(leased))
        return lease_mode.settle_leased(connection, leased, self._slot.state.config.schema, next_claim)

    def release(self, connection: Connection) -> None:
        """Settle the jobs that the slot still holds after a claim that did not end in order."""
        if self.batch is not None:
            settled = lease_mode.release_waiting(connection, self.batch, self._slot.state.config.schema)
            self.batch = None
            self._slot.left += settled.left
            if settled.report is not None:
                self._slot.publish(settled.report)
