"""Schedules: lock the due ones, set their next times in the transaction that adds their jobs, and change schedules.

The row's lock and its `next_at` are the whole protocol: no relay is the leader, and fired times are not stored.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Select,
    Text,
    Update,
    and_,
    case,
    cast,
    delete,
    func,
    literal_column,
    null,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql.dml import ReturningDelete, ReturningInsert, ReturningUpdate

from outboxq.statements.builtin import pg, seconds
from outboxq.tables import Instant, schedule

SUMMARY_COLUMNS = (
    "name", "kind", "queue", "cron", "time_zone", "missed", "jitter_seconds", "declared", "next_at", "last_at",
    "paused_at", "created_at", "owner",
)  # fmt: skip
# The columns of a schedule, except its name and its times.
_GIVEN = ("kind", "queue", "args", "options", "cron", "time_zone", "missed", "jitter_seconds", "declared")
_NOW: ColumnElement[datetime] = pg.statement_timestamp(type_=Instant())
_CLOCK: ColumnElement[datetime] = pg.clock_timestamp(type_=Instant())
# As JSON, because tables before step 15 have no such columns.
_OWNER = cast(literal_column("pg_catalog.to_jsonb(schedule) ->> 'owner'::text"), Text)
_DISABLED_AT = cast(literal_column("pg_catalog.to_jsonb(schedule) ->> 'disabled_at'::text"), Instant())
# An operator's pause changes the time.
IS_DISABLED = func.coalesce(schedule.c.paused_at == _DISABLED_AT, literal_column("false"))
# If the database's clock goes back by at most this, fired times are waited for instead of being fired again.
CLOCK_STEP = timedelta(hours=1)


# For the transaction that fires schedules, because producers' transactions may hold the keys of unique jobs.
WAIT_SHORTLY = text("SELECT pg_catalog.set_config('lock_timeout', '2s', true)")


def lock_due(limit: int, without: Collection[str] = ()) -> Select[Any]:
    """Select and lock the due schedules, the longest overdue first, except those named in `without`; at most `limit`.

    Each row has the database's time too. Index: schedule_next, from its start. Locks: the rows, skipping those that
    another transaction holds: a relay that fires them, or an operator. If that transaction has set a new `next_at`, the
    row is checked again, and is no longer due.
    """
    return (
        select(*_summary(), schedule.c.args, schedule.c.options, _NOW.label("now"))
        .where(schedule.c.paused_at.is_(None), schedule.c.next_at <= _NOW, *_other_names(without))
        .order_by(schedule.c.next_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )


def advance(name: str, next_at: datetime, last_at: datetime | None) -> Update:
    """Return SQL that sets the schedule's next time, after the jobs that were due are added.

    `last_at` is the newest time for which the schedule was fired, None if it was not fired. Index: the primary key. The
    row is locked by `lock_due` in the same transaction.
    """
    fired = {} if last_at is None else {"last_at": last_at}
    return update(schedule).where(schedule.c.name == name).values(next_at=next_at, **fired)


def seconds_to_next(without: Collection[str] = ()) -> Select[Any]:
    """Select the seconds until the next schedule is due, except those named in `without`; negative if it is late.

    No row if there is no schedule. Index: schedule_next, its first entry. No locks.
    """
    distance = seconds(schedule.c.next_at - pg.clock_timestamp(type_=Instant()))
    conditions = (schedule.c.paused_at.is_(None), *_other_names(without))
    return select(distance).where(*conditions).order_by(schedule.c.next_at).limit(1)


def put(rows: Sequence[Mapping[str, object]], *, keep_declared: bool) -> ReturningInsert[Any]:
    """Return SQL that adds schedules, or changes those of the same names.

    It returns a row (the name) for each added or changed one. An existing schedule keeps its next time if cron text and
    time zone are the same, and a paused one stays paused. The next time is computed again if it is too late, because it
    was computed while the database's clock was ahead.

    Args:
        rows: Rows in the order of their names, so that two transactions lock them in the same order. If they have an
            owner, another owner's schedules are left alone, and disabled ones are enabled.
        keep_declared: True to leave alone schedules that an application's code declares.

    Index: the primary key. Locks: the rows of these names; waits briefly for a relay that fires one.
    """
    new = insert(schedule).values(list(rows))
    same = and_(schedule.c.cron == new.excluded.cron, schedule.c.time_zone == new.excluded.time_zone)
    has_owner = "owner" in rows[0]
    given = (*_GIVEN, "owner") if has_owner else _GIVEN
    changed = or_(*(schedule.c[name].is_distinct_from(new.excluded[name]) for name in given))
    allowed: list[ColumnElement[bool]] = [schedule.c.declared.is_(False)] if keep_declared else []
    ahead, back = _is_ahead(new.excluded.next_at), IS_DISABLED if has_owner else literal_column("false")
    values: dict[str, ColumnElement[Any]] = {name: new.excluded[name] for name in given}
    if has_owner:
        allowed.append(or_(schedule.c.owner.is_(None), schedule.c.owner == new.excluded.owner))
        values |= {"paused_at": case((back, null()), else_=schedule.c.paused_at), "disabled_at": null()}
    kept = case((and_(same, ~ahead, ~back), schedule.c.next_at), else_=new.excluded.next_at)
    return new.on_conflict_do_update(
        index_elements=[schedule.c.name],
        set_={**values, "next_at": kept},
        where=and_(or_(changed, ahead, back), *allowed),
    ).returning(schedule.c.name)


def _is_ahead(next_at: ColumnElement[datetime]) -> ColumnElement[bool]:
    """Return the condition that a schedule's stored next time is too late, computed by a clock that was ahead.

    A stored time is too late if it is after `next_at`, the schedule's first time from now on. The condition is false if
    `next_at` has passed by now. It is also false if the schedule was already fired for `next_at`, and the clock has
    then gone back by up to `CLOCK_STEP`. A firing by a clock that was further ahead does not count.
    """
    fired = and_(schedule.c.last_at >= next_at, schedule.c.last_at <= _CLOCK + CLOCK_STEP)
    not_fired = func.coalesce(~fired, literal_column("true"))
    return and_(schedule.c.next_at > next_at, next_at > _CLOCK, not_fired)


def select_schedules(*, queue: str | None = None, kind: str | None = None, limit: int | None = None) -> Select[Any]:
    """Select the schedules in the order of their names; only those whose jobs have this queue or kind, if given.

    Reads the table, which is small; no locks.
    """
    wanted = {"queue": queue, "kind": kind}
    conditions = [schedule.c[name] == value for name, value in wanted.items() if value is not None]
    return select(*_summary()).where(*conditions).order_by(schedule.c.name).limit(limit)


def select_schedule(name: str, *, lock: bool = False) -> Select[Any]:
    """Select one schedule with its job. Index: the primary key.

    `lock`: True to lock the row too, which waits for a relay that fires the schedule.
    """
    row = select(*_summary(), schedule.c.args, schedule.c.options).where(schedule.c.name == name)
    return row.with_for_update() if lock else row


def select_declared(owners: Collection[str]) -> Select[Any]:
    """Select the schedules that code of these owners, or of an unknown owner, declares, and that are not paused.

    Reads the table, which is small; no locks.
    """
    columns = [schedule.c[name] for name in ("name", "kind", "queue", "owner")]
    theirs = or_(schedule.c.owner.in_(sorted(owners)), schedule.c.owner.is_(None))
    return select(*columns).where(schedule.c.declared.is_(True), schedule.c.paused_at.is_(None), theirs)


def select_owners(names: Collection[str]) -> Select[Any]:
    """Select the owners of the schedules of these names, as rows: name, owner.

    Index: the primary key; no locks.
    """
    columns = [schedule.c[name] for name in ("name", "owner")]
    return select(*columns).where(schedule.c.name.in_(sorted(names)))


def disable(name: str, owner: str) -> ReturningUpdate[Any]:
    """Return SQL that disables a schedule that its owner's code no longer declares: pauses it until code declares it.

    It returns one row, the name; no row if the schedule was paused already, or belongs to another owner. Index: the
    primary key. Locks: the row.
    """
    is_theirs = and_(schedule.c.declared.is_(True), schedule.c.owner == owner)
    return (
        update(schedule)
        .where(schedule.c.name == name, is_theirs, schedule.c.paused_at.is_(None))
        .values(paused_at=_NOW, disabled_at=_NOW)
        .returning(schedule.c.name)
    )


def adopt(names: Sequence[str], owner: str | None) -> ReturningUpdate[Any]:
    """Return SQL that gives schedules to the owner of an application's code, or if `owner` is None to operators.

    It returns a row (the name) for each schedule that belonged to another. Paused schedules that operators get stay
    paused. Index: the primary key. Locks: the rows.
    """
    kept = {"disabled_at": null()} if owner is None else {}
    is_another = or_(schedule.c.owner.is_distinct_from(owner), schedule.c.declared.is_(owner is None))
    return (
        update(schedule)
        .where(schedule.c.name.in_(names), is_another)
        .values(owner=owner, declared=owner is not None, **kept)
        .returning(schedule.c.name)
    )


def remove(names: Sequence[str]) -> ReturningDelete[Any]:
    """Return SQL that deletes schedules: a row (the name) for each that existed.

    Index: the primary key. Locks: the rows.
    """
    return delete(schedule).where(schedule.c.name.in_(names)).returning(schedule.c.name)


def pause(names: Sequence[str]) -> ReturningUpdate[Any]:
    """Return SQL that pauses schedules: a row (the name) for each, except those that an operator had paused already.

    Index: the primary key. Locks: the rows.
    """
    return (
        update(schedule)
        .where(schedule.c.name.in_(names), or_(schedule.c.paused_at.is_(None), IS_DISABLED))
        .values(paused_at=pg.clock_timestamp())
        .returning(schedule.c.name)
    )


def resume(name: str, next_at: datetime) -> Update:
    """Return SQL that resumes a paused schedule, due at `next_at`. Index: the primary key. Locks: the row."""
    return update(schedule).where(schedule.c.name == name).values(paused_at=None, next_at=next_at)


def _summary() -> list[ColumnElement[Any]]:
    columns = [schedule.c[name] for name in SUMMARY_COLUMNS if name != "owner"]
    return [*columns, _OWNER.label("owner"), IS_DISABLED.label("is_disabled")]


def _other_names(names: Collection[str]) -> list[ColumnElement[bool]]:
    return [schedule.c.name.not_in(sorted(names))] if names else []
