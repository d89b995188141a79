"""Claim: take waiting jobs out of the table, and set the savepoint behind which they stay claimed.

In transaction mode the delete and the handlers' rows are one transaction: a relay that dies here gives its jobs back by
dying. In lease mode the claim is committed first, and a token fences whoever held it before.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from sqlalchemy import Connection

from outboxq.driver import ScriptResult, run_script
from outboxq.job import Job
from outboxq.statements import claim as statements
from outboxq.statements.claim import ANCHOR, RETURNED, ClaimScript, Cursor, claim_by_id, park_head
from outboxq.statements.session import LOCAL_SETTINGS

PARK_LIMIT = 10_000
_END_OF_JOB = 1 + len(RETURNED) + 1


@dataclass(frozen=True, slots=True)
class Anchor:
    """Which transaction a batch runs in: what to ask the server about it, and which backend holds it.

    Two savepoints lie behind the claim, under names that no handler can guess. Releasing the upper one, the seal,
    proves that the transaction is still the claim's; the lower one stands for as long as it is not committed.
    """

    savepoint: str
    xid: str
    pid: int

    @property
    def seal(self) -> str:
        """The upper savepoint."""
        return _seal(self.savepoint)

    def reset(self) -> str:
        """Back to where the claim ended. Fails where the transaction is not the claim's any more."""
        return f"ROLLBACK TO SAVEPOINT {self.savepoint}; SAVEPOINT {self.seal}"


@dataclass(frozen=True, slots=True)
class Claimed:
    """What one claim took: jobs in the order in which they should run, their `attempt` counted up to include this one.

    `moved` is the number of jobs that were made suspects instead, because an earlier claim of them died. `anchor` is
    None where nothing was taken, and in lease mode, where the jobs' transaction begins later.
    """

    jobs: tuple[Job, ...]
    moved: int
    anchor: Anchor | None


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """A claim of up to `limit` jobs, of those behind `cursor` only, and the savepoints behind it.

    Args:
        settings: What holds for the handlers and not for the claim itself: its deadline is theirs, and a claim that has
            far to walk must not starve by it.
    """

    script: ClaimScript
    limit: int
    cursor: Cursor | None = None
    settings: str = ""
    savepoint: str = field(default_factory=lambda: f"oq_{secrets.token_hex(8)}")

    def text(self) -> str:
        """The statements, for a transaction that has just begun."""
        claim_text = self.script.text(self.limit, self.cursor)
        return f"{LOCAL_SETTINGS}{claim_text}; {self.settings}{_savepoints(self.savepoint)}"

    def read(self, results: Sequence[ScriptResult]) -> Claimed:
        """What it took."""
        rows = next(result.rows for result in results if result.tag.startswith("SELECT"))
        moved = cast("int", rows[0][0]) if rows else 0
        taken = [row for row in rows if row[1] is not None]
        if len(taken) > self.limit:
            raise AssertionError(f"a claim took {len(taken)} jobs where {self.limit} were asked for")
        if self.script.leased or not taken:
            return Claimed(_in_order(taken), moved, None)
        xid, pid = taken[0][_END_OF_JOB:]
        return Claimed(_in_order(taken), moved, Anchor(self.savepoint, cast("str", xid), cast("int", pid)))


def claim(connection: Connection, request: ClaimRequest) -> Claimed:
    """Claim in the connection's transaction."""
    return request.read(run_script(connection, request.text()))


def claim_one(connection: Connection, schema: str, job_id: str) -> Claimed:
    """Claim one job by its id; nothing where it is gone, leased, or held by another transaction."""
    return claim(connection, ClaimRequest(claim_by_id(schema, job_id), 1))


def anchor(connection: Connection, settings: str = "") -> Anchor:
    """Begin the transaction of a leased job."""
    savepoint = f"oq_{secrets.token_hex(8)}"
    results = run_script(connection, f"{settings}SELECT {ANCHOR}; {_savepoints(savepoint)}")
    xid, pid = next(result.rows[0] for result in results if result.tag.startswith("SELECT"))
    return Anchor(savepoint, cast("str", xid), cast("int", pid))


def clear_marks(connection: Connection, schema: str, jobs: Iterable[Job]) -> None:
    """Say, by committing, that these jobs' claim was rolled back on purpose and killed nobody."""
    run_script(connection, statements.clear_marks(schema, [str(job.id) for job in jobs]))


def park_unknown(
    connection: Connection, schema: str, queue: str, known_kinds: tuple[str, ...], limit: int = PARK_LIMIT
) -> int:
    """Park what nobody here can run among the next jobs of a queue, ready and due. Returns how many."""
    scripts = [park_head(schema, queue, state, known_kinds, limit) for state in ("ready", "scheduled")]
    results = run_script(connection, "; ".join(scripts))
    return sum(cast("int", result.rows[0][0]) for result in results)


def _savepoints(savepoint: str) -> str:
    return f"SAVEPOINT {savepoint}; SAVEPOINT {_seal(savepoint)}"


def _seal(savepoint: str) -> str:
    return f"{savepoint}_seal"


def _in_order(rows: Iterable[tuple[object, ...]]) -> tuple[Job, ...]:
    jobs = [Job(*row[1:_END_OF_JOB]) for row in rows]  # type: ignore[arg-type]  # the columns of RETURNED, in order, and the token
    # RETURNING has no order.
    jobs.sort(key=lambda job: (-job.priority, job.seq))
    return tuple(jobs)
