"""What a handler receives first: its session, its job, the process's state, calls that count once, and a log."""

import functools
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, cast

import msgspec
from typing_extensions import TypeVar

from outboxq.database.sessions import plain_session
from outboxq.effects.request import Classify, LookUp, OnceOptions
from outboxq.effects.runners import AsyncEffectRunner, EffectAccess, EffectRunner
from outboxq.errors import EffectRefused
from outboxq.handlers.deferred import Write, checked_write, defer
from outboxq.handlers.row_writes import Statement
from outboxq.job import Job
from outboxq.outbox.session import AsyncOutboxSession, OutboxSession

S = TypeVar("S", default=Any)
T = TypeVar("T")
SessionType = TypeVar("SessionType", bound=OutboxSession | AsyncOutboxSession)
Runner = TypeVar("Runner", EffectRunner, AsyncEffectRunner)


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
class _JobContext(Generic[SessionType, Runner, S]):
    job: Job
    state: S
    session: SessionType = field(repr=False)
    effect_access: EffectAccess[Runner] | None = field(default=None, repr=False)

    @functools.cached_property
    def log(self) -> JobLogger:
        """A logger that names the job in each record."""
        return JobLogger(self.job)

    @property
    def headers(self) -> dict[str, str]:
        """The strings that the producer stored next to the arguments."""
        return msgspec.json.decode(self.job.headers.encode(), type=dict[str, str])

    def defer(self, statement: Statement, parameters: Mapping[str, object] | None = None) -> None:
        """Have a Core statement sent after the handler's flush and before COMMIT, together with its equals.

        Does no I/O, and is not awaited. In a shared batch equal statements that follow one another, of one job or of
        several, are sent as one, with the parameters of all; the order is always that of the jobs. If the handler
        rolls a savepoint of its own back, the statement is sent all the same.

        Args:
            statement: `insert()`, `update()`, `delete()` or a `text()` that writes; best a constant of the module with
                `bindparam()` for values.
            parameters: For one execution of it.

        Raises:
            DeferError: it does not write, returns rows, or the parameters are not values by name.
        """
        self._keep(checked_write(statement, parameters))

    def _keep(self, write: Write) -> None:
        defer(plain_session(self.session, "ctx.defer"), write)

    def _granted(self) -> EffectAccess[Runner]:
        if self.effect_access is None:
            raise EffectRefused(
                "this context was made without a database for effects: see outboxq.testing.sync_context"
            )
        return self.effect_access


@dataclass(frozen=True)
class Context(_JobContext[OutboxSession, EffectRunner, S]):
    """What a sync handler receives first.

    `session` writes in the transaction that removed the job: its rows commit with the job's disappearance, or not at
    all. Its `commit()` commits nothing, and its `rollback()` fails the attempt. `state` is what the registry's lifespan
    yielded.
    """

    def once(
        self,
        scope: str,
        *,
        key: str,
        call: Callable[[str], T],
        already_applied: Callable[[str], LookUp[T]] | None = None,
        ask_first: bool = False,
        provider_remembers: timedelta | None = None,
        payload: object = None,
        returns: type[T] | None = None,
        classify: Classify | None = None,
    ) -> T:
        """Call the other side once for this key, and return what that came to, now and ever after.

        The result is recorded in a short transaction of its own as soon as the call returns, whatever becomes of this
        attempt. For lease mode; in transaction mode the job's transaction is open while the call lasts, and a relay
        whose batches hold more than one job refuses it.

        Args:
            scope: A stable name for this sort of call, such as "stripe-charge".
            key: What is called for, such as the order's number; 1 to 512 bytes. A new key is a new effect.
            call: Given the provider key: a UUID as text, the same at every try, for the other side's idempotency key.
                Returns what JSON can hold. May raise `CallNotApplied` (surely nothing happened: called again later) or
                `CallRefused` (refused for good: recorded). After any other error its outcome is unknown.
            already_applied: Asks what became of an earlier call: `Applied(result)`, `NotApplied()` or `Unknown()`.
            ask_first: Ask it before every call, also the first: for calls that a database which lost its last commits
                (an asynchronous failover, a restored backup) does not know of. Costs one look-up a call.
            provider_remembers: How long the other side honours a provider key, from the first call on: until then a
                call whose outcome is unknown is made again with the same key.
            payload: The content of the request. The same key with another content is refused.
            returns: The type of the result, by default what `call` is declared to return, else JSON's own types.
            classify: Sorts the errors of `call` into "retryable" (surely not applied), "final" and "ambiguous".

        Raises:
            EffectInProgress: another caller is at it, or died not long ago. Let it out: the job comes back by itself.
            EffectFailed: refused for good, now or earlier. Let out, it sends the job to the dead letters.
            EffectUnknown: whether it was applied cannot be known; an operator decides.
            EffectConflict, ResultNotStorable, EffectLockLost, EffectNotRecorded, EffectRefused, InvalidKey: as named.
        """
        access = self._granted()
        options = OnceOptions(
            scope, key, call, already_applied, ask_first, provider_remembers, payload, returns, classify
        )
        return cast("T", access.runner.run(access.request(options), options))


@dataclass(frozen=True)
class AsyncContext(_JobContext[AsyncOutboxSession, AsyncEffectRunner, S]):
    """What an async handler receives first: the same as a sync one, with an async session."""

    async def once(
        self,
        scope: str,
        *,
        key: str,
        call: Callable[[str], Awaitable[T]],
        already_applied: Callable[[str], Awaitable[LookUp[T]]] | None = None,
        ask_first: bool = False,
        provider_remembers: timedelta | None = None,
        payload: object = None,
        returns: type[T] | None = None,
        classify: Classify | None = None,
    ) -> T:
        """Call the other side once for this key, as `Context.once` does, with functions that are awaited."""
        access = self._granted()
        options = OnceOptions(
            scope, key, call, already_applied, ask_first, provider_remembers, payload, returns, classify
        )
        return cast("T", await access.runner.run(access.request(options), options))


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
