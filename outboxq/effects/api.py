"""Effects: calls to the outside that count once, wherever they are made."""

from datetime import timedelta

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from outboxq.config import DEFAULT_RETENTION, check_retention
from outboxq.effects.access import AsyncCallsOnce, CallsOnce, EffectAccess
from outboxq.effects.runners import DEFAULT_LEASE_SECONDS, AsyncEffectRunner, EffectRunner
from outboxq.effects.transactions import AsyncEngineTransactions, EngineTransactions
from outboxq.errors import ConfigError


class Effects(CallsOnce):
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
        retention: timedelta = DEFAULT_RETENTION,
        schema: str | None = None,
    ) -> None:
        if not isinstance(engine, Engine):
            raise ConfigError(f"Effects takes a sync Engine, got {type(engine).__name__}: see AsyncEffects")
        window = check_retention(retention)
        self._transactions = EngineTransactions(engine, schema)
        self._access = EffectAccess(EffectRunner(self._transactions, lease_seconds), lambda _: window)

    def _granted(self) -> EffectAccess:
        return self._access

    def dispose(self) -> None:
        """Close the pool."""
        self._transactions.dispose()


class AsyncEffects(AsyncCallsOnce):
    """Calls to the outside that count once, in an event loop: `await AsyncEffects(engine).once(...)`.

    Args:
        engine: An async engine, or a sync one, whose transactions then run in threads.
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
        self._access = EffectAccess(AsyncEffectRunner(self._transactions, lease_seconds), lambda _: window)

    def _granted(self) -> EffectAccess:
        return self._access

    async def dispose(self) -> None:
        """Close the pool."""
        await self._transactions.dispose()
