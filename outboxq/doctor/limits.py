"""Checks for queues whose jobs wait because of a limit, a rate, or a session that holds relays' locks."""

import shlex
from collections.abc import Iterator, Mapping

from outboxq.doctor.findings import CheckContext, Finding
from outboxq.doctor.formatting import age
from outboxq.doctor.work import oldest_waiting
from outboxq.queue_limits import QueueLimits, limits_in_force, read_limits
from outboxq.statements.doctor import limits as statements
from outboxq.statements.relays import declared_limits, may_read_relays

_NONE = QueueLimits()


def find_limited_queues(context: CheckContext) -> Iterator[Finding]:
    """Yield a finding for each queue whose jobs wait because a limit is full or a rate is used up.

    A queue is reported only if one of its jobs has waited for `Limits.older_than_seconds`.
    """
    limits = _limits(context)
    if not limits:
        return
    late = {
        queue: seconds
        for queue, seconds in oldest_waiting(context).items()
        if queue in limits and seconds > context.limits.older_than_seconds
    }
    yield from _full(context, limits, late)
    yield from _throttled(context, limits, late)


def find_held_turns(context: CheckContext) -> Iterator[Finding]:
    """Yield a finding for each session that is no relay, but holds advisory locks that relays need to run jobs.

    Relays use such locks for limits, for groups, and for windows (jobs with `every=`, one for each period).
    """
    for row in context.rows(statements.foreign_locks(context.schema, None)):
        held = {"limits of queues": row.of_limits, "groups": row.of_groups, "windows": row.of_windows}
        whose = " and ".join(name for name, is_held in held.items() if is_held)
        session = "a prepared transaction" if row.pid is None else f"session {row.pid} of login {row.login!r}"
        named = "" if row.pid is None else f" ({row.application_name!r}, {row.state or 'its state is hidden'})"
        since = "" if row.seconds is None else f" for {age(row.seconds)}"
        yield Finding(
            "turn-held",
            "warning",
            f"{session}{named} is no relay, and has held advisory locks of {whose}{since}: their jobs wait for it",
            {
                "pid": row.pid,
                "login": row.login,
                "application_name": row.application_name,
                "state": row.state,
                "seconds": row.seconds,
                "limits": row.of_limits,
                "groups": row.of_groups,
                "windows": row.of_windows,
            },
            "Have it let go: relays alone take locks of these names. It is in pg_prepared_xacts."
            if row.pid is None
            else f"Have it let go: relays alone take locks of these names. To end it: SELECT "
            f"pg_terminate_backend({row.pid});",
        )


def _limits(context: CheckContext) -> Mapping[str, QueueLimits]:
    """Return the limits of each queue: as operators have set them, otherwise as the registry or relays declare them."""
    declared = {} if context.registry is None else context.registry.limits
    if "relay_status" in context.tables and context.scalar(may_read_relays(context.schema)):
        declared = {**read_limits(context.rows(declared_limits(context.schema))), **declared}
    return limits_in_force(read_limits(context.rows(statements.queue_limits(context.schema))), declared)


def _full(context: CheckContext, limits: Mapping[str, QueueLimits], late: Mapping[str, float]) -> Iterator[Finding]:
    most = {queue: limit for queue in sorted(late) if (limit := limits[queue].running) is not None}
    if not most:
        return
    statement = statements.running(context.schema).bindparams(names=list(most), most=list(most.values()))
    for row in context.rows(statement):
        if row.running >= row.most:
            yield Finding(
                "queue-limited",
                "info",
                f"jobs in queue {row.queue!r} wait for its limit: {row.running} of {row.most} run, and the oldest has "
                f"waited {age(late[row.queue])}",
                {"queue": row.queue, "running": row.running, "limit": row.most, "oldest_seconds": late[row.queue]},
                f"Nothing, if that is meant; else raise it: outboxq queues set {shlex.quote(row.queue)} --limit N",
            )


def _throttled(
    context: CheckContext, limits: Mapping[str, QueueLimits], late: Mapping[str, float]
) -> Iterator[Finding]:
    for row in context.rows(statements.rates_ahead(context.schema)):
        rate = limits.get(row.queue, _NONE).rate
        if rate is None or row.queue not in late or row.ahead_seconds <= (rate.burst - 1) * rate.seconds_each:
            continue
        yield Finding(
            "queue-throttled",
            "info",
            f"jobs in queue {row.queue!r} wait for its rate of {rate}: the oldest has waited {age(late[row.queue])}",
            {"queue": row.queue, "rate": str(rate), "burst": rate.burst, "oldest_seconds": late[row.queue]},
            f"Nothing, if that is meant; else raise it: outboxq queues set {shlex.quote(row.queue)} --rate N/TIME",
        )
