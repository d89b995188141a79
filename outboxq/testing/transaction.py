"""What a test does inside its own transaction: assert which jobs it has enqueued, call a handler, run all jobs."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import overload
from uuid import UUID

import msgspec
from sqlalchemy import Connection, event, select
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outboxq.clock import uuid7s
from outboxq.codec.values import encode_value, join_object
from outboxq.config import DEFAULT_RETENTION
from outboxq.database.driver import run_script
from outboxq.database.guard import Guard, keep_cancelled
from outboxq.effects.api import EffectAccess
from outboxq.effects.runners import AsyncEffectRunner, EffectRunner
from outboxq.effects.transactions import AsyncSavepointTransactions, SavepointTransactions
from outboxq.events import Event, JobDied, JobDone, JobRetried
from outboxq.execution.batch_state import BatchState
from outboxq.execution.claim import ClaimRequest, claim
from outboxq.execution.invoke import AsyncInvoker, Invoker, SyncInvoker
from outboxq.execution.keep import Keeper
from outboxq.execution.run import run
from outboxq.execution.runtime import Runtime, is_cancellation
from outboxq.handlers.context import AsyncContext, Context
from outboxq.handlers.registry import Jobs
from outboxq.job import Job
from outboxq.outbox.handle import JobHandle
from outboxq.outbox.kinds import JobKind, P
from outboxq.outbox.session import AsyncOutboxSession, OutboxSession
from outboxq.statements.claim import ClaimStatements
from outboxq.statements.done import may_write
from outboxq.statements.transaction import local_timeouts_off
from outboxq.tables import job, mapped_schema

_LEASE_SECONDS = 30.0
_DRAIN_LIMIT = 10_000


@overload
def assert_enqueued(session: Session, kind: "JobKind[P] | str", /, **args: object) -> JobHandle: ...


@overload
def assert_enqueued(session: AsyncSession, kind: "JobKind[P] | str", /, **args: object) -> Awaitable[JobHandle]: ...


def assert_enqueued(
    session: Session | AsyncSession, kind: "JobKind[P] | str", /, **args: object
) -> JobHandle | Awaitable[JobHandle]:
    """Assert that a job of `kind` waits whose arguments include `args`; await it for an async session.

    Flushes the session first, and sees what its transaction sees. Entities are compared by primary key.

    Raises:
        AssertionError: there is none; the message lists the jobs that wait.
    """
    name = kind if isinstance(kind, str) else kind.kind
    if isinstance(session, AsyncSession):
        return session.run_sync(_assert_enqueued, name, args)
    return _assert_enqueued(session, name, args)


def _assert_enqueued(session: Session, kind: str, args: dict[str, object]) -> JobHandle:
    session.flush()
    expected = join_object({name: encode_value(name, value) for name, value in args.items()})
    columns = select(job.c.id, job.c.kind, job.c.queue, job.c.args).order_by(job.c.seq)
    found = session.execute(
        columns.where(job.c.kind == kind, job.c.args.cast(JSONB).contains(msgspec.json.decode(expected)))
    ).first()
    if found is not None:
        return JobHandle(found.id.hex, found.kind, found.queue)
    waiting = [f"  {row.kind} {row.args}" for row in session.execute(columns.limit(20))]
    raise AssertionError(
        f"no job {kind} with {expected} is enqueued; waiting are:\n" + ("\n".join(waiting) or "  none")
    )


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


@dataclass(frozen=True, slots=True)
class DrainReport:
    """How many jobs `drain` has done, and an event for each that was not done."""

    done: int
    others: tuple[Event, ...]


@overload
def drain(session: Session, jobs: Jobs, *, state: object = None, allow_failures: bool = False) -> DrainReport: ...


@overload
def drain(
    session: AsyncSession, jobs: Jobs, *, state: object = None, allow_failures: bool = False
) -> Awaitable[DrainReport]: ...


def drain(
    session: Session | AsyncSession, jobs: Jobs, *, state: object = None, allow_failures: bool = False
) -> DrainReport | Awaitable[DrainReport]:
    """Run every job that is ready or due, inside the session's own transaction; await it for an async session.

    For tests whose outer transaction is rolled back at the end: handlers run as under a relay, contained by savepoints,
    and nothing is committed. A `Session` runs sync handlers, an `AsyncSession` async ones. Objects of the session are
    expired afterwards, so that the test reads what the handlers wrote.

    Args:
        state: What handlers see as `ctx.state`; the registry's lifespan is not entered.
        allow_failures: Report failed attempts instead of raising.

    Raises:
        AssertionError: a handler failed, and `allow_failures` is not set.
    """
    if isinstance(session, AsyncSession):
        return _drain_async(session, jobs, state, allow_failures)
    return _drain(session, SyncInvoker(), effect_runner(session), jobs, state, allow_failures)


async def _drain_async(session: AsyncSession, jobs: Jobs, state: object, allow_failures: bool) -> DrainReport:
    connection = await session.connection()
    runner = async_effect_runner(session)
    assert connection.sync_connection is not None
    keep = partial(keep_cancelled, own=connection.sync_connection)
    engine = connection.engine.sync_engine
    event.listen(engine, "handle_error", keep)
    try:
        return await session.run_sync(_drain, AsyncInvoker(connection), runner, jobs, state, allow_failures)
    finally:
        event.remove(engine, "handle_error", keep)


def _drain(
    session: Session,
    invoker: Invoker,
    runner: EffectRunner | AsyncEffectRunner,
    jobs: Jobs,
    state: object,
    allow_failures: bool,
) -> DrainReport:
    session.flush()
    connection = session.connection()
    schema = mapped_schema(connection)
    registry = jobs.resolve()
    keeps = run_script(connection, may_write(schema))[0].rows[0][0]
    runtime = Runtime(
        registry,
        state,
        invoker,
        Guard(connection),
        schema,
        max_crashes=1,
        epoch="",
        caller=runner,
        sharing_queues=frozenset(),
        is_interruption=_is_for_the_test,
        keeper=Keeper.of(registry) if keeps else Keeper(),
    )
    queues = [name for name, flavour in runtime.registry.flavours.items() if flavour == invoker.flavour]
    # Around everything: each claim from an empty queue leaves a savepoint of its own.
    run_script(connection, "SAVEPOINT oq_drain")
    try:
        events = [event for name in queues for event in _drain_queue(connection, name, runtime)]
        while more := [event for name in queues for event in _drain_queue(connection, name, runtime)]:
            events += more
    finally:
        runtime.guard.remove()
    run_script(connection, "RELEASE SAVEPOINT oq_drain")
    session.expire_all()
    failures = [event for event in events if isinstance(event, JobRetried | JobDied)]
    if failures and not allow_failures:
        raise AssertionError("handlers failed:\n" + "\n".join(f"  {_described(event)}" for event in failures))
    done = sum(isinstance(event, JobDone) for event in events)
    return DrainReport(done, tuple(event for event in events if not isinstance(event, JobDone)))


def _is_for_the_test(error: BaseException) -> bool:
    # A Ctrl-C, or pytest.fail() in a handler.
    return is_cancellation(error) or not isinstance(error, Exception | SystemExit | asyncio.CancelledError)


def _drain_queue(connection: Connection, name: str, runtime: Runtime) -> list[Event]:
    statements = ClaimStatements(runtime.schema, name)
    events: list[Event] = []
    for _ in range(_DRAIN_LIMIT):
        claimed = claim(connection, ClaimRequest(statements.ready, 1))
        if claimed.transaction is None:
            claimed = claim(connection, ClaimRequest(statements.due, 1))
        if claimed.transaction is None:
            return events
        batch = BatchState(name, claimed.jobs, claimed.transaction)
        run(connection, batch, runtime, shared=True)
        # Told to nobody: the test's transaction is not committed.
        if kept := runtime.keeper.statements(runtime.schema, batch.events).keeping():
            run_script(connection, "; ".join(kept))
        batch.unique_adds.take(connection, runtime.schema)
        # The handlers' deadlines are not the test's.
        run_script(connection, f"{local_timeouts_off()}RELEASE SAVEPOINT {claimed.transaction.savepoint}")
        events += batch.report().events
    raise AssertionError(f"queue {name!r} is not empty after {_DRAIN_LIMIT:,} jobs: does a handler enqueue itself?")


def _described(event: JobRetried | JobDied) -> str:
    if isinstance(event, JobDied):
        return f"{event.job.kind}: {event.reason}"
    return f"{event.job.kind}: {event.error_type}: {event.message} ({', '.join(event.where)})"
