"""Parking: statements that postpone jobs of unknown kinds, so that relays that know only other kinds get past them.

The module also has statements that overwrite the marks (`xmax`) that a rolled back claim leaves in rows.
"""

from typing import LiteralString

from psycopg import sql

from outboxq.statements.claim import BY_PRIORITY
from outboxq.statements.numbers import one_more
from outboxq.statements.render import render

_UNKNOWN_HEAD: LiteralString = """\
WITH head AS MATERIALIZED (
  SELECT id FROM {job} WHERE queue = {queue} AND state = {state} {due} ORDER BY {order} LIMIT {limit}
), picked AS MATERIALIZED (
  SELECT id FROM {job} AS job
  WHERE id = ANY (ARRAY(SELECT id FROM head)) AND state = (SELECT {state}) AND NOT kind = ANY ({known})
  FOR UPDATE SKIP LOCKED"""
_PARKING: LiteralString = """
), parked AS (
  UPDATE {job} AS job SET state = 'scheduled', parked = {parked}, run_at = {later}
  WHERE id = ANY (ARRAY(SELECT id FROM picked)) RETURNING id
)
SELECT pg_catalog.count(*) FROM parked"""
# If its transaction is committed, this also overwrites the marks of a failed parking.
_MARKS: LiteralString = """
)
SELECT pg_catalog.count(*) FROM picked"""


def park_head(
    schema: str, queue: str, state: str, known_kinds: tuple[str, ...], limit: int, *, only_marks: bool = False
) -> str:
    """Return SQL that parks (postpones) the jobs of unknown kinds among the first `limit` of a queue and state.

    It returns the number of parked jobs. It walks at most `limit` entries of the claim's own index, and locks only the
    jobs that it parks, skipping those that others hold.

    Args:
        only_marks: True to park no job, and only overwrite the marks in their rows as `clear_marks` does.
    """
    scheduled = state == "scheduled"
    return render(
        schema,
        _UNKNOWN_HEAD + (_MARKS if only_marks else _PARKING),
        queue=queue,
        state=state,
        due=sql.SQL("AND run_at <= pg_catalog.statement_timestamp()" if scheduled else ""),
        order=sql.SQL("run_at" if scheduled else BY_PRIORITY),
        limit=limit,
        known=list(known_kinds),
        parked=sql.SQL(one_more("job.parked")),
        later=sql.SQL(PARKED_UNTIL),
    )


# 5 s, 10 s, 20 s, ... up to 5 min. The exponent is bounded on both sides first, because a power may also underflow.
PARKED_UNTIL = (
    "pg_catalog.clock_timestamp() + least(interval '5 minutes', "
    "interval '5 seconds' * pg_catalog.power(2, least(greatest(parked, 0), 6)))"
)


def clear_marks(schema: str, job_ids: list[str]) -> str:
    """Return SQL that locks these jobs: this overwrites, at COMMIT, the marks of a rolled back claim in their rows.

    A mark is the row's `xmax`, by which a later claim would take the job for one whose relay died; here the claim was
    rolled back intentionally. It returns the number of locked jobs. Index: the primary key. Locks: the rows, until the
    caller's transaction ends; skips rows that others hold.
    """
    return render(
        schema,
        "SELECT pg_catalog.count(*) FROM (SELECT FROM {job} WHERE id = ANY ({ids}::uuid[]) "
        "AND state IN ('ready', 'scheduled', 'grouped') FOR UPDATE SKIP LOCKED) AS cleared",
        ids=job_ids,
    )
