"""What a handler receives first: its session, its job, the process's state, calls that count once, and a log."""

import functools
import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Generic

import msgspec
from typing_extensions import TypeVar

from outboxq.database.sessions import plain_session
from outboxq.effects.api import AsyncCallsOnce, CallsOnce, EffectAccess, HasEffectAccess
from outboxq.errors import EffectRefused
from outboxq.handlers.deferred import Write, checked_write, defer
from outboxq.handlers.row_writes import Statement
from outboxq.job import Job
from outboxq.outbox.session import AsyncOutboxSession, OutboxSession

S = TypeVar("S", default=Any)
T = TypeVar("T")
SessionType = TypeVar("SessionType", bound=OutboxSession | AsyncOutboxSession)


class JobLogger(logging.LoggerAdapter[logging.Logger]):
    """Adds the job's id, kind, queue and attempt to the `extra` of each record."""

    def __init__(self, job: Job) -> None:
        extra: dict[str, object] = {
            "job_id": str(job.id),
            "job_kind": job.kind,
            "job_queue": job.queue,
            "job_attempt": job.attempt,
        }
        super().__init__(logging.getLogger("outboxq.handler"), extra)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Merge the caller's own `extra`, which the standard adapter would drop."""
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


@dataclass(frozen=True)
class JobContext(HasEffectAccess, Generic[SessionType, S]):
    """The base of `Context` and `AsyncContext`."""

    job: Job
    state: S
    session: SessionType = field(repr=False)
    effect_access: EffectAccess | None = field(default=None, repr=False)

    @functools.cached_property
    def log(self) -> JobLogger:
        """A logger that names the job in each record."""
        return JobLogger(self.job)

    @property
    def headers(self) -> dict[str, str]:
        """The strings that the producer stored next to the arguments."""
        return msgspec.json.decode(self.job.headers.encode(), type=dict[str, str])

    def defer(self, statement: Statement, parameters: Mapping[str, object] | None = None) -> None:
        """Have a Core statement sent after the handler's flush and before COMMIT, together with equal statements.

        Does no I/O, and is not awaited. In a shared batch equal statements that follow one another, of one job or of
        several, are sent as one, with the parameters of all; the order is always that of the jobs. If the handler
        rolls a savepoint of its own back, the statement is sent all the same.

        Args:
            statement: `insert()`, `update()`, `delete()` or a `text()` that writes; best a constant of the module with
                `bindparam()` for values.
            parameters: Those of one execution.

        Raises:
            DeferError: it does not write, returns rows, or the parameters are not values by name.
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
    """What a sync handler receives first.

    `session` writes in the transaction that removed the job: its rows commit with the job's disappearance, or not at
    all. Its `commit()` commits nothing, and its `rollback()` fails the attempt. `state` is what the registry's lifespan
    yielded.
    """


@dataclass(frozen=True)
class AsyncContext(JobContext[AsyncOutboxSession, S], AsyncCallsOnce):
    """What an async handler receives first: the same as a sync one, with an async session."""


@dataclass(frozen=True, slots=True)
class BatchItem(Generic[T]):
    """One job of a batch: its arguments as the class that the handler was registered with, and the job itself."""

    args: T
    job: Job


@dataclass(frozen=True)
class BatchContext(Generic[S]):
    """What a sync batch handler receives first.

    `session` writes in the transaction that removed the jobs: its rows commit with their disappearance, or not at all.
    """

    state: S
    session: OutboxSession


@dataclass(frozen=True)
class AsyncBatchContext(Generic[S]):
    """What an async batch handler receives first: the same with an async session."""

    state: S
    session: AsyncOutboxSession
