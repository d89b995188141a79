"""The dispatcher: claims jobs in lease mode for free slots, starts their calls, and writes the outcomes.

In lease mode the relay's lease protects a job while it runs, without an open transaction. A dispatcher has a connection
only while it has something to send, and it sends several statements as one string, in one round trip. Outcomes of calls
that end while the server executes a string are written (settled) by the next string, in one transaction with the claim
for the slots that are free by then. Thus many calls share a round trip, and a single call does not wait for others.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.util import await_only

from outboxq.config import SlotGroup
from outboxq.database.driver import ANY_SERVER, Answer, Script, end_transaction, is_listened_to, is_lost, run_script
from outboxq.database.errors import READ_ONLY, sqlstate_of
from outboxq.events import Event, JobsParked
from outboxq.execution.aside import describe, say_of_job
from outboxq.execution.batch_state import BatchReport, BatchState, Ended, Running
from outboxq.execution.claim import Claimed, ClaimRequest, claim
from outboxq.execution.commit import send_left
from outboxq.execution.errors import ConnectionLost
from outboxq.execution.families import decide
from outboxq.execution.leased_window import WindowEnd
from outboxq.execution.recovery import postpone, record_result
from outboxq.execution.runtime import Result, Runtime, is_cancellation
from outboxq.execution.settle import Settlement, settlement_of
from outboxq.execution.settle_many import SettleMany
from outboxq.execution.step import Step
from outboxq.execution.take_back import release
from outboxq.fault_points import fault_point
from outboxq.handlers.handler import AnyHandler, BatchHandler, Flavour
from outboxq.job import Job
from outboxq.relay.admission import Query
from outboxq.relay.calls import Call, CallThreads, TaskCall
from outboxq.relay.connections import CallConnections, SlotConnection
from outboxq.relay.idle import SlotSleep
from outboxq.relay.last_jobs import LastJobs
from outboxq.relay.outage import Outage
from outboxq.relay.parking import park_unknown_kinds
from outboxq.relay.planner import Planner
from outboxq.relay.poller import Order
from outboxq.relay.rolled_back import recover_claim_here
from outboxq.relay.slot import SlotWaits, send_query
from outboxq.relay.state import ClaimEvents, RelayState
from outboxq.statements.claim import adopt
from outboxq.statements.settle import PutBack

logger = logging.getLogger("outboxq.relay")

# The longest time for which a suspect, or several together, keep other calls from starting, and wait for running calls.
_ALONE_SECONDS = 10.0
# The number of suspects whose relay died once that run together: if one of them kills this relay too, all are suspects
# again.
_MOST_IN_COMPANY = 16
# The pause before results whose rows are held by other transactions are tried again.
_HELD_SECONDS = 0.5
# The same pause for outcomes that were refused, or waited for a lock.
_REFUSED_SECONDS = 5.0
# SQLSTATEs of locks, cancellations and conflicts.
_PASSING = ("55P03", "57014", "40")
_REST_SECONDS, _CHECK_SECONDS, _LEAST_SECONDS = 60.0, 0.1, 0.005
# The most results in one string.
_MOST_SETTLED = 1_000
_ALL = 1_000_000


@dataclass(slots=True, eq=False)
class _Outcome:
    """The outcome of a call, which the dispatcher is to write to the database (to settle).

    Attributes:
        batch: The leased job, as a batch with one job.
        change: The outcome: a `Settlement`, which can be written together with others, or a `Result` that needs
            separate statements.
        is_sent: True while the statements that write it are being executed, and it is not known to be committed.
        is_unsure: True if it was sent and the answer was lost, so that it may be committed already.
        was_held: True if another transaction held the job's row, or if the server refused the outcome; it is sent
            again.
    """

    batch: BatchState
    change: Settlement | Result
    is_sent: bool = False
    is_unsure: bool = False
    was_held: bool = False

    @property
    def job(self) -> Job:
        """The job of the call."""
        return self.batch.jobs[0]


@dataclass(frozen=True, slots=True)
class _Settling:
    """Outcomes that the dispatcher writes in one transaction, with the statements for it.

    Attributes:
        outcomes: The outcomes.
        many: The statements that write them.
        runtime: All that running a job needs, except the job.
        keeps: True to write rows of finished jobs too, for kinds of jobs whose rows are kept (`keep=`).
        is_again: True if the COMMIT of these outcomes was refused once.
    """

    outcomes: Sequence[_Outcome]
    many: SettleMany
    runtime: Runtime
    keeps: bool = True
    is_again: bool = False

    @classmethod
    def of(
        cls, outcomes: Sequence[_Outcome], runtime: Runtime, *, unsure: bool = False, keeps: bool = True
    ) -> "_Settling":
        together, changes = list[_Outcome](), list[Settlement]()
        stands_for: dict[UUID, tuple[UUID, ...]] = {}
        for outcome in outcomes:
            if isinstance(outcome.change, Settlement):
                together.append(outcome)
                changes.append(outcome.change)
                if outcome.batch.stands_for:
                    stands_for.update(outcome.batch.stands_for)
        many = SettleMany(changes, runtime.schema, runtime.keeper, stands_for, unsure)
        return cls(together, many, runtime, keeps)

    def without(self) -> "_Settling":
        """Return a copy without outcomes, to send a claim alone."""
        return self.of((), self.runtime)


class Dispatcher:
    """Claims and runs the jobs of one group of slots in lease mode (no transaction is open while a job runs).

    Args:
        wake: Wakes the dispatcher's loop.
        loop: The event loop in which async calls run; None for sync ones.
        fail: Ends the relay with the given error.

    Attributes:
        calls: The calls that run.
        batch: Always None, because each call has its own batch; slots have one here.
    """

    batch: BatchState | None = None

    def __init__(
        self,
        state: RelayState,
        group: SlotGroup,
        flavour: Flavour,
        connections: CallConnections,
        wake: Callable[[], None],
        fail: Callable[[BaseException], None],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        order = Order(group.queues, group.in_turns)
        self.state = state
        self.flavour: Flavour = flavour
        self.queues = group.queues
        self.slots = group.slots
        self.connections = connections
        self.fail = fail
        self.calls = set[Call]()
        self.connected: SlotConnection | None = None
        self.is_abandoned = False
        self.sleep = SlotSleep(state, order, self.may_wait)
        self._wake = wake
        self._loop = loop
        self._threads = CallThreads()
        self._planner = Planner(state, order)
        self._last_jobs = LastJobs(state, group.queues)
        self._claims = ClaimEvents(state)
        self._outage = Outage(state)
        self._ended: deque[_Outcome] = deque()
        # Results in a string that is being executed.
        self._sent: list[_Outcome] = []
        # Results whose rows other transactions hold, until they are tried again.
        self._held: list[_Outcome] = []
        self._held_until = 0.0
        # A claim that was sent, and whose jobs have not all been started.
        self._doubt: ClaimRequest | None = None
        # Those of `calls` that wait for a slot. The lock is held while calls get or leave slots, in any thread.
        self._waiting: deque[Call] = deque()
        self._slots_lock = threading.Lock()
        # The jobs of calls that were cut off.
        self._cut: set[tuple[str, int]] = set()
        # True from a claim that took jobs until a round that found none.
        self._may_wait = True
        # True if a call has ended since the last round.
        self._has_freed = False
        # True from a notification on: jobs may wait.
        self._is_called = False
        self._is_drained = False
        # The end of the turn in which this dispatcher's suspects run without other calls in the process; None without a
        # turn.
        self._turn_until: float | None = None

    # The interface of a slot, for its loop.

    @property
    def busy(self) -> int:
        """The number of slots in which a call runs."""
        return len(self.calls) - len(self._waiting)

    def goes_on(self) -> bool:
        """Return True while the dispatcher's loop must run.

        It must run while the relay works and, after the relay was stopped, until no call runs and all outcomes are
        written.
        """
        return not self.is_abandoned and (not self.state.stopping.is_set() or bool(self.calls) or self.is_in_doubt)

    @property
    def is_in_doubt(self) -> bool:
        """Return True if outcomes are still to be written, or if the answer to a claim was lost."""
        return bool(self._ended or self._held) or self._doubt is not None

    def is_seized(self) -> bool:
        """Return False: the relay takes jobs away from a dispatcher's single calls, not from the dispatcher."""
        return False

    @property
    def is_drained(self) -> bool:
        """Return True if the relay drains (ends when no job is left), and this dispatcher has no job and found none."""
        return self._is_drained

    def wants_work(self) -> bool:
        """Return True if there may be something to send: outcomes of calls, or a claim."""
        if self._has_results() or self._doubt is not None or self._outage.since is not None:
            return True
        return self._may_claim() and self._wants_claim()

    def work(self, connected: SlotConnection) -> bool:
        """Write outcomes and claim jobs until there is nothing left to send.

        Returns True always: unlike a slot, a dispatcher never needs another connection to go on.
        """
        with self._on(connected) as runtime:
            began_at = time.monotonic()
            self._work_on(connected, runtime)
            if self.state.until_empty and not self.calls and not self.is_in_doubt:
                work_once = partial(self._work_once, connected, runtime)
                self._is_drained = not self._last_jobs.work_off(connected.connection, work_once, began_at)
        return True

    def work_seen(self, connected: SlotConnection) -> bool:
        """Poll the queues if a poll is due, and claim if jobs wait.

        Returns True if jobs were claimed or outcomes written.
        """
        with self._on(connected) as runtime:
            self.sleep.poll(connected.connection)
            return self.sleep.has_work() and self._work_on(connected, runtime)

    def settle(self, connected: SlotConnection) -> bool:
        """Write the outcomes of ended calls, without claiming. Returns True always."""
        with self._on(connected) as runtime:
            self._send(connected.connection, self._take_results(), None, runtime)
        return True

    def lost(self, error: BaseException) -> float:
        """Report that a connection was lost or refused; return the seconds to wait before the next try.

        Raises:
            LoginRefused: the database has refused the relay's login for too long.
        """
        self.sleep.want_poll()
        return self._outage.lost(error)

    def rest(self, loop: SlotWaits) -> None:
        """Wait until there is something to do: a call ends, a notification or poll shows jobs, or the relay stops."""
        loop.clear()
        sleep, flagged = self.sleep, False
        if self._is_called:
            self._is_called = False
            sleep.want_poll()
        if self.state.until_empty or not self._may_claim() or not self._room()[0]:
            # Only the end of a call, of a turn or of the relay matters; one that came before `clear` counts too.
            has_freed, self._has_freed = self._has_freed, False
            is_over = self.state.until_empty and not (self.calls or self._held)
            if self.goes_on() and not (is_over or has_freed or self._has_results()):
                loop.wait(self._pause_seconds())
            return
        while not (self.state.stopping.is_set() or self.is_abandoned):
            if self._has_results():
                # No job waits, so nothing is claimed.
                loop.on_connection(self.settle)
            if sleep.needs_connection() and loop.on_connection(self.work_seen):
                return
            if not flagged:
                request = sleep.fall_asleep()
                flagged = sleep.is_flagged(None if request is None else loop.flagged_since(request))
                if sleep.is_behind():
                    continue
            if self._sleep(loop, time.monotonic() + sleep.pause_seconds(flagged=flagged)):
                sleep.want_poll()
                return

    def _sleep(self, loop: SlotWaits, until: float) -> bool:
        """Sleep until `until` (monotonic), when a poll is due; return True at once if jobs may wait or the relay stops.

        Writes the outcomes of calls that end in this time. `until` is absolute, so that these calls do not postpone the
        poll.
        """
        while (seconds := until - time.monotonic()) > 0:
            if self._has_results():
                # After a settled job, another one may be claimable; the call that wakes this loop has said so.
                loop.on_connection(self.settle)
            if self._is_called or self.state.stopping.is_set() or self.is_abandoned:
                self._is_called = False
                return True
            loop.wait(min(seconds, self._pause_seconds()))
            loop.clear()
        return False

    def _pause_seconds(self) -> float:
        """Return the longest time to sleep, in seconds, until something is due.

        No other thread wakes the dispatcher for some events, such as the time to send an outcome again.
        """
        now, times = time.monotonic(), [_REST_SECONDS]
        if self._held:
            times.append(self._held_until - now)
        if self._turn_until is not None and self._turn_until > now:
            times.append(self._turn_until - now)
        elif self._turn_until is None and self.state.quarantine.taken_seconds() is not None:
            # The end of another group's turn wakes only that group.
            times.append(_CHECK_SECONDS)
        if self.state.until_empty and (held_seconds := self.state.poller.held_seconds(self.queues)) is not None:
            times.append(held_seconds)
        return max(_LEAST_SECONDS, min(times))

    def may_wait(self) -> None:
        """Record, from any thread, that jobs may wait, and wake the dispatcher.

        Called after a notification, or after a call that put its job back.
        """
        self._is_called = True
        self._wake()

    # Calls.

    def receive_result(self, call: Call, settlement: Settlement) -> None:
        """Receive the outcome of a call that used no connection.

        The dispatcher writes the outcome later, in one transaction with those of other calls.
        """
        self._ended.append(_Outcome(call.batch, settlement))

    def receive_window(self, call: Call, end: WindowEnd) -> None:
        """Receive the results of a window, and make a call for each of its jobs that is to run again alone.

        These calls wait for free slots, such as the window's own, which is free next.
        """
        for job, change in end.changes:
            self._ended.append(_Outcome(_part_of(call.batch, (job,), end.seconds), change))
        # Before the window's call leaves `calls`: the relay's lease must know each job at any time.
        self._fill([self._call_of(call.batch, [job], end.handler) for job in end.alone])

    def receive_end(self, call: Call) -> None:
        """Free the slot of a call that has ended, and wake the dispatcher, which may claim another job for it."""
        if self._cut:
            self._cut -= _keys(call.batch)
        self._leave(call)

    # Rounds.

    def _work_on(self, connected: SlotConnection, runtime: Runtime) -> bool:
        """Send outcomes and claims until nothing is left to send.

        Returns True if outcomes were sent or jobs claimed.
        """
        worked = False
        while self._work_once(connected, runtime):
            worked = True
            if not (self._may_claim() or self._has_results()):
                break
        return worked

    def _work_once(self, connected: SlotConnection, runtime: Runtime) -> bool:
        """Send the outcomes of ended calls, with a claim if slots are free; return True if more may be left to send."""
        self._has_freed = False
        connection = connected.connection
        most, suspects = self._room() if self._may_claim() and self._wants_claim() else (0, False)
        if most:
            self.sleep.begin_claims()
            with closing(self._planner.first(connected.server, most, aside=suspects)) as asked:
                for each in asked:
                    if isinstance(each, Query):
                        send_query(connection, each)
                    elif self._send(connection, self._take_results(), each, runtime):
                        self._may_wait = True
                        return True
            if suspects:
                # No job waits, or none may be claimed now.
                self.end_turn()
            else:
                self._may_wait = False
        if self._has_results():
            self._send(connection, self._take_results(), None, runtime)
            return True
        return suspects

    def _wants_claim(self) -> bool:
        """Return True if a claim may find jobs. Otherwise no claim is sent, even when slots become free."""
        is_turn = self._turn_until is not None
        return self._may_wait or is_turn or self.state.until_empty or self.sleep.has_work()

    def _may_claim(self) -> bool:
        return self.busy < self.slots and not self.state.stopping.is_set() and not self.is_abandoned

    def _room(self) -> tuple[int, bool]:
        """Return the number of jobs to claim now, and True if only suspects are to be claimed.

        A suspect (a job that ran when its relay died, and may have caused that) starts only when no other call runs in
        this process, and while it runs no other call starts. Neither rule holds for longer than `_ALONE_SECONDS`,
        because calls may take long.
        """
        quarantine, now = self.state.quarantine, time.monotonic()
        if self._turn_until is None and self._knows_suspects() and quarantine.take_turn(self):
            self._turn_until = now + _ALONE_SECONDS
        if self._turn_until is None:
            # Another group's suspects may be running.
            is_free = (seconds := quarantine.taken_seconds()) is None or seconds >= _ALONE_SECONDS
            # At most half of the slots, so that their calls run while the next string is executed.
            return (min(self.slots - self.busy, (self.slots + 1) // 2) if is_free else 0), False
        is_over = now >= self._turn_until
        if any(call.is_suspect for call in self.calls.copy()):
            return (self.slots - self.busy if is_over else 0), False
        if self.calls and not is_over:
            return 0, False
        if not is_over:
            # They are alone. Otherwise this turn no longer waits, and other calls start beside them.
            self._turn_until = now + _ALONE_SECONDS
            quarantine.renew(self)
        return min(self.slots - self.busy, _MOST_IN_COMPANY), True

    def _knows_suspects(self) -> bool:
        known, is_held = self.state.quarantine.known_in(self.queues), self.state.poller.is_held
        return any(not is_held(name) for name in known) and self.state.lease.want()

    def end_turn(self) -> None:
        """Give up this dispatcher's turn to run suspects (jobs that ran when their relay died).

        Another slot or dispatcher may then have the turn.
        """
        self._turn_until = None
        self.state.quarantine.end_turn(self)

    def _has_results(self) -> bool:
        return bool(self._ended) or (bool(self._held) and time.monotonic() >= self._held_until)

    def _take_results(self) -> list[_Outcome]:
        """Remove up to `_MOST_SETTLED` outcomes of calls from the queue, mark them as being sent, and return them."""
        if self._held and time.monotonic() >= self._held_until:
            held, self._held = self._held, []
            self._ended.extend(held)
        # Before they leave the queue, because the lease's thread counts them at any time. Calls append in the meantime.
        taken = self._sent = list(self._ended.copy())[:_MOST_SETTLED]
        for outcome in taken:
            outcome.is_sent = True
            self._ended.popleft()
        return taken

    def _send(
        self, connection: Connection, taken: list[_Outcome], request: ClaimRequest | None, runtime: Runtime
    ) -> bool:
        """Write outcomes and claim jobs, in one round trip if possible, and start the calls of the claimed jobs.

        Args:
            taken: The outcomes, from `_take_results`.
            request: The claim; None to claim nothing.

        Returns:
            True if jobs were claimed, or if the claim failed and the next one is to be sent in another way (for fewer
            jobs, for example).

        Raises:
            ConnectionLost: the outcomes may be committed and jobs claimed; another connection shows if they are.
        """
        self._sent = taken
        try:
            # Separate transactions for outcomes that may be settled already, and for those whose rows were held, so
            # that the others do not wait for them.
            unsure = [outcome for outcome in taken if outcome.is_unsure]
            held = [outcome for outcome in taken if outcome.was_held and not outcome.is_unsure]
            for some, is_unsure in ((unsure, True), (held, False)):
                if some:
                    self._settle_and_claim(connection, _Settling.of(some, runtime, unsure=is_unsure), None)
            others = [outcome for outcome in taken if not (outcome.is_unsure or outcome.was_held)]
            claimed = self._settle_and_claim(connection, _Settling.of(others, runtime), request)
            if isinstance(claimed, Claimed) and claimed.jobs:
                self._start(connection, claimed, runtime)
                self._awake()
            for outcome in taken:
                if not isinstance(outcome.change, Settlement):
                    batch = outcome.batch
                    report = record_result(connection, batch, batch.job, outcome.change, runtime)
                    outcome.is_sent = False
                    # There is no notification for the next job of a group.
                    self._is_called |= batch.job.group_key is not None
                    self._publish(report, {batch.queue})
        except BaseException:
            left = [outcome for outcome in self._sent if outcome.is_sent]
            for outcome in left:
                outcome.is_unsure = True
            self._ended.extendleft(reversed(left))
            raise
        finally:
            self._sent = []
        return bool(claimed.jobs) if isinstance(claimed, Claimed) else claimed

    def _settle_and_claim(
        self, connection: Connection, settling: "_Settling", request: ClaimRequest | None
    ) -> Claimed | bool:
        """Send outcomes that are written together, and a claim, in as few round trips as possible.

        Returns:
            The answer to the claim. If there is none: True if the claim failed and the next one is to be sent in
            another way (for fewer jobs, for example), False if nothing was claimed.
        """
        is_listened, many = is_listened_to(connection), settling.many
        if request is not None and many.settlements and is_listened:
            # Users' code sets up each transaction.
            self._settle_and_claim(connection, settling, None)
            return self._settle_and_claim(connection, settling.without(), request)
        server = ANY_SERVER if self.connected is None else self.connected.server
        script, prepared = Script(), None
        # Results and the claim share a transaction and a flush to the disk, if the claim waits for no lock. Without an
        # answer to COMMIT both are in doubt: the jobs are adopted, and the results sent again.
        is_one = request is not None and not (request.script.lock or many.after_commit or many.is_asked)
        if many.settlements:
            fault_point("before-commit")
            prepared = many.add_to(script, server, keep=settling.keeps)
            if not is_one:
                script.add("settled", "COMMIT")
                many.add_question(script)
                for step, after in () if is_listened else many.after_commit:
                    script.add(step.name, *after)
        if request is not None:
            fault_point("before-claim")
            request.add_to(script, begins=bool(script.parts) and not is_one)
            self._doubt = request
        if not script.parts:
            return False
        with connection.begin() if is_listened else nullcontext():
            answer = script.send(connection)
            if answer.error is not None:
                if is_lost(connection):
                    raise ConnectionLost("the connection was lost: outcomes may be settled, and jobs claimed") from (
                        answer.error
                    )
                self._doubt = None
                run_script(connection, "ROLLBACK")
        if many.settlements:
            if is_one and not answer.is_committed:
                # The error may come from the results or from the claim, so each is sent by itself.
                self._settle_and_claim(connection, settling, None)
                return self._settle_and_claim(connection, settling.without(), request)
            if not answer.is_committed or (many.is_asked and "standing" not in answer.rows):
                assert answer.error is not None
                if prepared is not None and server.claims.failed(answer.error, prepared):
                    return self._settle_and_claim(connection, settling, request)
                if answer.failed_at != "settled":
                    return self._settle_with_less(connection, settling, request, answer.error)
                # The error is COMMIT's own, usually for a lock that others hold, but not for a row.
                if settling.is_again:
                    raise answer.error
                self._settle_and_claim(connection, replace(settling, is_again=True), None)
                return self._settle_and_claim(connection, settling.without(), request)
            fault_point("after-commit")
            if prepared is not None:
                server.claims.succeeded(prepared)
            self._settled(connection, settling, answer)
            if is_listened:
                for event in send_left(connection, many.steps):
                    self.state.emit(event)
        if request is None:
            return False
        if answer.error is not None and any(step.name == answer.failed_at for step in many.steps):
            # The step's work is left to the sweep.
            return self._settle_and_claim(connection, settling.without(), request)
        return self._received(connection, request, answer)

    def _settle_with_less(
        self, connection: Connection, settling: "_Settling", request: ClaimRequest | None, error: psycopg.Error
    ) -> Claimed | bool:
        """Write outcomes that the server refused: all again without rows of finished jobs, or each by itself.

        Then send the claim.

        Returns:
            The answer to the claim. If there is none: True if the claim failed and the next one is to be sent in
            another way (for fewer jobs, for example), False if nothing was claimed.
        """
        keeper, many = settling.many.keeper, settling.many
        if settling.keeps and keeper.kinds and keeper.may_be_refusal(error):
            keeper.refused(error)
            return self._settle_and_claim(connection, replace(settling, keeps=False), request)
        if len(settling.outcomes) > 1:
            for outcome in settling.outcomes:
                one = _Settling.of([outcome], settling.runtime, unsure=many.unsure, keeps=settling.keeps)
                self._settle_and_claim(connection, one, None)
        else:
            self._put_off(connection, settling, error)
        return self._settle_and_claim(connection, settling.without(), request)

    def _put_off(self, connection: Connection, settling: "_Settling", error: psycopg.Error) -> None:
        """Put off the job of an outcome that the server refused: the job runs again later, and holds up no other job.

        If the outcome only waited for a lock, or the job's row cannot be changed either, keep the outcome, to send it
        again later.
        """
        if is_lost(connection) or sqlstate_of(error) == READ_ONLY:
            raise error
        (outcome,) = settling.outcomes
        job, waits = outcome.job, (sqlstate_of(error) or "").startswith(_PASSING)
        if not waits:
            try:
                report = postpone(connection, job, settling.runtime)
            except (psycopg.Error, SQLAlchemyError):
                if is_lost(connection):
                    raise
                end_transaction(connection)
            else:
                self._publish(report, {job.queue})
                outcome.is_sent = False
                return
        message = "the outcome of a job cannot be stored, and is tried again"
        say_of_job(logging.WARNING, message, job.kind, job.id, describe(error))
        self._hold([outcome], _REFUSED_SECONDS)

    def _settled(self, connection: Connection, settling: "_Settling", answer: Answer) -> None:
        """Count written outcomes and emit their events; keep those whose rows others have locked, to send them again.

        If a written outcome parked a job of an unknown kind, park other such jobs at the head of its queue too.
        """
        settled = settling.many.read(answer)
        held = {settlement.job.id for settlement in settled.held}
        self._hold([outcome for outcome in settling.outcomes if held and outcome.job.id in held], _HELD_SECONDS)
        parked: dict[str, list[str]] = {}
        queues = set[str]()
        for outcome, settlement in zip(settling.outcomes, settling.many.settlements, strict=True):
            job = settlement.change.job
            queues.add(job.queue)
            # There is no notification for jobs that wait again, or that are next in their groups.
            self._is_called |= job.group_key is not None or isinstance(settlement.change, PutBack)
            if outcome.is_sent:
                outcome.is_sent = False
                if settlement.event is None:
                    parked.setdefault(job.queue, []).append(job.kind)
        events = (*settled.events, *(each for step in settling.many.steps for each in _rows_of(step, answer)))
        self._publish(BatchReport(len(settling.outcomes) - len(held), events), queues)
        for queue, kinds in parked.items():
            others = self._park(connection, queue, settling.runtime)
            report = BatchReport(0, (JobsParked(queue, tuple(sorted(set(kinds))), len(kinds)),))
            self._publish(report, (), others)

    def _hold(self, outcomes: list[_Outcome], seconds: float) -> None:
        """Keep outcomes that could not be written, to send them again after `seconds`."""
        if outcomes:
            self._held += outcomes
            self._held_until = time.monotonic() + seconds
            for outcome in outcomes:
                outcome.is_sent, outcome.was_held = False, True

    def _park(self, connection: Connection, queue: str, runtime: Runtime) -> int:
        """Make other jobs of unknown kinds at a queue's head wait for a relay that knows them; return their number."""
        kinds = runtime.orders.known_kinds(queue, runtime.registry.known_kinds(self.flavour))
        return park_unknown_kinds(connection, self.state.config.schema, queue, kinds)

    def _publish(self, report: BatchReport, queues: Collection[str], parked: int = 0) -> None:
        self._outage.losses = 0
        self._claims.emit()
        self.state.publish(report, parked)
        for queue in queues:
            self.state.admission.ended(queue)

    # Claims.

    def _received(self, connection: Connection, request: ClaimRequest, answer: Answer) -> Claimed | bool:
        """Record and return the answer to a claim.

        If the claim failed and the next one is to be sent in another way (for fewer jobs, for example), return True;
        raise the error if the next claim would fail too.
        """
        try:
            claimed = request.read(answer)
        except BaseException as error:  # noqa: BLE001  # raised again if the next claim would fail, too
            self._claims.record_failure(request.queue)
            ended = recover_claim_here(self.state, self._planner, connection, request, error)
            if ended is not None and ended.report is not None:
                self.publish(ended.report)
            return ended is not None
        self._claims.record(claimed)
        self._planner.record_claim(claimed, is_called=False)
        if claimed.jobs:
            self._planner.record(request, Ended(BatchReport(len(claimed.jobs), ())))
        else:
            self._doubt = None
        return claimed

    def _start(self, connection: Connection, claimed: Claimed, runtime: Runtime) -> None:
        """Start a call for each claimed job.

        A job whose outcome is decided without its handler gets no call: this outcome is written next. If the method
        raises, `_adopt` finds and starts the jobs later, as after a claim whose answer was lost.
        """
        fault_point("after-claim")
        batch = BatchState(claimed, claimed.jobs)
        handlers, windows = decide(connection, batch, runtime), dict[BatchHandler[Any, Any], list[Job]]()
        events = tuple(event for event in batch.of_claim if not isinstance(event, JobsParked))
        if events:
            self.state.publish(BatchReport(0, events))
        calls = list[Call]()
        for job in batch.jobs:
            result, handler = batch.decided.get(job.id), handlers[job.kind]
            if result is not None:
                settlement = settlement_of(job, result, runtime, 0.0)
                self._ended.append(_Outcome(_part_of(batch, (job,)), settlement or result))
                continue
            assert handler is not None, "jobs of unknown kinds are decided"
            if isinstance(handler, BatchHandler):
                windows.setdefault(handler, []).append(job)
            else:
                calls.append(self._call_of(batch, [job], handler))
        for handler, jobs in windows.items():
            # One of several suspects may end the process, or hang: a call each shows which.
            size = 1 if claimed.request.sort.is_suspect else handler.max_size
            for first in range(0, len(jobs), size):
                calls.append(self._call_of(batch, jobs[first : first + size], handler))
        if self._loop is None:
            self._fill(calls)
        # While the next string is executed, if there is one, so that the server need not wait.
        else:
            self._fill(calls, _start_now if self.sleep.is_asleep else self._loop.call_soon)
        self._doubt = None

    def _call_of(self, batch: BatchState, jobs: Sequence[Job], handler: AnyHandler) -> Call:
        """Make the call of a handler for jobs of a claim."""
        of_call = _part_of(batch, jobs)
        if self._loop is None:
            return Call(self, of_call, handler)
        return TaskCall(self, of_call, handler, self._loop)

    def _fill(self, added: Sequence[Call] = (), schedule: Callable[..., object] | None = None) -> None:
        """Start calls that wait, and `added` ones, in the free slots. Called in any thread.

        Args:
            schedule: Runs a function in the event loop; by default from another thread.
        """
        with self._slots_lock:
            self.calls.update(added)
            self._waiting.extend(added)
            free = max(0, self.slots - self.busy)
            starting = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        if self._loop is None:
            for call in starting:
                self._threads.start(call)
        elif starting:
            (schedule or self._loop.call_soon_threadsafe)(_start_tasks, starting)

    def _leave(self, call: Call) -> None:
        """Free the slot of a call that has ended or was cut off, for one that waits, and wake the dispatcher."""
        with self._slots_lock:
            self.calls.discard(call)
            # The relay may take away a call that has not begun.
            with suppress(ValueError):
                self._waiting.remove(call)
        self._fill()
        self._has_freed = True
        self._wake()

    def waits(self, call: Call) -> bool:
        """Return True if a call waits for a slot."""
        return call in self._waiting

    def _awake(self) -> None:
        """Record that the dispatcher is awake, if it slept until a claim took jobs.

        Async handlers of these jobs begin first.
        """
        if self.sleep.is_asleep:
            if self._loop is not None:
                await_only(asyncio.sleep(0))
            self.sleep.end()

    def _adopt(self, connection: Connection, request: ClaimRequest, runtime: Runtime) -> None:
        """Start the jobs of a claim whose answer was lost: those under the lease that this dispatcher does not have.

        If the relay stops, make these jobs claimable again instead. The set of the dispatcher's own jobs is read before
        the query: otherwise an own job that ends right after the query would be started again.
        """
        held = self._cut | self._known()
        script = adopt(self.state.config.schema, self.state.lease.owner, request.queue)
        with connection.begin():
            claimed = claim(connection, replace(request, script=script, limit=_ALL, cursor=None, server=ANY_SERVER))
        jobs = tuple(job for job in claimed.jobs if (str(job.id), job.lease_token) not in held)
        if not self.state.stopping.is_set() and not self.is_abandoned:
            self._start(connection, replace(claimed, jobs=jobs), runtime)
            return
        for job in jobs:
            for event in release(connection, job):
                self.state.emit(event)
        self._doubt = None

    # The connection.

    @contextmanager
    def _on(self, connected: SlotConnection) -> Iterator[Runtime]:
        """Use this connection in the block, and yield its `Runtime` (all that running a job needs, except the job).

        If the answer to a claim was lost, the jobs that it took are started first.
        """
        self.connected = connected
        try:
            runtime = self.runtime_on(connected)
            self._outage.connected()
            if self._doubt is not None:
                self._adopt(connected.connection, self._doubt, runtime)
            yield runtime
        finally:
            self.connected = None

    def runtime_on(self, connected: SlotConnection) -> Runtime:
        """Make the `Runtime` (all that running a job needs, except the job) for the dispatcher on a connection."""
        guard, invoker = connected.guard, connected.invoker
        return self.state.runtime(self.flavour, invoker, guard, frozenset(), self._is_interruption, connected)

    def publish(self, report: BatchReport) -> None:
        """Count committed outcomes and emit their events, after the events of the claims that took the jobs."""
        self._claims.emit()
        self.state.publish(report)

    def _is_interruption(self, error: BaseException) -> bool:
        return self.is_abandoned and is_cancellation(error)

    # The methods below are called by the relay's deadlines, in other threads.

    def close(self) -> None:
        """End the threads in which calls run, each when its call ends."""
        self._threads.close()

    def stop(self) -> None:
        """End the dispatcher's loop without waiting for running calls; only the outcomes that it has are written."""
        self.is_abandoned = True
        self._wake()

    def cut_off(self, call: Call) -> None:
        """Free the slot of a call from which the relay has taken the job away, although its handler may still run."""
        if call.is_alive():
            self._cut |= _keys(call.batch)
            self._leave(call)

    def _known(self) -> set[tuple[str, int]]:
        # In the order in which jobs move between these, because the lease's thread also calls this.
        known = set[tuple[str, int]]().union(*(_keys(call.batch) for call in self.calls.copy()))
        for results in (self._ended.copy(), self._sent, self._held):
            known.update(*(_keys(outcome.batch) for outcome in list(results)))
        return known

    def leased(self) -> set[tuple[str, int]] | None:
        """Return the ids and lease tokens of this dispatcher's jobs; None while the answer to a claim is lost.

        The lease's thread takes back jobs under the relay's lease that no slot or dispatcher has.
        """
        return None if self._doubt is not None else self._known()


def _start_tasks(tasks: Sequence[Call]) -> None:
    for task in tasks:
        assert isinstance(task, TaskCall)
        task.start()


def _start_now(start: Callable[[Sequence[Call]], None], tasks: Sequence[Call]) -> None:
    start(tasks)


def _part_of(batch: BatchState, jobs: Sequence[Job], seconds: float = 0.0) -> BatchState:
    """Return the state of some jobs of a claim, which run, and are settled, apart from the others.

    Args:
        seconds: The time for which a job has run, if it has.
    """
    stands_for = {job.id: batch.stands_for[job.id] for job in jobs if job.id in batch.stands_for}
    running = Running(_ran_seconds=seconds)
    return BatchState(batch.claimed, tuple(jobs), stands_for=stands_for, running=running, expires=batch.expires)


def _rows_of(step: Step, answer: Answer) -> Sequence[Event]:
    return step.committed(answer.rows.get(step.name, ()))


def _keys(batch: BatchState) -> set[tuple[str, int]]:
    return {(str(job.id), job.lease_token) for job in batch.jobs if job.lease_token is not None}
