"""Settling many jobs of one lease at once, each by its own token. Sent as text, with what follows behind it."""

from collections.abc import Iterable

from psycopg import sql

from outboxq.job import Job

_HELD = """\
WITH oq_held AS MATERIALIZED (
  SELECT id, token FROM unnest({ids}::uuid[], {tokens}::bigint[]) AS held (id, token)
)"""


def finish_held(schema: str, jobs: Iterable[Job]) -> str:
    """Delete jobs whose handlers are done; the ids of those that are not under their lease any more, a row each.

    Index: the primary key. Waits for a reaper or an operator who holds a row, and then finds what they left.
    """
    return _format(
        schema,
        jobs,
        """, gone AS (
  DELETE FROM {job} AS job USING oq_held AS held WHERE job.id = held.id AND job.lease_token = held.token
  RETURNING job.id
)
SELECT held.id FROM oq_held AS held WHERE NOT EXISTS (SELECT FROM gone WHERE gone.id = held.id)""",
    )


def give_back_held(schema: str, jobs: Iterable[Job]) -> str:
    """Jobs whose handlers have not begun wait again where they waited, their attempt uncounted; no rows.

    They keep their `seq`: a sweep finds what lies before a cursor, and behind a backlog they would wait for all of it.
    Index and locks: as `finish_held`.
    """
    return _format(
        schema,
        jobs,
        """
UPDATE {job} AS job SET state = 'ready', attempt = greatest(job.attempt - 1, 0), lease_owner = NULL,
  lease_token = job.lease_token + 1
FROM oq_held AS held WHERE job.id = held.id AND job.lease_token = held.token""",
    )


def standing(schema: str, jobs: Iterable[Job]) -> str:
    """The ids of those of these jobs that are in the table, a row each. Index: the primary key; no locks."""
    return _format(schema, jobs, " SELECT job.id FROM {job} AS job JOIN oq_held AS held ON job.id = held.id")


def _format(schema: str, jobs: Iterable[Job], statement: str) -> str:
    # By hand, because there may be a thousand: hexadecimal digits and an integer need no quoting.
    ids, tokens = zip(*((job.id.hex, str(int(job.lease_token or 0))) for job in jobs), strict=True)
    table = sql.Identifier(schema, "job").as_string(None)
    return (_HELD + statement).format(ids=f"'{{{','.join(ids)}}}'", tokens=f"'{{{','.join(tokens)}}}'", job=table)
