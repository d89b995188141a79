"""Unique jobs: a key is free when the job that has it has ended, and no period reserves the key any longer.

No relay writes a key when a job ends: the COMMIT that removes the job's row frees the key. A job that runs in
transaction mode is deleted, but every other snapshot still sees its row, so its key is taken. A job whose expiry has
passed counts as ended, unless it runs: a relay that claims it later drops it.

A new job takes over a key whose job is gone by compare-and-set: the key's row is changed only if it is still the
version (`ctid`) that the statement has read. If there is a newer version, another transaction has taken the key over
since, even if for a job of the same id. The job of that transaction is not in this statement's snapshot.
"""

from collections.abc import Mapping, Sequence
from typing import Any, LiteralString
from uuid import UUID

from psycopg import sql
from sqlalchemy import (
    CTE,
    Boolean,
    ColumnElement,
    Executable,
    Insert,
    Interval,
    Text,
    and_,
    any_,
    bindparam,
    cast,
    collate,
    exists,
    func,
    insert,
    literal_column,
    or_,
    select,
    true,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.sql.dml import ReturningInsert
from sqlalchemy.types import TypeEngine

from outboxq.job import UNIQUE_HEADER
from outboxq.new_job import UniqueJob
from outboxq.statements.builtin import pg
from outboxq.statements.claim import HELD
from outboxq.statements.enqueue import ARRAYS, arrays_of, interval_text, job_columns, rows_of, text_array
from outboxq.statements.render import render
from outboxq.tables import dead_job, job, unique_key

# The key without its kind, in the headers of its job: a dead letter has no other record of it.
KEY_HEADER = UNIQUE_HEADER
# A check of the table.
MAX_STORED_KEY_BYTES = 1_024

_ARRAYS: Mapping[str, TypeEngine[Any]] = {**ARRAYS, "key": Text(), "kept": Interval()}

# Not the job's id, because a retried dead letter takes its key over under its former id.
_VERSION: ColumnElement[Any] = literal_column("unique_key.ctid")
# The expiry is compared with a time before the snapshot, and the row's mark is read after it: a relay that has claimed
# the job by then is seen, and one that claims it later reads a later time before it calls the handler.
_LIVES: LiteralString = (
    "CASE WHEN job.expires_at <= pg_catalog.statement_timestamp() "
    f"THEN job.state = 'leased' OR job.state = 'group_leased' OR {HELD} ELSE true END"
)
_lives: ColumnElement[bool] = literal_column(_LIVES, Boolean())
# By the primary key, for each row of unique_key: with a join the planner might read the whole table.
_HAS_JOB = select(true()).where(job.c.id == unique_key.c.job_id, _lives).scalar_subquery().is_not(None)


def stored_key(kind: ColumnElement[str], headers: ColumnElement[Any]) -> ColumnElement[str]:
    """Return the expression of a job's unique key, as in the table `unique_key`; NULL if the job has none."""
    return kind.op("||")(literal_column("pg_catalog.chr(31)", Text())).op("||")(
        cast(headers, JSONB).op("->>")(literal_column(f"'{KEY_HEADER}'", Text()))
    )


def add_unique(jobs: Mapping[str, UniqueJob]) -> tuple[Executable, dict[str, str]]:
    """Return SQL that inserts jobs of different keys, in their order; a job whose key is taken is not inserted.

    It returns a row for each given job: its number from 1 on; true if it was added; and the id of another job that has
    its key. That id is NULL if there is none, or if another transaction has just taken the key.

    Index: the primary keys. Locks: the rows of the keys that are taken, until the transaction ends; waits for another
    transaction that is taking one of them. Bound: the jobs given.

    Args:
        jobs: The jobs by their ids in hex.

    Returns:
        The statement and its parameters.
    """
    return _ADD, _parameters(jobs)


def insert_without_keys(jobs: Mapping[str, UniqueJob]) -> tuple[Insert, dict[str, str]]:
    """Return the INSERT of jobs, given by their ids in hex, in their order; `take_keys` takes their unique keys later.

    Locks only the new rows; one index entry each.

    Returns:
        The statement and its parameters.
    """
    return _INSERT, _parameters(jobs)


def key_owners(keys: list[str]) -> Executable:
    """Select those of these unique keys that are stored, each with the id of its job as text.

    Index: the primary key; no locks.
    """
    wanted = cast(bindparam("keys", text_array(keys), type_=Text()), ARRAY(Text()))
    return select(unique_key.c.key, cast(unique_key.c.job_id, Text())).where(unique_key.c.key == any_(wanted))


def _parameters(jobs: Mapping[str, UniqueJob]) -> dict[str, str]:
    keys = [each.key for each in jobs.values()]
    return {
        **arrays_of(jobs),
        "key": text_array([each.key for each in keys]),
        "kept": text_array([interval_text(each.kept) for each in keys]),
    }


def _wanted() -> CTE:
    rows = rows_of(_ARRAYS, place="place")
    return select(*rows.c).cte("wanted").prefix_with("MATERIALIZED")


def _job_columns(wanted: CTE) -> dict[str, ColumnElement[Any]]:
    given = dict(wanted.c)
    own_key = pg.split_part(wanted.c.key, literal_column("pg_catalog.chr(31)"), literal_column("2"))
    header = pg.jsonb_build_object(literal_column(f"'{KEY_HEADER}'"), own_key)
    return {**job_columns(given), "headers": wanted.c.headers.op("||")(header)}


def _insert_without_keys() -> Insert:
    wanted = _wanted()
    columns = _job_columns(wanted)
    return insert(job).from_select(list(columns), select(*columns.values()).order_by(wanted.c.place)).inline()


def _add_unique() -> Executable:
    wanted = _wanted()
    is_kept = func.coalesce(unique_key.c.kept_until > pg.statement_timestamp(), literal_column("false"))
    standing = (
        select(
            unique_key.c.key,
            unique_key.c.job_id,
            _VERSION.label("version"),
            or_(is_kept, _HAS_JOB).label("stands"),
        )
        .where(unique_key.c.key == any_(cast(bindparam("key", type_=Text()), ARRAY(Text()))))
        .cte("standing")
        .prefix_with("MATERIALIZED")
    )
    kept_until = pg.statement_timestamp() + wanted.c.kept
    taking = _take(wanted, standing, {"key": wanted.c.key, "job_id": wanted.c.id, "kept_until": kept_until})
    taken = taking.cte("taken")
    columns = _job_columns(wanted)
    won = select(*columns.values()).join_from(wanted, taken, taken.c.job_id == wanted.c.id).order_by(wanted.c.place)
    added = insert(job).from_select(list(columns), won).inline().cte("added")
    stands = and_(standing.c.key == wanted.c.key, standing.c.stands)
    return (
        select(wanted.c.place, taken.c.job_id.is_not(None), cast(standing.c.job_id, Text()))
        .select_from(wanted.outerjoin(taken, taken.c.job_id == wanted.c.id).outerjoin(standing, stands))
        .add_cte(added)
    )


def _take(wanted: CTE, standing: CTE, values: Mapping[str, ColumnElement[Any]]) -> ReturningInsert[tuple[UUID]]:
    """Return the INSERT that takes each wanted key that is free; it returns the ids of the jobs that got their key.

    Keys are taken in the order of their bytes, so that all transactions wait for keys in one order. `standing` has the
    present rows of these keys: a key is taken over only if its row is still the version that was read there.
    """
    stands = exists().where(standing.c.key == wanted.c.key, standing.c.stands)
    free = select(*values.values()).where(~stands).order_by(collate(wanted.c.key, "C"))
    judged = select(standing.c.version).where(standing.c.key == literal_column("unique_key.key", Text()))
    statement = postgresql_insert(unique_key).from_select(list(values), free)
    return statement.on_conflict_do_update(
        index_elements=[unique_key.c.key],
        set_={name: statement.excluded[name] for name in values if name != "key"},
        where=judged.scalar_subquery() == _VERSION,
    ).returning(unique_key.c.job_id)


_ADD = _add_unique()
_INSERT = _insert_without_keys()


# Keys in the order of their bytes, so that all transactions wait for keys in one order. The scalar subqueries run for
# each row, by the primary key; with a join the planner might read the whole table.
_TAKE: LiteralString = """\
WITH added AS MATERIALIZED (
  SELECT new.key, new.id, new.kept_for, new.place
  FROM unnest({keys}::text[], {ids}::uuid[], {kept_for}::interval[]) WITH ORDINALITY AS new (key, id, kept_for, place)
  WHERE (SELECT true FROM {job} AS job WHERE job.id = new.id)
), wanted AS MATERIALIZED (
  SELECT DISTINCT ON (key COLLATE "C") key, id, kept_for FROM added ORDER BY key COLLATE "C", place
), standing AS MATERIALIZED (
  SELECT held.key, held.job_id, held.ctid AS version,
    coalesce(held.kept_until > pg_catalog.statement_timestamp(), false)
    OR (SELECT true FROM {job} AS job WHERE job.id = held.job_id AND {lives}) IS NOT NULL AS stands
  FROM {unique_key} AS held WHERE held.key = ANY (ARRAY(SELECT key FROM wanted))
), taken AS (
  INSERT INTO {unique_key} AS held (key, job_id, kept_until)
  SELECT key, id, pg_catalog.statement_timestamp() + kept_for FROM wanted
  WHERE NOT EXISTS (SELECT FROM standing WHERE standing.key = wanted.key AND standing.stands)
  ORDER BY key COLLATE "C"
  ON CONFLICT (key) DO UPDATE SET job_id = excluded.job_id, kept_until = excluded.kept_until
  WHERE held.ctid = (SELECT version FROM standing WHERE standing.key = held.key)
  RETURNING held.job_id
), suppressed AS (
  DELETE FROM {job} AS job WHERE job.id = ANY (ARRAY(SELECT id FROM added EXCEPT SELECT job_id FROM taken))
)
SELECT pg_catalog.replace(added.id::text, '-', ''), taken.job_id IS NOT NULL, standing.job_id::text
FROM added LEFT JOIN taken ON taken.job_id = added.id LEFT JOIN standing ON standing.key = added.key AND standing.stands
"""


def take_keys(schema: str, jobs: Mapping[str, UniqueJob]) -> str:
    """Return SQL that takes the unique keys of jobs that this transaction added, and deletes jobs whose key is taken.

    Of two given jobs of one key the first gets it. A job that a rollback to a savepoint has undone takes no key. It
    returns a row for each job that exists: its id in hex, true if it stays, and the id of the job that has the key, if
    known.

    Index: the primary keys. Locks: the rows of the keys that are taken, until the transaction ends; waits for another
    transaction that is taking one of them. Bound: the keys given.

    Args:
        jobs: The jobs by their ids in hex.
    """
    return render(
        schema,
        _TAKE,
        keys=[each.key.key for each in jobs.values()],
        ids=list(jobs),
        kept_for=[interval_text(each.key.kept) for each in jobs.values()],
        lives=sql.SQL(_LIVES),
    )


def key_is_free(key: ColumnElement[str]) -> ColumnElement[bool]:
    """Return the condition that no waiting or running job has this key, or the key is NULL.

    Index: the primary keys; no locks.
    """
    holder = exists().where(unique_key.c.key == key, job.c.id == unique_key.c.job_id, _lives)
    return ~holder


def take_for_dead(picked: CTE, conditions: Sequence[ColumnElement[bool]]) -> tuple[CTE, CTE]:
    """Return the CTEs that take the unique keys of dead letters when they are retried.

    Only those dead letters among `picked` that meet the conditions take their keys. If a period still reserves a key
    for a job that is gone, the key is taken nevertheless, and the period continues: it restricts only new jobs.

    Index: the primary keys. Locks: the rows of the keys that are taken; waits for another transaction that is just
    taking one of them.

    Returns:
        A CTE of the dead letters that have their keys now (`job_id`), and one of those that did not get theirs (`id`).
    """
    key = stored_key(dead_job.c.kind, dead_job.c.headers)
    asking = (
        select(dead_job.c.id, key.label("key"))
        .where(dead_job.c.id == picked.c.id, pg.octet_length(key) <= MAX_STORED_KEY_BYTES, *conditions)
        .cte("asking")
        .prefix_with("MATERIALIZED")
    )
    wanted = (
        select(cast(pg.min(cast(asking.c.id, Text()), type_=Text()), job.c.id.type).label("id"), asking.c.key)
        .group_by(asking.c.key)
        .cte("wanted")
        .prefix_with("MATERIALIZED")
    )
    standing = (
        select(unique_key.c.key, _VERSION.label("version"), _HAS_JOB.label("stands"))
        .where(unique_key.c.key == any_(select(wanted.c.key).scalar_subquery()))
        .cte("standing")
        .prefix_with("MATERIALIZED")
    )
    statement = _take(wanted, standing, {"key": wanted.c.key, "job_id": wanted.c.id})
    taken = statement.cte("taken_keys")
    blocked = select(asking.c.id).where(asking.c.id.not_in(select(taken.c.job_id))).cte("blocked")
    return taken, blocked


def lock_idle_keys(schema: str, after: str, limit: int) -> str:
    """Return SQL that locks the unused keys among the next `limit` keys after `after`, for `delete_idle_keys`.

    A key is unused if its job is gone and its period has ended. The SQL returns a row for each of the `limit` keys in
    their order: the key, and true if it was locked.

    Index: the primary key, from `after` on; that of `job` for each key. Locks: the unused keys, skipping those that
    another transaction holds. A producer that takes one over waits for this transaction.
    """
    return render(schema, _LOCK_IDLE, after=after, limit=limit)


_LOCK_IDLE: LiteralString = """\
WITH page AS MATERIALIZED (
  SELECT key, job_id, kept_until FROM {unique_key} WHERE key > {after}::text ORDER BY key LIMIT {limit}
), idle AS MATERIALIZED (
  SELECT key FROM page
  WHERE coalesce(kept_until <= pg_catalog.statement_timestamp(), true)
    AND (SELECT true FROM {job} AS job WHERE job.id = page.job_id) IS NULL
), locked AS MATERIALIZED (
  SELECT key FROM {unique_key} WHERE key = ANY (ARRAY(SELECT key FROM idle)) FOR UPDATE SKIP LOCKED
)
SELECT page.key, locked.key IS NOT NULL FROM page LEFT JOIN locked ON locked.key = page.key ORDER BY page.key
"""

# Checked again, in a snapshot taken with the locks held: before, a producer may have taken a key over.
_DELETE_IDLE: LiteralString = """\
WITH deleted AS (
  DELETE FROM {unique_key} AS held
  WHERE key = ANY ({keys}::text[])
    AND coalesce(kept_until <= pg_catalog.statement_timestamp(), true)
    AND (SELECT true FROM {job} AS job WHERE job.id = held.job_id) IS NULL
  RETURNING 1
)
SELECT pg_catalog.count(*) FROM deleted
"""


def delete_idle_keys(schema: str, keys: list[str]) -> str:
    """Return SQL that deletes keys that this transaction has locked, if they are still unused.

    It returns one row, the number of deleted keys. It is a separate statement after `lock_idle_keys`, so that it sees
    what was committed before the locks. Index: the primary keys. Locks: only those held already.
    """
    return render(schema, _DELETE_IDLE, keys=keys)
