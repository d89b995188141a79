"""The claim of grouped jobs: one at a time of each group, in the order of `seq`.

A claim is two statements in one string. The first one walks over the groups and locks some of them; the second one
takes a new snapshot, with the locks held, and picks jobs. In a single statement, the snapshot could be older than the
lock, and miss a lease that another relay committed in between: two jobs of a group would run at the same time.

The locks are advisory ones of the transaction. In transaction mode they are held while the jobs run; in lease mode they
are held up to the claim's COMMIT, and then the leased row itself keeps other claims from its group. Both modes check
for a leased job, because suspects (jobs that ran when their relay died) always run under a lease. Two groups whose keys
have the same hash only wait for each other.

If a queue lets N jobs of a group run at a time, a group has N locks. A claim in transaction mode holds the first free
one, and takes no jobs if its number is above N minus the leased jobs. A claim under a lease needs two locks: the last
one, which excludes other such claims, and the one whose number is N minus the leased jobs, which no transaction may use
from then on.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, LiteralString, NamedTuple, TypeAlias
from uuid import UUID

from psycopg import sql

from outboxq.database.driver import ServerSession
from outboxq.statements import claim
from outboxq.statements.added import headers_with_order
from outboxq.statements.limit import lock_claims, room
from outboxq.statements.numbers import next_token, one_more, one_more_attempt
from outboxq.statements.render import compose, quote_literal, render
from outboxq.statements.wake import channel_name

# The most groups that one claim visits: groups whose first job may not run yet cost a probe each.
GROUPS_SEEN = 200

# The index job_group (queue, group_key COLLATE "C", seq), which has no entries for jobs that are out of their group's
# order.
_FIRST: LiteralString = """\
(SELECT group_key, state, run_at, {lap} AS lap FROM {job}
      WHERE {if_lap}queue = {queue} AND state <> 'group_waiting' AND group_key COLLATE "C" {where}
      ORDER BY group_key COLLATE "C", seq LIMIT 1)"""

# One probe of the index for each group, whether it has one job or a million: from the group after `after` to the last
# one, then from the first one (lap 1) up to `after`. The arms of UNION ALL are tried in order, up to the first row.
_HEADS: LiteralString = """\
heads AS (
  (SELECT head.*, 1 AS place FROM (
    {ahead}
    UNION ALL
    {around}
    LIMIT 1) AS head
  WHERE {has_room} AND NOT EXISTS (SELECT FROM {queue_table} WHERE name = {queue} AND paused_at IS NOT NULL))
  UNION ALL
  SELECT head.*, heads.place + 1 FROM heads CROSS JOIN LATERAL (
    {next}
    UNION ALL
    {next_around}
    UNION ALL
    {begin_around}
    LIMIT 1) AS head
  WHERE heads.place < {seen}
)"""

# Suspects that are first in their groups, by the index job_group_state (state, queue, run_at).
_SUSPECT_HEADS: LiteralString = """\
heads AS (
  SELECT suspect.group_key, suspect.state, suspect.run_at, 0 AS lap, pg_catalog.row_number() OVER () AS place FROM (
    SELECT id, group_key, state, run_at FROM {job} WHERE state = 'group_suspect' AND queue = {queue}{of_sort}
    ORDER BY run_at LIMIT {seen}) AS suspect
  CROSS JOIN LATERAL (
    SELECT id FROM {job} WHERE queue = {queue} AND state <> 'group_waiting'
      AND group_key COLLATE "C" = suspect.group_key
    ORDER BY group_key COLLATE "C", seq LIMIT 1) AS head
  WHERE head.id = suspect.id AND {has_room}
    AND NOT EXISTS (SELECT FROM {queue_table} WHERE name = {queue} AND paused_at IS NOT NULL)
)"""

# CASE, so that only groups that may run are locked; LIMIT stops the walk at the last wanted group.
_LOCK: LiteralString = """\
WITH RECURSIVE {room}setting AS MATERIALIZED (
  SELECT coalesce((SELECT max_per_group FROM {queue_table} WHERE name = {queue}), {per_group}) AS most
), {heads}, mine AS MATERIALIZED (
  SELECT heads.group_key, taken.slot FROM heads CROSS JOIN LATERAL (
    SELECT slot.number AS slot
    FROM pg_catalog.generate_series({first_slot}, (SELECT most FROM setting)) AS slot (number)
    WHERE CASE WHEN heads.state = {state} AND ({is_suspect} OR heads.run_at <= pg_catalog.statement_timestamp())
        OR (SELECT most FROM setting) > 1
      THEN pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext({lock}),
        pg_catalog.hashtext(pg_catalog.concat_ws(pg_catalog.chr(31), {queue}::text, heads.group_key, slot.number)))
      ELSE false END
    LIMIT 1) AS taken
  LIMIT {groups}
)
SELECT pg_catalog.set_config('outboxq.groups', coalesce((
    SELECT pg_catalog.json_agg(pg_catalog.json_build_array(group_key, slot)) FROM mine)::text, '[]'), true),
  CASE WHEN (SELECT pg_catalog.count(*) FROM mine) < {groups} THEN (SELECT pg_catalog.max(place) FROM heads) END,
  CASE WHEN (SELECT pg_catalog.count(*) FROM mine) < {groups}
    THEN (SELECT group_key FROM heads WHERE place = (SELECT pg_catalog.max(place) FROM heads)) END,
  EXISTS (SELECT FROM {job} WHERE state = 'group_waiting' AND queue = {queue}
    AND run_at <= pg_catalog.statement_timestamp()),
  {has_room}"""

# There are at most as many leased jobs in the queue as all slots hold. `run` has the first jobs of each group that the
# claim could take; if several run at a time, other transactions may have the first of them.
_PICK: LiteralString = """\
WITH setting AS MATERIALIZED (
  SELECT coalesce((SELECT max_per_group FROM {queue_table} WHERE name = {queue}), {per_group}) AS most
), mine AS MATERIALIZED (
  SELECT element.value ->> 0 AS group_key, (element.value ->> 1)::integer AS slot
  FROM pg_catalog.json_array_elements(pg_catalog.current_setting('outboxq.groups')::json) AS element (value)
), leased AS MATERIALIZED (
  SELECT group_key, pg_catalog.count(*)::integer AS jobs FROM {job}
  WHERE state = 'group_leased' AND queue = {queue} GROUP BY group_key
), open AS MATERIALIZED (
  SELECT mine.group_key FROM mine LEFT JOIN leased ON leased.group_key = mine.group_key
  WHERE {is_open}
), run AS MATERIALIZED (
  SELECT open.group_key, next.id, next.seq, {free} AS free FROM open CROSS JOIN LATERAL (
    SELECT id, seq, state, run_at, errors FROM {job}
    WHERE queue = {queue} AND state <> 'group_waiting' AND group_key COLLATE "C" = open.group_key
    ORDER BY group_key COLLATE "C", seq
    LIMIT {each} * (SELECT most FROM setting)) AS next
), """
_EACH: LiteralString = "(SELECT greatest(1, {limit} / greatest(pg_catalog.count(*), 1)) FROM open)"
_FREE: LiteralString = "next.state = 'grouped' AND next.run_at <= pg_catalog.statement_timestamp()"
# The sort of a suspect does not change while its group is locked. If it were tested with the rows found by their keys,
# the planner might read all suspects, in the belief that these are fewer.
_FREE_SUSPECT: LiteralString = "next.state = 'group_suspect'{of_sort}"
_OPEN: LiteralString = "mine.slot <= (SELECT most FROM setting) - coalesce(leased.jobs, 0)"
_OPEN_LEASED: LiteralString = """\
coalesce(leased.jobs, 0) < (SELECT most FROM setting)
    AND EXISTS (SELECT FROM {relay} WHERE id = {owner} AND alive_until > pg_catalog.clock_timestamp())
    AND pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtext({lock}), pg_catalog.hashtext(pg_catalog.concat_ws(
      pg_catalog.chr(31), {queue}::text, mine.group_key, (SELECT most FROM setting) - coalesce(leased.jobs, 0))))"""

# In transaction mode a group's jobs are taken up to the first one that is not due, that another transaction holds, or
# that died with its claim. Jobs that died become suspects, each in its place: the claim's COMMIT overwrites their
# marks. Of groups that let several jobs run at a time, all free jobs are taken.
_LOCKED: LiteralString = """\
locked AS MATERIALIZED (
  SELECT id, {died} AS died FROM {job} AS job
  WHERE id = ANY (ARRAY(SELECT id FROM run WHERE free)) AND state = 'grouped'
  LIMIT {limit} FOR UPDATE SKIP LOCKED
), broken AS MATERIALIZED (
  SELECT run.group_key, pg_catalog.min(run.seq) AS seq FROM run LEFT JOIN locked ON locked.id = run.id
  WHERE (NOT run.free OR locked.id IS NULL OR locked.died) AND (SELECT most FROM setting) = 1 GROUP BY run.group_key
), picked AS MATERIALIZED (
  SELECT run.id, locked.died FROM run JOIN locked ON locked.id = run.id
  LEFT JOIN broken ON broken.group_key = run.group_key
  WHERE broken.seq IS NULL OR run.seq < broken.seq OR locked.died
)"""
_DELETING: LiteralString = """, moved AS (
  UPDATE {job} AS job SET state = 'group_suspect' WHERE id = ANY (ARRAY(SELECT id FROM picked WHERE died)) RETURNING id
), claimed AS (
  DELETE FROM {job} AS claimed WHERE id = ANY (ARRAY(SELECT id FROM picked WHERE NOT died))
  RETURNING {columns}, NULL::bigint AS lease_token, {anchor}
)
SELECT count.moved, claimed.*
FROM (SELECT pg_catalog.count(*) AS moved FROM moved) AS count LEFT JOIN claimed ON true"""

# Under a lease one job of each group is taken: the next one begins when this one is settled.
_LOCKED_FIRST: LiteralString = """\
first AS MATERIALIZED (
  SELECT group_key, pg_catalog.min(seq) AS seq FROM run WHERE free OR (SELECT most FROM setting) = 1 GROUP BY group_key
), picked AS MATERIALIZED (
  SELECT id FROM {job} AS job
  WHERE id = ANY (ARRAY(SELECT run.id FROM run JOIN first ON first.group_key = run.group_key AND first.seq = run.seq
    WHERE run.free)) AND state = {state}
  FOR UPDATE SKIP LOCKED
)"""
_LEASING: LiteralString = """, claimed AS (
  UPDATE {job} AS claimed SET state = 'group_leased', lease_owner = {owner}, lease_token = {token},
    attempt = {attempt}, crashes = {crashes}
  WHERE id = ANY (ARRAY(SELECT id FROM picked))
  RETURNING {columns}, claimed.lease_token
)
SELECT 0, claimed.* FROM claimed"""
_CLEARING: LiteralString = """
SELECT id FROM picked"""


@dataclass(frozen=True, slots=True)
class Look:
    """The result of a claim's walk over a queue's groups, which decides where the next walk begins.

    Attributes:
        taken: The keys of the groups that the claim locked, in the order of its walk.
        seen: The number of groups that the walk visited; None if it stopped early, with as many groups as were
            wanted.
        last: The key of the last group visited; None if `seen` is None, or no group was visited.
        is_back_due: True if jobs whose retry time has come, and which later jobs of their groups have passed, are
            to be returned to their groups by `bring_back`.
        has_room: True if the queue's limit has room; otherwise no group was visited.
    """

    taken: tuple[str, ...]
    seen: int | None
    last: str | None
    is_back_due: bool
    has_room: bool


@dataclass(frozen=True, slots=True)
class GroupScript:
    """The SQL to claim jobs of a queue's groups.

    It is sent as text and not prepared, because the planner must see the group's key at which the walk begins. `name`,
    `by_seq` and `takes_firsts` have the same meaning as in `ClaimScript`.

    Args:
        owner: The lease under which the jobs run; None in transaction mode.
        per_group: The number of jobs of a group that run at a time, if no operator has set it.
        most: The number of jobs of the queue that may run at a time; with `counts_leases` leased jobs are counted, and
            the claim takes as many as there is room for.
        suspects: True to claim only suspects (jobs that ran when their relay died), if they are the first of their
            groups.
        in_company: For suspects: True claims those whose relay died only once, without counting a crash; False claims
            those whose relay died more often, which run alone: each claim takes one, and counts the crash. None claims
            any suspect, in the same way as False.
    """

    # Connections do not prepare it. Priorities do not matter within a group. A claim takes the first jobs of groups,
    # and more jobs may wait after each.
    name: ClassVar[str] = ""
    by_seq: ClassVar[bool] = True
    takes_firsts: ClassVar[bool] = True

    schema: str
    queue: str
    owner: UUID | None = None
    most: int | None = None
    counts_leases: bool = False
    suspects: bool = False
    in_company: bool | None = None
    per_group: int = 1

    def for_limit(self, _: int) -> "GroupScript":
        """Return this script: it is the same for a claim of any size. `ClaimScript` has another one for many jobs."""
        return self

    @property
    def leased(self) -> bool:
        """Return True if the claim gives jobs a lease instead of deleting their rows."""
        return self.owner is not None

    @property
    def lock(self) -> tuple[str, ...]:
        """Return the statements to send before the claim; none unless the queue has a limit that counts leased jobs."""
        is_counted = self.counts_leases and self.most is not None
        return lock_claims(self.schema, self.queue) if is_counted else ()

    def text(self, limit: int, after: str = "") -> str:
        """Return the SQL text of a claim of up to `limit` jobs.

        It walks over the groups after the key `after`, and then over the others. Indexes: job_group, an entry for each
        of up to `GROUPS_SEEN` groups, and the jobs that are taken; job_group_state, the leased jobs of the queue; the
        primary key. Locks: the groups, by advisory locks, and the jobs, skipping those that another transaction holds;
        never waits.
        """
        return "; ".join(statement for _, statement in self.parts(limit, after))

    def clearing(self, limit: int, after: str | None = None) -> list[tuple[str, str]]:
        """Return statements that lock the jobs that the claim would pick; the one labelled "claim" returns their ids.

        The COMMIT after them overwrites the marks (`xmax`) that a rolled back claim left in the rows, which would make
        the jobs look as if their relay had died. Indexes, locks and bound are those of the claim.
        """
        return self.parts(limit, after, clears=True)

    def parts(self, limit: int, after: str | None, _: object = (), *, clears: bool = False) -> list[tuple[str, str]]:
        """Return the statements of a claim (`text`), or with `clears` those of `clearing`, as pairs of a label and SQL.

        The one labelled "groups" returns the groups, for `look`; the one labelled "claim" returns the jobs.
        """
        texts, number = _texts(self), str(int(limit))
        # The cursor is last, because a group's key may contain any character.
        lock = texts.lock.replace(_LIMIT, number).replace(_AFTER, quote_literal(after or ""))
        pick = (texts.clearing if clears else texts.claim).replace(_LIMIT, number)
        return [*texts.limited, *claim.BY_INDEX, ("groups", lock), ("claim", pick), *claim.AS_EVERYWHERE]

    def look(self, rows: Mapping[str, Sequence[tuple[Any, ...]]], _: ServerSession) -> Look:
        """Return a `Look`, the groups that a claim visited and locked, from the rows of its statement "groups"."""
        groups, seen, last, is_back_due, has_room = rows["groups"][0]
        taken = [str(key) for key, _ in json.loads(groups)] if has_room else []
        return Look(tuple(taken), seen, last, bool(is_back_due), bool(has_room))

    def failed(self, _error: BaseException, _: ServerSession) -> bool:
        """Return False: the claim is sent as text, so another try in another form would not help.

        `ClaimScript.failed`, which callers use in the same way, may return True.
        """
        return False

    def one(self, job_id: UUID) -> str:
        """Return SQL that claims one job by its id, regardless of its group, to test if its row can be claimed."""
        picked: LiteralString = (
            "WITH picked AS MATERIALIZED (SELECT id, false AS died FROM {job} WHERE id = {id} "
            "AND state IN ('grouped', 'group_suspect') LIMIT 1 FOR UPDATE SKIP LOCKED)"
        )
        return render(self.schema, picked, id=job_id) + _action(self)


AnyScript: TypeAlias = claim.ClaimScript | GroupScript


class _Texts(NamedTuple):
    """The SQL texts of a script's claim; control characters mark the places of its limit and of its first group.

    Attributes:
        limited: The statements to send before, for a limit that counts leased jobs; pairs of a label and SQL.
        lock: The statement that walks over the groups and locks some of them.
        claim: The statement that claims jobs of the locked groups.
        clearing: In place of `claim`, a statement that only locks the jobs.
    """

    limited: tuple[tuple[str, str], ...]
    lock: str
    claim: str
    clearing: str


# As in claim.py: control characters, which no name contains.
_LIMIT: LiteralString = "\1"
_AFTER: LiteralString = "\2"


@lru_cache(256)
def _texts(script: GroupScript) -> _Texts:
    schema, owner, most, suspects = script.schema, script.owner, script.most, script.suspects
    has_room: LiteralString = "true" if most is None else "EXISTS (SELECT FROM room)"
    common: dict[str, object] = {
        "queue": sql.Literal(script.queue),
        "per_group": script.per_group,
        "owner": owner,
        "lock": lock_class(schema),
        "limit": sql.SQL(_LIMIT),
        "after": sql.SQL(_AFTER),
        "has_room": sql.SQL(has_room),
        "seen": GROUPS_SEEN,
        "state": "group_suspect" if suspects else "grouped",
        "is_suspect": suspects,
        "of_sort": sql.SQL(_OF_SORT[script.in_company]),
    }

    def part(text: LiteralString, **values: object) -> sql.Composed:
        return compose(schema, text, **common, **values)

    def first(lap: int, where: LiteralString, if_lap: LiteralString = "") -> sql.Composed:
        return part(_FIRST, lap=lap, where=part(where), if_lap=sql.SQL(if_lap))

    heads = part(
        _SUSPECT_HEADS if suspects else _HEADS,
        ahead=first(0, "> {after}"),
        around=first(1, "<= {after}"),
        next=first(0, "> heads.group_key", "heads.lap = 0 AND "),
        next_around=first(1, '> heads.group_key AND group_key COLLATE "C" <= {after}', "heads.lap = 1 AND "),
        begin_around=first(1, "<= {after}", "heads.lap = 0 AND "),
    )
    limited: sql.Composable = sql.SQL("")
    if most is not None:
        limited = room(schema, common["queue"], most, counts_leases=script.counts_leases) + sql.SQL(", ")
    first_slot: LiteralString = "1" if owner is None else "(SELECT most FROM setting)"
    # Under a lease a claim takes one job of each of its groups.
    groups = part("least({limit}, (SELECT free FROM room))" if script.lock else "{limit}")
    lock = part(_LOCK, room=limited, heads=heads, first_slot=sql.SQL(first_slot), groups=groups).as_string(None)
    pick = part(
        _PICK,
        is_open=part(_OPEN if owner is None else _OPEN_LEASED),
        free=part(_FREE_SUSPECT if suspects else _FREE),
        each=part(_EACH if owner is None else "1"),
    ) + part(_LOCKED if owner is None else _LOCKED_FIRST, died=sql.SQL(claim.DIED))
    claimed = pick.as_string(None) + _action(script)
    before = tuple(("lock", statement) for statement in script.lock)
    return _Texts(before, lock, claimed, pick.as_string(None) + _CLEARING)


def lock_class(schema: str) -> str:
    """Return the name whose hash is the first of the two keys of this installation's advisory locks on groups."""
    return f"{channel_name(schema)} group"


# By the argument `in_company` of a script.
_OF_SORT: Mapping[bool | None, LiteralString] = {
    None: "",
    True: f" AND {claim.FEW_DEATHS}",
    False: f" AND {claim.MORE_DEATHS}",
}


def _action(script: GroupScript) -> str:
    schema, owner, is_crash = script.schema, script.owner, script.suspects and not script.in_company
    if owner is None:
        return render(schema, _DELETING, columns=sql.SQL(claim.COLUMNS), anchor=sql.SQL(claim.ANCHOR))
    return render(
        schema,
        _LEASING,
        owner=owner,
        token=sql.SQL(next_token("lease_token")),
        attempt=sql.SQL(one_more_attempt("attempt")),
        crashes=sql.SQL(one_more("crashes") if is_crash else "crashes"),
        columns=sql.SQL(claim.counted_columns(crashed=is_crash)),
    )


def bring_back(schema: str, queue: str) -> str:
    """Return SQL that moves jobs that are due again to the ends of their groups, after later jobs have passed them.

    It returns the number of moved jobs. Index: job_group_state, up to 1,000 jobs. Locks: the jobs, skipping those that
    another transaction holds. Send it in a separate transaction: if it were rolled back with a claim, it would leave
    marks (`xmax`) on the jobs, as if their relay had died.
    """
    return render(schema, _BRING_BACK, queue=queue, headers=sql.SQL(headers_with_order("job")))


_BRING_BACK: LiteralString = """\
WITH due AS MATERIALIZED (
  SELECT id FROM {job} WHERE state = 'group_waiting' AND queue = {queue} AND run_at <= pg_catalog.statement_timestamp()
  ORDER BY run_at LIMIT 1000 FOR UPDATE SKIP LOCKED
), back AS (
  UPDATE {job} AS job SET state = 'grouped', headers = {headers}, seq = DEFAULT
  WHERE id = ANY (ARRAY(SELECT id FROM due)) RETURNING id
)
SELECT pg_catalog.count(*) FROM back"""
