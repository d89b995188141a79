"""Statements that settle many jobs of one relay's lease at once, each job only if its row still has the claim's token.

The statements are sent as text. Each finds its jobs by the primary key, in one walk (`NO_SCANS`), and compares them
with the list of ids and tokens (the CTE `oq_held`) by a hash. It finds the values for a row in a map, by the job's id.
Without statistics, a join might read the whole list for each row, or the whole table.

Locks: the jobs. If another transaction has locked a row, the statement waits, or with `free` skips the row. If a relay
that takes jobs back, or an operator's command, has changed a row, that change wins: the row has another token, or is
gone.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import LiteralString
from uuid import UUID

import msgspec

from outboxq.job import Job
from outboxq.statements.added import headers_with_order
from outboxq.statements.numbers import MOST_COUNTED, next_token, one_attempt_less
from outboxq.statements.park import PARKED_UNTIL
from outboxq.statements.render import named, quote_identifier, quote_literal
from outboxq.statements.settle import Bury, PutBack

_MICROSECOND = timedelta(microseconds=1)

_HELD: LiteralString = """\
WITH oq_held AS MATERIALIZED (
  SELECT id, token FROM unnest({ids}::uuid[], {tokens}::bigint[]) AS held (id, token)
)"""
# Within IS TRUE, so that the planner makes no join of it.
_MINE: LiteralString = """job.id = ANY ({ids}::uuid[])
    AND ((job.id, job.lease_token) IN (SELECT held.id, held.token FROM oq_held AS held)) IS TRUE"""
_FREE: LiteralString = (
    """, free AS MATERIALIZED (
  SELECT job.id FROM {job} AS job
  WHERE """
    + _MINE
    + """
  FOR UPDATE OF job SKIP LOCKED
)"""
)
_IS_FREE: LiteralString = "job.id = ANY (ARRAY(SELECT free.id FROM free))"
# By the statement's snapshot: a row that was changed while the statement began still counts as held.
_IS_HELD: LiteralString = """(
  SELECT true FROM {job} AS job WHERE job.id = held.id AND job.lease_token = held.token LIMIT 1
) IS TRUE"""

# Keeps the newest 24 records, and this one. Only users' SQL writes errors that are no array.
_ERRORS: LiteralString = """\
CASE
      WHEN change.record IS NULL THEN job.errors
      ELSE CASE pg_catalog.jsonb_typeof(job.errors)
          WHEN 'array'::text THEN pg_catalog.jsonb_path_query_array(job.errors, '$[last - 23 to last]')
          ELSE '[]'::jsonb
        END || pg_catalog.jsonb_build_array(
          change.record || pg_catalog.jsonb_build_object('at', pg_catalog.clock_timestamp()))
    END"""
_PUT_BACK: LiteralString = (
    """, changed AS (
  UPDATE {job} AS job SET lease_owner = NULL, lease_token = """
    + next_token("job.lease_token")
    + """, (attempt, crashes, parked, run_at, errors, state) = (
    SELECT change.attempt, change.crashes, coalesce(change.parked, 0::smallint),
    CASE
      WHEN change.parked IS NOT NULL THEN """
    + PARKED_UNTIL.replace("parked", "change.parked - 1")
    + """
      WHEN change.delay IS NULL THEN job.run_at
      ELSE least(pg_catalog.clock_timestamp() + change.delay, job.expires_at)
    END,
    """
    + _ERRORS
    + """,
    CASE WHEN change.parked IS NULL AND change.delay IS NULL THEN """
)
_FROM_CHANGE: LiteralString = """
    FROM pg_catalog.jsonb_to_record({changes}::jsonb -> job.id::text) AS change (
      attempt integer, crashes smallint, parked smallint, delay interval, passes boolean, record jsonb)
  )"""
_PUT_BACK_ALONE: LiteralString = (
    _PUT_BACK
    + "'ready' ELSE 'scheduled' END"
    + _FROM_CHANGE
    + ", seq = DEFAULT, headers = "
    + headers_with_order("job")
)
_PUT_BACK_IN_GROUP: LiteralString = (
    _PUT_BACK
    + """'grouped'
      WHEN change.parked IS NULL AND (change.passes OR (
        SELECT queue.max_per_group FROM {queue_table} AS queue WHERE queue.name = job.queue) > 1) THEN 'group_waiting'
      ELSE 'grouped'
    END"""
    + _FROM_CHANGE
)
_BURY: LiteralString = (
    """, buried AS (
  INSERT INTO {dead} (id, queue, kind, args, headers, priority, attempt, max_attempts, crashes, unique_key, group_key,
    errors, reason, created_at, batch_id)
  SELECT CASE WHEN EXISTS (SELECT FROM {dead} AS earlier WHERE earlier.id = job.id
      AND (earlier.queue, earlier.kind) <> (job.queue, job.kind)) THEN pg_catalog.gen_random_uuid() ELSE job.id END,
    job.queue, job.kind, job.args, """
    + headers_with_order("job")
    + """, job.priority, change.attempt, job.max_attempts,
    change.crashes, job.unique_key, job.group_key, """
    + _ERRORS
    + """, change.reason, job.created_at, job.batch_id
  FROM changed AS job CROSS JOIN LATERAL pg_catalog.jsonb_to_record({changes}::jsonb -> job.id::text) AS change (
    attempt integer, crashes smallint, reason text, record jsonb)
  ON CONFLICT (id) DO UPDATE SET queue = excluded.queue, kind = excluded.kind, args = excluded.args,
    headers = excluded.headers, priority = excluded.priority, attempt = excluded.attempt,
    max_attempts = excluded.max_attempts, crashes = excluded.crashes, unique_key = excluded.unique_key,
    group_key = excluded.group_key, errors = excluded.errors, reason = excluded.reason,
    created_at = excluded.created_at, batch_id = excluded.batch_id, died_at = pg_catalog.clock_timestamp()
)"""
)


class _Written(msgspec.Struct, omit_defaults=True, frozen=True, gc=False):
    """The values to write into the row of a job that is put back or becomes a dead letter, as JSON for the statement.

    Attributes:
        attempt, crashes: The numbers to store.
        record: The error to add.
        delay: The time until the job is due, as an SQL interval.
        passes: True if later jobs of its group do not wait for it.
        parked: The number of claims by relays that did not know the job's kind, given only if this was such a claim.
        reason: The reason of the dead letter.
    """

    attempt: int
    crashes: int
    record: msgspec.Raw | None = None
    delay: str | None = None
    passes: bool = False
    parked: int | None = None
    reason: str | None = None


def finish_leased(schema: str, jobs: Iterable[Job], *, free: bool = False, keeping: str = "") -> str:
    """Return SQL that deletes done jobs: a row for each job that it did not delete.

    The row has the job's id, and true if another transaction has locked the job; otherwise the job is gone, or has
    another token.

    Args:
        free: True to skip jobs whose rows are locked. Otherwise the statement waits for these jobs, and no row has
            true.
        keeping: SQL that writes the finished rows of the deleted jobs (`insert_finished` with `gone`).
    """
    kept: LiteralString = ", kept AS (\n{keeping}\n)" if keeping else ""
    return _with_jobs(schema, jobs, _finished(free, kept), keeping=keeping)


@cache
def finishing(schema: str) -> tuple[str, str]:
    """Return the statement that deletes done jobs whose rows are not locked, prepared: its name, and its PREPARE.

    It must be planned once (`PLANNED_ONCE`), because planning takes longer than deleting a job.
    """
    statement = _finished(free=True).format(ids="$1", tokens="$2", job=quote_identifier(schema, "job"))
    return named(statement, "uuid[], bigint[]")


def finish_prepared(schema: str, jobs: Iterable[Job]) -> str:
    """Return the EXECUTE statement that runs the prepared statement of `finishing` with these jobs."""
    name, _ = finishing(schema)
    return _with_jobs(schema, jobs, "EXECUTE {name}({ids}, {tokens})", name=name)


def _finished(free: bool, kept: LiteralString = "") -> LiteralString:
    deleted: LiteralString = ", gone AS (\n  DELETE FROM {job} AS job\n  WHERE "
    return _held(free) + deleted + _mine(free) + "\n  RETURNING job.id\n)" + kept + _left(free, "gone")


def put_back_leased(schema: str, changes: Sequence[PutBack], *, free: bool = True) -> tuple[str, ...]:
    """Return one or two statements that put leased jobs back into their queues, after all waiting ones (a new `seq`).

    Grouped jobs, which keep their places, have a separate statement, which also reads `queue` by its primary key. The
    returned rows and `free` are as in `finish_leased`. The effect on each job is that of `settle.put_back`, or of
    `put_back_parked` if no handler here knows the job's kind.
    """
    alone = [change for change in changes if change.job.group_key is None]
    in_groups = [change for change in changes if change.job.group_key is not None]
    texts = []
    if alone:
        texts.append(_put_back(schema, alone, _PUT_BACK_ALONE, free=free))
    if in_groups:
        texts.append(_put_back(schema, in_groups, _PUT_BACK_IN_GROUP, free=free))
    return tuple(texts)


def _put_back(schema: str, changes: Sequence[PutBack], update: LiteralString, *, free: bool) -> str:
    statement = _held(free) + update + "\n  WHERE " + _mine(free) + "\n  RETURNING job.id\n)" + _left(free, "changed")
    written = {change.job.id: _written_back(change) for change in changes}
    jobs, queue_table = (change.job for change in changes), quote_identifier(schema, "queue")
    return _with_jobs(schema, jobs, statement, changes=_by_id(written), queue_table=queue_table)


def bury_leased(schema: str, changes: Sequence[Bury], *, free: bool = True) -> str:
    """Return SQL that moves leased jobs to the dead letters; rows and `free` are as in `finish_leased`.

    For one job it does the same as `settle.remove` and `insert_dead`: a dead letter with the same id, queue and kind is
    overwritten; if one with this id has another queue or kind, the new one gets another id. Index: also the primary key
    of `dead_job`.
    """
    deleted: LiteralString = ", changed AS (\n  DELETE FROM {job} AS job\n  WHERE "
    statement = _held(free) + deleted + _mine(free) + "\n  RETURNING job.*\n)" + _BURY + _left(free, "changed")
    written = {change.job.id: _buried(change) for change in changes}
    jobs, dead = (change.job for change in changes), quote_identifier(schema, "dead_job")
    return _with_jobs(schema, jobs, statement, changes=_by_id(written), dead=dead)


def release_leased(schema: str, jobs: Iterable[Job], *, free: bool = False) -> str:
    """Return SQL that puts leased jobs whose handlers have not begun back in their places; no attempt is counted.

    It returns no rows. Jobs keep their `seq`, because a new one would put them after all waiting jobs. Relays claim
    from the last claimed job on; at intervals they claim from the start, and then find these jobs. `free` is as in
    `finish_leased`.
    """
    return _with_jobs(
        schema,
        jobs,
        _held(free)
        + """
UPDATE {job} AS job SET state = CASE job.state WHEN 'group_leased' THEN 'grouped' ELSE 'ready' END, attempt = """
        + one_attempt_less("job.attempt")
        + """, lease_owner = NULL,
  lease_token = """
        + next_token("job.lease_token")
        + """
WHERE """
        + _mine(free),
    )


def standing(schema: str, jobs: Iterable[Job]) -> str:
    """Select the ids of those of these jobs whose rows are still in the table, with any token.

    If an answer to COMMIT was lost, the relay learns from it which jobs that COMMIT has ended. Index: the primary key;
    no locks.
    """
    return _with_jobs(schema, jobs, "SELECT id FROM {job} WHERE id = ANY ({ids}::uuid[])")


def _held(free: bool) -> LiteralString:
    return _HELD + _FREE if free else _HELD


def _mine(free: bool) -> LiteralString:
    return _IS_FREE if free else _MINE


def _left(free: bool, changed: LiteralString) -> LiteralString:
    is_held: LiteralString = _IS_HELD if free else "false"
    left: LiteralString = "FROM oq_held AS held WHERE (held.id IN (SELECT changed.id FROM "
    return "\nSELECT held.id, " + is_held + " AS is_held\n" + left + changed + " AS changed)) IS NOT TRUE"


def _written_back(change: PutBack) -> _Written:
    job = change.job
    delay = None if change.delay is None else f"{change.delay // _MICROSECOND} microseconds"
    parked = min(job.parked + 1, MOST_COUNTED) if change.parks else None
    return _Written(change.attempt, job.crashes, _raw(change.record), delay, change.passes, parked)


def _buried(change: Bury) -> _Written:
    return _Written(change.job.attempt, change.job.crashes, _raw(change.record), reason=change.reason)


def _raw(record: str | None) -> msgspec.Raw | None:
    return None if record is None else msgspec.Raw(record.encode())


def _by_id(written: Mapping[UUID, _Written]) -> str:
    return quote_literal(msgspec.json.encode(written).decode())


def _with_jobs(schema: str, jobs: Iterable[Job], statement: LiteralString, **parts: str) -> str:
    # Formatted without quoting, which takes time for a thousand: hexadecimal digits and integers need none.
    ids, tokens = zip(*((job.id.hex, str(int(job.lease_token or 0))) for job in jobs), strict=True)
    table = quote_identifier(schema, "job")
    return statement.format(ids=f"'{{{','.join(ids)}}}'", tokens=f"'{{{','.join(tokens)}}}'", job=table, **parts)
