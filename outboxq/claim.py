"""Claim: take waiting jobs out of the table, and set the savepoint behind which they stay claimed.

In transaction mode the delete and the handlers' rows are one transaction: a relay that dies here gives its jobs back by
dying. In lease mode the claim is committed first, and a token fences whoever held it before.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from sqlalchemy import Connection

from outboxq.driver import run_script
from outboxq.job import Job
from outboxq.statements import claim as statements
from outboxq.statements.claim import ANCHOR, RETURNED, ClaimScript, claim_by_id, park_head
from outboxq.statements.session import LOCAL_SETTINGS

PARK_LIMIT = 10_000
_END_OF_JOB = 1 + len(RETURNED) + 1


@dataclass(frozen=True, slots=True)
class Anchor:
    """Which transaction a batch runs in: what to ask the server about it, and which backend holds it.

    `savepoint` has a name that no handler can guess: releasing it proves that the transaction is still the claim's.
    """

    savepoint: str
    xid: str
    pid: int


@dataclass(frozen=True, slots=True)
class Claimed:
    """What one claim took: jobs in the order in which they should run, their `attempt` counted up to include this one.

    `moved` is the number of jobs that were made suspects instead, because an earlier claim of them died. `anchor` is
    None where nothing was taken, and in lease mode, where the jobs' transaction begins later.
    """

    jobs: tuple[Job, ...]
    moved: int
    anchor: Anchor | None


def claim(connection: Connection, script: ClaimScript, limit: int, before: str = "", after: str = "") -> Claimed:
    """Run one of `ClaimStatements` in the connection's transaction.

    Args:
        before: Settings to send before it, in the same string.
        after: Settings for what follows it.
    """
    savepoint = _new_savepoint()
    results = run_script(connection, f"{before}{script.text(limit)}; {after}SAVEPOINT {savepoint}")
    rows = next(result.rows for result in results if result.tag.startswith("SELECT"))
    moved = cast("int", rows[0][0]) if rows else 0
    taken = [row for row in rows if row[1] is not None]
    if len(taken) > limit:
        raise AssertionError(f"a claim took {len(taken)} jobs where {limit} were asked for")
    if script.leased or not taken:
        return Claimed(tuple(_in_order(taken)), moved, None)
    xid, pid = taken[0][_END_OF_JOB:]
    return Claimed(tuple(_in_order(taken)), moved, Anchor(savepoint, cast("str", xid), cast("int", pid)))


def claim_one(connection: Connection, schema: str, job_id: str) -> Claimed:
    """Claim one job by its id; nothing where it is gone, leased, or held by another transaction."""
    return claim(connection, claim_by_id(schema, job_id), 1, LOCAL_SETTINGS)


def anchor(connection: Connection, settings: str = "") -> Anchor:
    """Begin the transaction of a leased job."""
    savepoint = _new_savepoint()
    xid, pid = run_script(connection, f"{settings}SELECT {ANCHOR}; SAVEPOINT {savepoint}")[-2].rows[0]
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


def _new_savepoint() -> str:
    return f"oq_{secrets.token_hex(8)}"


def _in_order(rows: Sequence[tuple[object, ...]]) -> list[Job]:
    jobs = [_job(row[1:_END_OF_JOB]) for row in rows]
    jobs.sort(key=lambda job: (-job.priority, job.seq))
    return jobs


def _job(values: Sequence[object]) -> Job:
    job = Job(*values)  # type: ignore[arg-type]  # the columns of RETURNED, in order, and the token
    return replace(job, attempt=job.attempt + 1)
