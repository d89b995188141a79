"""Effects: calls to the outside that count once, wherever they are made."""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeVar, cast

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from outboxq.effect_calls import AsyncCaller, Caller, EngineTransactions, async_transactions, schema_of
from outboxq.effect_request import Classify, make_request
from outboxq.errors import ConfigError
from outboxq.once import Applied as Applied
from outboxq.once import LookUp
from outboxq.once import NotApplied as NotApplied
from outboxq.once import Unknown as Unknown

T = TypeVar("T")

DEFAULT_EFFECT_RETENTION = timedelta(days=30)
DEFAULT_LEASE_SECONDS = 30.0


class Effects:
    """Calls to the outside that count once, outside of handlers: `Effects(engine).once(...)`.

    Args:
        engine: A sync engine; connections come from a pool of our own beside its pool.
        lease_seconds: How long a call stays its caller's after its last sign of life, 0.5 to 3600. Long calls are kept.
        retention: How long what a call came to is remembered.
        schema: The PostgreSQL schema of outboxq's tables; by default as the engine's `schema_translate_map` has it.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        retention: timedelta = DEFAULT_EFFECT_RETENTION,
        schema: str | None = None,
    ) -> None:
        if not isinstance(engine, Engine):
            raise ConfigError(f"Effects takes a sync Engine, got {type(engine).__name__}: see AsyncEffects")
        self.retention = check_retention(retention)
        self._transactions = EngineTransactions(engine, schema_of(engine, schema))
        self._caller = Caller(self._transactions, lease_seconds)

    def once(
        self,
        scope: str,
        *,
        key: str,
        call: Callable[[str], T],
        already_applied: Callable[[str], LookUp[T]] | None = None,
        provider_remembers: timedelta | None = None,
        payload: object = None,
        returns: type[T] | None = None,
        classify: Classify | None = None,
    ) -> T:
        """Call the other side once for this key; later callers get the recorded result. See `Context.once`."""
        request = make_request(
            scope,
            key,
            call,
            payload=payload,
            asks=already_applied is not None,
            provider_remembers=provider_remembers,
            returns=returns,
            classify=classify,
            lease=self._caller.lease,
            retention=self.retention,
        )
        return cast("T", self._caller.run(request, call, already_applied))

    def dispose(self) -> None:
        """Close the pool."""
        self._transactions.dispose()


class AsyncEffects:
    """As `Effects`, awaited.

    Args:
        engine: An async engine, or a sync one, whose transactions then run in threads.
    """

    def __init__(
        self,
        engine: AsyncEngine | Engine,
        *,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        retention: timedelta = DEFAULT_EFFECT_RETENTION,
        schema: str | None = None,
    ) -> None:
        self.retention = check_retention(retention)
        self._transactions = async_transactions(engine, schema)
        self.caller = AsyncCaller(self._transactions, lease_seconds)

    async def once(
        self,
        scope: str,
        *,
        key: str,
        call: Callable[[str], Awaitable[T]],
        already_applied: Callable[[str], Awaitable[LookUp[T]]] | None = None,
        provider_remembers: timedelta | None = None,
        payload: object = None,
        returns: type[T] | None = None,
        classify: Classify | None = None,
    ) -> T:
        """Call the other side once for this key; later callers get the recorded result. See `Context.once`."""
        request = make_request(
            scope,
            key,
            call,
            payload=payload,
            asks=already_applied is not None,
            provider_remembers=provider_remembers,
            returns=returns,
            classify=classify,
            lease=self.caller.lease,
            retention=self.retention,
        )
        return cast("T", await self.caller.run(request, call, already_applied))

    async def dispose(self) -> None:
        """Close the pool."""
        await self._transactions.dispose()


def check_retention(retention: timedelta) -> timedelta:
    """Refuse a window that is no window.

    Raises:
        ConfigError: under a second, or over ten years.
    """
    if not isinstance(retention, timedelta) or not timedelta(seconds=1) <= retention <= timedelta(days=3_653):
        raise ConfigError(f"retention takes a timedelta from 1 second to 10 years, got {retention!r}")
    return retention
