"""Effects: claim or take over a call, extend its lock, record its outcome. Guarded HTTP requests use their rows too.

Each statement but `record_with_rows` is its own transaction at READ COMMITTED. A call is fenced by its `lock_token`, a
UUID that its caller made: the next caller writes another one, and the earlier caller's statements match no row. All
times are the database's.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias
from uuid import UUID

from sqlalchemy import (
    CTE,
    ColumnElement,
    Executable,
    FromClause,
    Select,
    Update,
    and_,
    case,
    cast,
    exists,
    func,
    literal,
    null,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import insert

from outboxq.statements.builtin import pg, seconds
from outboxq.tables import StoredText, deployment, effect

# One less than the greatest number that the column holds.
_ALMOST_INTEGER = 2_147_483_646

Status: TypeAlias = Literal["started", "done", "failed", "retryable", "unknown"]

# The time that one try of a claim waits for a row if the session would wait without end.
_TRY = "1s"

_now = pg.clock_timestamp


@dataclass(frozen=True, slots=True)
class EffectState:
    """An effect as its claim found it, or left it.

    `claimed`: we are to make the call. `in_doubt`: an earlier call may have been applied. `known_seconds`: since the
    first call; `locked_seconds`: until the lock expires, negative afterwards. `durably`: not to be read.
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


@dataclass(frozen=True, slots=True)
class EffectLock:
    """The lock on an effect, for its holder: it matches no row once another caller took over."""

    scope: str
    key: str
    token: UUID

    def matches(self) -> tuple[ColumnElement[bool], ...]:
        """The conditions on the effect's row."""
        return effect.c.scope == self.scope, effect.c.key == self.key, effect.c.lock_token == self.token


def claim(lock: EffectLock, fingerprint: bytes | None, provider_key: UUID, lease: timedelta) -> Executable:
    """Claim the call, or take it over from a caller that died; else read the effect. One row, or none.

    No row only if another caller claimed it after this statement's snapshot: then claim again.
    Index: the primary key. Locks: the effect's row, and only to take it: a call under way or recorded is neither locked
    nor waited for, even while its record is being committed. If the session would wait without end
    (`select_waits_without_end`), the wait for a row to be taken is one second (then 55P03), so that the caller can be
    cancelled between two tries. A repeated claim, whose first COMMIT was not answered, finds its own token.
    """
    # Cast, or a driver would have to guess the type of a NULL.
    given = cast(literal(fingerprint, effect.c.fingerprint.type), effect.c.fingerprint.type)
    same_request = or_(effect.c.fingerprint.is_(None), given.is_(None), effect.c.fingerprint == given)
    is_free = or_(effect.c.status == "retryable", and_(effect.c.status == "started", effect.c.locked_until <= _now()))
    standing = _standing(lock, same_request, is_free)
    # The insert reads this, so the time-out is set before the wait for a row.
    patience = select(_shorten_wait().label("value")).cte("patience").prefix_with("MATERIALIZED")
    is_wanted = and_(patience.c.value.is_not(None), ~exists(select(standing.c.claimed).where(~standing.c.is_free)))
    new = _new_row(lock, given, provider_key, lease)
    claimed = (
        insert(effect)
        .from_select(list(new), select(*new.values()).where(is_wanted), include_defaults=False)
        .on_conflict_do_update(
            index_elements=[effect.c.scope, effect.c.key],
            set_=_taken_over(lock.token, given, lease),
            # Once more, on the row's newest version: after the wait for its lock it may be another caller's.
            where=and_(same_request, is_free),
        )
        .returning(*effect.c)
        .cte("claimed")
    )
    taken = select(*_state(claimed, true(), true()), _durably())
    others = select(*(column for column in standing.c if column.key != "is_free"), null())
    return taken.union_all(others.where(~standing.c.is_free).where(~exists(select(claimed.c.scope))))


def _standing(lock: EffectLock, same_request: ColumnElement[bool], is_free: ColumnElement[bool]) -> CTE:
    """The effect in this statement's snapshot."""
    is_ours = and_(effect.c.lock_token == lock.token, effect.c.status == "started")
    return (
        select(*_state(effect, is_ours, same_request), and_(same_request, is_free).label("is_free"))
        .where(effect.c.scope == lock.scope, effect.c.key == lock.key)
        .cte("standing")
        .prefix_with("MATERIALIZED")
    )


def _new_row(
    lock: EffectLock, fingerprint: ColumnElement[Any], provider_key: UUID, lease: timedelta
) -> dict[str, ColumnElement[Any]]:
    """The values of a first call."""
    return {
        "scope": literal(lock.scope),
        "key": literal(lock.key),
        "fingerprint": fingerprint,
        "status": literal("started"),
        "provider_key": literal(provider_key, effect.c.provider_key.type),
        "lock_token": literal(lock.token, effect.c.lock_token.type),
        "locked_until": _now() + literal(lease),
    }


def _taken_over(token: UUID, fingerprint: ColumnElement[Any], lease: timedelta) -> dict[str, object]:
    """The new values of a row that is called again."""
    return {
        "status": "started",
        "fingerprint": func.coalesce(effect.c.fingerprint, fingerprint),
        # Our own token: this caller claimed before, hung, and has not called.
        "in_doubt": or_(effect.c.in_doubt, and_(effect.c.status == "started", effect.c.lock_token != token)),
        "lock_token": token,
        "locked_until": _now() + lease,
        "attempts": func.least(effect.c.attempts, _ALMOST_INTEGER) + 1,
        "changed_at": _now(),
        "expires_at": None,
    }


def _state(
    rows: FromClause, claimed: ColumnElement[bool], same_request: ColumnElement[bool]
) -> list[ColumnElement[Any]]:
    """The columns of an `EffectState`."""
    return [
        claimed.label("claimed"),
        *(rows.c[name] for name in ("status", "in_doubt", "provider_key")),
        same_request.label("same_request"),
        *(rows.c[name] for name in ("result", "error")),
        seconds(_now() - rows.c["first_called_at"]).label("known_seconds"),
        seconds(rows.c["locked_until"] - _now()).label("locked_seconds"),
    ]


def _shorten_wait() -> ColumnElement[str]:
    set_now = pg.set_config("lock_timeout", _TRY, True, type_=StoredText())
    return case((_waits_without_end(), set_now), else_="as it was")


def _waits_without_end() -> ColumnElement[bool]:
    return pg.current_setting("lock_timeout", type_=StoredText()) == "0"


def select_waits_without_end() -> Select[Any]:
    """One row: true if the session's own lock_timeout is 0. No locks."""
    return select(_waits_without_end())


def _durably() -> ColumnElement[str | None]:
    """Make COMMIT wait for the disk even if it is set not to: a call that a crash forgets would be made again."""
    is_off = pg.current_setting("synchronous_commit", type_=StoredText()) == "off"
    return case((is_off, pg.set_config("synchronous_commit", "on", True))).label("durably")


def record(
    lock: EffectLock,
    status: Status,
    *,
    in_doubt: bool = False,
    result: str | None = None,
    error: str | None = None,
    keep: timedelta | None = None,
    unlock: bool = True,
) -> Executable:
    """Write a call's outcome; one row with the result and the error as stored, or none if another caller took over.

    May be repeated: the token stays.

    Args:
        keep: The time until it expires; None for ever, as for everything unsettled.
        unlock: Let the next caller take over at once, and not when the lock expires.

    Index: the primary key. Locks: the effect's row.
    """
    values = ending(status, in_doubt=in_doubt, result=result, error=error, keep=keep)
    if not unlock:
        del values["locked_until"]
    return update(effect).where(*lock.matches()).values(values).returning(effect.c.result, effect.c.error, _durably())


def ending(
    status: Status, *, in_doubt: bool = False, result: str | None, error: str | None, keep: timedelta | None
) -> dict[str, object]:
    """The values of a call that has ended; the next caller may take over at once."""
    return {
        "status": status,
        "in_doubt": in_doubt,
        "result": result,
        "error": error,
        "locked_until": _now(),
        "changed_at": _now(),
        "expires_at": None if keep is None else _now() + keep,
    }


def extend(lock: EffectLock, lease: timedelta) -> Executable:
    """Extend the lock of a call under way; no row if another caller took over, or while its record is being committed.

    Index: the primary key. Locks: the effect's row, never waited for.
    """
    return _update_started(lock, {"locked_until": _now() + lease}).returning(true(), _durably())


def _update_started(lock: EffectLock, values: dict[str, object]) -> Update:
    """Change a call that is under way; no row if it is not ours, is recorded, or is locked. Never waits."""
    held = select(effect.c.scope, effect.c.key).where(*lock.matches(), effect.c.status == "started")
    locked = held.with_for_update(skip_locked=True).cte("held").prefix_with("MATERIALIZED")
    return update(effect).where(effect.c.scope == locked.c.scope, effect.c.key == locked.c.key).values(values)


def record_with_rows(lock: EffectLock, *, result: str | None, error: str | None, keep: timedelta) -> Executable:
    """Write the response in the transaction of the endpoint's rows; no row if another request took over.

    Index: the primary key. Locks: the effect's row, until the endpoint's transaction ends: until then a retry is
    answered that the request is under way. If the lease has expired, the retry waits for the transaction's end.
    """
    return (
        update(effect)
        .where(*lock.matches(), effect.c.status.in_(("started", "done")))
        .values(ending("done", result=result, error=error, keep=keep))
        .returning(true())
    )


def settle_started(
    lock: EffectLock, status: Status, *, result: str | None, error: str | None, keep: timedelta
) -> Executable:
    """Settle a request under way; no row if it was taken over, is recorded, or is just being recorded.

    Index: the primary key. Locks: the effect's row, never waited for: if an open transaction has recorded the outcome,
    its COMMIT or ROLLBACK decides.
    """
    return _update_started(lock, ending(status, result=result, error=error, keep=keep)).returning(true())


def release(lock: EffectLock, *, keep: timedelta) -> Executable:
    """Settle a request that was claimed and not executed; no row if it was taken over.

    A doubt about an earlier request stays: only this one is known not to have been executed. Index: the primary key.
    Locks: the effect's row.
    """
    return (
        update(effect)
        .where(*lock.matches(), effect.c.status == "started")
        .values(
            status="retryable",
            error="not executed",
            locked_until=_now(),
            changed_at=_now(),
            expires_at=case((effect.c.in_doubt, null()), else_=_now() + keep),
        )
        .returning(true())
    )


def select_done(lock: EffectLock) -> Executable:
    """One row if our record was committed, else none. Index: the primary key; no locks."""
    return select(true()).where(*lock.matches(), effect.c.status == "done")


def select_deployment() -> Select[Any]:
    """The id of this deployment. One row; no locks."""
    return select(deployment.c.id)
