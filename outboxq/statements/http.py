"""Guarded HTTP requests: what an endpoint records in its own transaction, and what the middleware settles without it.

On the rows of `effect`, claimed as any other effect, and fenced by the same `EffectLock`.
"""

from datetime import timedelta

from sqlalchemy import Executable, case, null, select, true, update

from outboxq.statements.builtin import pg
from outboxq.statements.effects import EffectLock, Status, ending, update_started
from outboxq.tables import effect

_now = pg.clock_timestamp


def record_with_rows(lock: EffectLock, *, result: str | None, error: str | None, keep: timedelta) -> Executable:
    """Write the response in the transaction of the endpoint's rows; no row if another request took over.

    Index: the primary key. Locks: the effect's row, until the endpoint's transaction ends: a retry that comes meanwhile
    is told that it is under way. If the lease has run out it waits, and then sees how the transaction ended.
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
    """Settle a request that is under way; no row if it was taken over, is recorded, or is just being recorded.

    Index: the primary key. Locks: the effect's row, never waited for: a transaction that has recorded, and has not
    ended, decides by its end.
    """
    return update_started(lock, ending(status, result=result, error=error, keep=keep)).returning(true())


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
    """One row if what we recorded was committed, else none. Index: the primary key; no locks."""
    return select(true()).where(*lock.matches(), effect.c.status == "done")
