"""Runs the jobs of a test's transaction inside that transaction."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from typing import overload

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outboxq.database.driver import run_script
from outboxq.database.guard import Guard, keep_cancelled
from outboxq.effects.runners import AsyncEffectRunner, EffectRunner
from outboxq.events import Event, JobDied, JobDone, JobRetried
from outboxq.execution.batch_state import BatchState
from outboxq.execution.claim import ClaimRequest, claim
from outboxq.execution.invoke import AsyncInvoker, Invoker, SyncInvoker
from outboxq.execution.run import run
from outboxq.execution.runtime import Runtime, is_cancellation
from outboxq.handlers.registry import Jobs
from outboxq.statements.claim import ClaimStatements
from outboxq.statements.transaction import local_timeouts_off
from outboxq.tables import mapped_schema
from outboxq.testing.contexts import async_effect_runner, effect_runner

_DRAIN_LIMIT = 10_000


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
    runtime = Runtime(
        jobs.resolve(),
        state,
        invoker,
        Guard(connection),
        schema,
        max_crashes=1,
        epoch="",
        caller=runner,
        sharing_queues=frozenset(),
        is_interruption=_is_for_the_test,
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
        # The handlers' deadlines are not the test's.
        run_script(connection, f"{local_timeouts_off()}RELEASE SAVEPOINT {claimed.transaction.savepoint}")
        events += batch.report().events
    raise AssertionError(f"queue {name!r} is not empty after {_DRAIN_LIMIT:,} jobs: does a handler enqueue itself?")


def _described(event: JobRetried | JobDied) -> str:
    if isinstance(event, JobDied):
        return f"{event.job.kind}: {event.reason}"
    return f"{event.job.kind}: {event.error_type}: {event.message} ({', '.join(event.where)})"
