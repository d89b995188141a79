"""Waiting for results: SQL for callers that wait until jobs have ended, and for the transactions that end these jobs.

A waiter first locks a shared advisory lock for each job (its "flag"), and then queries if the job has ended. A
transaction that ends a job tries the same lock in exclusive mode, and keeps it until its COMMIT: if it does not get the
lock, a waiter exists, and the transaction sends a notification, upon which the waiter queries again.
"""

from collections.abc import Collection
from typing import LiteralString
from uuid import UUID

from outboxq.statements.render import fill, render

# Represents all jobs: as a flag that every waiter holds, and in a notification.
ALL_JOBS = ""
# All sessions share the server's lock table, so a transaction that ends more jobs than this tries only the flag of all
# jobs.
_FLAGS_TRIED = 64


def result_channel(schema: str) -> str:
    """Return the name of the channel on which waiters for results listen.

    The name's hash is also the first of the two keys of the waiters' advisory locks.
    """
    return f"outboxq_{schema} result"


def try_result_flags(schema: str, names: Collection[str]) -> str:
    """Return SQL with which a waiter for results tries to lock the shared advisory locks ("flags") of its jobs.

    It returns a row for each of `names`, which are jobs' ids, or `ALL_JOBS`: the name, and true if the lock is held
    now. It never waits: a lock is refused while a transaction that ends the job holds it, from late in that transaction
    to its end.
    """
    return fill(
        "SELECT name, pg_catalog.pg_try_advisory_lock_shared(pg_catalog.hashtext({channel}), pg_catalog.hashtext(name))"
        " FROM pg_catalog.unnest({names}::text[]) AS wanted (name)",
        channel=result_channel(schema),
        names=sorted(names),
    )


def drop_result_flags(schema: str, names: Collection[str]) -> str:
    """Return SQL that unlocks the advisory locks of `try_result_flags` for these names, which this session holds."""
    return fill(
        "SELECT pg_catalog.pg_advisory_unlock_shared(pg_catalog.hashtext({channel}), pg_catalog.hashtext(name)) "
        "FROM pg_catalog.unnest({names}::text[]) AS dropped (name)",
        channel=result_channel(schema),
        names=sorted(names),
    )


_TELL: LiteralString = """\
SELECT pg_catalog.pg_notify({channel}, name) FROM pg_catalog.unnest({names}::text[]) AS ended (name)
WHERE NOT pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext({channel}), pg_catalog.hashtext(name))"""


def tell_waiters(schema: str, job_ids: Collection[UUID]) -> str:
    """Return SQL that notifies the waiters for these jobs; a job without a waiter causes no notification.

    Send it in the transaction that ends the jobs. Never waits, and holds up to 64 advisory locks until the transaction
    ends. If two jobs' locks have the same hash, or two transactions end many jobs each, some notifications are not
    needed.
    """
    names = sorted(map(str, job_ids)) if len(job_ids) <= _FLAGS_TRIED else [ALL_JOBS]
    return fill(_TELL, channel=result_channel(schema), names=names)


_LOOK: LiteralString = """\
SELECT wanted.id, waiting.found, ended.outcome, ended.result, ended.reason
FROM pg_catalog.unnest({ids}::uuid[]) AS wanted (id)
LEFT JOIN LATERAL (SELECT true AS found FROM {job} WHERE id = wanted.id LIMIT 1) AS waiting ON true
LEFT JOIN LATERAL (
  SELECT outcome, result::text, NULL AS reason, finished_at AS ended_at FROM {done} WHERE id = wanted.id
  UNION ALL SELECT NULL, NULL, reason, died_at FROM {dead} WHERE id = wanted.id
  ORDER BY ended_at DESC LIMIT 1
) AS ended ON true"""


def look_at_jobs(schema: str, job_ids: Collection[str]) -> str:
    """Select the outcomes of jobs: id, true if it waits or runs, outcome and result if finished, reason if it is dead.

    If a finished row and a dead letter have the same id, which a producer chose twice, the later one counts. It is one
    statement, so that a job that moves between tables is found in one of them. A result is JSON text. Indexes: the
    primary keys; no locks.
    """
    return render(schema, _LOOK, ids=list(job_ids))
