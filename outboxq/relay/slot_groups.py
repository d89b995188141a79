"""Groups of slots: which slots serve which queues, split by the flavour of their handlers."""

from typing import TypeAlias

from outboxq.config import RelayConfig, SlotGroup
from outboxq.database.engines import Engines, check_capacity
from outboxq.errors import ConfigError
from outboxq.handlers.handler import Flavour
from outboxq.handlers.resolved import Registry

FlavouredGroup: TypeAlias = tuple[SlotGroup, Flavour]


def resolve_groups(config: RelayConfig, registry: Registry) -> list[FlavouredGroup]:
    """The groups of slots, each with its flavour; `*` becomes every queue that no group names.

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
    unnamed = tuple(sorted(registry.flavours.keys() - set(named)))
    return [pair for group in config.groups for pair in _by_flavour(group, unnamed, registry)]


def _by_flavour(group: SlotGroup, unnamed: tuple[str, ...], registry: Registry) -> list[FlavouredGroup]:
    names = tuple(name for given in group.queues for name in (unnamed if given == "*" else (given,)))
    flavours: list[Flavour] = list(dict.fromkeys(registry.flavours[name] for name in names))
    if len(flavours) > 1 and "*" not in group.queues:
        raise ConfigError(
            f"the queues {', '.join(names)} have sync and async handlers, which cannot share slots: "
            "give each flavour a group of its own"
        )
    in_turns = group.in_turns.union(unnamed if "*" in group.queues else ())
    found: list[FlavouredGroup] = []
    for flavour in flavours:
        own = tuple(name for name in names if registry.flavours[name] == flavour)
        found.append((SlotGroup(own, group.slots, in_turns=in_turns.intersection(own)), flavour))
    return found


def check_engines(groups: list[FlavouredGroup], engines: Engines) -> None:
    """Refuse slots that have no engine, or an engine whose pool has too few connections.

    Raises:
        ConfigError: the message names the queues or the engine.
    """
    for flavour, engine, hint in (
        ("sync", engines.sync, "give Relay a sync Engine or a URL, and the AsyncEngine as async_engine="),
        ("async", engines.asynchronous, "give Relay async_engine=..., or a URL"),
    ):
        own = [group for group, its_flavour in groups if its_flavour == flavour]
        if own and engine is None:
            names = ", ".join(name for group in own for name in group.queues)
            raise ConfigError(f"the queues {names} have {flavour} handlers, but there is no {flavour} engine: {hint}")
        if own and engine is not None:
            check_capacity(engine, sum(group.slots for group in own) + 1)
