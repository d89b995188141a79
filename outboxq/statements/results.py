"""Results that are waited for: the flags of waiters, the query of jobs' outcomes, and the call to query again.

A waiter takes the flags of its jobs, as shared advisory locks, before it queries. A transaction that ends a job tries
the same locks exclusively, until its COMMIT: if one is refused, a waiter exists, and a notification goes with the
COMMIT.
"""

from collections.abc import Collection
from typing import LiteralString
from uuid import UUID

from outboxq.statements.render import fill, render

# All jobs, as a flag that every waiter holds, and in a notification.
ALL_JOBS = ""
# All sessions share the server's table of locks: a transaction that ends more jobs tries the flag of all.
_FLAGS_TRIED = 64


def result_channel(schema: str) -> str:
    """The channel on which waiters listen, and the class of their flags."""
    return f"outboxq_{schema} result"


def try_result_flags(schema: str, names: Collection[str]) -> str:
    """Try to hold flags, shared: a row for each, with its name and true if it is held now. Never waits.

    False from the time when a transaction that ends the job has tried the flag, late in it, until its end.
    """
    return fill(
        "SELECT name, pg_catalog.pg_try_advisory_lock_shared(pg_catalog.hashtext({channel}), pg_catalog.hashtext(name))"
        " FROM pg_catalog.unnest({names}::text[]) AS wanted (name)",
        channel=result_channel(schema),
        names=sorted(names),
    )


def drop_result_flags(schema: str, names: Collection[str]) -> str:
    """Release flags."""
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
    """Notify the waiters for these jobs, in the transaction that ends them; without waiters there is no notification.

    Never waits, and holds up to 64 advisory locks until the transaction ends. Two jobs whose flags have the same hash,
    and two large transactions, notify for nothing.
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
    """The outcomes of jobs: a row for each, with its id; true if it waits or runs; the outcome and result (JSON text)
    of its finished row; the reason of its dead letter.

    Of a finished row and a dead letter of one id, which a producer chose twice, the later counts. One statement, so
    that a job on its way between tables is seen in one of them. Indexes: the primary keys; no locks.
    """
    return render(schema, _LOOK, ids=list(job_ids))
