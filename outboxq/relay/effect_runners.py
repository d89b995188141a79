"""Effect runners: run the short transactions of `ctx.once`, on connections besides those of the slots."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from outboxq.database.engines import EFFECTS_NAME, Engines, make_async_engine, make_engine
from outboxq.effects.runners import AsyncEffectRunner, EffectRunner
from outboxq.effects.transactions import AsyncEngineTransactions, EngineTransactions
from outboxq.emitter import Emitter
from outboxq.events import EffectCalled


@dataclass(frozen=True, slots=True)
class EffectRunners:
    """A runner for each flavour that the relay has an engine for. No connection is opened before the first call."""

    sync: EffectRunner | None
    asynchronous: AsyncEffectRunner | None
    _sync_transactions: EngineTransactions | None
    _async_transactions: AsyncEngineTransactions | None

    def trim(self) -> None:
        if self._sync_transactions is not None:
            self._sync_transactions.trim()

    async def trim_in_loop(self) -> None:
        if self._async_transactions is not None:
            await self._async_transactions.trim()

    def dispose(self, in_loop: Callable[[Awaitable[None]], object]) -> None:
        """Close the pools; closing the async one is given to `in_loop`."""
        if self._sync_transactions is not None:
            self._sync_transactions.dispose()
        if self._async_transactions is not None and self._async_transactions.was_used:
            in_loop(self._async_transactions.dispose())


def make_effect_runners(engines: Engines, schema: str, lease_seconds: float, emit: Emitter) -> EffectRunners:
    """Make the runners, with pools besides the user's engines; for our own engines the pools grow with the slots."""
    sync, asynchronous = engines.sync, engines.asynchronous
    if engines.owns_sync and sync is not None:
        sync = make_engine(sync.url, application_name=EFFECTS_NAME, pooled=True)
    if engines.owns_asynchronous and asynchronous is not None:
        asynchronous = make_async_engine(asynchronous.url, application_name=EFFECTS_NAME, pooled=True)
    plain = None if sync is None else EngineTransactions(sync, schema)
    awaited = None if asynchronous is None else AsyncEngineTransactions(asynchronous, schema)
    # A sync engine, if there is one, extends locks: an event loop that a handler blocks extends none.
    tell = emit if emit.wants(EffectCalled) else None
    keeper = None if plain is None else plain.keeper_transaction()
    return EffectRunners(
        None if plain is None else EffectRunner(plain, lease_seconds, tell=tell),
        None if awaited is None else AsyncEffectRunner(awaited, lease_seconds, keeper, tell=tell),
        plain,
        awaited,
    )
