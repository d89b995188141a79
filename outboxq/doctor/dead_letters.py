"""A check for dead letters that no relay deletes, although the time for which their queue keeps them has ended."""

import shlex
from collections.abc import Iterator

from outboxq.doctor.findings import CheckContext, Finding, detail_of
from outboxq.doctor.formatting import age
from outboxq.statements.doctor import dead_letters as statements

# Relays prune now and then, and skip rows that others hold.
_LATE_SECONDS = 86_400.0


def find_overdue_dead_letters(context: CheckContext) -> Iterator[Finding]:
    """Yield a finding for queues whose oldest dead letter should have been deleted by a relay more than a day ago."""
    declared = {} if context.registry is None else context.registry.keep_dead
    kept = {queue: time.total_seconds() for queue, time in declared.items()}
    kept |= {row.name: float(row.keep) for row in context.rows(statements.kept_queues(context.schema))}
    wanted = {queue: seconds for queue, seconds in kept.items() if seconds}
    if not wanted:
        return
    statement = statements.overdue(context.schema).bindparams(
        names=list(wanted), seconds=list(wanted.values()), late=_LATE_SECONDS
    )
    for row in context.rows(statement):
        yield Finding(
            "dead-letters-overdue",
            "warning",
            f"queue {row.queue!r} keeps dead letters for {age(row.keep_seconds)}, and its oldest is dead for "
            f"{age(row.oldest_seconds)}",
            detail_of(row),
            "Start a relay that prunes (prune_seconds above 0), and give its role what `outboxq roles --sql` prints; "
            f"or keep them: outboxq queues set {shlex.quote(row.queue)} --keep-dead forever",
        )
