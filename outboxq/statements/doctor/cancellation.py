"""The doctor's statements for cancellation requests that no relay has answered, and for kinds that are paused.

No locks.
"""

from sqlalchemy import TextClause, text

from outboxq.statements.cancel import COUNTS
from outboxq.statements.doctor.sessions import qualified

MAX_REQUESTS = 100


def unanswered_requests(schema: str, after_seconds: float) -> TextClause:
    """Select cancellation requests older than `after_seconds` whose jobs still run, the oldest first.

    A row each: id, queue, kind and the request's age. Reads all requests, of which there are few. Index: the primary
    key of `job`.
    """
    return text(
        f"""\
SELECT job.id::text AS id, job.queue, job.kind,
  extract(epoch FROM pg_catalog.clock_timestamp() - request.requested_at)::float8 AS seconds
FROM {qualified(schema, "cancel_request")} AS request JOIN {qualified(schema, "job")} AS job ON {COUNTS}
WHERE request.requested_at < pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => :after_seconds)
  AND (job.state IN ('leased', 'group_leased') OR job.xmax IN (
    SELECT backend_xid FROM pg_catalog.pg_stat_activity WHERE backend_xid IS NOT NULL
  ))
ORDER BY request.requested_at LIMIT :most"""
    ).bindparams(after_seconds=after_seconds, most=MAX_REQUESTS)


def paused_kinds(schema: str) -> TextClause:
    """Select the paused kinds, and the seconds for which each has been paused. Reads the small table `paused_kind`."""
    return text(
        "SELECT queue, kind, extract(epoch FROM pg_catalog.clock_timestamp() - paused_at)::float8 AS seconds "
        f"FROM {qualified(schema, 'paused_kind')} ORDER BY queue, kind"
    )
