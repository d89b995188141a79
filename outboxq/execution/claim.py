"""Claim: take waiting jobs out of the table, and set the savepoint after which they stay claimed.

In transaction mode the delete and the handlers' rows are one transaction: if the relay dies, the server's rollback
gives its jobs back. In lease mode the claim is committed first, and a token fences off earlier holders of the job.
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
# Statements before a claim, in a transaction that has begun or begins there.
_BEGUN = [("settings", UNTIMED), ("settings", READABLE_DATES)]
_BEGIN = ("settings", BEGIN)


@dataclass(frozen=True, slots=True)
class ClaimTransaction:
    """The transaction of a batch: its id, its backend and its savepoints.

    Two savepoints follow the claim, under names that no handler can guess. Releasing the inner one proves that the
    transaction is still the claim's; the outer one, `savepoint`, exists until COMMIT.
    """

    savepoint: str
    inner_savepoint: str
    xid: str
    pid: int

    def reset(self) -> str:
        """Go back to the end of the claim. Fails if the transaction is not the claim's any more."""
        return f"ROLLBACK TO SAVEPOINT {self.savepoint}; SAVEPOINT {self.inner_savepoint}"

    def renew(self) -> str:
        """Set the savepoints again: a reset keeps all that was written before."""
        outer = self.savepoint
        return f"RELEASE SAVEPOINT {outer}; SAVEPOINT {outer}; SAVEPOINT {self.inner_savepoint}"


@dataclass(frozen=True, slots=True)
class Claimed:
    """The jobs of one claim, in the order in which they should run; `attempt` includes this one.

    `moved` is the number of jobs that were made suspects instead, because an earlier claim of them died. `transaction`
    is None if nothing was taken, and in lease mode, in which the jobs' transaction begins later. `is_full`: nothing was
    claimed, because as many jobs of the queue run as may at once. `is_cut`: fewer were claimed than requested,
    and more may wait. `look`: what else the claim found. `extras`: the names of `EXTRAS` that at least one of the jobs
    has; checks for the others are left out.
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
        """Return True if more jobs of the sort may wait, if the claim took so many, those that it moved included."""
        return taken > 0 if self.request.script.takes_firsts else self.is_cut or taken >= self.request.limit


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """A claim of up to `limit` jobs of a queue, of those after `cursor` only, and the savepoints after it.

    Args:
        cursor: A place in the order of the script; None for the start.
        sort: The sort of jobs that `script` claims; `alike` are the claims that take jobs of the queue in the same way.
        timeout_seconds: The longest deadline of the queue's handlers. It does not hold for the claim itself, which
            may have far to walk and would never succeed. None for the settings of the role and the database.
        server: The server session that claims, and knows the jobs' transaction.
        clock: The clock of the jobs' `claimed_at`.
        asked_at: When the claim was requested (monotonic).
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
        """Append the claim, for a transaction that has done nothing but settle jobs; in lease mode it ends with COMMIT.

        Args:
            begins: Begin the transaction: the claim follows a COMMIT.
        """
        claim, parts = self.script.for_limit(self.limit), script.parts
        own = [*_BEGUN, *claim.parts(self.limit, self.cursor, self.server)]
        if begins:
            parts += [_BEGIN, *own]
        else:
            # Results that are settled in the same transaction have made some of the settings.
            parts += [part for part in own if part not in parts]
        if claim.leased:
            parts.append(("claim", "COMMIT"))
        else:
            settings = local_timeouts(self.timeout_seconds) or (TIMED_AGAIN,)
            script.add("settings", *settings, f"SAVEPOINT {self.savepoint}", f"SAVEPOINT {self.savepoint}_inner")

    def clearing(self) -> list[tuple[str, str]]:
        """Statements that lock what the claim would pick, and return the ids."""
        return self.script.clearing(self.limit, self.cursor)

    def failed(self, error: BaseException) -> bool:
        """Return True if the claim failed for how it was sent, so that another try may succeed in a new transaction."""
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
        # One row without a job, or a row for each.
        taken = rows if rows and rows[0][1] is not None else ()
        if len(taken) > self.limit:
            raise AssertionError(f"a claim took {len(taken)} jobs where {self.limit} were asked for")
        jobs, extras, now = (
            list[Job](),
            set[str](),
            (datetime.fromtimestamp(time.time() + self.clock.ahead_seconds, UTC),),
        )
        for row in taken:
            # The columns of RETURNED, in order, the token, and the time. Added: unpacking both would make a list first.
            job = _JOB(*(row[1:_END_OF_JOB] + now))
            jobs.append(job)
            if (found := extras_of(job)) != NO_EXTRAS:
                extras.update(name for name, value in zip(EXTRAS, found, strict=True) if value is not None)
        if len(jobs) > 1:
            # RETURNING has no order.
            jobs.sort(key=attrgetter("seq") if self.script.by_seq else _place_in_queue)
        transaction = None
        if jobs and not self.script.leased:
            xid, pid = rows[0][_END_OF_JOB:]
            transaction = ClaimTransaction(
                self.savepoint, f"{self.savepoint}_inner", cast("str", xid), cast("int", pid)
            )
        # Under a lease, the number of jobs at which the claim ended early, if it may have done so.
        ends = rows[0][_END_OF_JOB:] if rows and self.script.leased else ()
        is_cut = bool(ends) and ends[0] is not None and ends[0] <= len(jobs) < self.limit
        return Claimed(self, tuple(jobs), moved, transaction, is_cut=is_cut, look=look, extras=extras)


def _place_in_queue(job: Job) -> tuple[int, int]:
    return -job.priority, job.seq


def claim(connection: Connection, request: ClaimRequest) -> Claimed:
    """Claim in the connection's transaction."""
    script = Script()
    request.add_to(script)
    answer = script.send(connection)
    if answer.error is not None:
        request.server.roll_back(connection)
    return request.read(answer)


def claim_one(connection: Connection, schema: str, job_id: str) -> Claimed:
    """Claim one job by its id; nothing if it is gone, leased, or held by another transaction."""
    return claim(connection, ClaimRequest(claim_by_id(schema, job_id), 1))


def clear_marks(connection: Connection, schema: str, job_ids: Iterable[UUID]) -> None:
    """Clear these jobs' marks, once committed: their claim was rolled back on purpose, and killed no relay."""
    run_script(connection, marks_cleared(schema, [str(job_id) for job_id in job_ids]))


def forgive(connection: Connection, request: ClaimRequest) -> list[UUID]:
    """Clear the marks of a claim that failed, once committed; return the ids of the jobs that it would have taken.

    No handler ran, and no relay died. If another slot finds the marks before this commits, the jobs run one by one,
    once.
    """
    answer = Script([("settings", UNTIMED), *request.clearing()]).send(connection)
    if answer.error is not None:
        raise answer.error
    return [job_id for (job_id,) in answer.rows["claim"]]
