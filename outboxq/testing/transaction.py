"""Helpers in a test's own transaction: assert that a job was enqueued, call a handler, run all jobs."""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias, overload
from uuid import UUID

import msgspec
from sqlalchemy import Connection, event, select
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outboxq.clock import uuid7s
from outboxq.codec.values import encode_value, join_object
from outboxq.config import DEFAULT_RETENTION
from outboxq.database.answers import Answer
from outboxq.database.driver import run_script
from outboxq.database.guard import Guard, keep_cancelled
from outboxq.effects.api import EffectAccess
from outboxq.effects.runners import AsyncEffectRunner, EffectRunner
from outboxq.effects.transactions import AsyncSavepointTransactions, SavepointTransactions
from outboxq.errors import ConfigError
from outboxq.events import Event, JobDied, JobDone, JobRetried
from outboxq.execution.batch_state import BatchState
from outboxq.execution.claim import ClaimRequest, claim
from outboxq.execution.families import decide, steps_of
from outboxq.execution.invoke import AsyncInvoker, Invoker, SyncInvoker
from outboxq.execution.keep import Keeper
from outboxq.execution.run import run
from outboxq.execution.runtime import Runtime, is_cancellation
from outboxq.handlers.context import AsyncContext, Context
from outboxq.handlers.registry import Jobs
from outboxq.handlers.resolved import Registry
from outboxq.job import Job
from outboxq.outbox.handle import JobHandle
from outboxq.outbox.kinds import JobKind, P
from outboxq.outbox.session import AsyncOutboxSession, OutboxSession
from outboxq.relay.event_loop import LoopThread, enter_lifespan, make_lifespan
from outboxq.statements.builtin import pg
from outboxq.statements.claim import ClaimStatements
from outboxq.statements.done import may_write
from outboxq.statements.transaction import TIMEOUTS_OFF
from outboxq.tables import job, mapped_schema

_LEASE_SECONDS = 30.0
_DRAIN_LIMIT = 10_000
# The time that an async lifespan may take to end.
_LEAVE_SECONDS = 30.0
# Calls handlers of one flavour, and their `ctx.once`.
_Runner: TypeAlias = "tuple[Invoker, EffectRunner | AsyncEffectRunner]"
# Represents the state from the registry's lifespan.
_LIFESPAN: Final = object()


@overload
def assert_enqueued(session: Session, kind: "JobKind[P] | str", /, **args: object) -> JobHandle: ...


@overload
def assert_enqueued(session: AsyncSession, kind: "JobKind[P] | str", /, **args: object) -> Awaitable[JobHandle]: ...


def assert_enqueued(
    session: Session | AsyncSession, kind: "JobKind[P] | str", /, **args: object
) -> JobHandle | Awaitable[JobHandle]:
    """Assert that a job of `kind` waits whose arguments include `args`, and return its handle.

    For an async session, the call is to be awaited. The session is flushed first, and the rows that its transaction
    sees are searched. An entity among `args` is compared by its primary key.

    Raises:
        AssertionError: there is no such job; the message lists the waiting jobs.
    """
    name = kind if isinstance(kind, str) else kind.kind
    if isinstance(session, AsyncSession):
        return Answer(session.run_sync(_assert_enqueued, name, args), "assert_enqueued(...)")
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
    """Make a context to call a sync handler in a unit test: `credit(sync_context(session), account, cents=5)`.

    The context's `once` records outcomes in savepoints of the test's own transaction; they are rolled back with the
    transaction, or with a savepoint around the call.
    """
    return Context(unit_test_job(), state, session, EffectAccess(effect_runner(session), _retention))


def async_context(session: AsyncOutboxSession, *, state: object = None) -> AsyncContext[object]:
    """Make a context to call an async handler in a unit test: `await credit(async_context(session), account, cents=5)`.

    The context's `once` records outcomes in savepoints of the test's own transaction; they are rolled back with the
    transaction, or with a savepoint around the call.
    """
    return AsyncContext(unit_test_job(), state, session, EffectAccess(async_effect_runner(session), _retention))


def effect_runner(session: Session) -> EffectRunner:
    """Return the object that runs `ctx.once` of sync handlers, in savepoints of the test's own transaction."""
    return EffectRunner(SavepointTransactions(session.connection), _LEASE_SECONDS)


def async_effect_runner(session: AsyncSession) -> AsyncEffectRunner:
    """Return the object that runs `ctx.once` of async handlers, in savepoints of the test's own transaction."""
    return AsyncEffectRunner(AsyncSavepointTransactions(session.connection), _LEASE_SECONDS)


def _retention(_scope: str) -> timedelta:
    return DEFAULT_RETENTION


def unit_test_job() -> Job:
    """Make a job without arguments, as if a relay had claimed it just now, for the contexts of unit tests."""
    now = datetime.now(UTC)
    return Job(UUID(uuid7s(1)[0]), "default", "unit-test", "{}", "{}", 0, 1, None, 0, 0, None, None, "[]", now, now, 0)


@dataclass(frozen=True, slots=True)
class DrainReport:
    """The result of `drain`.

    Attributes:
        done: The number of jobs that were done.
        others: An event for each other outcome of a job, such as a failed attempt.
    """

    done: int
    others: tuple[Event, ...]


@overload
def drain(session: Session, jobs: Jobs, *, state: object = ..., allow_failures: bool = False) -> DrainReport: ...


@overload
def drain(
    session: AsyncSession, jobs: Jobs, *, state: object = ..., allow_failures: bool = False
) -> Awaitable[DrainReport]: ...


def drain(
    session: Session | AsyncSession, jobs: Jobs, *, state: object = _LIFESPAN, allow_failures: bool = False
) -> DrainReport | Awaitable[DrainReport]:
    """Run every job that is ready or due now, inside the session's own transaction; await it for an async session.

    For tests whose outer transaction is rolled back at the end: handlers run as in a relay, isolated by savepoints, and
    nothing is committed. A `Session` runs sync handlers, an `AsyncSession` async and sync ones. Jobs that the handlers
    add are run too. The session's objects are expired afterwards, so that the test reads the rows that the handlers
    wrote.

    Args:
        state: The value of `ctx.state`; by default that of the registry's lifespan, which is entered for this call, and
            left at its end.
        allow_failures: True to return failed attempts in the report instead of raising.

    Raises:
        AssertionError: a handler failed, and `allow_failures` is not set; or jobs of async handlers are left, and the
            session is not async.
        ConfigError: the session's engine has another driver than psycopg.
    """
    if isinstance(session, AsyncSession):
        return Answer(_drain_async(session, jobs, state, allow_failures), "drain(...)")
    runner: _Runner = (SyncInvoker(), effect_runner(session))
    with ExitStack() as stack:
        return _drain(session, [runner], jobs, _state(stack, jobs, state), allow_failures)


def _state(stack: ExitStack, jobs: Jobs, state: object) -> object:
    """Return the value of `ctx.state`: the given one or, by default, that of the registry's lifespan.

    The lifespan is entered here, and left when `stack` is closed.
    """
    if state is not _LIFESPAN:
        return state
    lifespan = make_lifespan(jobs.lifespan)
    if isinstance(lifespan, AbstractContextManager):
        return stack.enter_context(lifespan)
    loop = LoopThread()
    stack.enter_context(loop.run())
    return enter_lifespan(stack, lifespan, loop, _LEAVE_SECONDS)


async def _drain_async(session: AsyncSession, jobs: Jobs, state: object, allow_failures: bool) -> DrainReport:
    connection = await session.connection()
    assert connection.sync_connection is not None
    runners: list[_Runner] = [
        (AsyncInvoker(connection.engine), async_effect_runner(session)),
        (SyncInvoker(), effect_runner(session.sync_session)),
    ]
    engine = connection.engine.sync_engine
    event.listen(engine, "handle_error", keep_cancelled)
    try:
        async with AsyncExitStack() as stack:
            if state is _LIFESPAN:
                lifespan = make_lifespan(jobs.lifespan)
                if isinstance(lifespan, AbstractContextManager):
                    state = stack.enter_context(lifespan)
                else:
                    state = await stack.enter_async_context(lifespan)
            return await session.run_sync(_drain, runners, jobs, state, allow_failures)
    finally:
        event.remove(engine, "handle_error", keep_cancelled)


def _drain(
    session: Session,
    runners: Sequence[_Runner],
    jobs: Jobs,
    state: object,
    allow_failures: bool,
) -> DrainReport:
    session.flush()
    connection = session.connection()
    _check_driver(connection)
    registry = jobs.resolve()
    guard = Guard(connection)
    by_flavour = _runtimes(connection, guard, registry, state, runners)
    runtimes = {name: by_flavour[flavour] for name, flavour in registry.flavours.items() if flavour in by_flavour}
    # Around everything, because each claim from an empty queue leaves a savepoint.
    run_script(connection, "SAVEPOINT oq_drain")
    try:
        events: list[Event] = []
        while more := [
            each for name, of_queue in runtimes.items() for each in _drain_queue(connection, name, of_queue)
        ]:
            events += more
    finally:
        guard.remove()
    run_script(connection, "RELEASE SAVEPOINT oq_drain")
    session.expire_all()
    failures = [event for event in events if isinstance(event, JobRetried | JobDied)]
    if failures and not allow_failures:
        raise AssertionError("handlers failed:\n" + "\n".join(f"  {_described(event)}" for event in failures))
    _refuse_to_leave(session, registry.flavours.keys() - runtimes.keys())
    done = sum(isinstance(event, JobDone) for event in events)
    return DrainReport(done, tuple(event for event in events if not isinstance(event, JobDone)))


def _check_driver(connection: Connection) -> None:
    if connection.dialect.driver != "psycopg":
        raise ConfigError(
            f"drain runs jobs by the relay's own statements, which are psycopg's, and this session's engine is on "
            f"{connection.dialect.driver}. Another connection would not see this transaction's rows, so bind the "
            "session of this test to an engine of a URL that begins with postgresql+psycopg://"
        )


def _runtimes(
    connection: Connection,
    guard: Guard,
    registry: Registry,
    state: object,
    runners: Sequence[_Runner],
) -> dict[str, Runtime]:
    schema = mapped_schema(connection)
    keeps = run_script(connection, may_write(schema))[0][0]
    return {
        invoker.flavour: Runtime(
            registry,
            state,
            invoker,
            guard,
            schema,
            max_crashes=1,
            caller=runner,
            sharing_queues=frozenset(),
            coalesces=False,
            is_interruption=_is_for_the_test,
            keeper=Keeper.of(registry) if keeps else Keeper(),
        )
        for invoker, runner in runners
    }


def _refuse_to_leave(session: Session, queues: Iterable[str]) -> None:
    """Raise AssertionError if jobs that only an async session can run still wait in these queues."""
    waits = job.c.state.in_(("scheduled", "grouped", "group_waiting")) & (job.c.run_at <= pg.statement_timestamp())
    is_due = (job.c.state == "ready") | waits
    left = session.scalars(select(job.c.kind).where(job.c.queue.in_(queues), is_due).distinct().order_by(job.c.kind))
    if kinds := left.all():
        raise AssertionError(
            f"jobs of async handlers wait ({', '.join(kinds)}), which only an AsyncSession runs, and sync ones with "
            "them: await drain(session, jobs) with one"
        )


def _is_for_the_test(error: BaseException) -> bool:
    # Ctrl-C, or pytest.fail() in a handler.
    return is_cancellation(error) or not isinstance(error, Exception | SystemExit | asyncio.CancelledError)


def _drain_queue(connection: Connection, name: str, runtime: Runtime) -> list[Event]:
    statements = ClaimStatements(runtime.schema, name)
    events: list[Event] = []
    for _ in range(_DRAIN_LIMIT):
        claimed = claim(connection, ClaimRequest(statements.ready, 1, queue=name))
        if claimed.transaction is None:
            claimed = claim(connection, ClaimRequest(statements.due, 1, queue=name))
        if claimed.transaction is None:
            return events
        batch = BatchState.of(claimed)
        run(connection, batch, runtime, decide(connection, batch, runtime), shared=True)
        # Within the test's transaction, which is not committed, so that its notifications are never sent.
        for step in steps_of(batch, batch.events, runtime):
            if statements_of_step := step.statements():
                step.committed(run_script(connection, *statements_of_step))
        # The handlers' deadlines must not apply to the test.
        run_script(connection, *TIMEOUTS_OFF, f"RELEASE SAVEPOINT {claimed.transaction.savepoint}")
        events += batch.report().events
    raise AssertionError(f"queue {name!r} is not empty after {_DRAIN_LIMIT:,} jobs: does a handler enqueue itself?")


def _described(event: JobRetried | JobDied) -> str:
    if isinstance(event, JobDied):
        return f"{event.job.kind}: {event.reason}"
    return f"{event.job.kind}: {event.error_type}: {event.message} ({', '.join(event.where)})"
