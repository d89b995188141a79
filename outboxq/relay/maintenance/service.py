"""The periodic tasks of one relay, made from its configuration."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from outboxq.config import RelayConfig
from outboxq.database.driver import DriverConnection
from outboxq.emitter import Emitter
from outboxq.handlers.resolved import Registry
from outboxq.relay.limits import RelayLimits
from outboxq.relay.maintenance.pruner import Pruner
from outboxq.relay.maintenance.reindexer import Reindexer
from outboxq.relay.maintenance.task import PeriodicTask

Connector: TypeAlias = Callable[[], DriverConnection]

# The longest time between two sweeps if nothing is pruned.
_SWEEP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Maintenance:
    """The periodic tasks of one relay: those that run during its work, and those that run once when a drain ends."""

    periodic: tuple[PeriodicTask, ...]
    at_end: tuple[PeriodicTask, ...]

    @classmethod
    def from_config(
        cls,
        config: RelayConfig,
        limits: RelayLimits,
        connector: Callable[[str | None], Connector],
        emit: Emitter,
        stopping: threading.Event,
        registry: Registry,
        until_empty: bool,
    ) -> "Maintenance":
        """Make the tasks that the configuration enables.

        Args:
            connector: Returns a function that opens connections: to the given URL or, for None, by the relay's engine.
        """
        made: list[PeriodicTask] = []
        seconds = config.prune_seconds or _SWEEP_SECONDS
        pruner = Pruner(connector(None), config.schema, emit, stopping, seconds, limits.first_prune_seconds)
        # Callback batches are always swept: without that a callback might never run.
        pruner.deletes = config.prune_seconds > 0
        pruner.keep_dead = {queue: time.total_seconds() for queue, time in registry.keep_dead.items()}
        made.append(pruner)
        if until_empty:
            # The drain of a cron job may be the only relay.
            return cls((), tuple(made))
        if config.reindex:
            # `listen_url` bypasses a pooler.
            made.append(Reindexer(connector(config.listen_url), config.schema, emit, stopping))
        return cls(tuple(made), ())
