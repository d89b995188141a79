"""Runners: perform the steps of the effect protocol, in the caller's thread or in an event loop."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import TypeAlias, TypeVar, assert_never, cast
from uuid import UUID

from sqlalchemy import Connection

from outboxq.database.errors import missing_tables_explained
from outboxq.effects.lock_keeper import LockKeeper, Transaction
from outboxq.effects.protocol import LockExpiry, once
from outboxq.effects.request import OnceOptions, Request
from outboxq.effects.shielding import DelayedCancellation
from outboxq.effects.steps import Call, LookUpCall, Pause, Step, Steps, Transact
from outboxq.effects.telling import telling
from outboxq.effects.transactions import AsyncTransactions, Transactions
from outboxq.errors import CallNotApplied, ConfigError, HandlerError
from outboxq.events import EffectCalled
from outboxq.forks import await_here, call_here
from outboxq.names import with_article
from outboxq.statements.effects import select_deployment

T = TypeVar("T")
Tell: TypeAlias = Callable[[EffectCalled], None]

DEFAULT_LEASE_SECONDS = 30.0
MIN_LEASE_SECONDS, MAX_LEASE_SECONDS = 0.5, 3600.0


class EffectRunner:
    """Performs the steps of `once` (transactions, calls, look-ups and pauses) in the caller's thread.

    Args:
        tell: Called with the outcome of each call, if given.
    """

    def __init__(self, transactions: Transactions, lease_seconds: float, *, tell: Tell | None = None) -> None:
        self._tell = tell
        self.lease = timedelta(seconds=check_lease(lease_seconds))
        self._transactions = transactions
        self._keeper = LockKeeper(transactions.keeper_transaction(), lease_seconds)
        self._deployment: UUID | None = None

    def run(self, request: Request, options: OnceOptions) -> object:
        """Make the call, or replay its outcome; raises what `protocol.once` raises."""
        if self._deployment is None:
            self._deployment = self._transactions.run(_read_deployment)
        expiry = LockExpiry(request)
        with self._keeper.keeping(expiry):
            return self._drive(_told(once(request, expiry, self._deployment), request, self._tell), options)

    def _drive(self, steps: Steps[object], options: OnceOptions) -> object:
        try:
            step = next(steps)
            while True:
                try:
                    answer = self._perform(step, options)
                except BaseException as error:  # noqa: BLE001  # the protocol decides, and raises it again
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            return end.value

    def _perform(self, step: Step, options: OnceOptions) -> object:
        match step:
            case Transact(work, settles):
                return self._transactions.run(work, settles=settles)
            case Call(provider_key):
                return _not_awaitable(call_here(options.call, provider_key))
            case LookUpCall(provider_key):
                assert options.already_applied is not None
                return call_here(options.already_applied, provider_key)
            case Pause(seconds):
                time.sleep(seconds)
                return None
        assert_never(step)


class AsyncEffectRunner:
    """Performs the steps of `once` (transactions, calls, look-ups and pauses) in an event loop.

    Args:
        keep: Runs the lock keeper's transactions in the keeper's thread; by default they run through the event loop.
        tell: Called with the outcome of each call, if given.
    """

    def __init__(
        self,
        transactions: AsyncTransactions,
        lease_seconds: float,
        keep: Transaction | None = None,
        *,
        tell: Tell | None = None,
    ) -> None:
        self._tell = tell
        self._keep = keep
        self.lease = timedelta(seconds=check_lease(lease_seconds))
        self._transactions = transactions
        self._keepers: dict[asyncio.AbstractEventLoop, LockKeeper] = {}
        self._deployment: UUID | None = None

    def keeping(self, expiry: LockExpiry) -> AbstractContextManager[None]:
        """Extend the lock on a call while the block runs."""
        loop = asyncio.get_running_loop()
        keeper = self._keepers.get(loop)
        if keeper is None:
            keep = self._keep or self._transactions.keeper_transaction()
            keeper = LockKeeper(keep, self.lease.total_seconds())
            self._keepers = {loop: keeper}
        return keeper.keeping(expiry)

    async def deployment(self) -> UUID:
        """Return the id of this installation of outboxq, from which provider keys are derived; read only once."""
        if self._deployment is None:
            self._deployment = await self._transactions.run(_read_deployment)
        return self._deployment

    async def run(self, request: Request, options: OnceOptions) -> object:
        """Make the call, or replay its outcome; raises what `protocol.once` raises."""
        deployment = await self.deployment()
        expiry = LockExpiry(request)
        with self.keeping(expiry):
            return await self._drive(_told(once(request, expiry, deployment), request, self._tell), options)

    async def drive(self, steps: Steps[T]) -> T:
        """Perform steps that contain no call, such as a claim or a record, and return their result.

        For the HTTP middleware, which makes the call itself.
        """
        return cast("T", await self._drive(steps, None))

    async def _drive(self, steps: Steps[object], options: OnceOptions | None) -> object:
        # A cancellation waits until a decided record is written, and is raised before the next step.
        cancellation = DelayedCancellation()
        try:
            step = next(steps)
            while True:
                try:
                    answer = await self._perform(step, options, cancellation)
                except GeneratorExit:
                    # The event loop is gone: awaiting is impossible.
                    raise
                except BaseException as error:  # noqa: BLE001  # the protocol decides, and raises it again
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            cancellation.release()
            return end.value
        except Exception:
            cancellation.release()
            raise

    async def _perform(self, step: Step, options: OnceOptions | None, cancellation: DelayedCancellation) -> object:
        match step:
            case Transact(work, settles):
                return await cancellation.finish(partial(self._transactions.run, work, settles=settles))
            case Pause(seconds, settles=True):
                return await cancellation.finish(partial(asyncio.sleep, seconds))
            case Call(provider_key):
                if cancellation.error is not None:
                    # Recorded as not applied, and not as unknown: the call was certainly not made.
                    raise CallNotApplied("cancelled before the call")
                assert options is not None
                return await _awaited(call_here(options.call, provider_key))
            case LookUpCall(provider_key):
                cancellation.release()
                assert options is not None
                assert options.already_applied is not None
                return await _awaited(call_here(options.already_applied, provider_key))
            case Pause(seconds):
                cancellation.release()
                await asyncio.sleep(seconds)
                return None
        assert_never(step)


def _told(steps: Steps[object], request: Request, tell: Tell | None) -> Steps[object]:
    return steps if tell is None else telling(steps, request.scope, tell)


def check_lease(seconds: float) -> float:
    """Return the time for which a lock on a call lasts, after a check that it is 0.5 to 3600 seconds.

    A shorter lock would expire before it can be extended; a longer one would block its key for too long.

    Raises:
        ConfigError: `seconds` is out of range.
    """
    if not MIN_LEASE_SECONDS <= seconds <= MAX_LEASE_SECONDS:
        raise ConfigError(
            f"the lease on a call takes {MIN_LEASE_SECONDS:g} to {MAX_LEASE_SECONDS:g} seconds, got {seconds}"
        )
    return seconds


def _read_deployment(connection: Connection) -> UUID:
    with missing_tables_explained():
        found: UUID = connection.execute(select_deployment()).scalar_one()
    return found


async def _awaited(value: Awaitable[object] | object) -> object:
    # A plain function has done its work by now, so it must be recorded and not refused.
    return await await_here(value) if inspect.isawaitable(value) else value


def _not_awaitable(value: object) -> object:
    if inspect.iscoroutine(value) and inspect.getcoroutinestate(value) == inspect.CORO_CREATED:
        # It was never awaited: close it, else Python warns.
        value.close()
        raise CallNotApplied(
            "`call` is an async function, which is not awaited here: use an async handler, or AsyncEffects"
        )
    if inspect.isawaitable(value):
        raise HandlerError(
            f"`call` returned {with_article(type(value).__name__)}, which runs on, and is not awaited here"
        )
    return value
