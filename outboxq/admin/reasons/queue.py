"""What holds up a whole queue: it is paused, its table is locked, or a limit or a rate is used up."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from outboxq.admin.reasons.looks import Looks
from outboxq.admin.reasons.reason import Reason
from outboxq.admin.reasons.serving import Relays, find_missing_relay, may_read
from outboxq.codec.text import duration
from outboxq.queue_limits import QueueLimits, Rate, limits_in_force, read_limits
from outboxq.statements.doctor import limits
from outboxq.statements.doctor.sessions import BLOCKING_MODES, lock_holders
from outboxq.statements.explain import queue_facts
from outboxq.statements.relays import declared_limits


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """What is set for a queue, and where its rate is.

    Attributes:
        paused_seconds: For how long it has been paused; None if it is not.
        limits: What holds, by operators or by the applications of living relays.
        ahead_seconds: How far ahead its tokens are reserved, if it has had a rate.
    """

    paused_seconds: float | None
    limits: QueueLimits
    ahead_seconds: float | None


def look_at_queue(looks: Looks, queue: str) -> QueueFacts | None:
    """What is set for a queue; None if that is refused."""
    row = looks.row("the settings of the queue", queue_facts(looks.schema, queue))
    if row is None:
        return None
    found = looks.rows("the limits that applications declare", declared_limits(looks.schema)) if may_read(looks) else ()
    declared = read_limits(found)
    return QueueFacts(row.paused_seconds, limits_in_force(read_limits([row]), declared)[queue], row.ahead_seconds)


def find_in_queue(looks: Looks, queue: str, facts: QueueFacts | None, relays: Relays) -> Iterator[Reason]:
    """What holds up a queue."""
    yield from find_locked_table(looks)
    yield from find_missing_relay(relays, queue)
    if facts is None:
        return
    if facts.paused_seconds is not None:
        yield Reason(
            "queue-paused",
            f"queue {queue!r} has been paused for {duration(facts.paused_seconds)}",
            {"queue": queue, "paused_seconds": facts.paused_seconds},
            f"When the reason is gone: outboxq queues resume {shlex.quote(queue)}",
        )
    yield from _limited(looks, queue, facts.limits)
    yield from _throttled(queue, facts.limits.rate, facts.ahead_seconds)


def find_locked_table(looks: Looks) -> Iterator[Reason]:
    """A session that keeps relays from the tables."""
    for row in looks.rows("the locks on tables", lock_holders(looks.schema)):
        if set(BLOCKING_MODES).isdisjoint(row.modes):
            continue
        since = "a time that is hidden" if row.seconds is None else duration(row.seconds)
        yield Reason(
            "table-locked",
            f"session {row.pid} ({row.state or 'its state is hidden'}) has locked {', '.join(row.tables)} as a whole "
            f"for {since}: relays and producers wait",
            {"pid": row.pid, "tables": list(row.tables), "modes": list(row.modes), "seconds": row.seconds},
            f"Let it finish, or end it: SELECT pg_terminate_backend({row.pid});",
        )
        return


def _limited(looks: Looks, queue: str, held: QueueLimits) -> Iterator[Reason]:
    if held.running is None:
        return
    statement = limits.running(looks.schema).bindparams(names=[queue], most=[held.running])
    found = looks.row("how many jobs of the queue run", statement)
    if found is not None and found.running >= found.most:
        yield Reason(
            "queue-limited",
            f"{found.running} jobs of queue {queue!r} run, and {found.most} may run at a time",
            {"queue": queue, "running": found.running, "limit": found.most},
            f"Nothing, if that is meant; else raise it: outboxq queues set {shlex.quote(queue)} --limit N",
        )


def _throttled(queue: str, rate: Rate | None, ahead_seconds: float | None) -> Iterator[Reason]:
    if rate is None or ahead_seconds is None:
        return
    wait_seconds = ahead_seconds - (rate.burst - 1) * rate.seconds_each
    if wait_seconds > 0:
        yield Reason(
            "rate-limited",
            f"the rate of queue {queue!r} is {rate}, and the next job may begin in {duration(wait_seconds)}",
            {"queue": queue, "rate": str(rate), "burst": rate.burst, "wait_seconds": wait_seconds},
            f"Nothing, if that is meant; else raise it: outboxq queues set {shlex.quote(queue)} --rate N/TIME",
        )
