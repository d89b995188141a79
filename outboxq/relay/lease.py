"""The lease: one connection and one thread per relay, which show other relays that it lives.

At each beat (every `beat_seconds`) the thread extends the relay's lease, takes jobs from relays whose lease has
expired, and reads the operators' settings and the queues with suspects (jobs that ran when their relay died). It uses
libpq without psycopg's own layer, so that neither a blocked event loop nor a busy pool delays its next beat.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from uuid import UUID

import psycopg
from psycopg.pq import ConnStatus
from psycopg.pq.abc import PGconn

from outboxq.config import RelayConfig
from outboxq.database.closing import finish
from outboxq.database.driver import DriverConnection, Rows, run_on_libpq
from outboxq.database.errors import READ_ONLY, describe_refusal
from outboxq.emitter import Emitter
from outboxq.events import JobCrashed, LeaseExtensionFailed
from outboxq.execution.aside import describe, is_of_a_row, kind_of, say_of_job, take_one
from outboxq.execution.take_back import crashed
from outboxq.job import Job
from outboxq.relay.flow_settings import FlowSettings
from outboxq.relay.suspects import QuarantineTurns
from outboxq.statements import lease as statements

logger = logging.getLogger("outboxq.lease")

# The most jobs that one statement takes from dead relays; after a full one the next follows at once.
REAP_LIMIT = 100
_FORGET_EVERY_BEATS = 1_000
_BEATS_BEFORE_REAPING = 2
_STOP_SECONDS = 5.0
_ORPHANED = "its relay lived, but did not run the job that it had claimed"


@dataclass(eq=False)
class RelayLease:
    """The lease of a relay: a row with an expiry time, which the relay's thread extends regularly while it lives.

    Other relays take over the jobs that were claimed under a lease that has expired. The row is first written when a
    claim needs it. Until then the beats only take jobs from dead relays and read the operators' settings.

    Args:
        connect: Opens a connection outside a transaction; a transaction pooler will do.
        owner: A new id for each run of a relay, so that a restarted relay cannot be mistaken for its predecessor.
        queues: The relay's queues; each beat finds out which of them have suspects (jobs that ran when their relay
            died).
        flow: Stores the operators' settings, which each beat reads.
        running: Returns the ids and lease tokens of the jobs that this relay has claimed under the lease; None while
            the relay cannot know them.
        on_reaped: Called with an event for each job that was taken back: from a dead relay, or from this one if it had
            lost the answer to its claim.
        wake: Called if there are suspects, to wake sleeping slots: no notification announces them.
        expect_schedule: Called at each beat with the seconds until the next schedule is due.
    """

    connect: Callable[[], DriverConnection]
    config: RelayConfig
    owner: UUID
    queues: tuple[str, ...]
    quarantine: QuarantineTurns
    flow: FlowSettings
    running: Callable[[], set[tuple[str, int]] | None]
    emit: Emitter
    on_reaped: Callable[[JobCrashed], None]
    wake: Callable[[], None]
    expect_schedule: Callable[[float], None]

    def __post_init__(self) -> None:
        self._schema = self.config.schema
        self._wanted = False
        self._held_until = 0.0
        # A new term begins when the lease is taken again after it expired: jobs of the previous term may have been
        # reaped.
        self.term = 0
        self._orphans: set[tuple[str, int]] = set()
        # Jobs that ended well while another transaction held their rows, each with its earlier crash count.
        self._excused: dict[tuple[str, int], int] = {}
        self._beats = 0
        self._reap_from_beat = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._looks_soon = False
        self._thread = threading.Thread(target=self._run, name="outboxq-lease", daemon=True)

    def start(self) -> None:
        """Start the thread, which opens its connection itself, and a new one after each loss."""
        self._thread.start()

    def excuse(self, job: Job) -> None:
        """Make sure that no crash is counted for this job when it is taken back from this relay, to run again.

        The job ended well, but its result could not be stored, because another transaction held its row.
        """
        assert job.lease_token is not None
        self._excused[str(job.id), job.lease_token] = job.crashes

    def stop(self) -> None:
        """End the thread, waiting for 5 s at most.

        Before it ends, the thread gives up the lease, if the relay has one.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(_STOP_SECONDS)

    def look_soon(self) -> None:
        """Make the lease's thread query the operators' settings now, before its next beat. Returns at once."""
        with self._changed:
            self._looks_soon = True
            self._changed.notify_all()

    def want(self) -> bool:
        """Return True if the relay holds its lease. If not, make the lease's thread acquire it soon. Never waits.

        The lease may expire right after this call, so the claim's own statement checks it again.
        """
        if not self._is_held():
            with self._changed:
                self._wanted = True
                self._changed.notify_all()
        return self._is_held()

    def wait(self, seconds: float) -> bool:
        """Request the lease and wait until it is held, for `seconds` at most; return True if it is."""
        self.want()
        with self._changed:
            self._changed.wait_for(lambda: self._is_held() or self._stopping, seconds)
        return self._is_held()

    def _is_held(self) -> bool:
        return time.monotonic() < self._held_until

    def _run(self) -> None:
        while not self._stopping:
            # Without free memory even a pause may fail; without this thread the lease would expire.
            with suppress(Exception):
                self._connect_and_serve()

    def _connect_and_serve(self) -> None:
        connection = None
        try:
            connection = self.connect()
            self._serve(connection.pgconn)
        except Exception as error:  # noqa: BLE001  # users' engines raise what they like; the next connection may work
            message = "no connection for the lease" if connection is None else "the lease's connection failed"
            logger.debug(message, extra={"error_type": type(error).__name__})
            if connection is not None and self._wanted and not self._stopping:
                self.emit(LeaseExtensionFailed(describe_refusal(error)))
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, min(self.config.beat_seconds, 1.0))
        finally:
            if connection is not None:
                finish(connection)
                self._reap_from_beat = self._beats + _BEATS_BEFORE_REAPING

    def _serve(self, connection: PGconn) -> None:
        while not self._stopping:
            more = self._beat(connection)
            while more and not self._stopping:
                if self._wanted:
                    self._extend(connection)
                more = self._reap(connection)
            self._wait(connection)
        if self._wanted:
            run_on_libpq(connection, statements.end(self._schema, self.owner))

    def _beat(self, connection: PGconn) -> bool:
        """Do one heartbeat; return True if there may be more jobs of dead relays than it has taken back.

        A heartbeat extends the lease, if the relay needs one, makes jobs of dead relays claimable again, and reads the
        settings.
        """
        if self._wanted:
            self._extend(connection)
            self._take_back_orphans(connection)
        # After an outage of all relays, each gets time to extend its own lease first.
        has_more = self._beats >= self._reap_from_beat and self._reap(connection)
        self._look_around(connection)
        if self._beats % _FORGET_EVERY_BEATS == 0:
            run_on_libpq(connection, statements.forget_relays(self._schema))
        self._beats += 1
        return has_more

    def _look_around(self, connection: PGconn) -> None:
        seen = self.flow.record(run_on_libpq(connection, statements.look_around(self._schema, self.queues)))
        self.quarantine.queues.update(seen.suspects)
        self.quarantine.groups.update(seen.group_suspects)
        if seen.suspects or seen.group_suspects:
            self.wake()
        self.expect_schedule(seen.schedule_seconds)

    def _extend(self, connection: PGconn) -> None:
        # Measured before the statement, so that the lease ends here before it ends on the server.
        until = time.monotonic() + self.config.lease_seconds
        run_on_libpq(
            connection,
            statements.extend(self._schema, self.owner, self.config.lease_seconds, socket.gethostname(), os.getpid()),
        )
        with self._changed:
            if not self._is_held():
                self.term += 1
            self._held_until = until
            self._changed.notify_all()

    def _reap(self, connection: PGconn) -> bool:
        """Make up to `REAP_LIMIT` jobs of dead relays claimable again; return True if more may be left.

        Takes up to as many jobs in groups in addition, if any jobs in groups are leased.
        """
        taken = [self._reap_some(connection, in_group=False)]
        if self.flow.seen.group_leases:
            taken.append(self._reap_some(connection, in_group=True))
        return REAP_LIMIT in taken

    def _reap_some(self, connection: PGconn, *, in_group: bool) -> int:
        rows: Rows
        max_crashes = self.config.max_crashes
        try:
            rows = run_on_libpq(connection, statements.reap(self._schema, max_crashes, REAP_LIMIT, in_group=in_group))
        except psycopg.Error as error:
            if connection.status != ConnStatus.OK or error.sqlstate == READ_ONLY:
                raise
            # A job that cannot become a dead letter must not hold up others: this time no job becomes one.
            logger.warning("jobs could not be moved to the dead letters: %s", describe_refusal(error))
            rows = self._reap_without_dead_letters(connection, in_group=in_group)
        self._publish(rows, in_group=in_group)
        return len(rows)

    def _reap_without_dead_letters(self, connection: PGconn, *, in_group: bool) -> Rows:
        try:
            return run_on_libpq(
                connection, statements.reap(self._schema, statements.NEVER, REAP_LIMIT, in_group=in_group)
            )
        except psycopg.Error as error:
            _raise_unless_of_a_row(connection, error)
            logger.warning("jobs of dead relays are taken back one by one: %s", describe_refusal(error))
            return self._reap_one_by_one(connection, in_group=in_group)

    def _reap_one_by_one(self, connection: PGconn, *, in_group: bool) -> Rows:
        """Make jobs of dead relays claimable again one by one, after one statement for all failed; return the rows.

        A job whose row cannot be changed becomes a dead letter, unless all jobs fail: then their rows are not the
        cause.
        """
        lost = run_on_libpq(connection, statements.lost_jobs(self._schema, REAP_LIMIT, in_group=in_group))
        came = {UUID(found): self._reap_one(connection, UUID(found), in_group=in_group) for (found,) in lost}
        rows = [row for found in came.values() for row in found or ()]
        # If no job can be taken back, a single row is not the cause.
        for job_id in [job_id for job_id, found in came.items() if found is None and rows]:
            # Tried again, because the cause may have ended while the others were tried.
            found = self._reap_one(connection, job_id, in_group=in_group)
            rows += self._dead_letter(connection, job_id) if found is None else found
        return rows

    def _reap_one(self, connection: PGconn, job_id: UUID, *, in_group: bool) -> Rows | None:
        """Make one job of a dead relay claimable again; return its row, or None if this row causes an error."""
        try:
            return run_on_libpq(connection, statements.reap_one(self._schema, job_id, in_group=in_group))
        except psycopg.Error as error:
            _raise_unless_of_a_row(connection, error)
            return None

    def _dead_letter(self, connection: PGconn, job_id: UUID) -> Rows:
        try:
            dead_letter = statements.dead_letter_lost(
                self._schema, job_id, "its relay died, and its row cannot be changed"
            )
            return run_on_libpq(connection, dead_letter)
        except psycopg.Error as error:
            _raise_unless_of_a_row(connection, error)
            kind = kind_of(partial(run_on_libpq, connection), self._schema, job_id)
            message = "a job of a dead relay can neither be taken back nor moved to the dead letters"
            say_of_job(logging.WARNING, message, kind, job_id, describe(error))
            return ()

    def _take_back_orphans(self, connection: PGconn) -> None:
        """Make claimable again the jobs that are under this relay's lease although none of its slots runs them.

        Such jobs (orphans) exist if the answer to the COMMIT of a claim was lost. A job is taken back only if no slot
        ran it at two consecutive beats, because the answer may still arrive; if it comes even later, the lease token in
        it matches no row any more. A job that is taken back again and again becomes a dead letter, like a job whose
        relay dies again and again.
        """
        before, excused = self.running(), set(self._excused)
        if before is None:
            return
        rows = run_on_libpq(connection, statements.leased_jobs(self._schema, self.owner))
        leased = {(str(job_id), int(str(token))): str(in_group) in ("t", "True") for job_id, token, in_group in rows}
        now = self.running()
        if now is None:
            return
        orphans = leased.keys() - now - before
        for job_id, token in orphans & self._orphans:
            in_group = leased[job_id, token]
            self._publish(self._take_back(connection, UUID(job_id), token, in_group=in_group), in_group=in_group)
        self._orphans = orphans
        for settled in excused - leased.keys():
            self._excused.pop(settled, None)

    def _take_back(self, connection: PGconn, job_id: UUID, token: int, *, in_group: bool) -> Rows:
        schema, crashes = self._schema, self._excused.get((str(job_id), token))

        def taking(max_crashes: int) -> str:
            if crashes is not None:
                return statements.take_back_locked(schema, job_id, token, crashes, in_group=in_group)
            return statements.take_back(schema, job_id, token, max_crashes, _ORPHANED, in_group=in_group)

        return take_one(partial(run_on_libpq, connection), taking, self.config.max_crashes, schema, job_id)

    def _publish(self, rows: Iterable[tuple[object, ...]], *, in_group: bool) -> None:
        quarantine = self.quarantine
        for row in rows:
            event = crashed(row)
            if not event.dead_letter and event.queue in self.queues:
                (quarantine.groups if in_group else quarantine.queues).add(event.queue)
            self.on_reaped(event)

    def _wait(self, connection: PGconn) -> None:
        """Wait until the next heartbeat is due.

        Each time that `look_soon` is called, read the operators' settings at once.
        """
        until = time.monotonic() + self.config.beat_seconds
        while True:
            with self._changed:
                remaining = max(0.0, until - time.monotonic())
                self._changed.wait_for(lambda: self._looks_soon or self._is_beat_due(), remaining)
                looks, self._looks_soon = self._looks_soon, False
                if not looks or self._is_beat_due():
                    return
            self._look_around(connection)

    def _is_beat_due(self) -> bool:
        # Earlier if the lease is wanted and not held.
        return self._stopping or (self._wanted and not self._is_held())


def _raise_unless_of_a_row(connection: PGconn, error: psycopg.Error) -> None:
    """Raise `error` again, unless the contents of a single row caused it and the connection still works."""
    if connection.status != ConnStatus.OK or not is_of_a_row(error):
        raise error
