"""Effect runners: run the short transactions of `ctx.once`, on connections apart from those of the slots."""

from collections.abc import Awaitable, Callable

from outboxq.database.engines import EFFECTS_NAME, Engines, make_async_engine, make_engine
from outboxq.effects.runners import AsyncEffectRunner, EffectRunner
from outboxq.effects.transactions import AsyncEngineTransactions, EngineTransactions
from outboxq.emitter import Emitter
from outboxq.events import EffectCalled


class EffectRunners:
    """The runners of `ctx.once`: one for sync and one for async handlers, each only if the relay has an engine for it.

    Their pools are separate from those of the user's engines, and no connection is opened before the first `ctx.once`.
    If the relay made the engine itself, the pool is small, so calls of `ctx.once` wait for one another.
    """

    def __init__(self, engines: Engines, schema: str, lease_seconds: float, emit: Emitter) -> None:
        sync, asynchronous = engines.sync, engines.asynchronous
        if engines.owns_sync and sync is not None:
            sync = make_engine(sync.url, application_name=EFFECTS_NAME, pooled=True)
        if engines.owns_asynchronous and asynchronous is not None:
            asynchronous = make_async_engine(asynchronous.url, application_name=EFFECTS_NAME, pooled=True)
        self._plain = plain = None if sync is None else EngineTransactions(sync, schema)
        self._awaited = awaited = None if asynchronous is None else AsyncEngineTransactions(asynchronous, schema)
        # A sync engine, if there is one, extends locks, because an event loop that a handler blocks could not.
        keeper = None if plain is None else plain.keeper_transaction()
        tell = emit if emit.use_of(EffectCalled)() else None
        self.sync = None if plain is None else EffectRunner(plain, lease_seconds, tell=tell)
        self.asynchronous = None if awaited is None else AsyncEffectRunner(awaited, lease_seconds, keeper, tell=tell)

    def trim(self) -> None:
        if self._plain is not None:
            self._plain.trim()

    async def trim_in_loop(self) -> None:
        if self._awaited is not None:
            await self._awaited.trim()

    def dispose(self, in_loop: Callable[[Awaitable[None]], object]) -> None:
        """Close the pools; `in_loop` runs the closing of the async pool in the event loop."""
        if self._plain is not None:
            self._plain.dispose()
        if self._awaited is not None and self._awaited.was_used:
            in_loop(self._awaited.dispose())
