"""Claim: take waiting jobs out of the table, and set the savepoint behind which they stay claimed.

The delete and the handlers' rows are one transaction: a relay that dies here gives its jobs back by dying.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from sqlalchemy import Connection

from outboxq.driver import run_script
from outboxq.job import Job
from outboxq.statements.claim import claim_by_id, park_head

PARK_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class Batch:
    """Jobs that were claimed by one statement.

    `savepoint` has a name that no handler can guess: releasing it proves that the transaction is still the claim's.
    """

    jobs: tuple[Job, ...]
    savepoint: str
    xid: str


def claim(connection: Connection, script: str, limit: int) -> Batch | None:
    """Run one of `ClaimStatements` in the connection's transaction; None where nothing waits.

    The jobs come in the order in which they should run, their `attempt` counted up to include this one.
    """
    savepoint = f"oq_{secrets.token_hex(8)}"
    rows = run_script(connection, f"{script}; SAVEPOINT {savepoint}")[0].rows
    if not rows:
        return None
    if len(rows) > limit:
        raise AssertionError(f"a claim took {len(rows)} jobs where {limit} were asked for")
    return Batch(tuple(_in_order(rows)), savepoint, cast("str", rows[0][-1]))


def claim_one(connection: Connection, schema: str, job_id: str) -> Batch | None:
    """Claim one job by its id; None where it is gone or held by another transaction."""
    return claim(connection, claim_by_id(schema, job_id), 1)


def park_unknown(
    connection: Connection, schema: str, queue: str, known_kinds: tuple[str, ...], limit: int = PARK_LIMIT
) -> int:
    """Park what nobody here can run among the next jobs of a queue, ready and due. Returns how many."""
    scripts = [park_head(schema, queue, state, known_kinds, limit) for state in ("ready", "scheduled")]
    results = run_script(connection, "; ".join(scripts))
    return sum(cast("int", result.rows[0][0]) for result in results)


def _in_order(rows: Sequence[tuple[object, ...]]) -> list[Job]:
    jobs = [Job(*row[:-1]) for row in rows]  # type: ignore[arg-type]  # the columns of RETURNED, in order
    jobs.sort(key=lambda job: (-job.priority, job.seq))
    return [replace(job, attempt=job.attempt + 1) for job in jobs]
