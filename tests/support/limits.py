"""Relays with other limits than the ones that users get."""

from dataclasses import replace

from outboxq import Jobs, Relay, RelayConfig, SlotGroup
from outboxq.relay.limits import RelayLimits

LONG_SECONDS = 3600.0

# Slots go on with one sort of jobs for as long as there are any, and no poll grows old, on the slowest of machines.
FOLLOW_ON = RelayLimits(follow_least_seconds=LONG_SECONDS, follow_most_seconds=LONG_SECONDS)
# A slot's turns are over at once: all sorts of jobs are looked for after each batch.
FOLLOW_NEVER = RelayLimits(follow_most_seconds=-1.0)


def with_limits(relay: Relay, limits: RelayLimits) -> Relay:
    """The relay, with these limits."""
    relay._limits = limits
    return relay


def many_at_once(jobs: Jobs, config: RelayConfig | None) -> RelayConfig | None:
    """The settings, of a relay that takes `batch_size` jobs at once: under a lease each has a slot of its own."""
    if config is None or config.batch_size == 1 or "transaction" in jobs.resolve().claims.values():
        return config
    many = config.batch_size
    groups = tuple(SlotGroup(group.queues, many, in_turns=group.in_turns) for group in config.groups)
    return replace(config, groups=groups, slots_per_queue=many, batch_size=1)
