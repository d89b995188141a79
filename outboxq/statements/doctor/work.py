"""Which jobs wait, where and for how long, and whether relays are there to run them.

Bounded: at most 1,000 queues, and of each the first 10,000 jobs in the order of an index. No locks.
"""

from sqlalchemy import TextClause, text

from outboxq.statements.doctor.sessions import qualified

MAX_QUEUES = 1_000
MAX_JOBS = 10_000

# A walk from one queue's name to the next: DISTINCT would read every job.
_WAITING = """\
WITH RECURSIVE queues (name) AS (
  (SELECT queue FROM {job} WHERE state = '{state}' ORDER BY queue LIMIT 1)
  UNION ALL
  SELECT (SELECT queue FROM {job} WHERE state = '{state}' AND queue > queues.name ORDER BY queue LIMIT 1)
  FROM queues WHERE queues.name IS NOT NULL
)
SELECT names.name AS queue, waiting.kind, pg_catalog.count(*) AS jobs,
  pg_catalog.count(*) FILTER (WHERE waiting.parked > 0) AS parked,
  extract(
    epoch FROM pg_catalog.statement_timestamp() - pg_catalog.min(waiting.run_at) FILTER (WHERE waiting.parked = 0)
  )::float8 AS oldest_seconds
FROM (SELECT name FROM queues WHERE name IS NOT NULL LIMIT :max_queues) AS names
CROSS JOIN LATERAL (
  SELECT kind, parked, run_at, xmax AS holder FROM {job}
  WHERE queue = names.name AND state = '{state}' ORDER BY {order} LIMIT :max_jobs
) AS waiting
-- A job that runs was deleted by a transaction that is open, or prepared, and can still be seen.
WHERE waiting.holder NOT IN (
  SELECT backend_xid FROM pg_catalog.pg_stat_activity WHERE backend_xid IS NOT NULL
  UNION ALL SELECT transaction FROM pg_catalog.pg_prepared_xacts
)
GROUP BY 1, 2 ORDER BY 1, 2"""


def waiting_ready(schema: str) -> TextClause:
    """Kinds of ready jobs per queue. Index: job_ready, in its order."""
    return _waiting(schema, "ready", "(-priority), seq")


def waiting_scheduled(schema: str) -> TextClause:
    """Kinds of scheduled jobs per queue; `oldest_seconds` is negative before their time. Index: job_scheduled."""
    return _waiting(schema, "scheduled", "run_at")


def _waiting(schema: str, state: str, order: str) -> TextClause:
    statement = _WAITING.format(job=qualified(schema, "job"), state=state, order=order)
    return text(statement).bindparams(max_queues=MAX_QUEUES, max_jobs=MAX_JOBS)


def paused_queues(schema: str) -> TextClause:
    """The queues that are paused. Reads the small table `queue`."""
    return text(f"SELECT name FROM {qualified(schema, 'queue')} WHERE paused_at IS NOT NULL")


def suspects(schema: str) -> TextClause:
    """Suspect jobs per queue. Index: job_suspect, 10,000 entries of it."""
    return text(
        f"SELECT queue, pg_catalog.count(*) AS jobs FROM (SELECT queue FROM {qualified(schema, 'job')} "
        "WHERE state = 'suspect' LIMIT :max_jobs) AS found GROUP BY 1 ORDER BY 1"
    ).bindparams(max_jobs=MAX_JOBS)


def orphaned_leases(schema: str, grace_seconds: float) -> TextClause:
    """Leased jobs per owner that is not alive, or not known. Index: job_leased, 10,000 entries of it."""
    return text(
        f"""\
SELECT leased.lease_owner::text AS owner, relay.host, relay.pid, leased.jobs,
  extract(epoch FROM pg_catalog.clock_timestamp() - relay.alive_until)::float8 AS seconds
FROM (
  SELECT lease_owner, pg_catalog.count(*) AS jobs
  FROM (SELECT lease_owner FROM {qualified(schema, "job")} WHERE state = 'leased' LIMIT :max_jobs) AS found
  GROUP BY 1
) AS leased LEFT JOIN {qualified(schema, "relay")} AS relay ON relay.id = leased.lease_owner
WHERE relay.id IS NULL
  OR relay.alive_until < pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => :grace_seconds)
ORDER BY leased.jobs DESC LIMIT 100"""
    ).bindparams(max_jobs=MAX_JOBS, grace_seconds=grace_seconds)


def connected_relays() -> TextClause:
    """How many connections of relays this database has."""
    return text(
        "SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_activity "
        "WHERE datname = pg_catalog.current_database() AND application_name = 'outboxq relay'"
    )


def living_relays(schema: str) -> TextClause:
    """How many relays hold a lease that has not run out. Reads the small table `relay`."""
    return text(
        f"SELECT pg_catalog.count(*) FROM {qualified(schema, 'relay')} WHERE alive_until > pg_catalog.clock_timestamp()"
    )
