"""The waiting jobs, by queue and age, and the relays that could run them."""

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
    """Count the jobs in state `ready` that do not run, by queue and kind, with the age of the oldest in seconds.

    Reads up to `MAX_JOBS` of each queue. Index: job_ready, in its order.
    """
    return _waiting(schema, "ready", "(-priority), seq")


def waiting_scheduled(schema: str) -> TextClause:
    """Count the jobs in state `scheduled` that do not run, by queue and kind, with the seconds since the first was due.

    The seconds are negative if the first job is due later. Reads up to `MAX_JOBS` of each queue. Index: job_scheduled.
    """
    return _waiting(schema, "scheduled", "run_at")


def _waiting(schema: str, state: str, order: str) -> TextClause:
    statement = _WAITING.format(job=qualified(schema, "job"), state=state, order=order)
    return text(statement).bindparams(max_queues=MAX_QUEUES, max_jobs=MAX_JOBS)


def paused_queues(schema: str) -> TextClause:
    """Select the paused queues. Reads the small table `queue`."""
    return text(f"SELECT name FROM {qualified(schema, 'queue')} WHERE paused_at IS NOT NULL")


def suspects(schema: str) -> TextClause:
    """Count the suspects (jobs that ran when their relay died) of each queue.

    Indexes: job_suspect and job_group_state, 10,000 entries of them.
    """
    return text(
        f"SELECT queue, pg_catalog.count(*) AS jobs FROM (SELECT queue FROM {qualified(schema, 'job')} "
        "WHERE state = 'suspect' OR state = 'group_suspect' LIMIT :max_jobs) AS found GROUP BY 1 ORDER BY 1"
    ).bindparams(max_jobs=MAX_JOBS)


def orphaned_leases(schema: str, grace_seconds: float) -> TextClause:
    """Count the leased jobs of dead relays, by the relay's id.

    A relay counts as dead if it has no lease, or if its lease expired over `grace_seconds` ago. Indexes: job_leased,
    job_group_state, 10,000 entries.
    """
    return text(
        f"""\
SELECT leased.lease_owner::text AS owner, relay.host, relay.pid, leased.jobs,
  extract(epoch FROM pg_catalog.clock_timestamp() - relay.alive_until)::float8 AS seconds
FROM (
  SELECT lease_owner, pg_catalog.count(*) AS jobs
  FROM (SELECT lease_owner FROM {qualified(schema, "job")}
    WHERE state = 'leased' OR state = 'group_leased' LIMIT :max_jobs) AS found
  GROUP BY 1
) AS leased LEFT JOIN {qualified(schema, "relay")} AS relay ON relay.id = leased.lease_owner
WHERE relay.id IS NULL
  OR relay.alive_until < pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => :grace_seconds)
ORDER BY leased.jobs DESC LIMIT 100"""
    ).bindparams(max_jobs=MAX_JOBS, grace_seconds=grace_seconds)


def connected_relays() -> TextClause:
    """Count the relays' connections to this database."""
    return text(
        "SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_activity "
        "WHERE datname = pg_catalog.current_database() AND application_name = 'outboxq relay'"
    )


def living_relays(schema: str) -> TextClause:
    """Count the relays whose lease has not expired. Reads the small table `relay`."""
    return text(
        f"SELECT pg_catalog.count(*) FROM {qualified(schema, 'relay')} WHERE alive_until > pg_catalog.clock_timestamp()"
    )


# One entry of job_group for each of the first groups of a queue, and up to 1,000 entries after a postponed job.
_BLOCKED = """\
WITH RECURSIVE queues (name) AS (
  (SELECT queue FROM {job} WHERE group_key IS NOT NULL AND state <> 'group_waiting' ORDER BY queue LIMIT 1)
  UNION ALL
  SELECT (SELECT queue FROM {job} WHERE group_key IS NOT NULL AND state <> 'group_waiting' AND queue > queues.name
    ORDER BY queue LIMIT 1)
  FROM queues WHERE queues.name IS NOT NULL
), heads AS (
  SELECT first.*, 1 AS place
  FROM (SELECT name FROM queues WHERE name IS NOT NULL LIMIT :max_queues) AS names CROSS JOIN LATERAL (
    SELECT id, queue, group_key, kind, state, run_at, attempt, parked FROM {job}
    WHERE queue = names.name AND state <> 'group_waiting' AND group_key COLLATE "C" > ''
    ORDER BY group_key COLLATE "C", seq LIMIT 1) AS first
  UNION ALL
  SELECT next.*, heads.place + 1 FROM heads CROSS JOIN LATERAL (
    SELECT id, queue, group_key, kind, state, run_at, attempt, parked FROM {job}
    WHERE queue = heads.queue AND state <> 'group_waiting' AND group_key COLLATE "C" > heads.group_key
    ORDER BY group_key COLLATE "C", seq LIMIT 1) AS next
  WHERE heads.place < :max_groups
)
SELECT heads.queue, heads.id::text AS id, heads.kind, heads.attempt, heads.parked, behind.jobs,
  extract(epoch FROM heads.run_at - pg_catalog.clock_timestamp())::float8 AS due_in_seconds
FROM heads CROSS JOIN LATERAL (
  SELECT pg_catalog.count(*) - 1 AS jobs FROM (
    SELECT FROM {job} WHERE queue = heads.queue AND state <> 'group_waiting'
      AND group_key COLLATE "C" = heads.group_key LIMIT 1001) AS found) AS behind
WHERE heads.state = 'grouped' AND heads.run_at > pg_catalog.clock_timestamp() AND behind.jobs > 0
ORDER BY behind.jobs DESC, heads.id"""
MAX_GROUPS = 1_000


def blocked_groups(schema: str) -> TextClause:
    """Select the first jobs of groups that wait for a later time, and so hold up the jobs after them.

    Each has the number of jobs that wait for it, counted up to 1,000; the highest number comes first. Index: job_group,
    an entry for each of the first 1,000 groups of a queue. No locks.
    """
    statement = _BLOCKED.format(job=qualified(schema, "job"))
    return text(statement).bindparams(max_queues=MAX_QUEUES, max_groups=MAX_GROUPS)


# The most open callback batches that are checked, the oldest first.
MAX_BATCHES = 1_000


def stale_batches(schema: str, seconds: float) -> TextClause:
    """Select open callback batches older than `seconds`, among the oldest 1,000.

    A callback batch is a set of jobs with a callback job, which is added when all of them have ended. `is_over` is true
    if no job and no nested batch of the batch is left. Index: the primary key of `batch`; job_batch and batch_parent,
    one probe each. No locks.
    """
    batch, job = qualified(schema, "batch"), qualified(schema, "job")
    return text(
        f"SELECT oldest.id, oldest.kind, "
        f"extract(epoch FROM pg_catalog.clock_timestamp() - oldest.created_at)::float8 AS age_seconds, "
        f"NOT EXISTS (SELECT FROM {job} AS member WHERE member.batch_id = oldest.id) "
        f"AND NOT EXISTS (SELECT FROM {batch} AS nested WHERE nested.parent_id = oldest.id) AS is_over "
        f"FROM (SELECT id, pg_catalog.jsonb_extract_path_text(callback, 'kind') AS kind, created_at "
        f"FROM {batch} ORDER BY id LIMIT {MAX_BATCHES}) AS oldest "
        "WHERE oldest.created_at < pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => :seconds) "
        "ORDER BY oldest.id"
    ).bindparams(seconds=seconds)
