"""The bounds of a relay that no user has to know; tests set others."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """How long a relay waits for what.

    Args:
        linger_seconds: A slot's connection that was not used for so long is closed, unless it is kept warm.
        loop_patience_seconds: An event loop that stands still for so long, while no handler runs, is stuck.
        first_prune_seconds: A relay that lives for so long has pruned, however long its rounds are apart.
    """

    linger_seconds: float = 5.0
    loop_patience_seconds: float = 60.0
    first_prune_seconds: float = 60.0
