"""The claim: take waiting jobs out of the table, in the transaction that will hold their effects.

Sent as text, so that claim and savepoint are one string and one round trip. Parsing and planning a claim takes as long
as executing it, so a slot prepares its claims on its connection and executes them by name.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import LiteralString, TypeAlias
from uuid import UUID

from psycopg import sql

from outboxq.statements.limit import count_parts, lock_claims, slot_parts
from outboxq.statements.numbers import next_token, one_more, one_more_attempt
from outboxq.statements.render import compose, named, quote_literal, render

# The order in which `claim.py` reads a row.
RETURNED: tuple[LiteralString, ...] = (
    "id", "queue", "kind", "args::text", "headers::text", "priority", "attempt", "max_attempts", "crashes", "parked",
    "unique_key", "group_key", "errors::text", "run_at", "created_at", "seq", "expires_at", "batch_id",
)  # fmt: skip
# The attempt includes the one that begins here.
_ATTEMPT: LiteralString = one_more_attempt("claimed.attempt")
COLUMNS: LiteralString = ", ".join(_ATTEMPT if column == "attempt" else f"claimed.{column}" for column in RETURNED)

# Which transaction this is, and in which backend: enough to ask later what became of it, or to end it.
ANCHOR = "pg_catalog.pg_current_xact_id()::text, pg_catalog.pg_backend_pid()"

# The id, widened to 64 bits by its distance from the next id, modulo 2^32.
_XID: LiteralString = "(next_xid - distance)::text::xid8"


def _of_last_transaction(known: LiteralString, unknown: LiteralString) -> LiteralString:
    """A condition on the transaction that last deleted or locked this version of the row; false if there is none.

    `unknown`: of an id that is not less than the next one: that transaction has only begun, or it is a multixact.
    """
    return f"""\
CASE WHEN job.xmax = '0'::xid THEN false ELSE (
    SELECT CASE WHEN distance BETWEEN 1 AND 2147483647 AND distance < next_xid - 2
      THEN {known} ELSE {unknown} END
    FROM (SELECT next_xid, (next_xid - job.xmax::text::bigint) & 4294967295 AS distance
      FROM (SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint AS next_xid) AS now
    ) AS widened
  ) END"""


# Whether it was aborted: a claim that died. A hint, never a count: any lock that was rolled back reads the same, and so
# may a multixact's number.
DIED = _of_last_transaction(f"coalesce(pg_catalog.pg_xact_status({_XID}) = 'aborted', false)", "false")
# Whether it may have claimed the job, and not given it back: it goes on, or this statement's snapshot is older than its
# end. Its status is that of the moment, also of a savepoint's id, which no snapshot lists.
HELD = _of_last_transaction(
    f"coalesce(pg_catalog.pg_xact_status({_XID}) = 'in progress', false) "
    f"OR NOT pg_catalog.pg_visible_in_snapshot({_XID}, pg_catalog.pg_current_snapshot())",
    "true",
)

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
_ORDERED = """ AND paused_at IS NOT NULL)
  ORDER BY {order}
  LIMIT """

BY_PRIORITY: LiteralString = "(-priority), seq"

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


# For a queue with a limit: the claim takes jobs if there is room for them, and counts -1 moved jobs if there is none.
_IF_ROOM: LiteralString = " AND EXISTS (SELECT FROM room)"
_LIMITED_TRANSACTION = _TRANSACTION.replace(
    "SELECT count.moved,", "SELECT CASE WHEN EXISTS (SELECT FROM room) THEN count.moved ELSE -1 END,"
)
_LIMITED_LEASE = _LEASE.replace(
    "SELECT 0, claimed.* FROM claimed",
    "SELECT CASE WHEN EXISTS (SELECT FROM room) THEN 0 ELSE -1 END, claimed.* "
    "FROM (SELECT true) AS one LEFT JOIN claimed ON true",
)


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
class Room:
    """What the claim of a queue with a limit has in place of the parts that do not look at the limit.

    Args:
        head: The CTE `room`, cut at the queue's name and at the limit.
        parts: Those of `ClaimScript`, which look at `room`; if it is empty, the number of moved jobs is -1.
        lock: Statements to go in front of the claim, or none.
        most: The limit.
    """

    head: tuple[str, str, str]
    parts: tuple[str, str, str, str, str]
    lock: tuple[str, ...]
    most: int


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
        room: If the queue has a limit: then the claims that run jobs keep it.
    """

    parts: tuple[str, str, str, str, str]
    queue: str
    is_keyed: bool = False
    leased: bool = False
    room: Room | None = None

    def text(self, limit: int, cursor: Cursor | None = None) -> str:
        """The claim of up to `limit` jobs, of those behind `cursor` only."""
        return "; ".join(statement for _, statement in self.statements(limit, cursor))

    def statements(self, limit: int, cursor: Cursor | None = None) -> list[tuple[str, str]]:
        """The same as single statements, each with its owner; "claim" has the jobs."""
        start = _start(*cursor.key) if cursor else ""
        if (room := self.room) is None:
            return [("claim", _text(self.parts, self.queue, start, limit))]
        before, between, behind = room.head
        head = f"WITH {before}{self.queue}{between}{int(room.most)}{behind}, "
        claim = head + _text(room.parts, self.queue, start, limit)
        return [*(("lock", statement) for statement in room.lock), ("claim", claim)]

    def one(self, job_id: UUID) -> str:
        """The same claim for one job, which is not run; no row if the claim may not take it.

        Index: the primary key, or the claim's.
        """
        return _text(self.parts, self.queue, f" AND id = '{job_id}'", 1)

    def clearing(self, limit: int, cursor: Cursor | None = None) -> str:
        """Lock what the same claim would pick, so that a COMMIT overwrites the marks in these rows; returns the ids.

        Index, locks and bound are those of the claim.
        """
        return _text((*self.parts[:-1], _CLEARING), self.queue, _start(*cursor.key) if cursor else "", limit)

    def prepared(self, limit: int, *, behind: bool) -> "PreparedClaim":
        """The same claim as a prepared statement; with `behind`, each execution is given a cursor."""
        if (room := self.room) is None:
            return PreparedClaim(*_prepared(self.parts, limit, behind), self.queue)
        return PreparedClaim(*_prepared_with_room(room.head, room.parts, limit, behind), self.queue, room)


def _text(parts: tuple[str, ...], queue: str, start: str, limit: int) -> str:
    picked, eligible, not_paused, limited, action = parts
    # The limit is in the text, so that the planner knows how few rows are wanted.
    return f"{picked}{queue}{eligible}{start}{not_paused}{queue}{limited}{int(limit)}{action}"


# A few entries for each limit.
@lru_cache(1024)
def _prepared(parts: tuple[str, ...], limit: int, behind: bool) -> tuple[str, str]:
    text = _text(parts, "$1", _start("$2", "$3") if behind else "", limit)
    return named(text, f"text{', int, bigint' if behind else ''}")


@lru_cache(1024)
def _prepared_with_room(
    head: tuple[str, str, str], parts: tuple[str, ...], limit: int, behind: bool
) -> tuple[str, str]:
    before, between, within = head
    text = _text(parts, "$1", _start("$3", "$4") if behind else "", limit)
    return named(f"WITH {before}$1{between}$2{within}, {text}", f"text, int{', int, bigint' if behind else ''}")


@dataclass(frozen=True, slots=True)
class PreparedClaim:
    """A prepared claim: its name on a connection, its PREPARE statement, and the queue and limit to execute it for."""

    name: str
    definition: str
    queue: str
    room: Room | None = None

    def statements(self, cursor: Cursor | None) -> list[tuple[str, str]]:
        """The statements that execute the claim by its index, whatever the table's statistics are, with their owners.

        Until the transaction ends the planner has the settings of role and database, and no SET of the session's.
        """
        lock, arguments = ((), self.queue) if self.room is None else (self.room.lock, f"{self.queue}, {self.room.most}")
        if cursor:
            arguments = "{}, {}, {}".format(arguments, *cursor.key)
        claim = ("claim", f"EXECUTE {self.name}({arguments})")
        return [*(("lock", statement) for statement in lock), *_BY_INDEX, claim, *_AS_EVERYWHERE]


# A prepared claim is planned once, perhaps while the table is empty. With sorts and sequential scans off, the planner
# can choose nothing but a walk of the claim's own index, and of the primary key's.
_TOGGLES = ("enable_sort", "enable_seqscan")
_BY_INDEX = [
    ("settings", "SET LOCAL plan_cache_mode = force_generic_plan"),
    *(("settings", f"SET LOCAL {name} = off") for name in _TOGGLES),
]
_AS_EVERYWHERE = [("settings", f"SET LOCAL {name} TO DEFAULT") for name in ("plan_cache_mode", *_TOGGLES)]


def _start(priority: object, seq: object) -> str:
    # A row comparison in the index's own terms bounds the walk: (-priority), never priority DESC.
    return f" AND ((-priority), seq) > ({priority}, {seq})"


class ClaimStatements:
    """The claims of one queue.

    Index: ready jobs by job_ready, due ones by job_scheduled, suspects by job_suspect.

    Args:
        owner: The relay's lease; None if only transaction mode is asked for.
        most: The limit of jobs of the queue that run at a time.
        counts_leases: The limit is kept by counting leased jobs, and not by slots: the queue is in lease mode. Of
            these claims each takes one job.
    """

    def __init__(
        self,
        schema: str,
        queue: str,
        owner: UUID | None = None,
        *,
        most: int | None = None,
        counts_leases: bool = False,
    ) -> None:
        name = quote_literal(queue)
        self.most = most

        def script(owner: UUID | None, sort: _Sort, *, is_keyed: bool = False, crashed: bool = False) -> ClaimScript:
            parts, room = _parts(schema, owner, *sort, crashed=crashed), None
            if most is not None:
                head = count_parts(schema) if counts_leases else slot_parts(schema)
                lock = lock_claims(schema, queue) if counts_leases else ()
                room = Room(head, _parts(schema, owner, *sort, crashed=crashed, limited=True), lock, most)
            return ClaimScript(parts, name, is_keyed, owner is not None, room)

        self.ready = script(None, _READY, is_keyed=True)
        self.due = script(None, _DUE)
        if owner is not None:
            self.lease_ready = script(owner, _READY, is_keyed=True)
            self.lease_due = script(owner, _DUE)
            self.lease_suspect = script(owner, _SUSPECT, crashed=True)


# What is eligible, and in which order.
_Sort: TypeAlias = tuple[LiteralString, LiteralString]
# Index job_ready (queue, (-priority), seq) WHERE state = 'ready': walked in exactly this order.
_READY: _Sort = ("state = 'ready'", BY_PRIORITY)
# Index job_scheduled (queue, run_at) WHERE state = 'scheduled'. statement_timestamp(), unlike clock_timestamp(), is
# stable and can bound the index.
_DUE: _Sort = (
    "state = 'scheduled' AND run_at <= pg_catalog.statement_timestamp()",
    "run_at",
)
_ALIVE: LiteralString = (
    " AND EXISTS (SELECT FROM {relay} WHERE id = {owner} AND alive_until > pg_catalog.clock_timestamp())"
)
# Index job_suspect (queue, seq) WHERE state = 'suspect'.
_SUSPECT: _Sort = ("state = 'suspect'", "seq")


@lru_cache(256)
def _parts(
    schema: str,
    owner: UUID | None,
    eligible: LiteralString,
    order: LiteralString,
    *,
    crashed: bool = False,
    limited: bool = False,
) -> tuple[str, str, str, str, str]:
    leased = owner is not None
    # A relay whose lease ran out, because it was stopped or cut off, claims nothing: others would reap it at once.
    alive: LiteralString = _ALIVE if leased else ""
    also: LiteralString = "" if leased else f", {DIED} AS died"
    picked = render(schema, _PICKED.removeprefix("WITH ") if limited else _PICKED, also=sql.SQL(also))
    room: LiteralString = _IF_ROOM if limited else ""
    wanted = render(schema, _ELIGIBLE, eligible=compose(schema, eligible + alive + room, owner=owner))
    ordered = render(schema, _ORDERED, order=sql.SQL(order))
    leasing, deleting = (_LIMITED_LEASE, _LIMITED_TRANSACTION) if limited else (_LEASE, _TRANSACTION)
    action = _deleting(schema, deleting) if owner is None else _leasing(schema, leasing, owner, crashed=crashed)
    return picked, wanted, render(schema, _NOT_PAUSED), ordered, action


def _deleting(schema: str, deleting: LiteralString = _TRANSACTION) -> str:
    return render(schema, deleting, columns=sql.SQL(COLUMNS), anchor=sql.SQL(ANCHOR))


def _leasing(schema: str, leasing: LiteralString, owner: UUID, *, crashed: bool) -> str:
    return render(
        schema,
        leasing,
        owner=owner,
        token=sql.SQL(next_token("lease_token")),
        attempt=sql.SQL(one_more_attempt("attempt")),
        crashes=sql.SQL(one_more("crashes") if crashed else "crashes"),
        columns=sql.SQL(counted_columns(crashed=crashed)),
    )


def counted_columns(*, crashed: bool) -> LiteralString:
    """The columns that a claim under a lease returns: it has counted the attempt, and for a suspect a crash."""
    columns = COLUMNS.replace(_ATTEMPT, "claimed.attempt")
    return columns.replace("claimed.crashes", "claimed.crashes - 1") if crashed else columns


def claim_by_id(schema: str, job_id: str) -> ClaimScript:
    """Claim one job by its id; no row if it is gone, or another transaction or a lease holds it."""
    picked: LiteralString = (
        "WITH picked AS MATERIALIZED (SELECT id, false AS died FROM {job} WHERE id = {id} "
        "AND state NOT IN ('leased', 'group_leased') LIMIT "
    )
    return ClaimScript((render(schema, picked, id=job_id), "", "", "", _deleting(schema)), "")
