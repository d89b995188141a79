"""Bounds of a relay that users need not know; tests set other values."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class HookLimits:
    """Bounds on how far the hooks of a registry may lag, and how long a relay waits for them.

    Args:
        waiting_events: The most events that wait for the hooks.
        hold_seconds: How long a slot waits until there is room for its event. After that the event is dropped, and
            later ones are dropped at once, until half of the waiting events are delivered.
        await_seconds: How long an async hook may take for one event.
        finish_seconds: How long a relay that ends waits for the hooks to receive the last events; at most as long as
            its handlers have to finish (`drain_seconds`).
        log_seconds: The shortest time between two log lines about dropped events.
    """

    waiting_events: int = 1_000
    hold_seconds: float = 0.1
    await_seconds: float = 10.0
    finish_seconds: float = 5.0
    log_seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLimits:
    """Bounds on how often a relay writes (flushes) its state to the database, and adds to the history.

    Args:
        first_seconds: The longest time until the first flush, after which the relay is listed; the shortest is half of
            that.
        flush_seconds: The longest time between two flushes, which also show that the relay lives.
        gauges_after_seconds: The shortest time that a relay has run before it writes the gauges (the state of the
            queues), if no other relay does.
        finish_seconds: How long a relay that ends waits for its last flush.
    """

    first_seconds: float = 2.0
    flush_seconds: float = 15.0
    gauges_after_seconds: float = 60.0
    finish_seconds: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """The waiting times of a relay.

    Args:
        linger_seconds: A slot's connection is closed after being unused for this long, unless it is kept open.
        loop_patience_seconds: An event loop is stuck if it runs no callbacks for this long while no handler runs.
        first_prune_seconds: A relay prunes first within this time, however long its rounds are apart.
        probe_seconds: A listening connection is checked after receiving nothing for this long: its server may be gone,
            and a keepalive checks only the next machine.
        hearing_seconds: How long the relay's first notification to itself may take, on the slowest of machines, before
            the relay warns that notifications do not arrive.
        follow_least_seconds: The shortest time for which a slot claims, with each COMMIT, more jobs of the same sort;
            then it polls all of its queues again.
        follow_most_seconds: The longest such time, however long a poll takes.
        counts_seconds: After this time one COMMIT is sent without a claim, even if jobs wait, so that the session is
            idle outside a transaction: only then does the server collect its counts of changed and deleted rows, which
            autovacuum needs.
        full_least_seconds: After a claim of a queue at its limit, no slot of the relay claims from it for this long,
            unless a job of the queue ends in this relay; the time doubles with each further such claim.
        full_most_seconds: The longest such time, after which other relays may have made room.
        token_seconds: The longest time for which a relay keeps unused tokens of a queue's rate.
        cut_after_seconds: A cancelled statement or coroutine that has not ended after this time is cut off.
        free_after_seconds: If a handler that was cut off has not ended after this time, the relay ends.
        refused_seconds: The relay ends if the database refuses its login for this long: the password may have changed,
            and the next start may have the new one.
        abort_seconds: How long a stopping relay has to take back the jobs of all its slots, or to get answers to their
            COMMITs.
        hooks: How far the hooks of a registry may lag, and how long the relay waits for them.
        history: How often the relay writes its state and adds to the history.
    """

    linger_seconds: float = 5.0
    loop_patience_seconds: float = 60.0
    first_prune_seconds: float = 60.0
    probe_seconds: float = 10.0
    hearing_seconds: float = 15.0
    follow_least_seconds: float = 0.1
    follow_most_seconds: float = 1.0
    counts_seconds: float = 10.0
    full_least_seconds: float = 0.02
    full_most_seconds: float = 0.25
    token_seconds: float = 0.05
    cut_after_seconds: float = 2.0
    free_after_seconds: float = 10.0
    refused_seconds: float = 300.0
    abort_seconds: float = 15.0
    hooks: HookLimits = field(default_factory=HookLimits)
    history: HistoryLimits = field(default_factory=HistoryLimits)
