"""Relays with other limits than the ones that users get."""

from outboxq import Relay
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
