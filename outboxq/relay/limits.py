"""The bounds of a relay that no user has to know; tests set others."""

from dataclasses import dataclass, field

from outboxq.execution.lease_mode import LeaseModeLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """How long a relay waits, for each thing that it waits for.

    Args:
        linger_seconds: A slot's connection that was not used for so long is closed, unless it is kept warm.
        loop_patience_seconds: An event loop that stands still for so long, while no handler runs, is stuck.
        first_prune_seconds: A relay that lives for so long has pruned, however long its rounds are apart.
        probe_seconds: A listening connection through which nothing came for so long is asked for a sign of life: it may
            have no server behind it, and a keepalive asks only the next machine.
        follow_least_seconds: For how long at least a slot claims, with each COMMIT, more jobs of the same sort; then
            it polls all of its queues again.
        follow_most_seconds: For how long at most, however long such a poll takes.
        counts_seconds: After so long a COMMIT brings no claim, whatever waits, and the session is idle outside of a
            transaction: only then does the server take its counts of changed and deleted rows, by which autovacuum
            goes.
        cut_after_seconds: How long a cancelled statement or coroutine has to end in order.
        free_after_seconds: How long a handler that was cut off has to notice.
        abort_seconds: How long a stopping relay has to take the jobs of all its slots back, or to have their COMMITs
            answered.
        lease_mode: How long the claims of lease mode last.
    """

    linger_seconds: float = 5.0
    loop_patience_seconds: float = 60.0
    first_prune_seconds: float = 60.0
    probe_seconds: float = 10.0
    follow_least_seconds: float = 0.1
    follow_most_seconds: float = 1.0
    counts_seconds: float = 10.0
    cut_after_seconds: float = 2.0
    free_after_seconds: float = 10.0
    abort_seconds: float = 15.0
    lease_mode: LeaseModeLimits = field(default_factory=LeaseModeLimits)
