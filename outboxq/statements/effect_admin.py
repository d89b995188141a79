"""Statements for operators: list effects (recorded calls of other services), and settle those of unknown outcome."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Column, ColumnElement, Executable, Select, and_, literal, literal_column, or_, select, update

from outboxq.statements.builtin import pg, seconds
from outboxq.statements.effects import Status, ending
from outboxq.statements.paging import matching
from outboxq.tables import effect


@dataclass(frozen=True, slots=True)
class EffectFilter:
    """A filter for effects; without any value, it matches all of them. `error` is any part of the stored error."""

    scope: str | None = None
    status: Status | None = None
    error: str | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        """Return the filter as conditions on the table `effect`."""
        found = matching(effect, scope=self.scope, status=self.status)
        return found if self.error is None else [*found, pg.strpos(effect.c.error, self.error) > 0]


SUMMARY_COLUMNS = (
    "scope", "key", "status", "in_doubt", "provider_key", "attempts", "locked_until", "first_called_at", "changed_at",
    "expires_at", "error",
)  # fmt: skip


def _has_status(status: str) -> ColumnElement[bool]:
    # Written into the statement as a literal, so that the planner sees the condition of an index.
    return effect.c.status == literal_column(f"'{status}'")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the table `effect` that one index contains; lists read one part after the other.

    Attributes:
        by: The index's column, which has a value in all rows of the part.
        where: The conditions on the part's rows.
        statuses: The statuses that its rows may have.
    """

    by: Column[Any]
    where: tuple[ColumnElement[bool], ...]
    statuses: frozenset[Status]


# Each effect is in one of them; if its outcome is unknown, in one of the first two. Indexes: effect_unknown,
# effect_open, effect_expires.
PARTS = (
    Part(effect.c.changed_at, (_has_status("unknown"),), frozenset({"unknown"})),
    Part(
        effect.c.locked_until,
        (effect.c.expires_at.is_(None), ~_has_status("unknown")),
        frozenset({"started", "retryable", "done", "failed"}),
    ),
    Part(effect.c.expires_at, (effect.c.expires_at.is_not(None),), frozenset({"retryable", "done", "failed"})),
)


def select_effects(
    wanted: EffectFilter, part: Part, stretch: Sequence[ColumnElement[bool]], *, limit: int
) -> Select[Any]:
    """Select the effects that match `wanted` in one stretch of the part `part` of the table, the latest first.

    `stretch`: conditions from `stretches`. Index: the part's, backwards; no locks.
    """
    shown = (effect.c[name] for name in SUMMARY_COLUMNS)
    return select(*shown).where(*wanted.conditions(), *stretch).order_by(part.by.desc()).limit(limit)


def select_unresolved(wanted: EffectFilter, stretch: Sequence[ColumnElement[bool]]) -> Select[Any]:
    """Select the effects that match `wanted` and that an operator may resolve, in one stretch of the table.

    `stretch`: conditions from `stretches`. Index: that by which the stretch was made; no locks.
    """
    shown = (effect.c[name] for name in SUMMARY_COLUMNS)
    return select(*shown).where(*wanted.conditions(), *stretch, _is_open(brings_result=False))


def select_effect(scope: str, key: str) -> Executable:
    """Select one effect with all its columns. Index: the primary key; no locks; one row."""
    is_locked = and_(effect.c.status == "started", effect.c.locked_until > pg.clock_timestamp())
    return select(
        *(effect.c[name] for name in SUMMARY_COLUMNS),
        is_locked.label("is_locked"),
        _is_open(brings_result=True).label("can_be_resolved"),
        pg.encode(effect.c.fingerprint, "hex").label("fingerprint"),
        effect.c.result,
    ).where(*_is(scope, key))


def resolve(
    scope: str, key: str, status: Status, *, result: str | None, error: str | None, keep: timedelta
) -> Executable:
    """Return SQL that settles an effect as an operator decided.

    It returns one row, the effect's former and new state; the new one is NULL if the effect could not be resolved. No
    row without such an effect. Index: the primary key. Locks: the effect's row, FOR UPDATE SKIP LOCKED, never waited
    for. A caller that was suspended and resumes later finds another token, and can neither record its call nor extend
    its lock.
    """
    # MATERIALIZED, and the condition only here, because the lock rechecks it on the row's newest version.
    is_open = _is_open(brings_result=result is not None)
    open_one = select(effect.c.scope, effect.c.key).where(*_is(scope, key), is_open)
    picked = open_one.with_for_update(skip_locked=True).cte("picked").prefix_with("MATERIALIZED")
    resolved = (
        update(effect)
        .where(effect.c.scope == picked.c.scope, effect.c.key == picked.c.key)
        .values(ending(status, result=result, error=error, keep=keep) | {"lock_token": pg.gen_random_uuid()})
        .returning(*(effect.c[name] for name in SUMMARY_COLUMNS))
        .cte("resolved")
    )
    return (
        select(
            *(resolved.c[name] for name in SUMMARY_COLUMNS),
            effect.c.status.label("was_status"),
            is_open.label("was_open"),
            seconds(effect.c.locked_until - pg.clock_timestamp()).label("locked_seconds"),
        )
        .select_from(effect.outerjoin(resolved, effect.c.key == resolved.c.key))
        .where(*_is(scope, key))
    )


def _is(scope: str, key: str) -> tuple[ColumnElement[bool], ...]:
    return effect.c.scope == scope, effect.c.key == key


def _is_open(*, brings_result: bool) -> ColumnElement[bool]:
    """Return the condition that an operator may resolve the effect: its outcome is unknown, and no call is in progress.

    With `brings_result`, an effect that is done without a result may be resolved too: the operator adds the result.
    """
    return or_(
        and_(literal(brings_result), effect.c.status == "done", effect.c.result.is_(None)),
        effect.c.status == "unknown",
        and_(effect.c.status == "started", effect.c.locked_until <= pg.clock_timestamp()),
        and_(effect.c.status == "retryable", effect.c.in_doubt),
    )
