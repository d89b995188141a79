"""Windows: one job of a key runs in each part of the clock of length `every`. Sent as text.

A key's row in `unique_key` holds the end of its window and the job that has it, under the key after a character with
which no other key begins. It lasts for its time, like a unique job's, and is pruned with those.

The window is taken in the transaction that claimed the job, or, under a lease, in one that commits before its handler
begins. So if a relay dies, the window is free again, or belongs to the job that runs again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import LiteralString
from uuid import UUID

from psycopg import sql

from outboxq.job import EVERY_HEADER
from outboxq.statements.added import added_order, headers_with_order
from outboxq.statements.by_index import NO_SCANS, SCANS_AGAIN
from outboxq.statements.render import render

# A check of the table, less the first character.
MAX_KEY_BYTES = 1_023

# `locked`: a transaction whose handler runs for an hour may hold the row of a key. The lock is tried, and never waited
# for; it is held as long as the row. Two keys of one hash: the second job waits for its next window.
# `until` and the condition of the update are of one reading of the clock: a window is taken only if it ends later than
# the last one, whichever version of the row a transaction sees.
# `newest` is of a snapshot older than the lock: a transaction that has the lock is not committed in it, so the job that
# it runs seems to wait.
_TAKE: LiteralString = """\
WITH wanted AS MATERIALIZED (
  SELECT given.key, given.id, clock.now,
    pg_catalog.date_bin(given.every, clock.now, timestamptz 'epoch') + given.every AS until
  FROM unnest({keys}::text[], {ids}::uuid[], {every}::interval[]) AS given (key, id, every)
  CROSS JOIN (SELECT pg_catalog.clock_timestamp() AS now) AS clock
), locked AS MATERIALIZED (
  SELECT key, id, until FROM wanted
  WHERE pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext({locks}), pg_catalog.hashtext(key))
), taken AS (
  INSERT INTO {unique_key} AS held (key, job_id, kept_until)
  SELECT pg_catalog.chr(30) || key, id, until FROM locked
  ON CONFLICT (key) DO UPDATE SET job_id = excluded.job_id, kept_until = greatest(held.kept_until, excluded.kept_until)
  WHERE held.kept_until < excluded.kept_until OR held.job_id = ANY ({claimed}::uuid[])
  RETURNING key
)
SELECT wanted.key, wanted.until, newest.place, newest.created_at, newest.args, newest.headers, newest.max_attempts
FROM wanted LEFT JOIN LATERAL (
  SELECT ARRAY[{added}, job.seq] AS place, job.created_at, job.args::text, ({headers})::text AS headers,
    job.max_attempts
  FROM {job} AS job
  WHERE job.unique_key = wanted.key AND NOT job.id = ANY ({claimed}::uuid[]) AND job.headers->>{header} IS NOT NULL
    AND (job.state IN ('ready', 'leased', 'suspect')
      OR job.state = 'scheduled' AND (job.run_at <= wanted.now OR job.attempt > 0))
  ORDER BY {added} DESC, job.seq DESC LIMIT 1
) AS newest ON true
WHERE NOT EXISTS (SELECT FROM taken WHERE taken.key = pg_catalog.chr(30) || wanted.key)"""


@dataclass(frozen=True, slots=True)
class WantedWindow:
    """A window that a claim wants: for one job of a key whose windows have this length."""

    key: str
    job_id: UUID
    every_microseconds: int


def lock_class(schema: str) -> str:
    """The name of the advisory locks of an installation's windows; its hash is their first key."""
    return f"outboxq_{schema} every"


def take_windows(schema: str, wanted: Sequence[WantedWindow], claimed: Sequence[UUID]) -> str:
    """Take the present windows of these keys, one for each; a key whose window another job has is left out.

    A row for each key that was left out: the key, the end of the present window, and of the newest job of the key that
    waits or runs elsewhere and has `every` too, its place by the order of adding, its `created_at`, `args`, `headers`
    and `max_attempts`, or NULL.

    Index: the primary key, and job_unique for the keys that are left out, whose jobs are all read. Locks: an advisory
    lock and the row of each key that is taken, until the transaction ends. Waits for a pruner that deletes such a row,
    and for no other transaction.

    Args:
        claimed: The jobs of these keys that the claim has: a window of one of them is theirs.
    """
    return (
        f"{NO_SCANS}; "
        + render(
            schema,
            _TAKE,
            keys=[each.key for each in wanted],
            ids=[str(each.job_id) for each in wanted],
            every=[f"{each.every_microseconds} microseconds" for each in wanted],
            claimed=[str(job_id) for job_id in claimed],
            locks=lock_class(schema),
            header=EVERY_HEADER,
            added=sql.SQL(added_order("job")),
            headers=sql.SQL(headers_with_order("job")),
        )
        + f"; {SCANS_AGAIN}"
    )
