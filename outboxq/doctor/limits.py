"""Queues whose jobs wait because of a limit or a rate."""

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
    """Queues in which jobs have waited for long, and whose limit is full, or whose rate has no tokens now."""
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


def _limits(context: CheckContext) -> Mapping[str, QueueLimits]:
    """What holds for each queue: as operators have set it, else as the registry declares it, or living relays do."""
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
