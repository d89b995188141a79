"""Effects: calls of other services, each recorded in a row of the table `effect`, so that it is made once.

Statements to claim or take over a call, extend its lock, and record its outcome; HTTP requests with an idempotency key
use the rows too. Each statement but `record_with_rows` is its own transaction at READ COMMITTED. The row has the
caller's `lock_token`, a UUID: the next caller writes another token, and then the earlier caller's statements match no
row. All times are the database's.
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

# One less than the highest number in the column's type.
_ALMOST_INTEGER = 2_147_483_646

Status: TypeAlias = Literal["started", "done", "failed", "retryable", "unknown"]

# The time that one try of a claim waits for a row if the session would wait without limit.
_TRY = "1s"

_now = pg.clock_timestamp


@dataclass(frozen=True, slots=True)
class EffectState:
    """The state of an effect, as the statement `claim` returns it; from it the caller decides if it makes the call.

    Attributes:
        claimed: True if this caller is to make the call.
        status: The stored status, `started` while a call is in progress.
        in_doubt: True if an earlier call may have been applied.
        provider_key: The idempotency key to send to the service.
        same_request: True unless the claim and the stored row have different fingerprints.
        result, error: The stored result as JSON text, and the stored error.
        known_seconds: The seconds since the first call.
        locked_seconds: The seconds until the lock expires, negative afterwards.
        durably: Always ignored; the statement computes it only for its side effect.
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
    """The lock of one caller on an effect: the effect's scope and key, and a token that only this caller uses.

    The effect's row contains the token. After another caller has taken over, the row has another token, and statements
    with this lock match no row.
    """

    scope: str
    key: str
    token: UUID

    def matches(self) -> tuple[ColumnElement[bool], ...]:
        """Return the conditions that match the effect's row as long as this caller has the lock."""
        return effect.c.scope == self.scope, effect.c.key == self.key, effect.c.lock_token == self.token


def claim(lock: EffectLock, fingerprint: bytes | None, provider_key: UUID, lease: timedelta) -> Executable:
    """Return SQL that claims the call of an effect, or takes it over from a dead caller; else it only reads the row.

    It returns one row, the columns of an `EffectState`. It returns no row only if another caller claimed the call after
    this statement's snapshot: then send it again. Index: the primary key. Locks: the effect's row, if the call can be
    claimed. If a call is in progress or recorded, the statement neither locks nor waits, even while its record is being
    committed. If the session has no lock_timeout (`select_waits_without_end`), a wait for the row ends after one second
    (55P03), so that the caller can be cancelled between two tries. If the first COMMIT was not answered, a repeated
    claim finds its own token.
    """
    # A cast, because otherwise a driver would have to guess the type of a NULL.
    given = cast(literal(fingerprint, effect.c.fingerprint.type), effect.c.fingerprint.type)
    same_request = or_(effect.c.fingerprint.is_(None), given.is_(None), effect.c.fingerprint == given)
    is_free = or_(effect.c.status == "retryable", and_(effect.c.status == "started", effect.c.locked_until <= _now()))
    standing = _standing(lock, same_request, is_free)
    # The insert reads this, so that the time-out is set before the wait for a row.
    patience = select(_shorten_wait().label("value")).cte("patience").prefix_with("MATERIALIZED")
    is_wanted = and_(patience.c.value.is_not(None), ~exists(select(standing.c.claimed).where(~standing.c.is_free)))
    new = _new_row(lock, given, provider_key, lease)
    claimed = (
        insert(effect)
        .from_select(list(new), select(*new.values()).where(is_wanted), include_defaults=False)
        .on_conflict_do_update(
            index_elements=[effect.c.scope, effect.c.key],
            set_=_taken_over(lock.token, given, lease),
            # Checked again on the row's newest version: after the wait for its lock it may belong to another caller.
            where=and_(same_request, is_free),
        )
        .returning(*effect.c)
        .cte("claimed")
    )
    taken = select(*_state(claimed, true(), true()), _durably())
    others = select(*(column for column in standing.c if column.key != "is_free"), null())
    return taken.union_all(others.where(~standing.c.is_free).where(~exists(select(claimed.c.scope))))


def _standing(lock: EffectLock, same_request: ColumnElement[bool], is_free: ColumnElement[bool]) -> CTE:
    """Return a CTE for `claim`: the effect's present row as an `EffectState`, and a column `is_free`.

    `is_free` is true if the call may be claimed.
    """
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
    """Return the values, by column, of a new effect's row, for its first call."""
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
    """Return the values, by column, to write into an effect's row when a further caller claims its call."""
    return {
        "status": "started",
        "fingerprint": func.coalesce(effect.c.fingerprint, fingerprint),
        # The token is ours: this caller claimed before, was suspended, and has not called.
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
    """Return the columns of an `EffectState`, computed from an effect's row."""
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
    """Select one row: true if the session's own lock_timeout is 0, so that it waits for locks without end. No locks."""
    return select(_waits_without_end())


def _durably() -> ColumnElement[str | None]:
    """Return an SQL expression that makes this transaction's COMMIT wait for the disk, despite the session's setting.

    If a crash of the server could undo the record of a call, the call would be repeated.
    """
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
    """Return SQL that writes a call's outcome.

    It returns one row with the stored result and error, or no row if another caller took over. It may be sent again,
    because the row keeps the caller's token.

    Args:
        in_doubt: True if the call may have been applied.
        keep: The time until the effect expires; None for ever, as for unsettled effects.
        unlock: True to let the next caller take over at once, False only when the lock expires.

    Index: the primary key. Locks: the effect's row.
    """
    values = ending(status, in_doubt=in_doubt, result=result, error=error, keep=keep)
    if not unlock:
        del values["locked_until"]
    return update(effect).where(*lock.matches()).values(values).returning(effect.c.result, effect.c.error, _durably())


def ending(
    status: Status, *, in_doubt: bool = False, result: str | None, error: str | None, keep: timedelta | None
) -> dict[str, object]:
    """Return the values, by column, to write into an effect's row when its call has ended; they also unlock the row."""
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
    """Return SQL that extends the lock of a call in progress: one row if it did.

    No row if another caller took over, or while a transaction that records the call is committing. Index: the primary
    key. Locks: the effect's row, never waited for.
    """
    return _update_started(lock, {"locked_until": _now() + lease}).returning(true(), _durably())


def _update_started(lock: EffectLock, values: dict[str, object]) -> Update:
    """Return SQL that changes an effect's row while this caller's call is in progress.

    No row is changed if another caller took over, or the call is recorded, or its row is locked. Never waits.
    """
    held = select(effect.c.scope, effect.c.key).where(*lock.matches(), effect.c.status == "started")
    locked = held.with_for_update(skip_locked=True).cte("held").prefix_with("MATERIALIZED")
    return update(effect).where(effect.c.scope == locked.c.scope, effect.c.key == locked.c.key).values(values)


def record_with_rows(lock: EffectLock, *, result: str | None, error: str | None, keep: timedelta) -> Executable:
    """Return SQL that writes the response of an HTTP request with an idempotency key, in its endpoint's transaction.

    It returns one row, or none if another request took over. Index: the primary key. Locks: the effect's row, until the
    endpoint's transaction ends. Until then a retry gets the answer that the request is in progress; but if the lock of
    the effect has expired, the retry waits for the transaction's end.
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
    """Return SQL that settles an HTTP request with an idempotency key while it is in progress: one row if it did.

    No row is returned if another request took over, or if the outcome is recorded. If an open transaction is recording
    the outcome, no row is returned either: that transaction's COMMIT or ROLLBACK decides. Index: the primary key.
    Locks: the effect's row, never waited for.
    """
    return _update_started(lock, ending(status, result=result, error=error, keep=keep)).returning(true())


def release(lock: EffectLock, *, keep: timedelta) -> Executable:
    """Return SQL that settles an HTTP request with an idempotency key that was claimed and not executed.

    A retry may then be executed. The SQL returns one row, or none if another request took over. If an earlier request
    is in doubt, the doubt stays: only this request is known not to have been executed. Index: the primary key. Locks:
    the effect's row.
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
    """Select one row if the outcome that this caller recorded was committed, else none.

    Index: the primary key; no locks.
    """
    return select(true()).where(*lock.matches(), effect.c.status == "done")


def select_deployment() -> Select[Any]:
    """Select the installation's id, from which the idempotency keys for other services are made. One row; no locks."""
    return select(deployment.c.id)
