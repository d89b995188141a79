"""What holds up a whole queue: it is paused, its table is locked, or a limit or a rate is used up."""

import shlex
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Row

from outboxq.admin.reasons.looks import Looks
from outboxq.admin.reasons.reason import Reason
from outboxq.admin.reasons.serving import Relays, find_missing_relay
from outboxq.codec.text import duration
from outboxq.queue_limits import Rate
from outboxq.statements.doctor import limits
from outboxq.statements.doctor.sessions import BLOCKING_MODES, lock_holders


def find_in_queue(looks: Looks, queue: str, facts: Row[Any] | None, relays: Relays) -> Iterator[Reason]:
    """What holds up a queue; `facts` is a row of `statements.explain.queue_facts`."""
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
    yield from _limited(looks, queue, facts)
    yield from _throttled(queue, facts)


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


def _limited(looks: Looks, queue: str, facts: Row[Any]) -> Iterator[Reason]:
    if facts.max_running is None:
        return
    statement = limits.running(looks.schema).bindparams(names=[queue], most=[facts.max_running])
    found = looks.row("how many jobs of the queue run", statement)
    if found is not None and found.running >= found.most:
        yield Reason(
            "queue-limited",
            f"{found.running} jobs of queue {queue!r} run, and {found.most} may run at a time",
            {"queue": queue, "running": found.running, "limit": found.most},
            f"Nothing, if that is meant; else raise it: outboxq queues set {shlex.quote(queue)} --limit N",
        )


def _throttled(queue: str, facts: Row[Any]) -> Iterator[Reason]:
    if facts.rate_jobs is None or facts.ahead_seconds is None:
        return
    rate = Rate(facts.rate_jobs, facts.rate_seconds, facts.rate_burst)
    wait_seconds = facts.ahead_seconds - (rate.burst - 1) * rate.seconds_each
    if wait_seconds > 0:
        yield Reason(
            "rate-limited",
            f"the rate of queue {queue!r} is {rate}, and the next job may begin in {duration(wait_seconds)}",
            {"queue": queue, "rate": str(rate), "burst": rate.burst, "wait_seconds": wait_seconds},
            f"Nothing, if that is meant; else raise it: outboxq queues set {shlex.quote(queue)} --rate N/TIME",
        )
