"""The batches of a slot: claim, run, commit, publish, and so on with the jobs that each COMMIT claims."""

from dataclasses import replace

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from outboxq.database.closing import give_up
from outboxq.database.driver import is_listened_to, is_lost, run_script
from outboxq.database.errors import LOCK_NOT_AVAILABLE, describe_error, sqlstate_of
from outboxq.errors import LeaseLost
from outboxq.events import BatchRolledBack, JobsSuspected
from outboxq.execution import lease_mode, recovery
from outboxq.execution.batch_state import BatchReport, BatchState
from outboxq.execution.claim import AnyScript, Claimed, ClaimRequest, return_suspect, take_slot
from outboxq.execution.coalesce import coalesce, coalesce_leased
from outboxq.execution.commit import Committed, commit, send_left
from outboxq.execution.decide import decide
from outboxq.execution.errors import ConnectionSpoiled, TransactionEscaped, WritesRefused
from outboxq.execution.lease_mode import LeasedBatch
from outboxq.execution.run import run
from outboxq.execution.runtime import Runtime
from outboxq.execution.settle import JobRowHeld
from outboxq.execution.step import Step
from outboxq.execution.steps import steps_of
from outboxq.fault_points import fault_point
from outboxq.handlers.handler import Flavour
from outboxq.job import Job
from outboxq.relay.claim_planner import ClaimPlanner
from outboxq.relay.claim_tally import ClaimTally
from outboxq.relay.failed_claims import FailedClaims
from outboxq.relay.idle import SlotSleep
from outboxq.relay.parking import park_unknown_kinds
from outboxq.relay.state import RelayState
from outboxq.statements.group_claim import GroupScript, bring_back


class BatchLoop:
    """The batches of one slot, one after the other.

    Attributes:
        batch: The batch that runs, or whose outcome is not known yet.
        leased_batch: The jobs that are claimed under the lease besides the one that runs.
        outages: How often the database was lost since the last batch was committed.
        claim_failed: The last claim took nothing: it was answered with an error, which `run_claims` raised again.
        is_full: The last claim found its queue at its limit.
    """

    def __init__(self, state: RelayState, flavour: Flavour, planner: ClaimPlanner, sleep: SlotSleep) -> None:
        self.batch: BatchState | None = None
        self.leased_batch: LeasedBatch | None = None
        self.outages = 0
        self.claim_failed = False
        self._state = state
        self._flavour: Flavour = flavour
        self._planner = planner
        self._sleep = sleep
        self._failed_claims = FailedClaims(state.config.schema, planner)
        self._tally = ClaimTally(state.emit)
        # Of steps that could not go along with their COMMIT.
        self._left: list[Step] = []
        self.is_full = False

    @property
    def running(self) -> int:
        """How many jobs are claimed."""
        # Read once each: other threads ask, and the slot's may just end them.
        batch, leased = self.batch, self.leased_batch
        own = 0 if batch is None else len(batch.jobs)
        return own if leased is None else own + leased.unsettled

    @property
    def is_seized(self) -> bool:
        """Whether the relay has taken the batch away."""
        return self.batch is not None and self.batch.is_seized

    def run_claims(self, connection: Connection, name: str, script: AnyScript, runtime: Runtime) -> bool:
        """Run batches of one sort of jobs for as long as each COMMIT claims the next; False if none waits.

        False also if the queue's rate lets no job begin now.
        """
        self.claim_failed = False
        # A claim that found nothing has left its tokens to this one.
        size, has_tokens = self._planner.batch_size(name), self._planner.tokens.are_left_to(name)
        if not (has_tokens or self._state.admission.admits(connection, name, size)):
            return False
        while (request := self._planner.ask(name, script)) is not None:
            self._tally.begin()
            try:
                work_off = self._run_leased if script.leased else self._run_batches
                report = work_off(connection, request, runtime)
            except BaseException as error:  # noqa: BLE001  # what is not settled here is raised again
                if self._failed_to_be_sent(connection, error):
                    continue
                if self._gave_way(connection, request, error):
                    return False
                report = self._recovered(connection, error, runtime)
            self.release_waiting(connection)
            self.batch = None
            if report is not None:
                # First: what is left may wait, or meet the end of the connection, and the batch has ended.
                self._after(connection, report, runtime)
            self._send_left(connection)
            if report is not None:
                if not self.is_full:
                    self._state.admission.ended(name)
                return True
            if self.is_full:
                return False
            self._state.admission.found_room(name)
            if self._planner.found_nothing(name, script):
                return False
            self._bring_back(connection, name, script)
            # Nothing is left behind the cursor: claim once more, from the start, or from the next groups.
        return False

    def _bring_back(self, connection: Connection, name: str, script: AnyScript) -> None:
        """Let jobs that were passed over by their groups wait there again, if a claim has seen that they are due."""
        if isinstance(script, GroupScript) and self._planner.take_back_due(name):
            with connection.begin():
                run_script(connection, bring_back(self._state.config.schema, name))

    def _run_batches(self, connection: Connection, request: ClaimRequest, runtime: Runtime) -> BatchReport | None:
        """Run batches in transaction mode: publish all but the last, and return its report; None if nothing waited."""
        fault_point("before-claim")
        with connection.begin():
            # The batches' own scripts commit; leaving the block ends the transaction that the last script began.
            claimed = self._look_at(self._tally.claim(connection, request))
            while claimed.jobs:
                batch = self.batch = BatchState.of(claimed, runtime.epoch)
                if not batch.is_plain:
                    coalesce(connection, batch, self._state.config.schema)
                handlers = decide(connection, batch, runtime)
                self._has_claimed(batch.queue, claimed.jobs, batch.moved)
                fault_point("after-claim")
                committed = None
                # None: COMMIT was refused, and all is undone.
                while committed is None:
                    run(connection, batch, runtime, handlers, shared=not batch.is_lone)
                    next_claim = self._next_claim(connection, batch, runtime)
                    committed = commit(connection, batch, runtime, next_claim)
                self._left += committed.left
                following = committed.claimed
                if following is None or following.request.queue != batch.queue:
                    self._state.admission.ended(batch.queue)
                if following is None or not (self._look_at(following).jobs or following.moved):
                    return batch.report(committed.events)
                self._ended(batch.report(committed.events))
                claimed = following
        # If this is not committed, a claim finds the suspects again by their marks.
        return BatchReport(0, (JobsSuspected(claimed.request.queue, claimed.moved),)) if claimed.moved else None

    def _run_leased(self, connection: Connection, request: ClaimRequest, runtime: Runtime) -> BatchReport | None:
        """Run claims in lease mode: publish all but the last, and return its report; None if nothing waited.

        After any error `release_waiting` settles the jobs that are claimed besides the one that ran.
        """
        fault_point("before-claim")
        with connection.begin():
            claimed: Claimed | None = self._look_at(self._tally.claim(connection, request))
        report, leased, holds = None, self._hold(connection, claimed), claimed
        # BEGIN is sent with the first statement, so no transaction is open while handlers work outside the database.
        with connection.begin():
            if holds is not None and not self._has_slot(connection, holds):
                self.leased_batch = None
                return None
            while leased is not None:
                claimed, term = None, self._planner.lease_term
                # If a handler leaves something on the connection, no other job runs there: the rest goes back to wait.
                while (job := leased.begin(allowed=not runtime.guard.left and self._may_begin(term))) is not None:
                    batch = self.batch = BatchState(
                        leased.queue, (job,), None, epoch=runtime.epoch, stands_for=leased.stands_for
                    )
                    handlers, committed = decide(connection, batch, runtime), None
                    while committed is None:
                        run(connection, batch, runtime, handlers, shared=False)
                        committed = commit(connection, batch, runtime, self._next_claim(connection, batch, runtime))
                    claimed = committed.claimed and self._look_at(committed.claimed)
                    self._leased_job_ended(leased, batch, committed)
                self.batch = None
                settled = Committed()
                if not leased.is_worked_off:
                    settled = self._settle_leased(connection, leased, runtime)
                    claimed = settled.claimed
                report = BatchReport(len(leased.jobs), leased.parked())
                self.leased_batch = None
                # Now: the connection may be lost already, and then this transaction ends with an error.
                if claimed is not None and claimed.jobs:
                    self._ended(replace(report, events=report.events + settled.events))
                elif settled.events:
                    self.publish(BatchReport(0, settled.events))
                leased = self._hold(connection, claimed)
        return report

    def _hold(self, connection: Connection, claimed: Claimed | None) -> LeasedBatch | None:
        """Hold the jobs of a claim that is committed, with those that it takes along; None without any.

        If COMMIT's answer is lost, the lease's beats find jobs that no slot runs.
        """
        if claimed is None or not claimed.jobs:
            return None
        state, queue = self._state, claimed.request.queue
        leased = LeasedBatch(queue, claimed.jobs, state.limits.lease_mode, keeper=state.keeper)
        self.leased_batch = leased
        events = coalesce_leased(connection, leased, self._state.config.schema)
        if events:
            self.publish(BatchReport(0, events))
        self._has_claimed(leased.queue, claimed.jobs, 0)
        fault_point("after-claim")
        return leased

    def _look_at(self, claimed: Claimed) -> Claimed:
        """Take note of whether a claim found its queue at its limit."""
        self._tally.record(claimed)
        self.is_full = claimed.is_full
        if claimed.is_full:
            self._state.admission.found_full(claimed.request.queue)
        elif claimed.jobs:
            self._state.admission.found_room(claimed.request.queue)
        return claimed

    def _gave_way(self, connection: Connection, request: ClaimRequest, error: BaseException) -> bool:
        """Whether a claim gave up because another claim of the queue hangs: then slots claim elsewhere for a moment."""
        if self.batch is not None or not request.script.lock or sqlstate_of(error) != LOCK_NOT_AVAILABLE:
            return False
        if is_lost(connection):
            return False
        self.release_waiting(connection)
        self.is_full = True
        self._state.admission.found_full(request.queue)
        return True

    def _has_slot(self, connection: Connection, claimed: Claimed) -> bool:
        """Take a slot of the limit again for a suspect of a queue in transaction mode; without one it goes back.

        Its claim had a slot, which went with the claim's COMMIT. Here the transaction of the job itself begins, and
        holds the slot to its end.
        """
        request, script = claimed.request, claimed.request.script
        if script.most is None or script.lock or not claimed.jobs:
            return True
        if take_slot(connection, self._state.config.schema, request):
            return True
        return_suspect(connection, self._state.config.schema, claimed.jobs[0])
        self.is_full = True
        self._state.admission.found_full(request.queue)
        return False

    def _settle_leased(self, connection: Connection, leased: LeasedBatch, runtime: Runtime) -> Committed:
        # If users' code listens to it, each job has a transaction of its own: then claims do not grow.
        ends_here = runtime.guard.left or is_listened_to(connection)
        next_claim = None if ends_here else self._planner.next_leased_claim(leased)
        self._tally.begin()
        settled = lease_mode.settle_leased(connection, leased, self._state.config.schema, next_claim)
        self._left += settled.left
        if settled.claimed is not None:
            self._tally.record(settled.claimed)
        return settled

    def _may_begin(self, term: int) -> bool:
        """Whether the lease is held, as it was at the claim, and the relay is not stopping."""
        lease = self._state.lease
        return not self._state.stopping.is_set() and lease.want() and lease.term == term

    def _has_claimed(self, queue: str, jobs: tuple[Job, ...], moved: int) -> None:
        # Without a listener no slot sleeps for long, and to be called would cost it claims in vain.
        is_called = self._sleep.is_asleep or (self._planner.is_called and self._state.listener is not None)
        self._planner.took(queue, jobs, moved)
        calls_another = is_called and self._planner.is_more(jobs, moved)
        self._sleep.end()
        if calls_another:
            self._state.wake_another(queue)

    def _next_claim(self, connection: Connection, batch: BatchState, runtime: Runtime) -> ClaimRequest | None:
        """The claim that goes with the COMMIT of a batch, if any should."""
        if batch.transaction is None or is_listened_to(connection) or runtime.guard.left:
            return None
        self._tally.begin()
        if not batch.is_leased:
            return self._planner.next_claim(batch)
        leased = self.leased_batch
        is_last = leased is not None and leased.is_worked_off and not (batch.decided and batch.parked)
        return self._planner.next_leased_claim(leased) if leased is not None and is_last else None

    def _leased_job_ended(self, leased: LeasedBatch, batch: BatchState, committed: Committed) -> None:
        self._left += committed.left
        if batch.transaction is None:
            leased.finish(batch.events[0])
        elif batch.decided and batch.parked:
            # Published later, with the other jobs that are parked.
            leased.unknown.append(batch.job)
        else:
            self._ended(BatchReport(0, (*batch.events, *committed.events)))

    def _ended(self, report: BatchReport) -> None:
        """Publish a committed batch before the slot goes on, because the connection may be lost after this."""
        self.batch = None
        self.outages = 0
        self.publish(report)

    def _after(self, connection: Connection, report: BatchReport, runtime: Runtime) -> None:
        """Publish the last batch of its sort; park its jobs of unknown kinds, with others at the head of the queue."""
        self.outages = 0
        self._planner.has_found = True
        self._planner.alone_for = max(0, self._planner.alone_for - report.claimed)
        parked, queue = 0, report.parked_in
        try:
            if queue is not None:
                kinds = runtime.orders.known_kinds(queue, runtime.registry.known_kinds(self._flavour))
                parked = park_unknown_kinds(connection, self._state.config.schema, queue, kinds)
        finally:
            self.publish(report, parked)

    def publish(self, report: BatchReport, parked: int = 0) -> None:
        """Count and emit what was committed."""
        self._state.publish(report, self._tally.take(), parked)

    def _failed_to_be_sent(self, connection: Connection, error: BaseException) -> bool:
        """Whether a claim failed because of how it was sent (prepared), and is to be sent in another way."""
        request = self._planner.request
        if self.batch is not None or request is None or not isinstance(error, psycopg.Error | SQLAlchemyError):
            return False
        if is_lost(connection) or not request.failed(error):
            return False
        self.release_waiting(connection)
        return True

    def _recovered(self, connection: Connection, error: BaseException, runtime: Runtime) -> BatchReport:
        """What became of a claim or a batch that ended in `error`; raises `error` if it cannot be settled here."""
        if isinstance(error, TransactionEscaped | LeaseLost):
            try:
                report = self._recover_broken(connection, error, runtime)
            except (psycopg.Error, SQLAlchemyError) as refused:
                # The recovery's own writes were refused: the job is charged, or put off, as for any database error.
                report = self._recover_refused(connection, refused, runtime)
        elif isinstance(error, psycopg.Error | SQLAlchemyError | WritesRefused):
            report = self._recover_refused(connection, error, runtime)
        elif self.batch is None or runtime.guard.left is None or not runtime.is_failure(error):
            raise error
        else:
            # The cause is something that a handler left on the connection: a listener, or a type that it registered.
            give_up(connection)
            raise ConnectionSpoiled(runtime.describe(error, self.batch.job)) from error
        if self.leased_batch is None:
            return report
        # Published now: settling the other jobs of the claim may fail.
        self.publish(replace(report, claimed=0))
        return replace(report, events=())

    def _recover_refused(
        self, connection: Connection, error: psycopg.Error | SQLAlchemyError | WritesRefused, runtime: Runtime
    ) -> BatchReport:
        """Recover from a database error, of a claim, or of a batch that is rolled back."""
        if is_lost(connection) or self.is_seized:
            raise error
        if self.batch is None:
            request = self._planner.request
            report = None if request is None else self._failed_claims.recover(connection, request, error)
            self.claim_failed = report is None
        else:
            self._state.emit(BatchRolledBack(self.batch.queue, self.running, describe_error(error)))
            report = self.recover(connection, self.batch, error, runtime)
        if report is None:
            raise error
        return report

    def _recover_broken(
        self, connection: Connection, error: TransactionEscaped | LeaseLost, runtime: Runtime
    ) -> BatchReport:
        """Recover after a handler ended its transaction, or lost its lease."""
        batch, running = self.batch, self.running
        assert batch is not None
        batch.begin_recovery()
        if isinstance(error, JobRowHeld):
            self._state.lease.excuse(batch.job)
        report = self.recover(connection, batch, error, runtime)
        if report is not None:
            return report
        self._state.emit(BatchRolledBack(batch.queue, running, describe_error(error)))
        return BatchReport(0, ())

    def recover(
        self, connection: Connection, batch: BatchState, error: BaseException, runtime: Runtime
    ) -> BatchReport | None:
        """What became of the batch that ended in `error`; None if all of its jobs wait again as they were."""
        recovered = recovery.recover(connection, batch, error, runtime)
        self.batch = None
        # Whatever became of its jobs: some may have ended.
        self._left += steps_of(connection, batch, (), runtime)
        if recovered.run_alone:
            self._planner.alone_for = recovered.run_alone
        return recovered.report

    def release_waiting(self, connection: Connection) -> None:
        """Settle the jobs that the slot still holds from a claim that did not end in order."""
        if self.leased_batch is not None:
            settled = lease_mode.release_waiting(connection, self.leased_batch, self._state.config.schema)
            self._left += settled.left
            self.leased_batch = None
            self.publish(BatchReport(0, settled.events))

    def _send_left(self, connection: Connection) -> None:
        """Send what could not go along with a COMMIT; SQLAlchemy has no transaction open."""
        if self._left and not is_lost(connection):
            left, self._left = self._left, []
            for event in send_left(connection, left):
                self._state.emit(event)
