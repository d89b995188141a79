"""Guarded HTTP requests: what an endpoint records in its own transaction, and what the middleware settles without it.

On the rows of `effect`, claimed as any other effect. All three are fenced by `lock_token`: whoever took over has
written a token of its own.
"""

from datetime import timedelta
from uuid import UUID

from sqlalchemy import ColumnElement, Executable, case, null, select, true, update

from outboxq.statements.builtin import pg
from outboxq.statements.effects import Status
from outboxq.tables import effect

_now = pg.clock_timestamp


def record_with_rows(
    scope: str, key: str, token: UUID, *, result: str | None, error: str | None, keep: timedelta
) -> Executable:
    """Write the response in the transaction of what the endpoint did; no row where somebody took over.

    Index: the primary key. Locks: the effect's row, until the endpoint's transaction ends: a retry that comes meanwhile
    is told that it is under way, or waits where the lease has run out, and then sees what became of it.
    """
    return (
        update(effect)
        .where(*_held(scope, key, token), effect.c.status.in_(("started", "done")))
        .values(_settled("done", result, error, keep))
        .returning(true())
    )


def settle_started(
    scope: str, key: str, token: UUID, status: Status, *, result: str | None, error: str | None, keep: timedelta
) -> Executable:
    """Settle a request that is under way; no row where it was taken over, is recorded, or is just being recorded.

    Index: the primary key. Locks: the effect's row, never waited for: a transaction that has recorded, and has not
    ended, decides by its end.
    """
    held = select(effect.c.scope, effect.c.key).where(*_held(scope, key, token), effect.c.status == "started")
    locked = held.with_for_update(skip_locked=True).cte("held").prefix_with("MATERIALIZED")
    return (
        update(effect)
        .where(effect.c.scope == locked.c.scope, effect.c.key == locked.c.key)
        .values(_settled(status, result, error, keep))
        .returning(true())
    )


def give_back(scope: str, key: str, token: UUID, *, keep: timedelta) -> Executable:
    """Settle a request that was claimed and not executed; no row where it was taken over.

    A doubt that it took over stays: only what it knows of itself is written. Index: the primary key. Locks: the
    effect's row.
    """
    return (
        update(effect)
        .where(*_held(scope, key, token), effect.c.status == "started")
        .values(
            status="retryable",
            error="not executed",
            locked_until=_now(),
            changed_at=_now(),
            expires_at=case((effect.c.in_doubt, null()), else_=_now() + keep),
        )
        .returning(true())
    )


def select_done(scope: str, key: str, token: UUID) -> Executable:
    """Whether what we recorded was committed: one row, or none. Index: the primary key; no locks."""
    return select(true()).where(*_held(scope, key, token), effect.c.status == "done")


def _settled(status: Status, result: str | None, error: str | None, keep: timedelta) -> dict[str, object]:
    return {
        "status": status,
        "in_doubt": False,
        "result": result,
        "error": error,
        "locked_until": _now(),
        "changed_at": _now(),
        "expires_at": _now() + keep,
    }


def _held(scope: str, key: str, token: UUID) -> tuple[ColumnElement[bool], ...]:
    return effect.c.scope == scope, effect.c.key == key, effect.c.lock_token == token
