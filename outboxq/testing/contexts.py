"""Contexts for calling a handler in a unit test, without a relay."""

from datetime import UTC, datetime, timedelta

from outboxq.config import DEFAULT_RETENTION
from outboxq.effects.runners import EffectAccess
from outboxq.handlers.context import AsyncContext, Context
from outboxq.job import Job, uuid7
from outboxq.outbox.session import AsyncOutboxSession, OutboxSession
from outboxq.testing.transactions import async_effect_runner, effect_runner


def sync_context(session: OutboxSession, *, state: object = None) -> Context[object]:
    """A context for calling a sync handler in a unit test: `credit(sync_context(session), account, cents=5)`.

    Its `once` records in savepoints of the test's own transaction: undone with it, and with what surrounds the call.
    """
    return Context(unit_test_job(), state, session, EffectAccess(effect_runner(session), _retention))


def async_context(session: AsyncOutboxSession, *, state: object = None) -> AsyncContext[object]:
    """A context for calling an async handler in a unit test."""
    return AsyncContext(unit_test_job(), state, session, EffectAccess(async_effect_runner(session), _retention))


def _retention(_scope: str) -> timedelta:
    return DEFAULT_RETENTION


def unit_test_job() -> Job:
    """A job without arguments, as a relay would have claimed it now."""
    now = datetime.now(UTC)
    return Job(uuid7(), "default", "unit-test", "{}", "{}", 0, 1, None, 0, 0, None, None, "[]", now, now, 0)
