"""The claim: takes waiting jobs out of the table, in the transaction that will hold their effects.

There is one statement for each sort of jobs, mode and kind of limit. Parsing and planning it takes as long as executing
it, so a slot prepares it on its connection and executes it by name; else it is sent as text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import ClassVar, LiteralString, NamedTuple, TypeAlias
from uuid import UUID

from psycopg import sql

from outboxq.database.driver import ServerSession
from outboxq.statements import by_index
from outboxq.statements.limit import lock_claims, room
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

# The transaction and its backend: enough to query its outcome later, or to end it.
ANCHOR = "pg_catalog.pg_current_xact_id()::text, pg_catalog.pg_backend_pid()"

# The id, widened to 64 bits by its distance from the next id, modulo 2^32.
_XID: LiteralString = "(next_xid - distance)::text::xid8"


def _of_last_transaction(known: LiteralString, unknown: LiteralString) -> LiteralString:
    """A condition on the transaction that last deleted or locked this version of the row; false if there is none.

    `unknown`: for an id that is not less than the next one: that transaction has only begun, or it is a multixact.
    """
    return f"""\
CASE WHEN job.xmax = '0'::xid THEN false ELSE (
    SELECT CASE WHEN distance BETWEEN 1 AND 2147483647 AND distance < next_xid - 2
      THEN {known} ELSE {unknown} END
    FROM (SELECT next_xid, (next_xid - job.xmax::text::bigint) & 4294967295 AS distance
      FROM (SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint AS next_xid) AS now
    ) AS widened
  ) END"""


# True if it was aborted: a claim that died. A hint, never a count: any lock that was rolled back reads the same, and so
# may a multixact's number.
DIED = _of_last_transaction(f"coalesce(pg_catalog.pg_xact_status({_XID}) = 'aborted', false)", "false")
# True if it may have claimed the job, and not given it back: it goes on, or this statement's snapshot is older than its
# end. The status is the present one, also of a savepoint's id, which no snapshot lists.
HELD = _of_last_transaction(
    f"coalesce(pg_catalog.pg_xact_status({_XID}) = 'in progress', false) "
    f"OR NOT pg_catalog.pg_visible_in_snapshot({_XID}, pg_catalog.pg_current_snapshot())",
    "true",
)

# MATERIALIZED: a bare `id IN (SELECT ... LIMIT ...)` may be planned as a join whose limited side runs again for each
# row of the other, and then takes more than the limit. Every eligibility test is inside.
# Locks: the picked jobs, skipping those that another transaction holds. READ COMMITTED rechecks `picked` against the
# newest version of a row, so a job that has just finished is skipped. The later parts find the jobs by an array of
# their keys: a join, planned while the table was empty, may walk the whole table.
_WALK: LiteralString = """\
  SELECT id{also} FROM {job} AS job
  WHERE queue = {queue} AND {eligible}
    AND NOT EXISTS (SELECT FROM {queue_table} WHERE name = {queue} AND paused_at IS NOT NULL)
  ORDER BY {order}
  LIMIT {limit}
  FOR UPDATE SKIP LOCKED"""
_PICKED: LiteralString = "WITH {room}picked AS MATERIALIZED (\n"
# Around the walk, whose own limit the planner knows. Each ends the walk, and its locks, at the last job that is taken.
# For a limit that counts leased jobs, at the last one that there is room for.
_FOR_ROOM: tuple[LiteralString, LiteralString] = (
    "SELECT * FROM (\n",
    "\n) AS walked LIMIT coalesce((SELECT free FROM room), 0)",
)
# At the job with which the arguments reach the budget: a row for each kilobyte of a job, and a limit of the rows. The
# arguments of the jobs after it are not even read. A sum over the jobs, in a window, would cost three times as much.
_WITHIN_BUDGET: tuple[LiteralString, LiteralString] = (
    "SELECT id, pg_catalog.generate_series(1, kilobytes) FROM (\n",
    "\n) AS sized LIMIT {budget}",
)
# Begun kilobytes of the text that a claim returns. Small values are not measured, as in the checks of the table.
KILOBYTES: LiteralString = (
    "CASE WHEN pg_catalog.pg_column_size(args) <= 1024 AND pg_catalog.pg_column_compression(args) IS NULL "
    "THEN 1 ELSE pg_catalog.octet_length(args::text) / 1024 + 1 END AS kilobytes"
)
# The budget of one claim under a lease, 4 MB, so that a relay with many slots can hold what it claims for them. It
# holds for claims of more than `FEW` jobs: of fewer it would cost more than 3 % of the claim.
BUDGET_KILOBYTES, FEW = 4_096, 50

BY_PRIORITY: LiteralString = "(-priority), seq"

# The left side has one row, so that the count is returned even if nothing was claimed.
_DELETING: LiteralString = """, moved AS (
  UPDATE {job} AS job SET state = 'suspect' WHERE id = ANY (ARRAY(SELECT id FROM picked WHERE died)) RETURNING id
), claimed AS (
  DELETE FROM {job} AS claimed WHERE id = ANY (ARRAY(SELECT id FROM picked WHERE NOT died))
  RETURNING {columns}, NULL::bigint AS lease_token, {anchor}
)
SELECT {moved}, claimed.*
FROM (SELECT pg_catalog.count(*) AS moved FROM moved) AS count LEFT JOIN claimed ON true"""

# The claim counts the attempt, and for a suspect a crash; it returns the number of crashes before the claim.
_LEASING: LiteralString = """, claimed AS (
  UPDATE {job} AS claimed SET state = 'leased', lease_owner = {owner}, lease_token = {token}, attempt = {attempt},
    crashes = {crashes}
  WHERE id = ANY (ARRAY(SELECT id FROM picked))
  RETURNING {columns}, claimed.lease_token
)
SELECT {moved}, claimed.*{most} FROM (SELECT 0 AS moved) AS count LEFT JOIN claimed ON true"""
_CLEARING = "\nSELECT id FROM picked"

_MOVED: LiteralString = "count.moved"
# For a queue with a limit: the claim takes jobs if there is room, and counts -1 moved jobs if there is none.
_IF_ROOM: LiteralString = " AND EXISTS (SELECT FROM room)"
_MOVED_IF_ROOM: LiteralString = "CASE WHEN EXISTS (SELECT FROM room) THEN count.moved ELSE -1 END"
# The number of jobs at which the claim ended, if it did so before its limit.
_FREE: LiteralString = "(SELECT free FROM room)"
SPENT: LiteralString = "CASE WHEN (SELECT pg_catalog.count(*) FROM picked) >= {budget} THEN 0 END"

# The parameters of a claim, in their order. In its text each is a control character, which no name has.
_TYPES = "text, int, int, bigint, int"
_QUEUE, _LIMIT, _PRIORITY, _SEQ, _MOST, _ID = (sql.SQL(mark) for mark in ("\1", "\2", "\3", "\4", "\5", "\6"))
# As a cursor: the place before every job.
_START = (-32_769, -1)


class Sort(Enum):
    """A sort of jobs that wait in a queue; each has its own claim."""

    READY = auto()
    DUE = auto()
    GROUPED = auto()
    SUSPECT = auto()
    GROUP_SUSPECT = auto()
    # Suspects in lease mode whose relay died once.
    COMPANY = auto()
    GROUP_COMPANY = auto()

    @property
    def is_suspect(self) -> bool:
        """Return True if a job of this sort ran when its relay died: it runs under the lease, alone or in company."""
        return self not in (Sort.READY, Sort.DUE, Sort.GROUPED)


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the order of the ready jobs: that of the last one claimed."""

    priority: int
    seq: int


class ClaimTexts(NamedTuple):
    """The texts of a claim, the same for all queues, with marks for its parameters.

    Attributes:
        claim: The claim.
        clearing: A lock of the jobs that it would pick.
        one: The claim of one job.
        name: The name under which a connection prepares the claim, by `definition`.
    """

    claim: str
    clearing: str = ""
    one: str = ""
    name: str = ""
    definition: str = ""


@dataclass(frozen=True, slots=True)
class ClaimScript:
    """The claim of one sort of jobs of a queue.

    Args:
        queue: The queue's name, as a literal.
        is_keyed: True if the claim may start after a cursor, so that it does not walk over rows that were claimed
            before and are not vacuumed yet.
        leased: True if the claim gives jobs a lease instead of deleting their rows.
        most: The queue's limit, if any: then the claim takes jobs if there is room for them. If the limit is kept by
            counting leased jobs, it takes as many as there is room for.
        lock: Statements before the claim, with their owner, for a limit that is kept by counting leased jobs.
        name: The name under which a connection prepares the claim.
        for_many: The claim of more than `FEW` jobs, which keeps a budget of their arguments. It and a claim that counts
            leased jobs return another column, the last one: the number of jobs at which they ended or less, or NULL.
    """

    # Its jobs run in the order of their priorities. A claim that took fewer than its limit left nothing.
    by_seq: ClassVar[bool] = False
    takes_firsts: ClassVar[bool] = False

    texts: ClaimTexts
    queue: str = ""
    is_keyed: bool = False
    leased: bool = False
    most: int | None = None
    lock: tuple[tuple[str, str], ...] = ()
    name: str = ""
    for_many: "ClaimScript | None" = None

    def for_limit(self, limit: int) -> "ClaimScript":
        """The script that claims up to so many jobs."""
        return self if self.for_many is None or limit <= FEW else self.for_many

    def text(self, limit: int, cursor: Cursor | None = None) -> str:
        """The claim of up to `limit` jobs, only of those after `cursor`."""
        return "; ".join(statement for _, statement in self.statements(limit, cursor))

    def statements(self, limit: int, cursor: Cursor | None = None) -> list[tuple[str, str]]:
        """Single statements of `text`, each with its owner; "claim" returns the jobs."""
        # With literals, the planner knows how few rows are wanted.
        claim = _filled(self.texts.claim, self._arguments(limit, cursor))
        return [*self.lock, ("claim", claim)]

    def parts(self, limit: int, cursor: Cursor | None, server: ServerSession) -> list[tuple[str, str]]:
        """Statements that send the claim: its text, or its execution by name, which always walks its index.

        From then on in the transaction the planner has the settings of role and database, and no SET of the session's;
        under a lease COMMIT follows.

        Args:
            server: The session that executes it, which may have prepared it.
        """
        if server.claims.is_plain:
            return self.statements(limit, cursor)
        preparing = [] if self.name in server.claims.names else [("settings", self.texts.definition)]
        claim = f"EXECUTE {self.name}({', '.join(self._arguments(limit, cursor))})"
        after = [] if self.leased else _AS_BEFORE
        return [*preparing, *self.lock, *_PLANNED_ONCE, ("claim", claim), *after]

    def look(self, _: Mapping[str, object], server: ServerSession) -> None:
        """Record that a session has executed the claim, which reports nothing but the jobs that it took."""
        if self.name:
            server.claims.succeeded(self.name)

    def failed(self, error: BaseException, server: ServerSession) -> bool:
        """Return True if the claim failed because the session had prepared it, or had not: it is worth another try."""
        return bool(self.name) and server.claims.failed(error, self.name)

    def one(self, job_id: UUID) -> str:
        """Claim one job by its id, to test and not to run it, also if the queue is at its limit.

        Index: the primary key, or the claim's.
        """
        return _filled(self.texts.one, [*self._arguments(1), f"'{job_id}'"])

    def clearing(self, limit: int, cursor: Cursor | None = None) -> list[tuple[str, str]]:
        """Lock the jobs that the claim would pick, so that a COMMIT overwrites their marks; "claim" returns the ids.

        Index, locks and bound are those of the claim of a queue without a limit.
        """
        return [("claim", _filled(self.texts.clearing, self._arguments(limit, cursor)))]

    def _arguments(self, limit: int, cursor: Cursor | None = None) -> list[str]:
        priority, seq = (-int(cursor.priority), int(cursor.seq)) if cursor else _START
        return [self.queue, str(int(limit)), str(priority), str(seq), str(int(self.most or 0))]


def _filled(text: str, arguments: Sequence[str]) -> str:
    # The queue last: its name is the only argument that users write.
    for number in range(len(arguments), 0, -1):
        text = text.replace(chr(number), arguments[number - 1])
    return text


# With sorts and sequential scans off, the planner can only choose a walk of the claim's own index, and of the primary
# key's. Its penalty for a plan with one of them, or its guess of a tenth of the table if it does not know the limit,
# would start the compiler.
BY_INDEX = [("settings", setting) for setting in (*by_index.BY_INDEX, "SET LOCAL jit = off")]
AS_EVERYWHERE = [("settings", setting) for setting in (*by_index.AS_EVERYWHERE, "SET LOCAL jit TO DEFAULT")]
# A prepared claim is planned once, perhaps while the table is empty.
_PLANNED_ONCE = [("settings", by_index.PLANNED_ONCE), *BY_INDEX]
_AS_BEFORE = [("settings", "SET LOCAL plan_cache_mode TO DEFAULT"), *AS_EVERYWHERE]


class ClaimStatements:
    """The claims of one queue.

    Index: ready jobs by job_ready, due ones by job_scheduled, suspects by job_suspect.

    A relay in lease mode dies with many jobs, and few of them are to blame. So there are two sorts of suspects: those
    whose relay died once may be claimed together, and no crash is counted; those whose relay died more often are to run
    alone, one at a time, and the claim counts the crash. `lease_suspect` takes any, and counts it: in transaction mode
    the jobs of a claim that died are suspects before they ran alone, and without a record in their `errors`.

    Args:
        owner: The relay's lease; None for transaction mode only.
        most: The limit of jobs of the queue that run at a time.
        counts_leases: The limit is kept by counting leased jobs, and not by slots: the queue is in lease mode.
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
        self.most = most
        counts = None if most is None else counts_leases
        lock = tuple(("lock", statement) for statement in lock_claims(schema, queue)) if counts else ()
        named = quote_literal(queue)

        def script(owner: UUID | None, sort: _Eligible, *, is_budgeted: bool = False) -> ClaimScript:
            many = script(owner, sort, is_budgeted=True) if owner is not None and not is_budgeted else None
            texts = _texts(schema, owner, sort, counts, is_budgeted=is_budgeted)
            return ClaimScript(texts, named, sort == _READY, owner is not None, most, lock, texts.name, many)

        self.ready = script(None, _READY)
        self.due = script(None, _DUE)
        if owner is not None:
            self.lease_ready = script(owner, _READY)
            self.lease_due = script(owner, _DUE)
            self.lease_suspect = script(owner, _SUSPECT)
            self.lease_suspects_in_company = script(owner, _IN_COMPANY)
            self.lease_suspect_alone = script(owner, _ALONE)


# The condition of eligible jobs, and their order.
_Eligible: TypeAlias = tuple[LiteralString, LiteralString]
# Index job_ready (queue, (-priority), seq) WHERE state = 'ready': walked in exactly this order. A row comparison in the
# index's own terms bounds the walk: (-priority), never priority DESC.
_READY: _Eligible = ("state = 'ready' AND ((-priority), seq) > ({priority}, {seq})", BY_PRIORITY)
# Index job_scheduled (queue, run_at) WHERE state = 'scheduled'. statement_timestamp(), unlike clock_timestamp(), is
# stable and can bound the index.
_DUE: _Eligible = ("state = 'scheduled' AND run_at <= pg_catalog.statement_timestamp()", "run_at")
_ALIVE: LiteralString = (
    " AND EXISTS (SELECT FROM {relay} WHERE id = {owner} AND alive_until > pg_catalog.clock_timestamp())"
)
# Index job_suspect (queue, seq) WHERE state = 'suspect'.
_SUSPECT: _Eligible = ("state = 'suspect'", "seq")
# By the records that `lease.reap` writes, of the newest 25 in all. A job that dies each time has two at once, and
# keeps them until as many other attempts have come to their end.
FEW_DEATHS: LiteralString = (
    "pg_catalog.jsonb_array_length(pg_catalog.jsonb_path_query_array("
    "errors, '$[*] ? (@.type == \"outboxq.RelayDied\")')) < 2"
)
MORE_DEATHS: LiteralString = f"NOT {FEW_DEATHS}"
# The walk also passes the suspects of the other sort: at most as many as all slots held when their relays died.
_IN_COMPANY: _Eligible = (f"state = 'suspect' AND {FEW_DEATHS}", "seq")
_ALONE: _Eligible = (f"state = 'suspect' AND {MORE_DEATHS}", "seq")


@lru_cache(256)
def _texts(
    schema: str, owner: UUID | None, sort: _Eligible, counts_leases: bool | None, *, is_budgeted: bool = False
) -> ClaimTexts:
    """The texts of the claim of one sort, for queues with a limit unless `counts_leases` is None."""
    eligible, order = sort
    # A relay whose lease expired, because it was stopped or cut off, claims nothing: others would reap it at once.
    alive: LiteralString = _ALIVE if owner else ""

    sized: LiteralString = f", {KILOBYTES}" if is_budgeted else ""

    def picked(only: LiteralString = "", limited: sql.Composed | None = None, walk: LiteralString = _WALK) -> str:
        wanted = compose(schema, eligible + alive + only, owner=owner, priority=_PRIORITY, seq=_SEQ, id=_ID)
        return render(
            schema,
            _PICKED + walk + "\n)",
            room=sql.SQL("") if limited is None else limited + sql.SQL(", "),
            also=sql.SQL(sized if owner else f", {DIED} AS died"),
            budget=BUDGET_KILOBYTES,
            queue=_QUEUE,
            eligible=wanted,
            order=sql.SQL(order),
            limit=_LIMIT,
        )

    is_crash = sort in (_SUSPECT, _ALONE)
    action = _action(schema, owner, _MOVED, crashed=is_crash)
    walk, limited, ends = _WALK, None, []
    if counts_leases is not None:
        limited = room(schema, _QUEUE, _MOST, counts_leases=counts_leases)
    if counts_leases:
        walk = _FOR_ROOM[0] + walk + _FOR_ROOM[1]
        ends.append(_FREE)
    if is_budgeted:
        walk = _WITHIN_BUDGET[0] + walk + _WITHIN_BUDGET[1]
        ends.append(SPENT)
    claim = picked(_IF_ROOM if counts_leases is False else "", limited, walk) + _action(
        schema, owner, _MOVED if limited is None else _MOVED_IF_ROOM, crashed=is_crash, ends=ends
    )
    name, definition = named(_filled(claim, [f"${number}" for number in range(1, 6)]), _TYPES)
    return ClaimTexts(claim, picked() + _CLEARING, picked(" AND id = {id}") + action, name, definition)


def _action(
    schema: str,
    owner: UUID | None,
    moved: LiteralString,
    *,
    crashed: bool = False,
    ends: Sequence[LiteralString] = (),
) -> str:
    if owner is None:
        return render(schema, _DELETING, columns=sql.SQL(COLUMNS), anchor=sql.SQL(ANCHOR), moved=sql.SQL(moved))
    return render(
        schema,
        _LEASING,
        owner=owner,
        token=sql.SQL(next_token("lease_token")),
        attempt=sql.SQL(one_more_attempt("attempt")),
        crashes=sql.SQL(one_more("crashes") if crashed else "crashes"),
        columns=sql.SQL(counted_columns(crashed=crashed)),
        moved=sql.SQL(moved),
        most=compose(schema, f", least({', '.join(ends)})" if ends else "", budget=BUDGET_KILOBYTES),
    )


def counted_columns(*, crashed: bool) -> LiteralString:
    """The columns that a claim under a lease returns: it has counted the attempt, and for a suspect a crash."""
    columns = COLUMNS.replace(_ATTEMPT, "claimed.attempt")
    return columns.replace("claimed.crashes", "claimed.crashes - 1") if crashed else columns


def claim_by_id(schema: str, job_id: str) -> ClaimScript:
    """Claim one job by its id; no row if it is gone, or another transaction or a lease holds it."""
    picked: LiteralString = (
        "WITH picked AS MATERIALIZED (SELECT id, false AS died FROM {job} WHERE id = {id} "
        "AND state NOT IN ('leased', 'group_leased') LIMIT 1 FOR UPDATE SKIP LOCKED)"
    )
    return ClaimScript(ClaimTexts(render(schema, picked, id=job_id) + _action(schema, None, _MOVED)))


def adopt(schema: str, owner: UUID, queue: str) -> ClaimScript:
    """The jobs of a queue under a lease, as their claims returned them; without suspects, whose crashes were counted.

    Indexes: job_leased, job_group_state, all of the leased jobs; no locks.
    """
    chosen: LiteralString = (
        "SELECT 0 AS moved, {columns}, claimed.lease_token FROM {job} AS claimed "
        "WHERE state IN ('leased', 'group_leased') AND lease_owner = {owner} AND queue = {queue} AND crashes = 0"
    )
    columns = sql.SQL(counted_columns(crashed=False))
    return ClaimScript(ClaimTexts(render(schema, chosen, columns=columns, owner=owner, queue=queue)), leased=True)
