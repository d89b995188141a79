"""Reasons that hold up a whole queue: it is paused, its table is locked, or a limit or a rate is used up."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

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
    """The settings of a queue, and the state of its rate, as `look_at_queue` reads them for the reasons.

    Attributes:
        paused_seconds: For how long the queue has been paused; None if it is not.
        limits: The limits in force: set by operators, otherwise declared by the applications of living relays.
        ahead_seconds: For how many seconds from now jobs have already used up the queue's rate; None if it never had a
            rate.
    """

    paused_seconds: float | None
    limits: QueueLimits
    ahead_seconds: float | None


def look_at_queue(looks: Looks, queue: str) -> QueueFacts | None:
    """Read the settings of a queue, and the state of its rate; None if the query fails."""
    row = looks.row("the settings of the queue", queue_facts(looks.schema, queue))
    if row is None:
        return None
    found = looks.rows("the limits that applications declare", declared_limits(looks.schema)) if may_read(looks) else ()
    declared = read_limits(found)
    return QueueFacts(row.paused_seconds, limits_in_force(read_limits([row]), declared)[queue], row.ahead_seconds)


def find_in_queue(looks: Looks, queue: str, facts: QueueFacts | None, relays: Relays) -> Iterator[Reason]:
    """Yield the reasons that hold up all jobs of the queue: a locked table, no relay, a pause, a limit or a rate."""
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
    statement = limits.foreign_locks(looks.schema, queue, most=facts.limits.running or 0)
    foreign = looks.rows("who holds the queue's limit", statement)
    yield from _limited(looks, queue, facts.limits, foreign)
    yield from _throttled(queue, facts.limits.rate, facts.ahead_seconds)


def find_locked_table(looks: Looks) -> Iterator[Reason]:
    """Yield a reason if a session has locked one of the tables in a mode that keeps relays from it."""
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


def _held_turn(row: Row[Any], whose: str) -> Reason:
    """Make the reason `turn-held`: a session that is no relay has an advisory lock that relays need to run jobs.

    `whose` names, in words, what the lock is for, such as a group.
    """
    who = "a prepared transaction" if row.pid is None else f"session {row.pid} (login {row.login!r}"
    if row.pid is not None:
        since = "a time that is hidden" if row.seconds is None else duration(row.seconds)
        who += f", application {row.application_name!r}, {row.state or 'its state is hidden'}, for {since})"
    return Reason(
        "turn-held",
        f"{who} is no relay, and holds an advisory lock of {whose}: relays take it for jobs that run",
        {
            "pid": row.pid,
            "login": row.login,
            "application_name": row.application_name,
            "state": row.state,
            "seconds": row.seconds,
        },
        "Have it let go, or look for it in pg_prepared_xacts."
        if row.pid is None
        else f"Have it let go, or end it: SELECT pg_terminate_backend({row.pid});",
    )


def find_held_group(looks: Looks, job: Row[Any], per_group: int) -> Iterator[Reason]:
    """Yield a reason if a session that is no relay has the advisory lock of the job's group.

    Relays need that lock to run the group's jobs.
    """
    if job.group_key is None:
        return
    statement = limits.foreign_locks(looks.schema, job.queue, group=job.group_key, per_group=per_group)
    for row in looks.rows("who holds its group", statement):
        if row.of_groups:
            yield _held_turn(row, f"group {job.group_key!r} of queue {job.queue!r}")


def _limited(looks: Looks, queue: str, held: QueueLimits, foreign: Sequence[Row[Any]]) -> Iterator[Reason]:
    if held.running is None:
        return
    yield from (_held_turn(row, f"the limit of queue {queue!r}") for row in foreign if row.of_claims)
    statement = limits.running(looks.schema).bindparams(names=[queue], most=[held.running])
    found = looks.row("how many jobs of the queue run", statement)
    if found is not None and found.running >= found.most:
        yield from (_held_turn(row, f"the limit of queue {queue!r}") for row in foreign if not row.of_claims)
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
