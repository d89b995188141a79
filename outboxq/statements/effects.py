"""Effects: claim or take over a call, keep it, record what it came to.

Each statement is a transaction of its own on READ COMMITTED. A call is fenced by its `lock_token`, a UUID that its
caller made: whoever takes over writes a token of its own, and the earlier caller's statements match no row any more.
All times are the database's.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Executable,
    Float,
    FromClause,
    Select,
    and_,
    case,
    cast,
    exists,
    extract,
    func,
    literal,
    null,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import insert

from outboxq.statements.builtin import pg
from outboxq.tables import StoredText, deployment, effect

# The next of them is the greatest that the column holds.
_ALMOST_INTEGER = 2_147_483_646

Status: TypeAlias = Literal["started", "done", "failed", "retryable", "unknown"]

# How long one try of a claim waits for a row where the session would wait without end.
_TRY = "1s"

_now = pg.clock_timestamp


@dataclass(frozen=True, slots=True)
class EffectState:
    """An effect as its claim found it, or left it.

    `claimed`: the call is ours to make. `in_doubt`: an earlier one may have been applied. `known_seconds`: since the
    first one; `locked_seconds`: how long the lock still lasts, negative once it ran out. `durably` says nothing.
    """

    claimed: bool
    status: Status
    in_doubt: bool
    provider_key: UUID
    same_request: bool
    result: str | None
    error: str | None
    known_seconds: float
    locked_seconds: float
    durably: str | None = None


def claim(
    scope: str, key: str, fingerprint: bytes | None, provider_key: UUID, token: UUID, lease: timedelta
) -> Executable:
    """Claim the call, or take it over from a caller that died; else look at what stands. One row, or none.

    None only where somebody else claimed it after this statement's snapshot: look again.
    Index: the primary key. Locks: the effect's row, and only to take it: what is under way, or came to an end, is
    neither locked nor waited for, also where its record is just being committed. A row that is to be taken is
    waited for a second long where the session would wait without end (`select_waits_without_end`; 55P03), so that the
    caller can be cancelled between two tries.
    A repetition of a claim whose COMMIT was not answered finds its own token.
    """
    # Cast: without, a driver would have to guess the type of a NULL.
    given = cast(literal(fingerprint, effect.c.fingerprint.type), effect.c.fingerprint.type)
    same_request = or_(effect.c.fingerprint.is_(None), given.is_(None), effect.c.fingerprint == given)
    is_free = or_(effect.c.status == "retryable", and_(effect.c.status == "started", effect.c.locked_until <= _now()))
    is_ours = and_(effect.c.lock_token == token, effect.c.status == "started")
    standing = (
        select(*_seen(effect, is_ours, same_request), and_(same_request, is_free).label("is_free"))
        .where(effect.c.scope == scope, effect.c.key == key)
        .cte("standing")
        .prefix_with("MATERIALIZED")
    )
    new = {
        "scope": literal(scope),
        "key": literal(key),
        "fingerprint": given,
        "status": literal("started"),
        "provider_key": literal(provider_key, effect.c.provider_key.type),
        "lock_token": literal(token, effect.c.lock_token.type),
        "locked_until": _now() + literal(lease),
    }
    # Read by the insert, so it is set before a row is waited for.
    patience = select(_shorten_wait().label("value")).cte("patience").prefix_with("MATERIALIZED")
    is_wanted = and_(patience.c.value.is_not(None), ~exists(select(standing.c.claimed).where(~standing.c.is_free)))
    claimed = (
        insert(effect)
        .from_select(
            list(new),
            select(*new.values()).where(is_wanted),
            include_defaults=False,
        )
        .on_conflict_do_update(
            index_elements=[effect.c.scope, effect.c.key],
            set_={
                "status": "started",
                "fingerprint": func.coalesce(effect.c.fingerprint, given),
                # Our own token: this caller claimed before, stood still, and has not called.
                "in_doubt": or_(effect.c.in_doubt, and_(effect.c.status == "started", effect.c.lock_token != token)),
                "lock_token": token,
                "locked_until": _now() + lease,
                "attempts": func.least(effect.c.attempts, _ALMOST_INTEGER) + 1,
                "changed_at": _now(),
                "expires_at": None,
            },
            # Once more, on the row's newest version: after the wait for its lock it may be somebody else's.
            where=and_(same_request, is_free),
        )
        .returning(*effect.c)
        .cte("claimed")
    )
    taken = select(*_seen(claimed, true(), true()), _durably())
    seen = (column for column in standing.c if column.key != "is_free")
    others = select(*seen, null()).where(~standing.c.is_free).where(~exists(select(claimed.c.scope)))
    return taken.union_all(others)


def _seen(
    rows: FromClause, claimed: ColumnElement[bool], same_request: ColumnElement[bool]
) -> list[ColumnElement[Any]]:
    return [
        claimed.label("claimed"),
        rows.c["status"],
        rows.c["in_doubt"],
        rows.c["provider_key"],
        same_request.label("same_request"),
        rows.c["result"],
        rows.c["error"],
        _seconds(_now() - rows.c["first_called_at"]).label("known_seconds"),
        _seconds(rows.c["locked_until"] - _now()).label("locked_seconds"),
    ]


def _shorten_wait() -> ColumnElement[str]:
    set_now = pg.set_config("lock_timeout", _TRY, True, type_=StoredText())
    return case((_waits_without_end(), set_now), else_="as it was")


def _waits_without_end() -> ColumnElement[bool]:
    return pg.current_setting("lock_timeout", type_=StoredText()) == "0"


def select_waits_without_end() -> Select[Any]:
    """Whether the session's own lock_timeout is none. One row; no locks."""
    return select(_waits_without_end())


def _durably() -> ColumnElement[str | None]:
    """Make COMMIT wait for the disk although it is set not to: what a crash forgets would be called again."""
    is_off = pg.current_setting("synchronous_commit", type_=StoredText()) == "off"
    return case((is_off, pg.set_config("synchronous_commit", "on", True))).label("durably")


def _seconds(interval: ColumnElement[Any]) -> ColumnElement[float]:
    return cast(extract("epoch", interval), Float(53))


def record(
    scope: str,
    key: str,
    token: UUID,
    status: Status,
    *,
    in_doubt: bool = False,
    result: str | None = None,
    error: str | None = None,
    keep: timedelta | None = None,
    unlock: bool = True,
) -> Executable:
    """Write what a call came to; one row with the result and the error as stored, or none if another caller took over.

    May be repeated: the token stays.

    Args:
        keep: How long it is remembered; None for ever, as for everything that is not settled.
        unlock: Let the next caller take over at once, and not when the lock runs out.

    Index: the primary key. Locks: the effect's row.
    """
    values: dict[str, object] = {
        "status": status,
        "in_doubt": in_doubt,
        "result": result,
        "error": error,
        "changed_at": _now(),
        "expires_at": None if keep is None else _now() + keep,
    }
    if unlock:
        values["locked_until"] = _now()
    return (
        update(effect)
        .where(*_held(scope, key, token))
        .values(values)
        .returning(effect.c.result, effect.c.error, _durably())
    )


def extend(scope: str, key: str, token: UUID, lease: timedelta) -> Executable:
    """Keep a call that is under way; no row where somebody took over, or where its record is just being committed.

    Index: the primary key. Locks: the effect's row, never waited for.
    """
    held = select(effect.c.scope, effect.c.key).where(*_held(scope, key, token), effect.c.status == "started")
    locked = held.with_for_update(skip_locked=True).cte("held").prefix_with("MATERIALIZED")
    return (
        update(effect)
        .where(effect.c.scope == locked.c.scope, effect.c.key == locked.c.key)
        .values(locked_until=_now() + lease)
        .returning(true(), _durably())
    )


def _held(scope: str, key: str, token: UUID) -> tuple[ColumnElement[bool], ...]:
    return effect.c.scope == scope, effect.c.key == key, effect.c.lock_token == token


def select_deployment() -> Select[Any]:
    """The id of this deployment. One row; no locks."""
    return select(deployment.c.id)
