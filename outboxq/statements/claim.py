"""The claim: take waiting jobs out of the table, in the transaction that will hold their effects.

Sent as text, so that claim and savepoint are one string and one round trip. Parsing and planning a claim takes as long
as executing it, so a slot prepares its claims on its connection and executes them by name.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import LiteralString
from uuid import UUID

from psycopg import sql

from outboxq.statements.numbers import next_token, one_more, one_more_attempt
from outboxq.statements.render import compose, quote_literal, render

# The order in which `claim.py` reads a row.
RETURNED: tuple[LiteralString, ...] = (
    "id", "queue", "kind", "args::text", "headers::text", "priority", "attempt", "max_attempts", "crashes", "parked",
    "unique_key", "group_key", "errors::text", "run_at", "created_at", "seq",
)  # fmt: skip
# The attempt includes the one that begins here.
_ATTEMPT: LiteralString = one_more_attempt("claimed.attempt")
_COLUMNS: LiteralString = ", ".join(_ATTEMPT if column == "attempt" else f"claimed.{column}" for column in RETURNED)

# Which transaction this is, and in which backend: enough to ask later what became of it, or to end it.
ANCHOR = "pg_catalog.pg_current_xact_id()::text, pg_catalog.pg_backend_pid()"

# Whether the transaction that last deleted or locked this version of the row was aborted: a claim that died. Its id is
# widened to 64 bits by its distance from the next id, modulo 2^32; an id that is not less than the next is in progress,
# or a multixact. A hint, never a count: any lock that was rolled back reads the same, and so may a multixact's number.
_DIED = """\
CASE WHEN job.xmax = '0'::xid THEN false ELSE (
    SELECT CASE WHEN distance BETWEEN 1 AND 2147483647 AND distance < next_xid - 2
      THEN coalesce(pg_catalog.pg_xact_status((next_xid - distance)::text::xid8) = 'aborted', false) ELSE false END
    FROM (SELECT next_xid, (next_xid - job.xmax::text::bigint) & 4294967295 AS distance
      FROM (SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint AS next_xid) AS now
    ) AS widened
  ) END"""

# MATERIALIZED: a bare `id IN (SELECT ... LIMIT ...)` may be planned as a join whose limited side is run again for each
# row of the other, and then takes more than it asked for. Every eligibility test stands inside.
# Locks: the picked jobs, skipping those that another transaction holds. READ COMMITTED rechecks `picked` against the
# newest version of a row, so a job that was finished a moment ago is passed over. The parts behind find the jobs by an
# array of their keys: a join, planned while the table was empty, may walk the whole table.
_PICKED = """\
WITH picked AS MATERIALIZED (
  SELECT id{also} FROM {job} AS job
  WHERE queue = """
_ELIGIBLE = """ AND {eligible}"""
_NOT_PAUSED = """
    AND NOT EXISTS (SELECT FROM {queue_table} WHERE name = """
_LIMITED = """ AND paused_at IS NOT NULL)
  ORDER BY {order}
  LIMIT """

_BY_PRIORITY: LiteralString = "(-priority), seq"

# The left side has one row, so that the count is returned even if nothing was claimed.
_TRANSACTION = """
  FOR UPDATE SKIP LOCKED
), moved AS (
  UPDATE {job} AS job SET state = 'suspect' WHERE id = ANY (ARRAY(SELECT id FROM picked WHERE died)) RETURNING id
), claimed AS (
  DELETE FROM {job} AS claimed WHERE id = ANY (ARRAY(SELECT id FROM picked WHERE NOT died))
  RETURNING {columns}, NULL::bigint AS lease_token, {anchor}
)
SELECT count.moved, claimed.*
FROM (SELECT pg_catalog.count(*) AS moved FROM moved) AS count LEFT JOIN claimed ON true"""

_CLEARING = """
  FOR UPDATE SKIP LOCKED
)
SELECT id FROM picked"""

# The claim counts the attempt, and for a suspect a crash; it returns the number of crashes before the claim.
_LEASE = """
  FOR UPDATE SKIP LOCKED
), claimed AS (
  UPDATE {job} AS claimed SET state = 'leased', lease_owner = {owner}, lease_token = {token}, attempt = {attempt},
    crashes = {crashes}
  WHERE id = ANY (ARRAY(SELECT id FROM picked))
  RETURNING {columns}, claimed.lease_token
)
SELECT 0, claimed.* FROM claimed"""


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the order of the ready jobs: that of the last one that was claimed."""

    priority: int
    seq: int

    @property
    def key(self) -> tuple[int, int]:
        """The place in the index."""
        return -int(self.priority), int(self.seq)


@dataclass(frozen=True, slots=True)
class ClaimScript:
    """The claim of one sort of jobs of a queue.

    Args:
        parts: The claim's text, cut at the queue's name (twice), the start and the limit. The same for all queues of
            a relay, so that a connection prepares no more claims if there are more queues.
        queue: The queue's name, as a literal.
        is_keyed: Whether the claim may start behind a cursor, so that it need not walk over rows that were claimed
            before and are not vacuumed yet.
        leased: Whether the claim gives jobs a lease instead of deleting their rows.
    """

    parts: tuple[str, str, str, str, str]
    queue: str
    is_keyed: bool = False
    leased: bool = False

    def text(self, limit: int, cursor: Cursor | None = None) -> str:
        """The claim of up to `limit` jobs, of those behind `cursor` only."""
        return _text(self.parts, self.queue, _start(*cursor.key) if cursor else "", limit)

    def one(self, job_id: UUID) -> str:
        """The same claim for one job; no row if the claim may not take it. Index: the primary key, or the claim's."""
        return _text(self.parts, self.queue, f" AND id = '{job_id}'", 1)

    def clearing(self, limit: int, cursor: Cursor | None = None) -> str:
        """Lock what the same claim would pick, so that a COMMIT overwrites the marks in these rows; returns the ids.

        Index, locks and bound are those of the claim.
        """
        return _text((*self.parts[:-1], _CLEARING), self.queue, _start(*cursor.key) if cursor else "", limit)

    def prepared(self, limit: int, *, behind: bool) -> "PreparedClaim":
        """The same claim as a prepared statement; with `behind`, each execution is given a cursor."""
        return PreparedClaim(*_prepared(self.parts, limit, behind), self.queue)


def _text(parts: tuple[str, ...], queue: str, start: str, limit: int) -> str:
    picked, eligible, not_paused, limited, action = parts
    # The limit is in the text, so that the planner knows how few rows are wanted.
    return f"{picked}{queue}{eligible}{start}{not_paused}{queue}{limited}{int(limit)}{action}"


# A few entries for each limit.
@lru_cache(1024)
def _prepared(parts: tuple[str, ...], limit: int, behind: bool) -> tuple[str, str]:
    text = _text(parts, "$1", _start("$2", "$3") if behind else "", limit)
    # The name is a hash of the text: if a pooler shows us another client's statement of this name, it is the same one.
    name = f"outboxq_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return name, f"PREPARE {name} (text{', int, bigint' if behind else ''}) AS {text}"


@dataclass(frozen=True, slots=True)
class PreparedClaim:
    """A prepared claim: its name on a connection, its PREPARE statement, and the queue to execute it for."""

    name: str
    definition: str
    queue: str

    def execution(self, cursor: Cursor | None) -> str:
        """The statements that execute the claim by its index, whatever the table's statistics are.

        Until the transaction ends the planner has the settings of role and database, and no SET of the session's.
        """
        arguments = "{}, {}, {}".format(self.queue, *cursor.key) if cursor else self.queue
        return f"{_BY_INDEX}EXECUTE {self.name}({arguments}); {_AS_EVERYWHERE}"


# A prepared claim is planned once, perhaps while the table is empty. With sorts and sequential scans off, the planner
# can choose nothing but a walk of the claim's own index, and of the primary key's.
_TOGGLES = ("enable_sort", "enable_seqscan")
_BY_INDEX = "SET LOCAL plan_cache_mode = force_generic_plan; " + "".join(f"SET LOCAL {n} = off; " for n in _TOGGLES)
_AS_EVERYWHERE = "SET LOCAL plan_cache_mode TO DEFAULT" + "".join(f"; SET LOCAL {name} TO DEFAULT" for name in _TOGGLES)


def _start(priority: object, seq: object) -> str:
    # A row comparison in the index's own terms bounds the walk: (-priority), never priority DESC.
    return f" AND ((-priority), seq) > ({priority}, {seq})"


class ClaimStatements:
    """The claims of one queue.

    Index: ready jobs by job_ready, due ones by job_scheduled, suspects by job_suspect.

    Args:
        owner: The relay's lease; None if only transaction mode is asked for.
    """

    def __init__(self, schema: str, queue: str, owner: UUID | None = None) -> None:
        name = quote_literal(queue)
        self.ready = ClaimScript(_parts(schema, None, *_READY), name, is_keyed=True)
        self.due = ClaimScript(_parts(schema, None, *_DUE), name)
        if owner is not None:
            self.lease_ready = ClaimScript(_parts(schema, owner, *_READY), name, is_keyed=True, leased=True)
            self.lease_due = ClaimScript(_parts(schema, owner, *_DUE), name, leased=True)
            self.lease_suspect = ClaimScript(_parts(schema, owner, *_SUSPECT, crashed=True), name, leased=True)


# Index job_ready (queue, (-priority), seq) WHERE state = 'ready': walked in exactly this order.
_READY: tuple[LiteralString, LiteralString] = ("state = 'ready'", _BY_PRIORITY)
# Index job_scheduled (queue, run_at) WHERE state = 'scheduled'. statement_timestamp(), unlike clock_timestamp(), is
# stable and can bound the index.
_DUE: tuple[LiteralString, LiteralString] = (
    "state = 'scheduled' AND run_at <= pg_catalog.statement_timestamp()",
    "run_at",
)
_ALIVE: LiteralString = (
    " AND EXISTS (SELECT FROM {relay} WHERE id = {owner} AND alive_until > pg_catalog.clock_timestamp())"
)
# Index job_suspect (queue, seq) WHERE state = 'suspect'.
_SUSPECT: tuple[LiteralString, LiteralString] = ("state = 'suspect'", "seq")


@lru_cache(256)
def _parts(
    schema: str, owner: UUID | None, eligible: LiteralString, order: LiteralString, *, crashed: bool = False
) -> tuple[str, str, str, str, str]:
    leased = owner is not None
    # A relay whose lease ran out, because it was stopped or cut off, claims nothing: others would reap it at once.
    alive: LiteralString = _ALIVE if leased else ""
    also: LiteralString = "" if leased else f", {_DIED} AS died"
    picked = render(schema, _PICKED, also=sql.SQL(also))
    wanted = render(schema, _ELIGIBLE, eligible=compose(schema, eligible + alive, owner=owner))
    limited = render(schema, _LIMITED, order=sql.SQL(order))
    action = _leasing(schema, owner, crashed=crashed) if owner is not None else _deleting(schema)
    return picked, wanted, render(schema, _NOT_PAUSED), limited, action


def _deleting(schema: str) -> str:
    return render(schema, _TRANSACTION, columns=sql.SQL(_COLUMNS), anchor=sql.SQL(ANCHOR))


def _leasing(schema: str, owner: UUID, *, crashed: bool) -> str:
    return render(
        schema,
        _LEASE,
        owner=owner,
        token=sql.SQL(next_token("lease_token")),
        attempt=sql.SQL(one_more_attempt("attempt")),
        crashes=sql.SQL(one_more("crashes") if crashed else "crashes"),
        columns=sql.SQL(_counted(crashed=crashed)),
    )


def _counted(*, crashed: bool) -> LiteralString:
    columns = _COLUMNS.replace(_ATTEMPT, "claimed.attempt")
    return columns.replace("claimed.crashes", "claimed.crashes - 1") if crashed else columns


def claim_by_id(schema: str, job_id: str) -> ClaimScript:
    """Claim one job by its id; no row if it is gone, or another transaction or a lease holds it."""
    picked: LiteralString = (
        "WITH picked AS MATERIALIZED (SELECT id, false AS died FROM {job} WHERE id = {id} AND state <> 'leased' LIMIT "
    )
    return ClaimScript((render(schema, picked, id=job_id), "", "", "", _deleting(schema)), "")


def clear_marks(schema: str, job_ids: list[str]) -> str:
    """Overwrite, at COMMIT, the marks in the rows of jobs whose claim was rolled back on purpose.

    Index: the primary key. Locks: the rows, until the caller's transaction ends; skips rows that others hold already.
    """
    return render(
        schema,
        "SELECT pg_catalog.count(*) FROM (SELECT FROM {job} WHERE id = ANY ({ids}::uuid[]) "
        "AND state IN ('ready', 'scheduled') FOR UPDATE SKIP LOCKED) AS cleared",
        ids=job_ids,
    )


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

    Walks at most `limit` entries of the claim's own index, and locks only what it parks, skipping what others hold.
    Arrays of keys, because a join may compare each with each if statistics know of no such job. The state is compared
    with a subquery, so that the planner finds the keys by the primary key and not by the claim's index.

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
        order=sql.SQL("run_at" if scheduled else _BY_PRIORITY),
        limit=limit,
        known=list(known_kinds),
        parked=sql.SQL(one_more("job.parked")),
        later=sql.SQL(PARKED_UNTIL),
    )


# 5 s, 10 s, 20 s, ... to 5 min. The exponent is bounded on both sides before it is used: a power may underflow, too.
PARKED_UNTIL = (
    "pg_catalog.clock_timestamp() + least(interval '5 minutes', "
    "interval '5 seconds' * pg_catalog.power(2, least(greatest(parked, 0), 6)))"
)
