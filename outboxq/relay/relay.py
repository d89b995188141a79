"""The relay: the process that claims jobs and runs their handlers, with one slot per unit of concurrency."""

import logging
import threading
from collections.abc import Callable, Iterable

from sqlalchemy.ext.asyncio import AsyncEngine

from outboxq.config import RelayConfig, SlotGroup
from outboxq.database.engines import AnyEngine, check_capacity, resolve_engines
from outboxq.errors import ConfigError
from outboxq.events import Emitter, Event, Hook
from outboxq.handlers.handler import Flavour
from outboxq.handlers.registry import Jobs, Registry
from outboxq.observability.logging import log_event
from outboxq.relay.run import RelayReport, RelayRun
from outboxq.relay.signals import stop_signals

logger = logging.getLogger("outboxq.relay")


class Relay:
    """Claims jobs and runs their handlers.

    Args:
        engine: Your own `Engine` or `AsyncEngine` (psycopg), or a URL in any spelling.
        jobs: The registry.
        config: Queues, slots, batches and pauses.
        async_engine: Where `engine` is a sync engine of yours and the registry has async handlers.
        hooks: Called with every event (see `outboxq.events`); by default they are logged.

    Raises:
        ConfigError, RegistryError: something does not fit; nothing was started.
    """

    def __init__(
        self,
        engine: AnyEngine,
        jobs: Jobs,
        config: RelayConfig | None = None,
        *,
        async_engine: AsyncEngine | None = None,
        hooks: Iterable[Hook] = (log_event,),
    ) -> None:
        self.config = config or RelayConfig()
        self._registry = jobs.resolve()
        self._groups = resolve_groups(self.config, self._registry)
        self._engines = resolve_engines(engine, async_engine)
        self._emit = Emitter(hooks, _report_hook)
        self._stopping = threading.Event()
        self._wakers: list[Callable[[], None]] = []
        self._check_engines()

    def run(self) -> RelayReport:
        """Work until `stop()`, SIGTERM or SIGINT, then let the running handlers finish.

        Signals are taken over only in the main thread. Waits, and says so, while the database is down.

        Raises:
            SchemaError: the tables are missing or too old.
        """
        with stop_signals(self.stop):
            return self._work(until_empty=False)

    def drain(self) -> RelayReport:
        """Work until nothing is ready or due in the queues, including what the handlers enqueue, then return.

        Raises:
            SchemaError: the tables are missing or too old.
        """
        with stop_signals(self.stop):
            return self._work(until_empty=True)

    def stop(self) -> None:
        """Stop claiming; `run` returns when the running handlers are done. Safe from any thread and from a signal.

        For good: to work again, make another relay.
        """
        self._stopping.set()
        for wake in list(self._wakers):
            wake()

    def _check_engines(self) -> None:
        for flavour, engine, hint in (
            ("sync", self._engines.sync, "give Relay a sync Engine or a URL, and the AsyncEngine as async_engine="),
            ("async", self._engines.asynchronous, "give Relay async_engine=..., or a URL"),
        ):
            groups = [group for group, its_flavour in self._groups if its_flavour == flavour]
            if groups and engine is None:
                names = ", ".join(name for group in groups for name in group.queues)
                raise ConfigError(
                    f"the queues {names} have {flavour} handlers, but there is no {flavour} engine: {hint}"
                )
            if groups and engine is not None:
                check_capacity(engine, sum(group.slots for group in groups) + 1)

    def _work(self, *, until_empty: bool) -> RelayReport:
        run = RelayRun(
            self._engines,
            self._registry,
            self._groups,
            self.config,
            self._emit,
            self._stopping,
            until_empty=until_empty,
        )
        self._wakers.append(run.wake_all)
        try:
            return run.work()
        finally:
            self._wakers.remove(run.wake_all)
            self._engines.dispose()


def resolve_groups(config: RelayConfig, registry: Registry) -> list[tuple[SlotGroup, Flavour]]:
    """The groups of slots with the flavour of their queues; `*` becomes every queue that no group names.

    Raises:
        ConfigError: a queue without handlers, a queue in two groups, or a group with both flavours.
    """
    if not config.groups:
        flavours: list[tuple[str, Flavour]] = sorted(registry.flavours.items())
        return [(SlotGroup((name,), config.slots_per_queue), flavour) for name, flavour in flavours]
    named = [name for group in config.groups for name in group.queues]
    for name in dict.fromkeys(named):
        if name != "*" and name not in registry.flavours:
            known = ", ".join(sorted(registry.flavours))
            raise ConfigError(f"queue {name!r} has no handlers in this registry (queues with handlers: {known})")
        if named.count(name) > 1:
            raise ConfigError(f"queue {name!r} is named by two groups: give each queue to one")
    rest = tuple(sorted(registry.flavours.keys() - set(named)))
    return [pair for group in config.groups for pair in _by_flavour(group, rest, registry)]


def _by_flavour(group: SlotGroup, rest: tuple[str, ...], registry: Registry) -> list[tuple[SlotGroup, Flavour]]:
    names = tuple(name for given in group.queues for name in (rest if given == "*" else (given,)))
    flavours: list[Flavour] = list(dict.fromkeys(registry.flavours[name] for name in names))
    if len(flavours) > 1 and "*" not in group.queues:
        raise ConfigError(
            f"the queues {', '.join(names)} have sync and async handlers, which cannot share slots: "
            "give each flavour a group of its own"
        )
    in_turns = group.in_turns.union(rest if "*" in group.queues else ())
    found: list[tuple[SlotGroup, Flavour]] = []
    for flavour in flavours:
        own = tuple(name for name in names if registry.flavours[name] == flavour)
        found.append((SlotGroup(own, group.slots, in_turns=in_turns.intersection(own)), flavour))
    return found


def _report_hook(hook: Hook, event: Event) -> None:
    logger.exception("a hook failed", extra={"outboxq_hook": repr(hook), "outboxq_event": type(event).__name__})
