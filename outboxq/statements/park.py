"""Park jobs of unknown kinds until later, and overwrite the marks that a claim leaves when it is rolled back."""

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
# If its transaction is committed, this overwrites the marks of a parking that failed.
_MARKS: LiteralString = """
)
SELECT pg_catalog.count(*) FROM picked"""


def park_head(
    schema: str, queue: str, state: str, known_kinds: tuple[str, ...], limit: int, *, only_marks: bool = False
) -> str:
    """Park the jobs of unknown kinds among the first `limit` of a queue, in one statement; returns how many.

    Walks at most `limit` entries of the claim's own index, and locks only the jobs that it parks, skipping those that
    others hold. Arrays of keys, because a join may compare each with each if statistics know of no such job. The state
    is compared with a subquery, so that the planner finds the keys by the primary key and not by the claim's index.

    Args:
        only_marks: Only clear the jobs' marks.
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


# 5 s, 10 s, 20 s, ... to 5 min. The exponent is bounded on both sides first: a power may underflow, too.
PARKED_UNTIL = (
    "pg_catalog.clock_timestamp() + least(interval '5 minutes', "
    "interval '5 seconds' * pg_catalog.power(2, least(greatest(parked, 0), 6)))"
)


def clear_marks(schema: str, job_ids: list[str]) -> str:
    """Overwrite, at COMMIT, the marks in the rows of jobs whose claim was rolled back intentionally.

    Index: the primary key. Locks: the rows, until the caller's transaction ends; skips rows that others hold.
    """
    return render(
        schema,
        "SELECT pg_catalog.count(*) FROM (SELECT FROM {job} WHERE id = ANY ({ids}::uuid[]) "
        "AND state IN ('ready', 'scheduled', 'grouped') FOR UPDATE SKIP LOCKED) AS cleared",
        ids=job_ids,
    )
