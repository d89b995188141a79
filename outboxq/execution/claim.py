"""Claim: take waiting jobs out of the table, and set the savepoint that keeps the claim when rows are undone.

In transaction mode a claim deletes the jobs in the transaction that also holds the handlers' rows: if the relay dies,
the server's rollback puts the jobs back. In lease mode the claim is committed first, and writes a new token into each
job's row. A relay that lost its lease has an old token, and its writes are refused.
"""

import secrets
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, cast
from uuid import UUID

from sqlalchemy import Connection

from outboxq.clock import DatabaseClock
from outboxq.database.driver import ANY_SERVER, Answer, Script, ServerSession, run_script
from outboxq.job import EXTRAS, NO_EXTRAS, Job, extras_of
from outboxq.statements.claim import RETURNED, Sort, claim_by_id
from outboxq.statements.group_claim import AnyScript, Look
from outboxq.statements.park import clear_marks as marks_cleared
from outboxq.statements.transaction import BEGIN, READABLE_DATES, TIMED_AGAIN, UNTIMED, local_timeouts

_END_OF_JOB = 1 + len(RETURNED) + 1
# A claim's columns have the types of Job's fields.
_JOB = cast("Callable[..., Job]", Job)
# Statements before a claim, in a transaction that has begun, or begins with them.
_BEGUN = [("settings", UNTIMED), ("settings", READABLE_DATES)]
_BEGIN = ("settings", BEGIN)


@dataclass(frozen=True, slots=True)
class ClaimTransaction:
    """The transaction of a batch, and the two savepoints set after the claim, under names that no handler can guess.

    Releasing the inner one proves that the transaction is still the claim's; the outer one exists until COMMIT.

    Attributes:
        savepoint: The outer savepoint.
        inner_savepoint: The inner savepoint.
        xid: The transaction's id.
        pid: The server process's id.
    """

    savepoint: str
    inner_savepoint: str
    xid: str
    pid: int

    def reset(self) -> str:
        """Return statements that undo everything since the claim; they fail if the claim's transaction has ended."""
        return f"ROLLBACK TO SAVEPOINT {self.savepoint}; SAVEPOINT {self.inner_savepoint}"

    def renew(self) -> str:
        """Return statements that set both savepoints again, so that a later `reset` keeps all rows written so far."""
        outer = self.savepoint
        return f"RELEASE SAVEPOINT {outer}; SAVEPOINT {outer}; SAVEPOINT {self.inner_savepoint}"


@dataclass(frozen=True, slots=True)
class Claimed:
    """The result of one claim.

    Attributes:
        jobs: The jobs taken, in the order in which they should run; their `attempt` counts this claim.
        moved: The number of jobs that were not taken, because an earlier claim of them ended without an outcome: each
            is made a suspect, which runs alone under a lease, to find a job that kills its relay.
        transaction: The jobs' transaction; None if nothing was taken, and in lease mode, in which it begins later.
        is_full: True if nothing was claimed, because the queue's limit of running jobs is reached.
        is_cut: True if fewer jobs were claimed than requested although more may wait.
        look: Facts about groups that a claim of grouped jobs found.
        extras: The names of optional job properties (`EXTRAS`) that at least one of the jobs has; checks for all others
            are skipped.
    """

    request: "ClaimRequest"
    jobs: tuple[Job, ...] = ()
    moved: int = 0
    transaction: ClaimTransaction | None = None
    is_full: bool = False
    is_cut: bool = False
    look: Look | None = None
    extras: Collection[str] = ()

    def may_leave_more(self, taken: int) -> bool:
        """Return True if more jobs of the claim's sort (`Sort`) may wait in the queue.

        Args:
            taken: The number of jobs that the claim took or made suspects.
        """
        return taken > 0 if self.request.script.takes_firsts else self.is_cut or taken >= self.request.limit


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """A claim of up to `limit` waiting jobs of one sort in a queue, and the settings and savepoints sent with it.

    Args:
        script: Makes the statements that claim jobs of this sort.
        cursor: The place, in the order in which `script` claims, after which the claim begins; None for the start.
        sort: The sort of jobs that `script` claims.
        alike: The claims that take this queue's jobs in the same way. After `script` has failed, they show if other
            jobs can be claimed.
        timeout_seconds: The longest deadline of the queue's handlers. It does not apply to the claim itself, which may
            have to skip many rows and would then never succeed. None means the settings of the role and the database.
        server: The session on the server that claims: its prepared statements are used.
        clock: The clock of the jobs' `claimed_at`.
        asked_at: The time (monotonic) at which the claim was requested.
        savepoint: The name of the outer savepoint that is set after the claim.
    """

    script: AnyScript
    limit: int
    cursor: Any = None
    queue: str = ""
    sort: Sort = Sort.READY
    alike: tuple[AnyScript, ...] = ()
    timeout_seconds: float | None = None
    server: ServerSession = ANY_SERVER
    clock: DatabaseClock = field(default_factory=DatabaseClock)
    asked_at: float = field(default_factory=time.monotonic)
    savepoint: str = field(default_factory=lambda: f"oq_{secrets.token_hex(8)}")

    def add_to(self, script: Script, *, begins: bool = False) -> None:
        """Append the statements of the claim to `script`; in lease mode these end with COMMIT.

        If `script` has earlier statements in the same transaction, they may only settle jobs.

        Args:
            begins: True to begin a transaction first, because the script's last one has ended with COMMIT.
        """
        claim, parts = self.script.for_limit(self.limit), script.parts
        own = [*_BEGUN, *claim.parts(self.limit, self.cursor, self.server)]
        if begins:
            parts += [_BEGIN, *own]
        else:
            # Settling results in the same transaction has already made some of these settings.
            parts += [part for part in own if part not in parts]
        if claim.leased:
            parts.append(("claim", "COMMIT"))
        else:
            settings = local_timeouts(self.timeout_seconds) or (TIMED_AGAIN,)
            script.add("settings", *settings, f"SAVEPOINT {self.savepoint}", f"SAVEPOINT {self.savepoint}_inner")

    def clearing(self) -> list[tuple[str, str]]:
        """Return labelled statements that lock the jobs the claim would pick; that with the label "claim" returns ids.

        A failed claim leaves a mark in these jobs' rows, as the claim of a dead relay does. The COMMIT of the locks
        overwrites the mark.
        """
        return self.script.clearing(self.limit, self.cursor)

    def failed(self, error: BaseException) -> bool:
        """Return True if the claim failed only because of its prepared statement, so that another try may succeed.

        For example, the statement was not prepared yet, or its plan was outdated. The server session then records that
        the next try must prepare the claim again, or send it as text.
        """
        return self.script.for_limit(self.limit).failed(error, self.server)

    def read(self, answer: Answer) -> Claimed:
        """Read the claimed jobs from the answer to a script with the claim's statements.

        Raises:
            psycopg.Error: the script failed.
        """
        if answer.error is not None:
            raise answer.error
        script = self.script.for_limit(self.limit)
        look, rows = script.look(answer.rows, self.server), answer.rows["claim"]
        moved = cast("int", rows[0][0]) if rows else 0
        if moved < 0 or (look is not None and not look.has_room):
            return Claimed(self, is_full=True)
        # The answer has one row without a job, or one row for each job.
        taken = rows if rows and rows[0][1] is not None else ()
        if len(taken) > self.limit:
            raise AssertionError(f"a claim took {len(taken)} jobs where {self.limit} were requested")
        jobs, extras, now = (
            list[Job](),
            set[str](),
            (datetime.fromtimestamp(time.time() + self.clock.ahead_seconds, UTC),),
        )
        for row in taken:
            # The columns of RETURNED, in order, then the token and the time. Concatenated: unpacking would make a list
            # first.
            job = _JOB(*(row[1:_END_OF_JOB] + now))
            jobs.append(job)
            if (found := extras_of(job)) != NO_EXTRAS:
                extras.update(name for name, value in zip(EXTRAS, found, strict=True) if value is not None)
        if len(jobs) > 1:
            # RETURNING guarantees no order.
            jobs.sort(key=attrgetter("seq") if self.script.by_seq else _place_in_queue)
        transaction = None
        if jobs and not self.script.leased:
            xid, pid = rows[0][_END_OF_JOB:]
            transaction = ClaimTransaction(
                self.savepoint, f"{self.savepoint}_inner", cast("str", xid), cast("int", pid)
            )
        # Under a lease, the number of jobs after which the claim may have stopped early.
        ends = rows[0][_END_OF_JOB:] if rows and self.script.leased else ()
        is_cut = bool(ends) and ends[0] is not None and ends[0] <= len(jobs) < self.limit
        return Claimed(self, tuple(jobs), moved, transaction, is_cut=is_cut, look=look, extras=extras)


def _place_in_queue(job: Job) -> tuple[int, int]:
    return -job.priority, job.seq


def claim(connection: Connection, request: ClaimRequest) -> Claimed:
    """Send the claim in the connection's transaction, and return the jobs that it took."""
    script = Script()
    request.add_to(script)
    answer = script.send(connection)
    if answer.error is not None:
        request.server.roll_back(connection)
    return request.read(answer)


def claim_one(connection: Connection, schema: str, job_id: str) -> Claimed:
    """Claim one job by its id; the result has no job if the job is gone, leased, or locked by another transaction."""
    return claim(connection, ClaimRequest(claim_by_id(schema, job_id), 1))


def clear_marks(connection: Connection, schema: str, job_ids: Iterable[UUID]) -> None:
    """Lock the rows of jobs whose claim was rolled back on purpose, so that COMMIT overwrites the claim's marks.

    A job whose mark remains would be treated as one whose relay died while it ran.
    """
    run_script(connection, marks_cleared(schema, [str(job_id) for job_id in job_ids]))


def forgive(connection: Connection, request: ClaimRequest) -> list[UUID]:
    """Lock the jobs that a failed claim would have taken, so that COMMIT overwrites its marks there; return their ids.

    Normally such a mark means that a relay died while the job ran; here no handler ran, and no relay died. If another
    slot finds the marks before COMMIT, it runs the jobs one by one, once, which does no harm.
    """
    answer = Script([("settings", UNTIMED), *request.clearing()]).send(connection)
    if answer.error is not None:
        raise answer.error
    return [job_id for (job_id,) in answer.rows["claim"]]
