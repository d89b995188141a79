"""Settle many jobs of one lease at once, each by its own token. Sent as text, with other statements after it."""

from collections.abc import Iterable
from typing import LiteralString

from outboxq.job import Job
from outboxq.statements.numbers import next_token, one_attempt_less
from outboxq.statements.render import quote_identifier

# `job` also has the keys in its own condition: only joined with the list, the whole table might be read if statistics
# know of no such jobs, or if the list is such a large part of the table that a scan seems cheap.
_LEASED: LiteralString = """\
WITH oq_held AS MATERIALIZED (
  SELECT id, token FROM unnest({ids}::uuid[], {tokens}::bigint[]) AS held (id, token)
)"""
# Only the jobs whose rows no other transaction has locked.
_UNLOCKED: LiteralString = """\
WITH oq_held AS MATERIALIZED (
  SELECT job.id, held.token FROM unnest({ids}::uuid[], {tokens}::bigint[]) AS held (id, token)
  JOIN {job} AS job ON job.id = ANY ({ids}::uuid[]) AND job.id = held.id AND job.lease_token = held.token
  FOR UPDATE OF job SKIP LOCKED
)"""
_MINE: LiteralString = "job.id = ANY ({ids}::uuid[]) AND job.id = held.id AND job.lease_token = held.token"


def finish_leased(schema: str, jobs: Iterable[Job], *, free: bool = False, keeping: str = "") -> str:
    """Delete jobs whose handlers are done; returns the ids of those no longer under their lease.

    Index: the primary key (`NO_SCANS`). Waits for a reaper or an operator's command that has locked a row, and respects
    its change.

    Args:
        free: Leave the jobs whose rows are locked, and return their ids too.
        keeping: Writes the finished rows of the deleted jobs (`insert_finished`, of `gone`).
    """
    kept: LiteralString = ", kept AS (\n{keeping}\n)" if keeping else ""
    return _with_jobs(
        schema,
        jobs,
        (_UNLOCKED if free else _LEASED)
        + """, gone AS (
  DELETE FROM {job} AS job USING oq_held AS held WHERE """
        + _MINE
        + """
  RETURNING job.id
)"""
        + kept
        + """
SELECT held.id FROM pg_catalog.unnest({ids}::uuid[]) AS held (id)
WHERE NOT EXISTS (SELECT FROM gone WHERE gone.id = held.id)""",
        keeping=keeping,
    )


def release_leased(schema: str, jobs: Iterable[Job], *, free: bool = False) -> str:
    """Give back jobs whose handlers have not begun, in their places, their attempt uncounted; no rows.

    They keep their `seq`: a new one would put them after a whole backlog. A sweep finds jobs that are before a cursor.
    Index, locks and `free` are those of `finish_leased`.
    """
    return _with_jobs(
        schema,
        jobs,
        (_UNLOCKED if free else _LEASED)
        + """
UPDATE {job} AS job SET state = CASE job.state WHEN 'group_leased' THEN 'grouped' ELSE 'ready' END, attempt = """
        + one_attempt_less("job.attempt")
        + """, lease_owner = NULL,
  lease_token = """
        + next_token("job.lease_token")
        + """
FROM oq_held AS held WHERE """
        + _MINE,
    )


def standing(schema: str, jobs: Iterable[Job]) -> str:
    """The ids of those of these jobs that are in the table, a row each. Index: the primary key; no locks."""
    return _with_jobs(schema, jobs, "SELECT id FROM {job} WHERE id = ANY ({ids}::uuid[])")


def _with_jobs(schema: str, jobs: Iterable[Job], statement: LiteralString, **parts: str) -> str:
    # Formatted without quotes, which cost time for a thousand: hexadecimal digits and integers need none.
    ids, tokens = zip(*((job.id.hex, str(int(job.lease_token or 0))) for job in jobs), strict=True)
    table = quote_identifier(schema, "job")
    return statement.format(ids=f"'{{{','.join(ids)}}}'", tokens=f"'{{{','.join(tokens)}}}'", job=table, **parts)
