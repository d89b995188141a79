"""The history: relays add counts of jobs to the table `stat`; minutes are summed up in hours, and old rows deleted.

A relay adds its counts several times a minute, as text, on a connection apart from those on which its jobs run.
"""

from collections.abc import Sequence
from typing import LiteralString
from uuid import UUID

from psycopg import sql

from outboxq.database.settings import SET_OURS
from outboxq.statements.render import compose, render

# The history need not wait for the disk: a server crash may undo its last moments. lock_timeout: another relay's
# statement may hold the rows of a minute.
SETTINGS = f"{SET_OURS}SET LOCAL synchronous_commit = off; SET LOCAL lock_timeout = '5s'; "

# The upper bounds of the buckets, in seconds; a last bucket counts all longer times.
BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0,
    43200.0,
)  # fmt: skip
BUCKETS = len(BOUNDS) + 1
OUTCOMES: tuple[LiteralString, ...] = ("done", "retried", "died", "snoozed", "discarded", "crashed", "lost")
_SECONDS: tuple[LiteralString, ...] = ("wait_seconds", "run_seconds")
_SUMS: tuple[LiteralString, ...] = (*OUTCOMES, *_SECONDS)
_HISTOGRAMS: tuple[LiteralString, ...] = ("wait", "run")

# No sum may exceed the table's check or its type: otherwise nothing more could be added to that minute.
_MOST: LiteralString = "1000000000000000"


def _at_most(value: LiteralString, type_: LiteralString) -> LiteralString:
    return f"least({value}, {_MOST})::{type_}"


_ADDED: LiteralString = ", ".join(
    f"{name} = {_at_most(f'total.{name}::numeric + excluded.{name}::numeric', 'bigint')}" for name in OUTCOMES
)
_ADDED += ", " + ", ".join(f"{name} = {_at_most(f'total.{name} + excluded.{name}', 'float8')}" for name in _SECONDS)
_ADDED_BUCKETS: LiteralString = ", ".join(
    f"{name} = ARRAY(SELECT {_at_most('one::numeric + other::numeric', 'bigint')} "
    f"FROM unnest(total.{name}, excluded.{name}) WITH ORDINALITY AS pair (one, other, place) ORDER BY place)"
    for name in _HISTOGRAMS
)
_COLUMNS: LiteralString = ", ".join((*_SUMS, *_HISTOGRAMS))

_REGISTER: LiteralString = """\
INSERT INTO {relay_status} (
  id, host, pid, version, schema_step, state, queues, kinds, slots, busy, listens, running, limits, flush)
SELECT {owner}, {host}, {pid}, {version}, (SELECT pg_catalog.max(step) FROM {migration}), 'starting', {queues}, {kinds},
  {slots}, 0, {listens}, '[]', {limits}, {flush}
ON CONFLICT (id) DO NOTHING"""

# READ COMMITTED: a statement that waited for the row of an earlier try checks the number again, and adds nothing if
# that try was committed. ORDER BY: all relays lock the rows of a minute in one order, so that they do not deadlock.
_FLUSH: LiteralString = """\
WITH mine AS (
  UPDATE {relay_status} SET flush = {flush}, seen_at = pg_catalog.clock_timestamp(), state = {state}, busy = {busy},
    free = {free}, running = {running}
  WHERE id = {owner} AND flush < {flush} RETURNING 1
){adding}
SELECT EXISTS (SELECT FROM mine), EXISTS (SELECT FROM {relay_status} WHERE id = {owner}),
  EXISTS (SELECT FROM {gauge} WHERE at = pg_catalog.date_bin('1 minute', pg_catalog.statement_timestamp(), {origin})),
  extract(epoch FROM pg_catalog.clock_timestamp())::float8"""

_ADDING: LiteralString = """\
, added AS (
  INSERT INTO {stat} AS total (grain, at, queue, kind, {columns})
  SELECT 60, pg_catalog.date_bin('1 minute', pg_catalog.statement_timestamp(), {origin}), queue, kind, {columns}
  FROM (VALUES {rows}) AS given (queue, kind, {columns})
  WHERE EXISTS (SELECT FROM mine)
  ORDER BY queue, kind
  ON CONFLICT (grain, at, queue, kind) DO UPDATE SET {added}
)"""

_ORIGIN = sql.SQL("timestamptz '2000-01-01 00:00:00+00'")


def register(
    schema: str,
    relay: UUID,
    host: str,
    pid: int,
    version: str,
    queues: Sequence[str],
    kinds: Sequence[str],
    slots: int,
    flush: int,
    *,
    listens: bool,
    limits: str,
) -> str:
    """Return SQL that adds the row of a relay to `relay_status`, unless it exists.

    Index: the primary key. Locks: the row.

    Args:
        limits: The limits that its application declares: JSON text of a list of objects, each with the queue's
            name.
        flush: The number of the relay's last flush: `flush_counts` adds only flushes with higher numbers.
    """
    return render(
        schema,
        _REGISTER,
        owner=relay,
        host=host,
        pid=pid,
        version=version,
        queues=_texts(queues),
        kinds=_texts(kinds),
        slots=slots,
        flush=flush,
        listens=listens,
        limits=limits,
    )


def flush_counts(
    schema: str,
    relay: UUID,
    flush: int,
    state: str,
    busy: int,
    free: Sequence[str],
    running: str,
    rows: Sequence[Sequence[object]],
) -> str:
    """Return SQL that writes the relay's state, and adds its counts to the present minute (one "flush").

    Nothing is added if a flush of this number was committed before, so the SQL may be sent again after a lost answer.
    It returns one row with four columns: true if it was added now; true if the relay's row exists; true if this minute
    has gauges; the database's time in seconds since 1970. Index: the primary keys. Locks: the relay's row, then a row
    for each of `rows`, in the order of queues and kinds.

    Args:
        flush: The number of the flush, higher than any before.
        busy: The number of slots that run jobs.
        free: The queues that a free slot could claim from.
        running: The long-running jobs, as a JSON array.
        rows: For each queue and kind its counts: queue, kind, a number for each of `OUTCOMES`, the sums of seconds of
            waiting and running, and the two histograms of these seconds.
    """
    adding = compose(
        schema,
        _ADDING,
        origin=_ORIGIN,
        columns=sql.SQL(_COLUMNS),
        added=sql.SQL(f"{_ADDED}, {_ADDED_BUCKETS}"),
        rows=sql.SQL(", ").join(map(_row, rows)),
    )
    return render(
        schema,
        _FLUSH,
        owner=relay,
        flush=flush,
        state=state,
        busy=busy,
        free=_texts(free),
        running=running,
        adding=adding if rows else sql.SQL(""),
        origin=_ORIGIN,
    )


def unregister(schema: str, relay: UUID) -> str:
    """Return SQL that removes the row of a relay that has ended. Index: the primary key. Locks: the row."""
    return render(schema, "DELETE FROM {relay_status} WHERE id = {owner}", owner=relay)


def _row(values: Sequence[object]) -> sql.Composable:
    queue, kind, *numbers = values
    cells: list[sql.Composable] = [sql.SQL("{}::text").format(queue), sql.SQL("{}::text").format(kind)]
    for number in numbers:
        if isinstance(number, list):
            cells.append(sql.SQL("{}::bigint[]").format(f"{{{','.join(map(str, number))}}}"))
        else:
            cells.append(sql.SQL("{}::float8" if isinstance(number, float) else "{}::bigint").format(number))
    return sql.SQL("({})").format(sql.SQL(", ").join(cells))


def _texts(names: Sequence[str]) -> sql.Composable:
    return sql.SQL("ARRAY[{}]::text[]").format(sql.SQL(", ").join(map(sql.Literal, names)))


_OLDEST_MINUTE: LiteralString = """\
SELECT pg_catalog.date_bin('1 hour', at, {origin})::text FROM {stat}
WHERE grain = 60 AND at > '-infinity'::timestamptz
  AND at < pg_catalog.date_bin('1 hour', pg_catalog.statement_timestamp() - {kept}::interval, {origin})
ORDER BY grain, at LIMIT 1"""

_ROLL_UP: LiteralString = """\
WITH gone AS (
  DELETE FROM {stat} WHERE grain = 60 AND at >= {hour}::timestamptz AND at < {hour}::timestamptz + interval '1 hour'
  RETURNING *
), summed AS (
  SELECT queue, kind, {sums} FROM gone GROUP BY queue, kind
), waits AS (
  SELECT queue, kind, pg_catalog.array_agg(jobs ORDER BY place) AS wait FROM (
    SELECT queue, kind, place, least(pg_catalog.sum(jobs), 1000000000000000)::bigint AS jobs
    FROM gone CROSS JOIN LATERAL pg_catalog.unnest(wait) WITH ORDINALITY AS bucket (jobs, place)
    GROUP BY queue, kind, place) AS buckets
  GROUP BY queue, kind
), runs AS (
  SELECT queue, kind, pg_catalog.array_agg(jobs ORDER BY place) AS run FROM (
    SELECT queue, kind, place, least(pg_catalog.sum(jobs), 1000000000000000)::bigint AS jobs
    FROM gone CROSS JOIN LATERAL pg_catalog.unnest(run) WITH ORDINALITY AS bucket (jobs, place)
    GROUP BY queue, kind, place) AS buckets
  GROUP BY queue, kind
)
INSERT INTO {stat} AS total (grain, at, queue, kind, {columns})
SELECT 3600, {hour}::timestamptz, queue, kind, {columns}
FROM summed JOIN waits USING (queue, kind) JOIN runs USING (queue, kind)
ORDER BY queue, kind
ON CONFLICT (grain, at, queue, kind) DO UPDATE SET {added}"""


def oldest_minute(schema: str, kept: str) -> str:
    """Select the oldest hour, as text, that has rows of minutes and is older than `kept` ("48 hours"), to sum it up.

    Relays do not add to the minutes of such an hour any more. The query returns no row if there is no such hour. Index:
    the primary key; no locks.
    """
    return render(schema, _OLDEST_MINUTE, kept=kept, origin=_ORIGIN)


def roll_up(schema: str, hour: str) -> str:
    """Return SQL that replaces the rows of the minutes of `hour` by rows of the hour, with the sums of their numbers.

    It is one statement, so that each number is either in the minutes or in the hour. Index: the primary key. Locks:
    those rows.
    """
    sums = ", ".join(
        f"{_at_most(f'pg_catalog.sum({name})', 'float8' if name in _SECONDS else 'bigint')} AS {name}" for name in _SUMS
    )
    return render(
        schema,
        _ROLL_UP,
        hour=hour,
        sums=sql.SQL(sums),
        columns=sql.SQL(_COLUMNS),
        added=sql.SQL(f"{_ADDED}, {_ADDED_BUCKETS}"),
    )


_PRUNE_HOURS: LiteralString = """\
WITH old AS MATERIALIZED (
  SELECT grain, at, queue, kind FROM {stat}
  WHERE grain = 3600 AND at < pg_catalog.statement_timestamp() - {kept}::interval
  ORDER BY grain, at LIMIT {limit} FOR UPDATE SKIP LOCKED
), deleted AS (
  DELETE FROM {stat} AS gone USING old
  WHERE gone.grain = old.grain AND gone.at = old.at AND gone.queue = old.queue AND gone.kind = old.kind RETURNING 1
)
SELECT pg_catalog.count(*) FROM deleted"""

_PRUNE_GAUGES: LiteralString = """\
WITH old AS MATERIALIZED (
  SELECT at, queue FROM {gauge} WHERE at < pg_catalog.statement_timestamp() - {kept}::interval
  ORDER BY at LIMIT {limit} FOR UPDATE SKIP LOCKED
), deleted AS (
  DELETE FROM {gauge} AS gone USING old WHERE gone.at = old.at AND gone.queue = old.queue RETURNING 1
)
SELECT pg_catalog.count(*) FROM deleted"""


def prune_hours(schema: str, kept: str, limit: int) -> str:
    """Return SQL that deletes up to `limit` rows of hours older than `kept`: one row, the number of deleted rows.

    Index: the primary key. Locks: the rows, skipping those that another transaction holds.
    """
    return render(schema, _PRUNE_HOURS, kept=kept, limit=limit)


def prune_gauges(schema: str, kept: str, limit: int) -> str:
    """Return SQL that deletes up to `limit` gauges older than `kept`, as `prune_hours` does with rows of hours."""
    return render(schema, _PRUNE_GAUGES, kept=kept, limit=limit)


def prune_relays(schema: str) -> str:
    """Return SQL that deletes the rows of relays that wrote no state for a day.

    Reads the small table `relay_status`; locks rows.
    """
    return render(
        schema,
        "DELETE FROM {relay_status} WHERE seen_at < pg_catalog.statement_timestamp() - interval '1 day'",
    )


_CLAIM_GAUGES: LiteralString = """\
SELECT pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext('outboxq gauges'), pg_catalog.hashtext({of}))
  AND NOT EXISTS (SELECT FROM {gauge}
    WHERE at = pg_catalog.date_bin('1 minute', pg_catalog.statement_timestamp(), {origin}))"""


def is_gauge_due(schema: str) -> str:
    """Select one row: true if the caller is to write this minute's gauges (numbers of jobs by state).

    That is so if they are not written yet, and the caller has got the lock with which only one session writes them.
    Index: the primary key. Locks: an advisory lock, never waited for, to the end of the transaction.
    """
    return render(schema, _CLAIM_GAUGES, of=schema, origin=_ORIGIN)


def is_roll_up_due(schema: str) -> str:
    """Select one row: true if the caller has got the lock with which one session at a time rolls up the history.

    Locks: an advisory lock, never waited for, to the end of the transaction.
    """
    return render(
        schema,
        "SELECT pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext('outboxq history'), "
        "pg_catalog.hashtext({of}))",
        of=schema,
    )


_WRITE_GAUGES: LiteralString = """\
INSERT INTO {gauge} (at, queue, ready, scheduled, due, leased, suspect, dead, exact, oldest_seconds)
SELECT pg_catalog.date_bin('1 minute', pg_catalog.statement_timestamp(), {origin}), given.*
FROM (VALUES {rows}) AS given
ON CONFLICT (at, queue) DO NOTHING"""


def write_gauges(schema: str, gauges: Sequence[Sequence[object]]) -> str:
    """Return SQL that writes the gauges (numbers of jobs by state) of queues for this minute.

    Index: the primary key. Locks: the new rows.

    Args:
        gauges: For each queue its values, in the order of the table's columns after `at`; at least one queue.
    """
    typed = [
        sql.SQL(
            "({}::text, {}::integer, {}::integer, {}::integer, {}::integer, {}::integer, {}::integer, {}, {}::real)"
        ).format(*row)
        for row in gauges
    ]
    return render(schema, _WRITE_GAUGES, origin=_ORIGIN, rows=sql.SQL(", ").join(typed))
