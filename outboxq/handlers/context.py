"""The first argument of a handler: session, job, the process's state, external calls made only once, and a log."""

import functools
import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn

import msgspec
from typing_extensions import TypeVar

from outboxq.database.sessions import plain_session
from outboxq.effects.api import AsyncCallsOnce, CallsOnce, EffectAccess, HasEffectAccess
from outboxq.errors import EffectRefused, SessionRefused
from outboxq.handlers.call import HandlerCall
from outboxq.handlers.deferred import Write, checked_write, defer
from outboxq.handlers.progress import checked_note
from outboxq.handlers.row_writes import Statement
from outboxq.job import OWN_HEADERS, Job, trace_id_of
from outboxq.outbox.callback_batch import FinishedBatch, JobBatch, batch_of, finished_batch
from outboxq.outbox.session import AsyncOutboxSession, OutboxSession

S = TypeVar("S", default=Any)
T = TypeVar("T")
SessionType = TypeVar("SessionType", bound=OutboxSession | AsyncOutboxSession)


class JobLogger(logging.LoggerAdapter[logging.Logger]):
    """Adds the job's id, kind, queue and attempt, and its `traceparent`'s trace id, to the `extra` of each record."""

    def __init__(self, job: Job) -> None:
        extra: dict[str, object] = {
            "job_id": str(job.id),
            "job_kind": job.kind,
            "job_queue": job.queue,
            "job_attempt": job.attempt,
        }
        trace_id = trace_id_of(job.headers)
        if trace_id is not None:
            extra["trace_id"] = trace_id
        super().__init__(logging.getLogger("outboxq.handler"), extra)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the caller's own `extra` to the job's fields; the standard adapter would drop it."""
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


class NoState:
    """The `ctx.state` of an application without a lifespan: it is falsy, and reading an attribute raises an error."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "(no state)"

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"ctx.state has no {name!r}, because it is empty: what a lifespan yields is ctx.state, as in "
            "Jobs(lifespan=...); a test passes state=...",
            name=name,
            obj=self,
        )


NO_STATE = NoState()


@dataclass(frozen=True)
class JobContext(HasEffectAccess, Generic[SessionType, S]):
    """The attributes and methods that `Context` and `AsyncContext`, the first arguments of handlers, have in common."""

    job: Job
    state: S
    session: SessionType = field(repr=False)
    effect_access: EffectAccess | None = field(default=None, repr=False)
    call: HandlerCall | None = field(default=None, repr=False, compare=False)

    @property
    def cancelled(self) -> bool:
        """True if the job was cancelled while it runs; cheap enough for every turn of a loop.

        Return or raise soon: the handler's rows are undone either way, and two seconds later the relay ends the
        handler's connection.
        """
        return self.call is not None and self.call.is_cancelled

    @property
    def jobs(self) -> tuple[Job, ...]:
        """A tuple of the one job, so that an around can read `ctx.jobs` for single handlers and batch handlers."""
        return (self.job,)

    def progress(self, fraction: float, note: str = "") -> None:
        """Record the handler's progress, for `find_job`, `outboxq jobs` and other views of running jobs.

        Not awaited, and cheap enough for every turn of a loop: the relay writes the newest note of each job outside the
        handler's transaction, once a second at most, and deletes it when the handler ends. If it cannot be written, the
        job still goes on.

        Args:
            fraction: From 0 to 1.
            note: The current step; readable by everyone who may read jobs, and cut to 200 characters.

        Raises:
            ArgumentError: a fraction out of its range, or values of other types.
        """
        checked = checked_note(fraction, note)
        if self.call is not None:
            self.call.note(self.job, *checked)

    @functools.cached_property
    def log(self) -> JobLogger:
        """A logger that names the job in each record."""
        return JobLogger(self.job)

    @property
    def headers(self) -> dict[str, str]:
        """The strings that the producer stored next to the arguments, without those that outboxq itself writes.

        They can be passed on to other jobs: `options(headers=ctx.headers)`.
        """
        stored = msgspec.json.decode(self.job.headers.encode(), type=dict[str, str])
        return {name: value for name, value in stored.items() if name not in OWN_HEADERS}

    @property
    def batch(self) -> JobBatch | None:
        """The batch that the job is a member of, to which more members can be added; None if the job is in no batch."""
        return batch_of(self.session, self.job)

    @property
    def finished_batch(self) -> FinishedBatch | None:
        """The batch whose callback the job is (`on_done` of `jobs.batch`); None if the job is no callback."""
        return finished_batch(self.job)

    def defer(self, statement: Statement, parameters: Mapping[str, object] | None = None) -> None:
        """Defer a Core statement: it is sent after the handler's flush and before COMMIT, with equal statements.

        Does no I/O, and is not awaited. If several jobs run in one transaction (`batchable=True`), consecutive equal
        statements, of one job or several, are sent as one, with all their parameters; the order is always that of the
        jobs. If the handler rolls back a savepoint of its own, the statement is still sent.

        Args:
            statement: `insert()`, `update()`, `delete()` or a `text()` that writes; best a constant of the module with
                `bindparam()` for values.
            parameters: The parameters of one execution.

        Raises:
            DeferError: the statement does not write or returns rows, or the parameters are not values by name.
        """
        self._keep(checked_write(statement, parameters))

    def _keep(self, write: Write) -> None:
        defer(plain_session(self.session, "ctx.defer"), write)

    def _granted(self) -> EffectAccess:
        if self.effect_access is None:
            raise EffectRefused(
                "this context was made without a database for effects: see outboxq.testing.sync_context"
            )
        return self.effect_access


@dataclass(frozen=True)
class Context(JobContext[OutboxSession, S], CallsOnce):
    """The first argument of a sync handler.

    `session` writes in the transaction that removed the job: its rows and the removal of the job are committed
    together, or not at all. Its `commit()` commits nothing, and its `rollback()` fails the attempt. `state` is the
    value that the registry's lifespan yielded.
    """


@dataclass(frozen=True)
class AsyncContext(JobContext[AsyncOutboxSession, S], AsyncCallsOnce):
    """The first argument of an async handler: like `Context`, with an async session."""


@dataclass(frozen=True, slots=True)
class BatchItem(Generic[T]):
    """One job of a batch: its arguments, as an object of the class given at registration, and the job."""

    args: T
    job: Job


class NoSession:
    """The `ctx.session` of a batch handler in lease mode: any use raises `SessionRefused`."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        raise SessionRefused

    def __enter__(self) -> NoReturn:
        raise SessionRefused

    def __exit__(self, *error: object) -> None: ...

    async def __aenter__(self) -> NoReturn:
        raise SessionRefused

    async def __aexit__(self, *error: object) -> None: ...


NO_SESSION: Any = NoSession()


@dataclass(frozen=True)
class BatchContext(Generic[S]):
    """The first argument of a sync batch handler.

    `session` writes in the transaction that removed the jobs: its rows and the removal of the jobs are committed
    together, or not at all. In lease mode there is no such transaction, and any use of `session` raises
    `SessionRefused`. `jobs` are the jobs of the items, in their order.
    """

    state: S
    session: OutboxSession
    jobs: tuple[Job, ...] = ()
    call: HandlerCall | None = field(default=None, repr=False, compare=False)

    @property
    def cancelled(self) -> bool:
        """True if one of the jobs was cancelled.

        Return or raise soon: the others run again, each by itself. In lease mode the call goes on, and the outcomes
        that it returns count for all jobs; the cancelled one ends as cancelled unless its outcome is done.
        """
        return self.call is not None and self.call.is_cancelled


@dataclass(frozen=True)
class AsyncBatchContext(Generic[S]):
    """The first argument of an async batch handler: like `BatchContext`, with an async session."""

    state: S
    session: AsyncOutboxSession
    jobs: tuple[Job, ...] = ()
    call: HandlerCall | None = field(default=None, repr=False, compare=False)

    @property
    def cancelled(self) -> bool:
        """True if one of the jobs was cancelled, as in `BatchContext`; in transaction mode the task is cancelled."""
        return self.call is not None and self.call.is_cancelled
