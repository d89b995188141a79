"""Coalesce: merge waiting jobs into a claimed job with the same coalescing key, which then runs for all of them.

The statements are sent as text, after the claim and before any statement of a handler: their snapshot is newer than the
claim's, and those of the handler's statements are newer still. So the run sees everything that the producers of these
jobs committed with them. A job that another transaction has locked is not merged, and runs by itself.
"""

from collections.abc import Iterable, Sequence
from typing import LiteralString

from psycopg import sql

from outboxq.job import Job
from outboxq.statements.added import added_order, headers_with_order
from outboxq.statements.by_index import AS_EVERYWHERE, BY_INDEX
from outboxq.statements.numbers import one_more_attempt
from outboxq.statements.render import compose, render

# The most jobs that one statement merges; after a full one the next follows at once.
TAKEN_AT_ONCE = 1_000

# The columns that a run takes over from the newest of its jobs, in the order in which they are read.
CONTENT: tuple[LiteralString, ...] = (
    "args", "headers", "attempt", "max_attempts", "errors", "created_at", "expires_at",
)  # fmt: skip
_TEXTS = frozenset({"args", "headers", "errors"})

# A job that has never run and is not due is left alone, because its producer set the time. A job that ran before waits
# for its next attempt, with older arguments than this run's: if it stayed, it would run with them after this run. Its
# attempts show that a job ran; if the last one was not counted, its token does.
IS_TAKEN_ALONG: LiteralString = """\
(state IN ('ready', 'suspect', 'group_waiting', 'group_suspect') OR state IN ('scheduled', 'grouped')
      AND (run_at <= pg_catalog.statement_timestamp() OR attempt > 0 OR lease_token > 0 OR parked > 0))"""
_SIBLINGS: LiteralString = f"""\
siblings AS MATERIALIZED (
  SELECT id, unique_key FROM {{job}} AS job
  WHERE unique_key = ANY ({{keys}}::text[])
    AND {IS_TAKEN_ALONG}
  LIMIT {{limit}} FOR UPDATE SKIP LOCKED
)"""
# The newest job of a key is the one added last, which no clock shows. `seq` alone does not show it either: a postponed
# job may have another job's content. An aggregate: a sort may get such a high cost that the statement would be
# compiled.
_NEWEST: LiteralString = f"""\
newest AS MATERIALIZED (
  SELECT unique_key, pg_catalog.array_agg(id) AS ids, pg_catalog.max(ARRAY[{added_order("gone")}, seq]) AS place
  FROM gone GROUP BY unique_key
)"""
_TAKEN_OVER: dict[str, LiteralString] = {
    "attempt": one_more_attempt("gone.attempt"),
    "headers": headers_with_order("gone"),
}
_RETURNED: LiteralString = ", ".join(
    f"({_TAKEN_OVER.get(name, f'gone.{name}')}){'::text' if name in _TEXTS else ''}" for name in CONTENT
)
_ROWS: LiteralString = """
SELECT newest.unique_key, newest.ids, gone.seq, {returned} FROM newest, gone WHERE gone.seq = newest.place[2]"""

_TAKE_ALONG: LiteralString = (
    "WITH "
    + _SIBLINGS
    + """, gone AS (
  DELETE FROM {job} AS job WHERE id = ANY (ARRAY(SELECT id FROM siblings))
  RETURNING id, unique_key, seq, {stored}
), """
    + _NEWEST
    + _ROWS
)

# `ours`: the other jobs may be deleted only while the lease is ours; otherwise the only run for them may have begun
# before they were added.
_TAKE_ALONG_LEASED: LiteralString = (
    "WITH "
    + _SIBLINGS
    + """, ours AS MATERIALIZED (
  SELECT job.id, job.unique_key, job.headers, job.seq
  FROM {job} AS job, unnest({ids}::uuid[], {tokens}::bigint[]) AS held (id, token)
  WHERE job.id = ANY ({ids}::uuid[]) AND job.id = held.id AND job.lease_token = held.token
    AND job.unique_key = ANY (ARRAY(SELECT unique_key FROM siblings))
  FOR UPDATE OF job SKIP LOCKED
), gone AS (
  DELETE FROM {job} AS job WHERE id = ANY (
    ARRAY(SELECT id FROM siblings WHERE unique_key = ANY (ARRAY(SELECT unique_key FROM ours))))
  RETURNING id, unique_key, seq, {stored}
), """
    + _NEWEST
    + f""", changed AS (
  UPDATE {{job}} AS job SET {{content}}
  FROM newest, gone, ours
  WHERE job.id = ANY (ARRAY(SELECT id FROM ours)) AND job.id = ours.id AND ours.unique_key = newest.unique_key
    AND gone.seq = newest.place[2] AND (newest.place[1], newest.place[2]) > ({added_order("ours")}, ours.seq)
)"""
    + _ROWS
)


def take_along(schema: str, keys: Sequence[str]) -> tuple[str, ...]:
    """Return SQL that deletes up to 1,000 waiting jobs of these keys: the claimed job of each key runs for them too.

    Send it in the transaction of the claim. One of the statements returns a row for each key: the key, the ids of the
    deleted jobs, and `seq` and `CONTENT` (such as the arguments) of the newest one; the others are planner settings.
    Index: job_unique, and the primary key. Locks: the jobs, skipping those that other transactions hold, so it never
    waits.
    """
    return *_render(schema, _TAKE_ALONG, keys), *AS_EVERYWHERE


def take_along_leased(schema: str, jobs: Iterable[Job]) -> tuple[str, ...]:
    """Return SQL that merges up to 1,000 waiting jobs into these leased jobs of the same keys.

    It deletes the waiting jobs, and writes the content of the newest one into the leased row: a relay that runs this
    row again after a crash then uses the newest arguments. Rows, index and locks are those of `take_along`, and the
    leased rows are also locked. A key is left out if its job's lease was lost, or if another transaction has locked the
    leased row.
    """
    held = list(jobs)
    content = ", ".join(f"{name} = {_TAKEN_OVER.get(name, f'gone.{name}')}" for name in CONTENT)
    return _render(
        schema,
        _TAKE_ALONG_LEASED,
        [job.unique_key for job in held],
        ids=[str(job.id) for job in held],
        tokens=[job.lease_token for job in held],
        content=compose(schema, content),
    )


def _render(schema: str, statement: LiteralString, keys: Sequence[str | None], **values: object) -> tuple[str, ...]:
    rendered = render(
        schema,
        statement,
        keys=list(keys),
        limit=TAKEN_AT_ONCE,
        stored=sql.SQL(", ").join(map(sql.Identifier, CONTENT)),
        returned=sql.SQL(_RETURNED),
        **values,
    )
    return *BY_INDEX, rendered
