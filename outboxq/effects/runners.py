"""Where calls to the outside meet the database and the caller's functions: from threads and from event loops."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, NoReturn, TypeVar, assert_never, cast
from uuid import UUID

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from outboxq.database.errors import explain_missing_tables
from outboxq.effects.lock_keeper import LockKeeper, Transaction
from outboxq.effects.protocol import Call, LockExpiry, LookUp, LookUpCall, Pause, Step, Steps, Transact, once
from outboxq.effects.request import Classify, Request, make_request
from outboxq.effects.transactions import AsyncTransactions, Transactions
from outboxq.errors import CallNotApplied, ConfigError, EffectRefused, HandlerError
from outboxq.statements.effects import select_deployment

T = TypeVar("T")
C = TypeVar("C", "EffectRunner", "AsyncEffectRunner")

MIN_LEASE_SECONDS, MAX_LEASE_SECONDS = 0.5, 3600.0


class EffectRunner:
    """Makes calls once, where the caller stands."""

    def __init__(self, transactions: Transactions, lease_seconds: float) -> None:
        self.lease = timedelta(seconds=check_lease(lease_seconds))
        self._transactions = transactions
        self._keeper = LockKeeper(transactions.keeper_transaction(), lease_seconds)
        self._deployment: UUID | None = None

    def run(self, request: Request, call: Callable[[str], object], ask: Callable[[str], LookUp[Any]] | None) -> object:
        """What the call comes to, or came to; see `once` for what it raises."""
        if self._deployment is None:
            self._deployment = self._transactions.run(_read_deployment)
        hold = LockExpiry(request)
        with self._keeper.keeping(hold):
            return self._drive(once(request, hold, self._deployment), call, ask)

    def _drive(self, steps: Steps[object], call: Callable[[str], object], ask: Callable[[str], Any] | None) -> object:
        try:
            step = next(steps)
            while True:
                try:
                    answer = self._perform(step, call, ask)
                except BaseException as error:  # noqa: BLE001  # the protocol decides, and raises it again
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            return end.value

    def _perform(self, step: Step, call: Callable[[str], object], ask: Callable[[str], Any] | None) -> object:
        match step:
            case Transact(work, settles):
                return self._transactions.run(work, settles=settles)
            case Call(provider_key):
                return _not_awaitable(call(provider_key))
            case LookUpCall(provider_key):
                assert ask is not None
                return ask(provider_key)
            case Pause(seconds):
                time.sleep(seconds)
                return None
        assert_never(step)


class AsyncEffectRunner:
    """Makes calls once, in an event loop.

    Args:
        keep: Runs the keeper's transactions from its thread; by default through the event loop.
    """

    def __init__(self, transactions: AsyncTransactions, lease_seconds: float, keep: Transaction | None = None) -> None:
        self._keep = keep
        self.lease = timedelta(seconds=check_lease(lease_seconds))
        self._transactions = transactions
        self._keepers: dict[asyncio.AbstractEventLoop, LockKeeper] = {}
        self._deployment: UUID | None = None

    def keeping(self, hold: LockExpiry) -> AbstractContextManager[None]:
        """Within the block, the lock is extended."""
        loop = asyncio.get_running_loop()
        keeper = self._keepers.get(loop)
        if keeper is None:
            keep = self._keep or self._transactions.keeper_transaction()
            keeper = LockKeeper(keep, self.lease.total_seconds())
            self._keepers = {loop: keeper}
        return keeper.keeping(hold)

    async def deployment(self) -> UUID:
        """The id of this deployment; read once."""
        if self._deployment is None:
            self._deployment = await self._transactions.run(_read_deployment)
        return self._deployment

    async def run(
        self,
        request: Request,
        call: Callable[[str], Awaitable[object]],
        ask: Callable[[str], Awaitable[LookUp[Any]]] | None,
    ) -> object:
        """See `EffectRunner.run`."""
        deployment = await self.deployment()
        hold = LockExpiry(request)
        with self.keeping(hold):
            return await self._drive(once(request, hold, deployment), call, ask)

    async def drive(self, steps: Steps[T]) -> T:
        """What steps come to that transact and pause, and call nobody."""
        return cast("T", await self._drive(steps, _call_nobody, None))

    async def _drive(
        self,
        steps: Steps[object],
        call: Callable[[str], Awaitable[object]],
        ask: Callable[[str], Awaitable[Any]] | None,
    ) -> object:
        # A cancellation lets what was decided be written to its end, and goes on before the next step.
        cancelled: asyncio.CancelledError | None = None
        answer: object
        try:
            step = next(steps)
            while True:
                try:
                    if isinstance(step, Transact):
                        done, interruption = await self._to_its_end(step)
                        cancelled = cancelled or interruption
                        answer = done.result()
                    elif isinstance(step, Pause) and step.settles:
                        cancelled = await _outlast(step.seconds) or cancelled
                        answer = None
                    else:
                        answer = await self._perform(step, call, ask, cancelled)
                except GeneratorExit:
                    # The loop is gone: nothing can be awaited any more.
                    raise
                except BaseException as error:  # noqa: BLE001  # the protocol decides, and raises it again
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            if cancelled is not None:
                raise cancelled from None
            return end.value
        except Exception:
            if cancelled is not None:
                raise cancelled from None
            raise

    async def _to_its_end(self, step: Transact) -> tuple[asyncio.Task[Any], asyncio.CancelledError | None]:
        """A transaction that has ended, well or not, and the cancellation that came meanwhile."""
        cancelled: asyncio.CancelledError | None = None
        while True:
            task = asyncio.ensure_future(self._transactions.run(step.run, settles=step.settles))
            while not task.done():
                try:
                    # Neither raises what the task raised, nor cancels it.
                    await asyncio.wait((task,))
                except asyncio.CancelledError as error:
                    cancelled = error
            # A loop that ends cancels every task, also this one, which we do not: claims and records may be repeated.
            if not (task.cancelled() and task.cancelling()):
                return task, cancelled

    async def _perform(
        self,
        step: Call | LookUpCall | Pause,
        call: Callable[[str], Awaitable[object]],
        ask: Callable[[str], Any] | None,
        cancelled: asyncio.CancelledError | None,
    ) -> object:
        if cancelled is not None:
            # It is known not to have been called: recorded as that, and not as unknown.
            raise CallNotApplied("cancelled before the call") if isinstance(step, Call) else cancelled
        match step:
            case Call(provider_key):
                return await _awaited(call(provider_key))
            case LookUpCall(provider_key):
                assert ask is not None
                return await _awaited(ask(provider_key))
            case Pause(seconds):
                await asyncio.sleep(seconds)
                return None
        assert_never(step)


@dataclass(frozen=True, slots=True)
class EffectAccess(Generic[C]):
    """Leave to call the outside through `caller`, or why there is none.

    `retention_of` says how long a scope's results are remembered.
    """

    caller: C
    retention_of: Callable[[str], timedelta]
    refusal: str | None = None

    def request(
        self,
        scope: str,
        key: str,
        call: Callable[[str], object],
        already_applied: object,
        ask_first: bool,
        provider_remembers: timedelta | None,
        payload: object,
        returns: object,
        classify: Classify | None,
    ) -> Request:
        """What is asked for, checked before anything is called.

        Raises:
            EffectRefused: not here.
            InvalidKey, ArgumentError, ConfigError: something cannot be used as given.
        """
        if self.refusal is not None:
            raise EffectRefused(self.refusal)
        return make_request(
            scope,
            key,
            call,
            payload=payload,
            asks=already_applied is not None,
            asks_first=ask_first,
            provider_remembers=provider_remembers,
            returns=returns,
            classify=classify,
            lease=self.caller.lease,
            retention=self.retention_of(scope),
        )


def check_lease(seconds: float) -> float:
    """Refuse a lock that would run out before it is kept, or block a key for ever.

    Raises:
        ConfigError: out of range.
    """
    if not MIN_LEASE_SECONDS <= seconds <= MAX_LEASE_SECONDS:
        raise ConfigError(
            f"the lease on a call takes {MIN_LEASE_SECONDS:g} to {MAX_LEASE_SECONDS:g} seconds, got {seconds}"
        )
    return seconds


def _read_deployment(connection: Connection) -> UUID:
    try:
        found: UUID = connection.execute(select_deployment()).scalar_one()
    except DBAPIError as error:
        missing = explain_missing_tables(error)
        if missing is None:
            raise
        raise missing from error
    return found


async def _outlast(seconds: float) -> asyncio.CancelledError | None:
    """Sleep through cancellations; the last of them."""
    cancelled: asyncio.CancelledError | None = None
    until = time.monotonic() + seconds
    while (left_seconds := until - time.monotonic()) > 0:
        try:
            await asyncio.sleep(left_seconds)
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


async def _call_nobody(_provider_key: str) -> NoReturn:
    raise AssertionError("these steps hold no call")


async def _awaited(value: Awaitable[object] | object) -> object:
    # A plain function has done its work by now: what it did must be recorded, not refused.
    return await value if inspect.isawaitable(value) else value


def _not_awaitable(value: object) -> object:
    if inspect.iscoroutine(value) and inspect.getcoroutinestate(value) == inspect.CORO_CREATED:
        # Never awaited: close it, or Python warns.
        value.close()
        raise CallNotApplied(
            "`call` is an async function, and nobody awaits it here: use an async handler, or AsyncEffects"
        )
    if inspect.isawaitable(value):
        raise HandlerError(f"`call` returned a {type(value).__name__}, which runs on, and nobody awaits it here")
    return value
