"""The runtime: everything that running a job needs except the job; the same as long as a slot's connection lives."""

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
    """The result of a job whose kind has no handler in this slot, or is paused.

    The job does not run, and waits for a later try.
    """


@dataclass(frozen=True, slots=True)
class CancelledResult:
    """The result of a job that an operator cancelled while it ran, or before its handler was called."""


@dataclass(frozen=True, slots=True)
class ExpiredResult:
    """The result of a job that expired before its handler was called."""


@dataclass(frozen=True, slots=True)
class GivenBack:
    """The result of a job that waits again, unchanged, because an earlier job of its group was put off."""


@dataclass(frozen=True, slots=True)
class SettledByClaim:
    """The result of a job that its claim has settled.

    The job was merged into another, or waits for the next period of its key (`every`).
    """


Result: TypeAlias = Outcome | Failed | UnknownKindResult | CancelledResult | ExpiredResult | GivenBack | SettledByClaim


@dataclass(slots=True, eq=False)
class Orders:
    """Operators' orders to a relay. Its polls of the database set the attributes; its slots read them without a lock.

    Attributes:
        cancelled: Jobs that had a cancellation at the relay's last poll. The transaction that ends the job checks if
            the cancellation still exists.
        paused: Kinds, each with its queue, that are not to be run.
    """

    cancelled: set[UUID] = field(default_factory=set)
    paused: AbstractSet[tuple[str, str]] = frozenset()

    def known_kinds(self, queue: str, kinds: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of `kinds` that are not paused in a queue."""
        return tuple(kind for kind in kinds if (queue, kind) not in self.paused) if self.paused else kinds


@dataclass(slots=True, eq=False)
class Runtime(JudgesFailures):
    """Everything that running a job needs except the job itself; the same as long as a slot's connection lives.

    Args:
        registry: The application's handlers.
        state: The handlers' `ctx.state`.
        invoker: Calls handlers.
        guard: Watches handlers' statements.
        max_crashes: The crashes after which a job is a dead letter.
        caller: Calls effects (`ctx.once`); None if this relay cannot.
        sharing_queues: The queues whose jobs may share a transaction.
        is_interruption: Returns True for an error of a handler that is the relay's own interruption.
        catalog: Facts of tables.
        orders: Operators' orders, such as cancellations.
        keeper: Makes finished rows.
        notes: Receives the progress of handlers; None if progress is not recorded.
        prepared_rows: The connection's prepared INSERT of finished rows.
        has_citus: True if a job may be visible before the rows of the transaction that added it.
        coalesces: True if waiting jobs are merged into claimed jobs of the same coalescing key.
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
        """Raise an error that puts a job off, if the missing row of an entity argument may come later (on Citus).

        Raises:
            RowsMayBeLate: the row may come later.
        """
        if self.has_citus:
            wait_while_young(connection, job)

    def effect_access(self, handler: AnyHandler, job: Job) -> EffectAccess | None:
        """Return the object by which the job's handler calls effects (`ctx.once`); None if this relay calls none."""
        if self.caller is None:
            return None
        # Refused even for a lone job: a handler must not depend on how busy its queue is.
        is_shared = job.queue in self.sharing_queues and job.lease_token is None
        retention, refusal = partial(self._retention, handler, job), _SHARED if is_shared else None
        return EffectAccess(self.caller, retention, refusal, partial(self._describe_call, job))

    def _describe_call(self, job: Job, error: BaseException) -> str:
        """Describe the error of an effect's call in one line: class, text if the handler's `messages` allow, place."""
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
        # The relay's start checks this for the handler's own max_attempts; a job may have a higher number.
        if retention < horizon:
            raise EffectRefused(
                f"effects of scope {scope!r} are remembered for {spoken(retention)}, and this job may still run "
                f"{spoken(horizon)} after its first attempt began (max_attempts={job.max_attempts}): remember them "
                f"longer with jobs.scope({scope!r}, retention=...), or give the job fewer attempts"
            )
        return retention

    def handler_of(self, job: Job) -> AnyHandler | None:
        """Return the job's handler; None if this slot cannot run the job, or its kind is paused."""
        if self.orders.paused and (job.queue, job.kind) in self.orders.paused:
            return None
        return self.registry.by_flavour[self.invoker.flavour].get(job.kind)


def is_cancellation(error: BaseException) -> bool:
    """Return True if the running task is cancelled and `error` is that cancellation, not a handler's own one."""
    if not issubclass(type(error), asyncio.CancelledError):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:
        # No event loop runs in this thread: a sync handler raised it.
        return False
    return task is not None and task.cancelling() > 0
