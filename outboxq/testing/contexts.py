"""Contexts for calling a handler in a unit test, without a relay."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outboxq.clock import uuid7s
from outboxq.config import DEFAULT_RETENTION
from outboxq.effects.runners import AsyncEffectRunner, EffectAccess, EffectRunner
from outboxq.effects.transactions import AsyncSavepointTransactions, SavepointTransactions
from outboxq.handlers.context import AsyncContext, Context
from outboxq.job import Job
from outboxq.outbox.session import AsyncOutboxSession, OutboxSession

_LEASE_SECONDS = 30.0


def sync_context(session: OutboxSession, *, state: object = None) -> Context[object]:
    """A context for calling a sync handler in a unit test: `credit(sync_context(session), account, cents=5)`.

    Its `once` records in savepoints of the test's own transaction: undone with it, and with what surrounds the call.
    """
    return Context(unit_test_job(), state, session, EffectAccess(effect_runner(session), _retention))


def async_context(session: AsyncOutboxSession, *, state: object = None) -> AsyncContext[object]:
    """A context for calling an async handler in a unit test."""
    return AsyncContext(unit_test_job(), state, session, EffectAccess(async_effect_runner(session), _retention))


def effect_runner(session: Session) -> EffectRunner:
    """Runs effects in savepoints of the test's own transaction."""
    return EffectRunner(SavepointTransactions(session.connection), _LEASE_SECONDS)


def async_effect_runner(session: AsyncSession) -> AsyncEffectRunner:
    """Runs effects of coroutines in savepoints of the test's own transaction."""
    return AsyncEffectRunner(AsyncSavepointTransactions(session.connection), _LEASE_SECONDS)


def _retention(_scope: str) -> timedelta:
    return DEFAULT_RETENTION


def unit_test_job() -> Job:
    """A job without arguments, as a relay would have claimed it now."""
    now = datetime.now(UTC)
    return Job(UUID(uuid7s(1)[0]), "default", "unit-test", "{}", "{}", 0, 1, None, 0, 0, None, None, "[]", now, now, 0)
