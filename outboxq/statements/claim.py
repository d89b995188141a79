"""The claim: takes waiting jobs out of the table, in the transaction that will also write the rows of their handlers.

There is one statement for each sort of jobs, mode and kind of limit. Parsing and planning a claim takes as long as
executing it. So a relay's connection prepares it once and executes it by name; if that is impossible, it is sent as
text.
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

# The order in which `execution/claim.py` reads a row.
RETURNED: tuple[LiteralString, ...] = (
    "id", "queue", "kind", "args::text", "headers::text", "priority", "attempt", "max_attempts", "crashes", "parked",
    "unique_key", "group_key", "errors::text", "run_at", "created_at", "seq", "expires_at", "batch_id",
)  # fmt: skip
# The attempt includes the one that begins now.
_ATTEMPT: LiteralString = one_more_attempt("claimed.attempt")
COLUMNS: LiteralString = ", ".join(_ATTEMPT if column == "attempt" else f"claimed.{column}" for column in RETURNED)

# The transaction and its backend: enough to query the outcome later, or to end the backend.
ANCHOR = "pg_catalog.pg_current_xact_id()::text, pg_catalog.pg_backend_pid()"

# The id, widened to 64 bits by its distance from the next id, modulo 2^32.
_XID: LiteralString = "(next_xid - distance)::text::xid8"


def _of_last_transaction(known: LiteralString, unknown: LiteralString) -> LiteralString:
    """Return an SQL condition on the transaction that last deleted or locked this version of a job's row (its `xmax`).

    It shows if an earlier claim of the job failed, or still goes on. If there is no such transaction, the condition is
    false.

    Args:
        known: The SQL condition to use if that transaction's id is less than the next id that the server will give.
        unknown: The SQL condition to use otherwise: the transaction has only begun, or the id is a multixact's.
    """
    return f"""\
CASE WHEN job.xmax = '0'::xid THEN false ELSE (
    SELECT CASE WHEN distance BETWEEN 1 AND 2147483647 AND distance < next_xid - 2
      THEN {known} ELSE {unknown} END
    FROM (SELECT next_xid, (next_xid - job.xmax::text::bigint) & 4294967295 AS distance
      FROM (SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint AS next_xid) AS now
    ) AS widened
  ) END"""


# True if it was aborted: a claim that died. This is a hint and never a count: any lock that was rolled back looks the
# same, and so may a multixact's number.
DIED = _of_last_transaction(f"coalesce(pg_catalog.pg_xact_status({_XID}) = 'aborted', false)", "false")
# True if it may have claimed the job without giving it back: it goes on, or ended after this statement's snapshot. The
# status is the present one, even of a savepoint's id, which no snapshot lists.
HELD = _of_last_transaction(
    f"coalesce(pg_catalog.pg_xact_status({_XID}) = 'in progress', false) "
    f"OR NOT pg_catalog.pg_visible_in_snapshot({_XID}, pg_catalog.pg_current_snapshot())",
    "true",
)

# MATERIALIZED: a bare `id IN (SELECT ... LIMIT ...)` may be planned as a join whose limited side runs again for each
# row of the other, and then takes more than the limit. Every test of eligibility is inside. Locks: the picked jobs,
# skipping those that another transaction holds. READ COMMITTED rechecks `picked` against the newest version of a row,
# so a job that has just finished is skipped. The later parts find the jobs by an array of their keys: a join, planned
# while the table was empty, may walk the whole table.
_WALK: LiteralString = """\
  SELECT id{also} FROM {job} AS job
  WHERE queue = {queue} AND {eligible}
    AND NOT EXISTS (SELECT FROM {queue_table} WHERE name = {queue} AND paused_at IS NOT NULL)
  ORDER BY {order}
  LIMIT {limit}
  FOR UPDATE SKIP LOCKED"""
_PICKED: LiteralString = "WITH {room}picked AS MATERIALIZED (\n"
# Wraps the walk, whose own limit the planner knows. Each wrapper ends the walk, and its locks, at the last job that is
# taken. For a limit that counts leased jobs, that is the last one with room.
_FOR_ROOM: tuple[LiteralString, LiteralString] = (
    "SELECT * FROM (\n",
    "\n) AS walked LIMIT coalesce((SELECT free FROM room), 0)",
)
# Ends at the job with which the arguments reach the budget: there is a row for each kilobyte of a job, and a limit of
# the rows. The arguments of later jobs are not even read. A sum over the jobs, in a window, would cost three times as
# much.
_WITHIN_BUDGET: tuple[LiteralString, LiteralString] = (
    "SELECT id, pg_catalog.generate_series(1, kilobytes) FROM (\n",
    "\n) AS sized LIMIT {budget}",
)
# Kilobytes, rounded up, of the text that a claim returns. Small values are not measured, as in the table's checks.
KILOBYTES: LiteralString = (
    "CASE WHEN pg_catalog.pg_column_size(args) <= 1024 AND pg_catalog.pg_column_compression(args) IS NULL "
    "THEN 1 ELSE pg_catalog.octet_length(args::text) / 1024 + 1 END AS kilobytes"
)
# The budget of one claim under a lease, 4 MB, so that a relay with many slots can hold all of its claims. It applies to
# claims of more than `FEW` jobs: for fewer it would cost more than 3 % of the claim.
BUDGET_KILOBYTES, FEW = 4_096, 50

BY_PRIORITY: LiteralString = "(-priority), seq"

# The left side has one row, so that the count is returned even if no job was claimed.
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
# For a queue with a limit: the claim takes jobs if there is room, and returns -1 as the number of moved jobs if there
# is none.
_IF_ROOM: LiteralString = " AND EXISTS (SELECT FROM room)"
_MOVED_IF_ROOM: LiteralString = "CASE WHEN EXISTS (SELECT FROM room) THEN count.moved ELSE -1 END"
# The number of jobs after which the claim stopped, if it stopped before its limit.
_FREE: LiteralString = "(SELECT free FROM room)"
SPENT: LiteralString = "CASE WHEN (SELECT pg_catalog.count(*) FROM picked) >= {budget} THEN 0 END"

# The parameters of a claim, in their order. In its text each is a control character, which no name contains.
_TYPES = "text, int, int, bigint, int"
_QUEUE, _LIMIT, _PRIORITY, _SEQ, _MOST, _ID = (sql.SQL(mark) for mark in ("\1", "\2", "\3", "\4", "\5", "\6"))
# A cursor that is before every job.
_START = (-32_769, -1)


class Sort(Enum):
    """The sorts of jobs that wait in a queue; each sort has its own claim statement.

    A suspect is a job that ran when its relay died, and that may be the cause.
    """

    READY = auto()
    DUE = auto()
    GROUPED = auto()
    SUSPECT = auto()
    GROUP_SUSPECT = auto()
    # Suspects in lease mode whose relay died only once.
    COMPANY = auto()
    GROUP_COMPANY = auto()

    @property
    def is_suspect(self) -> bool:
        """Return True for a sort of suspects (jobs that ran when their relay died), which run only under a lease."""
        return self not in (Sort.READY, Sort.DUE, Sort.GROUPED)


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the order of ready jobs, where the next claim begins: the last claimed job's priority and `seq`."""

    priority: int
    seq: int


class ClaimTexts(NamedTuple):
    """The SQL texts of a claim, the same for all queues: control characters mark the places of its parameters.

    Attributes:
        claim: The statement that claims jobs.
        clearing: A statement that only locks the jobs that the claim would pick, to overwrite marks in their rows.
        one: The statement that claims one job by its id.
        name, definition: The name of the claim as a prepared statement, and the PREPARE statement for it.
    """

    claim: str
    clearing: str = ""
    one: str = ""
    name: str = ""
    definition: str = ""


@dataclass(frozen=True, slots=True)
class ClaimScript:
    """The SQL to claim the jobs of one sort of a queue, which a relay sends at each poll.

    `by_seq` and `takes_firsts` are True in `GroupScript`: its jobs run in the order of `seq`, not of priorities, and a
    claim that took few jobs may have left some.

    Args:
        texts: The SQL texts, in which the values below are filled in.
        queue: The queue's name, as an SQL literal.
        is_keyed: True if the claim may start after a cursor (the last job claimed), to skip the rows of claimed jobs
            that are not vacuumed yet.
        leased: True if the claim gives jobs a lease instead of deleting their rows.
        most: The number of the queue's jobs that may run at a time, None without a limit. A claim takes no jobs if the
            limit is reached; if the limit counts leased jobs, it takes only as many as there is room for.
        lock: Statements to send before the claim, for a limit that counts leased jobs; pairs of a label and SQL.
        name: The name under which a connection prepares the claim.
        for_many: The script for claims of more than `FEW` jobs, which stop after `BUDGET_KILOBYTES` of arguments. Its
            claim, and one that counts leased jobs, return an additional last column: 0 if the claim stopped at the
            budget, otherwise the room under the limit; NULL without either.
    """

    # True if its jobs run in the order of their priorities. A claim that took fewer jobs than its limit left none.
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
        """Return the script to use for a claim of up to `limit` jobs: `for_many` for more than `FEW`, else this one."""
        return self if self.for_many is None or limit <= FEW else self.for_many

    def text(self, limit: int, cursor: Cursor | None = None) -> str:
        """Return the SQL text of a claim of up to `limit` jobs, after `cursor` if given."""
        return "; ".join(statement for _, statement in self.statements(limit, cursor))

    def statements(self, limit: int, cursor: Cursor | None = None) -> list[tuple[str, str]]:
        """Return the statements of `text` as pairs of a label and SQL; the one labelled "claim" returns the jobs."""
        # With literals, the planner knows how few rows are wanted.
        claim = _filled(self.texts.claim, self._arguments(limit, cursor))
        return [*self.lock, ("claim", claim)]

    def parts(self, limit: int, cursor: Cursor | None, server: ServerSession) -> list[tuple[str, str]]:
        """Return the statements of a claim for this session, as pairs of a label and SQL.

        The one labelled "claim" returns the jobs. It executes a prepared statement, after a PREPARE if this session has
        not prepared that; it then always walks its index. If the session cannot prepare statements, the claim is sent
        as text. After the claim, planner settings in the transaction are those of role and database, without the
        session's SETs; for a leasing claim the caller adds COMMIT.

        Args:
            server: The session that executes the statements: it records which claims are prepared there.
        """
        if server.claims.is_plain:
            return self.statements(limit, cursor)
        preparing = [] if self.name in server.claims.names else [("settings", self.texts.definition)]
        claim = f"EXECUTE {self.name}({', '.join(self._arguments(limit, cursor))})"
        after = [] if self.leased else _AS_BEFORE
        return [*preparing, *self.lock, *_PLANNED_ONCE, ("claim", claim), *after]

    def look(self, _: Mapping[str, object], server: ServerSession) -> None:
        """Note a successful claim: record in `server` that its session has prepared the claim, for later claims.

        It returns nothing. `GroupScript.look`, which callers use in the same way, returns the groups that the claim
        visited.
        """
        if self.name:
            server.claims.succeeded(self.name)

    def failed(self, error: BaseException, server: ServerSession) -> bool:
        """Return True if a claim failed only because its prepared statement was lost, outdated or there already.

        Another try may succeed then. The method also records in `server` how to send it: prepared again, or as text.
        """
        return bool(self.name) and server.claims.failed(error, self.name)

    def one(self, job_id: UUID) -> str:
        """Return SQL that claims one job by its id, even if the queue is at its limit.

        It tests if the job's row can be claimed at all: the caller undoes the claim, and the job does not run. Index:
        the primary key, or the claim's.
        """
        return _filled(self.texts.one, [*self._arguments(1), f"'{job_id}'"])

    def clearing(self, limit: int, cursor: Cursor | None = None) -> list[tuple[str, str]]:
        """Return a statement, labelled "claim", that locks the jobs that the claim would pick, and returns their ids.

        The COMMIT after it overwrites the marks (`xmax`) that a rolled back claim left in the rows, which would make
        the jobs look as if their relay had died. Index, locks and bound are those of the claim of a queue without a
        limit.
        """
        return [("claim", _filled(self.texts.clearing, self._arguments(limit, cursor)))]

    def _arguments(self, limit: int, cursor: Cursor | None = None) -> list[str]:
        priority, seq = (-int(cursor.priority), int(cursor.seq)) if cursor else _START
        return [self.queue, str(int(limit)), str(priority), str(seq), str(int(self.most or 0))]


def _filled(text: str, arguments: Sequence[str]) -> str:
    # The queue is last, because its name is the only argument that users write.
    for number in range(len(arguments), 0, -1):
        text = text.replace(chr(number), arguments[number - 1])
    return text


# With sorts and sequential scans off, the planner can only choose a walk of the claim's own index, and of the primary
# key's. Otherwise its penalty for a plan with one of them, or its guess of a tenth of the table if it does not know the
# limit, would start the compiler.
BY_INDEX = [("settings", setting) for setting in (*by_index.BY_INDEX, "SET LOCAL jit = off")]
AS_EVERYWHERE = [("settings", setting) for setting in (*by_index.AS_EVERYWHERE, "SET LOCAL jit TO DEFAULT")]
# A prepared claim is planned once, perhaps while the table is empty.
_PLANNED_ONCE = [("settings", by_index.PLANNED_ONCE), *BY_INDEX]
_AS_BEFORE = [("settings", "SET LOCAL plan_cache_mode TO DEFAULT"), *AS_EVERYWHERE]


class ClaimStatements:
    """The claims of the jobs of a queue that belong to no group: a `ClaimScript` for each sort of them.

    Index: ready jobs by job_ready, due ones by job_scheduled, suspects by job_suspect.

    A suspect is a job that ran when its relay died. A relay in lease mode dies with many jobs, and few of these are the
    cause. So `lease_suspects_in_company` claims suspects whose relay died once together, and counts no crash.
    `lease_suspect_alone` claims a suspect whose relay died more often; it runs alone, and the claim counts a crash.
    `lease_suspect`, for transaction mode, claims any suspect and counts a crash: in that mode a suspect's `errors` have
    no record of the death.

    Args:
        owner: The relay's lease; None for transaction mode only.
        most: The number of jobs of the queue that may run at a time.
        counts_leases: True if the limit counts leased jobs, and not slots, because the queue is in lease mode.
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
# By the records that `lease.reap` writes, among the newest 25. A job that dies each time has two at once, and keeps
# them until as many other attempts have ended.
FEW_DEATHS: LiteralString = (
    "pg_catalog.jsonb_array_length(pg_catalog.jsonb_path_query_array("
    "errors, '$[*] ? (@.type == \"outboxq.RelayDied\")')) < 2"
)
MORE_DEATHS: LiteralString = f"NOT {FEW_DEATHS}"
# The walk also passes suspects of the other sort: at most as many as all slots held when their relays died.
_IN_COMPANY: _Eligible = (f"state = 'suspect' AND {FEW_DEATHS}", "seq")
_ALONE: _Eligible = (f"state = 'suspect' AND {MORE_DEATHS}", "seq")


@lru_cache(256)
def _texts(
    schema: str, owner: UUID | None, sort: _Eligible, counts_leases: bool | None, *, is_budgeted: bool = False
) -> ClaimTexts:
    """Return the SQL texts of the claim of one sort of jobs.

    The claim checks the queue's limit unless `counts_leases` is None. With `is_budgeted` it stops after
    `BUDGET_KILOBYTES` of arguments.
    """
    eligible, order = sort
    # A relay whose lease expired, because it was stopped or cut off, claims nothing: other relays would reap the jobs
    # at once.
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
    """Return, as SQL, the columns of a job that a claim under a lease returns, from the row as the claim updated it.

    So the number of attempts already includes this one. With `crashed` the claim of a suspect (a job that ran when its
    relay died) has added a crash; the returned number of crashes is that from before.
    """
    columns = COLUMNS.replace(_ATTEMPT, "claimed.attempt")
    return columns.replace("claimed.crashes", "claimed.crashes - 1") if crashed else columns


def claim_by_id(schema: str, job_id: str) -> ClaimScript:
    """Return a script that claims one job by its id, to settle it after its transaction was rolled back.

    No row is returned if the job is gone, leased, or locked by another transaction.
    """
    picked: LiteralString = (
        "WITH picked AS MATERIALIZED (SELECT id, false AS died FROM {job} WHERE id = {id} "
        "AND state NOT IN ('leased', 'group_leased') LIMIT 1 FOR UPDATE SKIP LOCKED)"
    )
    return ClaimScript(ClaimTexts(render(schema, picked, id=job_id) + _action(schema, None, _MOVED)))


def adopt(schema: str, owner: UUID, queue: str) -> ClaimScript:
    """Return a script that selects the jobs of a queue that `owner` has leased, in the form of a claim's jobs.

    With it, a relay finds the jobs of a claim that was committed while its answer was lost. Suspects with crashes are
    left out. Indexes: job_leased, job_group_state, all of the leased jobs; no locks.
    """
    chosen: LiteralString = (
        "SELECT 0 AS moved, {columns}, claimed.lease_token FROM {job} AS claimed "
        "WHERE state IN ('leased', 'group_leased') AND lease_owner = {owner} AND queue = {queue} AND crashes = 0"
    )
    columns = sql.SQL(counted_columns(crashed=False))
    return ClaimScript(ClaimTexts(render(schema, chosen, columns=columns, owner=owner, queue=queue)), leased=True)
