"""The relay: the process that claims jobs and runs their handlers, with one slot per unit of concurrency."""

import threading
from collections.abc import Iterable
from dataclasses import replace

from sqlalchemy.ext.asyncio import AsyncEngine

from outboxq.config import RelayConfig
from outboxq.database.engines import AnyEngine, resolve_engines
from outboxq.emitter import Emitter
from outboxq.events import Hook
from outboxq.execution.failure import homes_of
from outboxq.handlers.registry import Jobs
from outboxq.observability.logging import EventLog
from outboxq.relay.hook_thread import HookThread
from outboxq.relay.limits import RelayLimits
from outboxq.relay.run import RelayLook, RelayRun
from outboxq.relay.signals import stop_signals
from outboxq.relay.startup import check_engines, resolve_groups
from outboxq.relay.state import RelayReport


class Relay:
    """Claims jobs and runs their handlers.

    Args:
        engine: Your own `Engine` or `AsyncEngine` (psycopg), or a URL of PostgreSQL in any spelling.
        jobs: The registry.
        config: Queues, slots, batches and pauses.
        async_engine: The engine for async handlers, if `engine` is your sync engine.
        hooks: Functions that receive this relay's events, in the thread in which each happened (usually a slot's, or
            the event loop's), which waits for them. The frequent `JobsClaimed`, `ClaimsEmpty`, `ClaimsFailed` and
            `EffectCalled` reach only hooks that name them. By default, events are logged. The registry's
            own hooks (`Jobs(hooks=...)`, `jobs.on`) are also called, in their own thread.

    Raises:
        ConfigError, RegistryError: an argument does not fit; nothing was started.
    """

    # Tests set other limits, for one relay or for all in a process.
    _limits = RelayLimits()

    def __init__(
        self,
        engine: AnyEngine,
        jobs: Jobs,
        config: RelayConfig | None = None,
        *,
        async_engine: AsyncEngine | None = None,
        hooks: Iterable[Hook] = (EventLog(),),
    ) -> None:
        self.config = config or RelayConfig()
        self._registry = jobs.resolve()
        self._groups = resolve_groups(self.config, self._registry)
        self._engines = resolve_engines(engine, async_engine)
        check_engines(self._groups, self._engines, self.config)
        self._hooks = tuple(hooks)
        self._stopping = threading.Event()
        self._run: RelayRun | None = None

    def run(self) -> RelayReport:
        """Work until `stop()`, SIGTERM or SIGINT, then let the running handlers finish.

        Signals are handled only in the main thread. While the database is down, the relay waits and emits
        `DatabaseLost`.

        Raises:
            SchemaError: the tables are missing or too old.
        """
        with stop_signals(self.stop):
            return self._work(until_empty=False)

    def drain(self) -> RelayReport:
        """Work until no job is ready or due in the queues, including jobs that handlers enqueue, and then return.

        Raises:
            SchemaError: the tables are missing or too old.
        """
        with stop_signals(self.stop):
            return self._work(until_empty=True)

    def stop(self) -> None:
        """Stop claiming for good; `run` returns when the running handlers have ended.

        Safe from any thread and from a signal handler. To work again, make another relay.
        """
        self._stopping.set()
        if (run := self._run) is not None:
            run.wake_all()

    def look(self) -> RelayLook | None:
        """Return the relay's counts and activity now, from any thread, even after its end; None before it began."""
        return None if self._run is None else self._run.look()

    def _work(self, *, until_empty: bool) -> RelayReport:
        for handler in self._registry.handlers.values():
            # Searched for now, because it takes a while, and a failed attempt needs the result.
            homes_of(handler.__module__)
        limits = self._limits.hooks
        finish_seconds = min(limits.finish_seconds, self.config.drain_seconds)
        hook_thread = HookThread(self._registry.hooks, replace(limits, finish_seconds=finish_seconds))
        run = self._run = RelayRun(
            self._engines,
            self._registry,
            self._groups,
            self.config,
            Emitter(self._hooks, hook_thread.report, hook_thread),
            hook_thread,
            self._stopping,
            self._limits,
            until_empty,
        )
        try:
            return run.work()
        finally:
            self._engines.dispose()
