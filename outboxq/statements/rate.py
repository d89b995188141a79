"""The rate of a queue: bounds how many of its jobs begin in a time, by the generic cell rate algorithm.

A relay reserves tokens and commits, then claims as many jobs, so no handler's transaction holds the row. A relay that
dies, or finds fewer jobs, wastes tokens: fewer jobs begin, never more.

`tat` is the theoretical arrival time: the time at which all reserved tokens would have arrived one by one. At most
`burst` tokens are ahead of the present time, in any order of reservations.
"""

from dataclasses import dataclass
from typing import LiteralString

from psycopg import sql

from outboxq.statements.by_index import BY_INDEX
from outboxq.statements.render import render
from outboxq.statements.transaction import UNTIMED

# `waiting`: the first jobs, up to the wanted number, that no transaction runs. A job whose row an open transaction has
# deleted looks as if it waited, and would cost a token each time; its `xmax` shows that. A multixact may have the
# number of a running transaction: then the next reservation finds the job.
_RUNS: LiteralString = "job.xmax = ANY (ARRAY(SELECT transactionid FROM open))"
_WAITING: LiteralString = """\
open AS MATERIALIZED (
  SELECT transactionid FROM pg_catalog.pg_locks WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock' AND granted
), waiting AS MATERIALIZED (
  SELECT FROM (
    (SELECT FROM {job} AS job WHERE queue = {queue} AND state = 'ready' AND NOT {runs}
      ORDER BY (-priority), seq LIMIT {most})
    UNION ALL
    (SELECT FROM {job} AS job WHERE queue = {queue} AND state = 'scheduled'
      AND run_at <= pg_catalog.statement_timestamp() AND NOT {runs} ORDER BY run_at LIMIT {most})
    UNION ALL
    (SELECT FROM {job} AS job WHERE queue = {queue} AND state = 'suspect' AND NOT {runs} ORDER BY seq LIMIT {most})
    UNION ALL
    (SELECT FROM {job} AS job WHERE queue = {queue} AND group_key IS NOT NULL AND state = 'grouped'
      AND run_at <= pg_catalog.statement_timestamp() AND NOT {runs} ORDER BY group_key COLLATE "C", seq LIMIT {most})
    UNION ALL
    (SELECT FROM {job} AS job WHERE queue = {queue} AND state = 'group_waiting'
      AND run_at <= pg_catalog.statement_timestamp() AND NOT {runs} ORDER BY run_at LIMIT {most})
    UNION ALL
    (SELECT FROM {job} AS job WHERE queue = {queue} AND state = 'group_suspect' AND NOT {runs}
      ORDER BY run_at LIMIT {most})
  ) AS found
  WHERE NOT EXISTS (SELECT FROM {queue_table} WHERE name = {queue} AND paused_at IS NOT NULL)
  LIMIT {most}
), asked AS MATERIALIZED (
  SELECT pg_catalog.count(*) AS jobs, least({chunk}, pg_catalog.count(*))::float8 AS least_jobs FROM waiting
)"""
# All times are in microseconds, and rounded up. The time is read after the row is locked. Several tokens are used
# within `keep`, and so count from its end; a single token is used at once. A `tat` that is too far ahead belongs to
# another rate, or to a clock that was set back: then the rate starts afresh, without tokens.
_TAKEN: LiteralString = """\
budget AS MATERIALIZED (
  SELECT rate.tat FROM {rate} AS rate CROSS JOIN asked
  WHERE rate.name = {queue} AND asked.jobs > 0 AND {has_room} AND (
    rate.tat <= pg_catalog.clock_timestamp() + ({depth} - asked.least_jobs * {each}) * interval '1 microsecond'
    OR rate.tat > pg_catalog.clock_timestamp() + ({depth} + 1000000::float8) * interval '1 microsecond')
  FOR UPDATE OF rate
), taken AS MATERIALIZED (
  SELECT now, ahead, CASE WHEN free >= least_jobs THEN least(jobs, free) ELSE 0 END AS tokens
  FROM (
    SELECT now, jobs, least_jobs, ahead, pg_catalog.floor(({depth} - ahead) / {each}) AS free
    FROM (
      SELECT now, jobs, least_jobs, greatest(
        least(extract(epoch FROM tat - now)::float8 * 1000000::float8, {depth}),
        CASE WHEN jobs > 1 THEN {keep} ELSE 0::float8 END) AS ahead
      FROM (SELECT tat, pg_catalog.clock_timestamp() AS now FROM budget) AS locked CROSS JOIN asked
    ) AS measured
  ) AS counted
), moved AS (
  UPDATE {rate} AS rate
  SET tat = taken.now + pg_catalog.ceil(taken.ahead + taken.tokens * {each}) * interval '1 microsecond'
  FROM taken WHERE rate.name = {queue} AND (taken.tokens > 0::float8 OR taken.ahead >= {depth})
)
SELECT asked.jobs, {has_room}, coalesce((SELECT tokens FROM taken), 0)::integer, (
    SELECT (least(greatest(extract(epoch FROM tat - pg_catalog.clock_timestamp())::float8 * 1000000::float8, 0::float8),
      {depth}) + asked.least_jobs * {each} - {depth}) / 1000000::float8
    FROM {rate} WHERE name = {queue})
FROM asked"""
_SETTINGS: LiteralString = "; ".join((*BY_INDEX, "SET LOCAL lock_timeout = '2s'; "))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """A relay's request, for `reserve_tokens`, for tokens of a queue's rate: each is the permission to begin one job.

    Args:
        most: The largest number of tokens to reserve.
        chunk: The smallest number of tokens to reserve; it may be fewer only if fewer jobs wait.
        each_seconds: The time from one token to the next, in seconds.
        burst: The largest number of tokens that may be free at once; enough for `chunk` and the tokens of
            `keep_seconds`.
        keep_seconds: The time in seconds within which the relay must use the tokens, if it reserves several.
    """

    most: int
    chunk: int
    each_seconds: float
    burst: int
    keep_seconds: float


def reserve_tokens(schema: str, queue: str, asked: TokenRequest, room: sql.Composed | None = None) -> str:
    """Return SQL that reserves tokens of a queue's rate if jobs wait and the queue's limit has room, and commits.

    It returns one row: how many jobs wait, up to `asked.most`; true if the limit has room; the number of tokens
    reserved; the seconds until tokens are due, NULL if the queue's rate has no row yet.

    Indexes: those of the claims, and job_group; up to `most` entries each, in addition to those of running jobs. Locks:
    the rate's row to the COMMIT of this string. It waits for other reservations, and fails (55P03) if one of these
    hangs. A place under the limit that is taken as a test for room is released at once.

    Args:
        room: The CTEs of `limit.room`, if the queue has a limit.
    """
    values = {
        "queue": queue,
        "runs": sql.SQL(_RUNS),
        "most": asked.most,
        "chunk": asked.chunk,
        "each": _float8(asked.each_seconds),
        "depth": _float8(asked.burst * asked.each_seconds),
        "keep": _float8(asked.keep_seconds),
        "has_room": sql.SQL("true" if room is None else "EXISTS (SELECT FROM room)"),
    }
    front = "" if room is None else f"{room.as_string(None)}, "
    waiting, taken = render(schema, _WAITING, **values), render(schema, _TAKEN, **values)
    return f"{UNTIMED}; {_SETTINGS}WITH {front}{waiting}, {taken}; COMMIT"


def _float8(seconds: float) -> sql.Composable:
    """Return a time, given in seconds, as an SQL literal of its microseconds in double precision."""
    return sql.Literal(repr(seconds * 1e6)) + sql.SQL("::float8")


def begin_rate(schema: str, queue: str) -> str:
    """Return SQL that adds the row of a queue's rate, with all of its tokens free, unless the row exists.

    A relay sends it if `reserve_tokens` has found no row. Index: the primary key.
    """
    return render(
        schema,
        "INSERT INTO {rate} (name, tat) VALUES ({queue}, pg_catalog.clock_timestamp()) ON CONFLICT (name) DO NOTHING",
        queue=queue,
    )
