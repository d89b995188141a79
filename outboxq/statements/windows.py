"""Windows: one job of a coalescing key runs in each period ("window") of length `every`. Statements are sent as text.

For each key a row in `unique_key` contains the end of its window and the id of the job that has the window. The key in
that row begins with a character with which no unique job's key begins. The row is kept until the window ends, and
pruned with those of unique jobs.

The window is taken in the transaction that claimed the job or, under a lease, in one that commits before its handler
begins. So if a relay dies, the window is free again, or belongs to the job that will run again.
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

# `locked`: a transaction whose handler runs for an hour may hold the row of a key. The lock is tried without waiting,
# and held as long as the row. If two keys have the same hash, the second job waits for its next window. `until` and the
# condition of the update use one reading of the clock: a window is taken only if it ends later than the last one,
# whichever version of the row a transaction sees. `newest` belongs to a snapshot older than the lock: in it, a
# transaction that has the lock is not committed, so the job that it runs seems to wait.
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
    """A present period of `every` in which a claim wants to run the job `job_id`, as the only job of its key.

    `take_windows` takes the period for the job. `every_microseconds` is the length of the key's periods.
    """

    key: str
    job_id: UUID
    every_microseconds: int


def lock_class(schema: str) -> str:
    """Return the name whose hash is the first of the two keys of this installation's advisory locks for windows."""
    return f"outboxq_{schema} every"


def take_windows(schema: str, wanted: Sequence[WantedWindow], claimed: Sequence[UUID]) -> str:
    """Return SQL that takes, for each of these keys, its present window (period of `every`), unless another job has it.

    It returns a row for each key whose window another job has: the key, the end of the present window, and values of
    the newest job of the key that waits or runs elsewhere and also has `every`: its position in the order of adding,
    its `created_at`, `args`, `headers` and `max_attempts`, or NULL without such a job.

    Index: the primary key, and job_unique for the keys that are left out, whose jobs are all read. Locks: an advisory
    lock and the row of each key that is taken, until the transaction ends. Waits for a pruner that deletes such a row,
    and for no other transaction.

    Args:
        claimed: The jobs of these keys in the claim: a window that one of them has counts as free.
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
