"""Checks for requested cancellations that no relay carries out, and for paused kinds."""

import shlex
from collections.abc import Iterator

from outboxq.doctor.findings import CheckContext, Finding, detail_of
from outboxq.doctor.formatting import age
from outboxq.statements.doctor import cancellation as statements

# A living relay receives a request within seconds, and ends the job two seconds later.
_ANSWER_SECONDS = 60.0


def find_unanswered_requests(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for jobs that still run although their cancellation was requested over a minute ago."""
    for row in context.rows(statements.unanswered_requests(context.schema, _ANSWER_SECONDS)):
        yield Finding(
            "cancellation-unanswered",
            "warning",
            f"job {row.id} ({row.kind!r} in queue {row.queue!r}) runs on, {age(row.seconds)} after it was cancelled",
            detail_of(row),
            "Its relay hangs, or is of a version that does not cancel. Restart it, or end the job's database session: "
            f"outboxq jobs cancel --running --force {row.id}",
        )


def find_paused_kinds(context: CheckContext) -> Iterator[Finding]:
    """Yield a finding for each paused kind.

    The finding is a warning if the pause is older than `Limits.older_than_seconds`, because it may have been forgotten.
    """
    for row in context.rows(statements.paused_kinds(context.schema)):
        late = row.seconds >= context.limits.older_than_seconds
        yield Finding(
            "kind-paused",
            "warning" if late else "info",
            f"kind {row.kind!r} of queue {row.queue!r} has been paused for {age(row.seconds)}",
            detail_of(row),
            f"When the reason is gone: outboxq kinds resume {shlex.quote(row.kind)} --queue {shlex.quote(row.queue)}",
        )


def paused_kinds(context: CheckContext) -> set[tuple[str, str]]:
    """Return the paused kinds, as pairs of queue and kind."""
    if "paused_kind" not in context.tables:
        return set()
    return {(row.queue, row.kind) for row in context.rows(statements.paused_kinds(context.schema))}
