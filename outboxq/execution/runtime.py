"""The runtime of handlers: all that they need except jobs, fixed for a slot's connection."""

import asyncio
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TypeAlias
from uuid import UUID

from sqlalchemy import Connection

from outboxq.codec.text import storable
from outboxq.database.driver import NOT_PREPARED, PreparedStatements
from outboxq.database.guard import Guard
from outboxq.effects.api import EffectAccess
from outboxq.effects.runners import AsyncEffectRunner, EffectRunner
from outboxq.errors import EffectRefused
from outboxq.execution.failure import Failed, JudgesFailures
from outboxq.execution.invoke import Invoker
from outboxq.execution.keep import Keeper
from outboxq.execution.preload import wait_while_young
from outboxq.handlers.handler import AnyHandler
from outboxq.handlers.progress import ProgressNotes
from outboxq.handlers.resolved import Registry
from outboxq.handlers.retention import spoken
from outboxq.handlers.row_writes import Catalog
from outboxq.job import Job
from outboxq.outcomes import Outcome

_SHARED = (
    "ctx.once is refused where jobs share a transaction (batch_size > 1): the others would wait for its call, and be "
    'repeated with it. Give the handler claim="lease", or its relay a batch size of 1'
)


@dataclass(frozen=True, slots=True)
class UnknownKindResult:
    """No handler here can run this kind in this slot, or the kind is paused."""


@dataclass(frozen=True, slots=True)
class CancelledResult:
    """An operator cancelled the job while it ran, or before its handler was called."""


@dataclass(frozen=True, slots=True)
class ExpiredResult:
    """The job expired before its handler was called."""


@dataclass(frozen=True, slots=True)
class GivenBack:
    """An earlier job of the batch was put off, and holds this one up: it waits again as it was."""


@dataclass(frozen=True, slots=True)
class SettledByClaim:
    """The job's claim has settled it: another job runs for it, or it was put back until its key's next window."""


Result: TypeAlias = Outcome | Failed | UnknownKindResult | CancelledResult | ExpiredResult | GivenBack | SettledByClaim


@dataclass(slots=True, eq=False)
class Orders:
    """The orders of operators; replaced by the relay's polls, and read by its slots without a lock.

    Attributes:
        cancelled: Jobs that had a cancellation at the relay's last poll. The transaction that ends the job checks if it
            still exists.
        paused: Kinds, each with its queue, that are not to be run.
    """

    cancelled: set[UUID] = field(default_factory=set)
    paused: AbstractSet[tuple[str, str]] = frozenset()

    def known_kinds(self, queue: str, kinds: tuple[str, ...]) -> tuple[str, ...]:
        """Return the kinds that are not paused in a queue."""
        return tuple(kind for kind in kinds if (queue, kind) not in self.paused) if self.paused else kinds


@dataclass(slots=True, eq=False)
class Runtime(JudgesFailures):
    """All that executing needs except the job, fixed for the life of a slot's connection.

    Args:
        is_interruption: Returns True for an error of a handler that is the relay's own interruption.
        notes: The progress of handlers; None if it is not recorded.
        prepared_rows: The connection's prepared INSERT of finished rows.
        coalesces: Claimed jobs of a key take along what waits for it.
        has_citus: A job may be seen before the rows of the transaction that added it.
    """

    registry: Registry
    state: object
    invoker: Invoker
    guard: Guard
    schema: str
    max_crashes: int
    caller: EffectRunner | AsyncEffectRunner | None
    sharing_queues: frozenset[str]
    is_interruption: Callable[[BaseException], bool]
    catalog: Catalog = field(default_factory=Catalog)
    orders: Orders = field(default_factory=Orders)
    keeper: Keeper = field(default_factory=Keeper)
    notes: ProgressNotes | None = None
    prepared_rows: PreparedStatements = NOT_PREPARED
    has_citus: bool = False
    coalesces: bool = True

    def absent(self, connection: Connection, job: Job) -> None:
        """Check if the missing row of an entity argument may come later.

        Raises:
            RowsMayBeLate: it may.
        """
        if self.has_citus:
            wait_while_young(connection, job)

    def effect_access(self, handler: AnyHandler, job: Job) -> EffectAccess | None:
        """The job's access to effects (`ctx.once`); None if this relay cannot call effects."""
        if self.caller is None:
            return None
        # Refused also for a lone job: a handler must not depend on how busy its queue is.
        is_shared = job.queue in self.sharing_queues and job.lease_token is None
        retention, refusal = partial(self._retention, handler, job), _SHARED if is_shared else None
        return EffectAccess(self.caller, retention, refusal, partial(self._describe_call, job))

    def _describe_call(self, job: Job, error: BaseException) -> str:
        """Describe an error of an effect's call: its class, its text as the job's handler wants it kept, its line."""
        record = self.redacted(job, self.describe(error, job)).record
        line = f" ({record.where[-1]})" if record.where else ""
        return storable(f"{record.type}{record.message and f': {record.message}'}{line}")

    def _retention(self, handler: AnyHandler, job: Job, scope: str) -> timedelta:
        if not self.registry.may_call(scope, handler.kind):
            raise EffectRefused(
                f"scope {scope!r} is declared for other kinds than {handler.kind!r}: name it in jobs.scope(kinds=...)"
            )
        retention = self.registry.effect_retention(scope)
        horizon = handler.retry_horizon(job.max_attempts)
        # The relay's start checks this for the handler's own max_attempts; a job may have more attempts.
        if retention < horizon:
            raise EffectRefused(
                f"effects of scope {scope!r} are remembered for {spoken(retention)}, and this job may still run "
                f"{spoken(horizon)} after its first attempt began (max_attempts={job.max_attempts}): remember them "
                f"longer with jobs.scope({scope!r}, retention=...), or give the job fewer attempts"
            )
        return retention

    def handler_of(self, job: Job) -> AnyHandler | None:
        """The job's handler, if this slot can run it, and its kind is not paused."""
        if self.orders.paused and (job.queue, job.kind) in self.orders.paused:
            return None
        return self.registry.by_flavour[self.invoker.flavour].get(job.kind)


def is_cancellation(error: BaseException) -> bool:
    """Return True if the running task is cancelled, and `error` is that cancellation, not a handler's own."""
    if not issubclass(type(error), asyncio.CancelledError):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:
        # No event loop in this thread: a sync handler raised it.
        return False
    return task is not None and task.cancelling() > 0
