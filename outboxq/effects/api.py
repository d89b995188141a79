"""`once`: calls to other services that take effect once, made through a handler's context or an `Effects` object."""

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from outboxq.codec.text import name_and_line
from outboxq.config import DEFAULT_RETENTION, check_retention
from outboxq.database.answers import Answer
from outboxq.effects.request import (
    Classify,
    Describe,
    LookUp,
    OnceOptions,
    make_request,
)
from outboxq.effects.runners import DEFAULT_LEASE_SECONDS, AsyncEffectRunner, EffectRunner, Tell
from outboxq.effects.transactions import AsyncEngineTransactions, EngineTransactions
from outboxq.emitter import HOOKS_OPTION, hand_to_hooks
from outboxq.errors import ConfigError, EffectRefused

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EffectAccess:
    """The means by which the `once` of a context or an `Effects` object makes its calls, or the reason why it may not.

    `runner` makes the calls. `retention_of` returns the time for which a scope's results are remembered. `refusal` is
    the message with which every call is refused; None allows calls. `describe` returns the text that is stored for an
    error.
    """

    runner: EffectRunner | AsyncEffectRunner
    retention_of: Callable[[str], timedelta]
    refusal: str | None = None
    describe: Describe = name_and_line

    def run(self, options: OnceOptions) -> Any:
        """Make the call, or replay its outcome; await the result if the runner works in an event loop.

        Raises:
            EffectRefused: calls are not allowed; `refusal` says why.
            InvalidKey, ArgumentError, ConfigError: an argument cannot be used as given.
        """
        if self.refusal is not None:
            raise EffectRefused(self.refusal)
        retention = self.retention_of(options.scope)
        request = make_request(options, lease=self.runner.lease, retention=retention, describe=self.describe)
        return self.runner.run(request, options)


class HasEffectAccess:
    """The base of contexts and `Effects`: subclasses return the `EffectAccess` by which their `once` makes calls."""

    def _granted(self) -> EffectAccess:
        raise NotImplementedError


class CallsOnce(HasEffectAccess):
    """The base of sync contexts and `Effects`: adds a method `once` that makes calls in the caller's thread."""

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
        """Call the other side, such as a payment service, once for this key; later callers get the recorded outcome.

        The result is recorded in a short transaction of its own as soon as the call returns, even if this attempt
        fails. For lease mode; in transaction mode the job's transaction is open while the call lasts, and a relay whose
        batches hold more than one job refuses it.

        Args:
            scope: A stable name for this sort of call, such as "stripe-charge".
            key: The subject of the call, such as the order's number; 1 to 512 bytes. A new key is a new effect.
            call: Receives the provider key: a UUID as text, the same at every try, for the other side's idempotency
                key. Returns a value that JSON can hold. May raise `CallNotApplied` (surely nothing happened: called
                again later) or `CallRefused` (refused for good: recorded). After any other error its outcome is
                unknown.
            already_applied: Looks up the outcome of an earlier call: `Applied(result)`, `NotApplied()` or `Unknown()`.
            ask_first: Call `already_applied` before every call, also the first: a database that lost its last commits
                (an asynchronous failover, a restored backup) has no record of some calls. Costs one look-up a call.
            provider_remembers: How long the other side honours a provider key, from the first call on: until then a
                call whose outcome is unknown is made again with the same key.
            payload: The content of the request. The same key with other content is refused.
            returns: The type of the result, by default what `call` is declared to return, else JSON's own types, or its
                own class. A value read by this type must equal the stored one.
            classify: Sorts the errors of `call` into "retryable" (surely not applied), "final" and "ambiguous".

        Raises:
            EffectInProgress: another caller's call is under way, or its process ended during the call and its lock has
                not expired yet. Do not catch it: the job runs again later.
            EffectFailed: refused for good, now or earlier. Not caught, it sends the job to the dead letters.
            EffectUnknown: whether it was applied cannot be known; an operator decides.
            EffectConflict, ResultNotStorable, EffectLockLost, EffectNotRecorded, EffectRefused, InvalidKey: for the
                reasons in their own descriptions.
        """
        options = OnceOptions(
            scope, key, call, already_applied, ask_first, provider_remembers, payload, returns, classify
        )
        return cast("T", self._granted().run(options))


class AsyncCallsOnce(HasEffectAccess):
    """The base of async contexts and `AsyncEffects`: adds a method `once` that makes calls in an event loop."""

    def once(
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
    ) -> Coroutine[Any, Any, T]:
        """Call the other side once for this key; later callers get the recorded outcome. To be awaited.

        The functions are async, or plain ones; the arguments and errors are explained at `CallsOnce.once`.
        """
        options = OnceOptions(
            scope, key, call, already_applied, ask_first, provider_remembers, payload, returns, classify
        )
        return Answer(self._once(options), f"once({scope!r}, ...)")

    async def _once(self, options: OnceOptions) -> Any:
        return await self._granted().run(options)


def _teller(engine: Engine | AsyncEngine) -> Tell | None:
    """Return the function that passes events to the engine's hooks; None if it has no hooks."""
    plain = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
    options = plain.get_execution_options()
    return partial(hand_to_hooks, options) if options.get(HOOKS_OPTION) else None


class Effects(CallsOnce):
    """Calls to other services that take effect once, outside of handlers: `Effects(engine).once(...)`.

    Args:
        engine: A sync engine; connections come from pools made like its own, never from its pool.
        lease_seconds: How long the lock on a call lasts after its caller's last sign of life, 0.5 to 3600 seconds;
            another caller may take over after that.
        retention: How long the outcome of a call is remembered.
        schema: The PostgreSQL schema of outboxq's tables; by default the one in the engine's `schema_translate_map`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        retention: timedelta = DEFAULT_RETENTION,
        schema: str | None = None,
    ) -> None:
        if not isinstance(engine, Engine):
            raise ConfigError(f"Effects takes a sync Engine, got {type(engine).__name__}: see AsyncEffects")
        window = check_retention(retention)
        self._transactions = EngineTransactions(engine, schema)
        self._access = EffectAccess(
            EffectRunner(self._transactions, lease_seconds, tell=_teller(engine)), lambda _: window
        )

    def _granted(self) -> EffectAccess:
        return self._access

    def dispose(self) -> None:
        """Close the pools of this object; the engine's own pool is not one of them."""
        self._transactions.dispose()


class AsyncEffects(AsyncCallsOnce):
    """Calls to other services that take effect once, in an event loop: `await AsyncEffects(engine).once(...)`.

    Args:
        engine: An async engine, or a sync one, whose transactions then run in threads; connections come from pools made
            like its own, never from its pool.
        lease_seconds: How long the lock on a call lasts after its caller's last sign of life, 0.5 to 3600 seconds;
            another caller may take over after that.
        retention: How long the outcome of a call is remembered.
        schema: The PostgreSQL schema of outboxq's tables; by default the one in the engine's `schema_translate_map`.
    """

    def __init__(
        self,
        engine: AsyncEngine | Engine,
        *,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        retention: timedelta = DEFAULT_RETENTION,
        schema: str | None = None,
    ) -> None:
        window = check_retention(retention)
        self._transactions = AsyncEngineTransactions(engine, schema)
        self._access = EffectAccess(
            AsyncEffectRunner(self._transactions, lease_seconds, tell=_teller(engine)), lambda _: window
        )

    def _granted(self) -> EffectAccess:
        return self._access

    async def dispose(self) -> None:
        """Close the pools of this object; the engine's own pool is not one of them."""
        await self._transactions.dispose()
