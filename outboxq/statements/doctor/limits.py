"""The doctor's statements for the limits and rates of queues, and their present use. No locks."""

from sqlalchemy import TextClause, text

from outboxq.database.engines import RELAY_NAME
from outboxq.statements import group_claim, windows
from outboxq.statements.doctor.sessions import qualified
from outboxq.statements.limit import lock_class

# The keys of advisory locks in pg_locks are unsigned numbers.
_RUNNING = """\
SELECT limited.name AS queue, limited.most, greatest((
    SELECT pg_catalog.count(*) FROM pg_catalog.pg_locks AS held
    WHERE held.locktype = 'advisory' AND held.granted AND held.objsubid = 2
      AND held.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
      AND held.classid::bigint = (pg_catalog.hashtext(CAST(:locks AS text))::bigint & 4294967295::bigint)
      AND held.objid::bigint IN (
        SELECT pg_catalog.hashtext(limited.name || pg_catalog.chr(31) || place::text)::bigint & 4294967295::bigint
        FROM pg_catalog.generate_series(0, limited.most - 1) AS place)
  ), leased.suspects) + leased.others AS running
FROM ROWS FROM (
  pg_catalog.unnest(CAST(:names AS text[])), pg_catalog.unnest(CAST(:most AS integer[]))
) AS limited (name, most)
CROSS JOIN LATERAL (
  SELECT pg_catalog.count(*) FILTER (WHERE crashes > 0) AS suspects,
    pg_catalog.count(*) FILTER (WHERE crashes = 0) AS others
  FROM (
    SELECT crashes FROM {job} WHERE state = 'leased' AND queue = limited.name
    UNION ALL SELECT crashes FROM {job} WHERE state = 'group_leased' AND queue = limited.name
  ) AS held
) AS leased"""


# Any role may take an advisory lock. `claims`: the lock under which a queue's claims in lease mode count.
_FOREIGN = """\
SELECT held.pid, activity.usename::text AS login, activity.application_name, activity.state,
  extract(epoch FROM pg_catalog.clock_timestamp() - coalesce(activity.xact_start, activity.state_change))::float8
    AS seconds,
  pg_catalog.bool_or(held.classid::bigint = names.limits) AS of_limits,
  pg_catalog.bool_or(held.classid::bigint = names.groups) AS of_groups,
  pg_catalog.bool_or(held.classid::bigint = names.windows) AS of_windows,
  coalesce(pg_catalog.bool_or(held.classid::bigint = names.limits AND held.objid::bigint = names.claims), false)
    AS of_claims
FROM (SELECT pg_catalog.hashtext(CAST(:limits AS text))::bigint & 4294967295::bigint AS limits,
  pg_catalog.hashtext(CAST(:groups AS text))::bigint & 4294967295::bigint AS groups,
  pg_catalog.hashtext(CAST(:windows AS text))::bigint & 4294967295::bigint AS windows,
  pg_catalog.hashtext(CAST(:queue AS text))::bigint & 4294967295::bigint AS claims) AS names
JOIN pg_catalog.pg_locks AS held ON held.classid::bigint IN (names.limits, names.groups, names.windows)
LEFT JOIN pg_catalog.pg_stat_activity AS activity ON activity.pid = held.pid
WHERE held.locktype = 'advisory' AND held.granted AND held.objsubid = 2
  AND held.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
  AND coalesce(activity.application_name, '') <> CAST(:relay AS text)
  AND (CAST(:queue AS text) IS NULL OR held.objid::bigint IN (
    SELECT pg_catalog.hashtext(name)::bigint & 4294967295::bigint
    FROM pg_catalog.unnest(CASE held.classid::bigint WHEN names.limits THEN CAST(:slots AS text[])
      WHEN names.groups THEN CAST(:turns AS text[]) END) AS named (name)))
GROUP BY held.pid, activity.usename, activity.application_name, activity.state, activity.xact_start,
  activity.state_change
ORDER BY held.pid LIMIT 20"""


def foreign_locks(
    schema: str, queue: str | None, *, most: int = 0, group: str | None = None, per_group: int = 1
) -> TextClause:
    """Select sessions other than relays' that hold advisory locks of outboxq, and so keep relays from claiming.

    The locks are those of queues' limits, of groups, and of the periods of `every`. With `queue`, only the locks of
    this queue's limit count, and those of its group `group`. Reads pg_locks. A prepared transaction has no `pid`.

    Args:
        most: The number of jobs of the queue that may run at a time.
        per_group: The number of jobs of a group that may run at a time.
    """
    slots = [] if queue is None else [queue, *(f"{queue}\x1f{place}" for place in range(most))]
    turns = [] if group is None else [f"{queue}\x1f{group}\x1f{slot}" for slot in range(1, per_group + 1)]
    return text(_FOREIGN).bindparams(
        limits=lock_class(schema),
        groups=group_claim.lock_class(schema),
        windows=windows.lock_class(schema),
        relay=RELAY_NAME,
        queue=queue,
        slots=slots,
        turns=turns,
    )


def queue_limits(schema: str) -> TextClause:
    """Select the limits that operators have set, a row for each queue with any. Reads the small table `queue`."""
    return text(
        "SELECT name, max_running AS running, max_per_group AS per_group, rate_jobs, rate_seconds, rate_burst "
        f"FROM {qualified(schema, 'queue')} WHERE max_running IS NOT NULL OR rate_jobs IS NOT NULL"
    )


def running(schema: str) -> TextClause:
    """Count, for each of some queues, the jobs that run or are leased, and so use the queue's limit.

    Parameters to bind: `names`, the queues; `most`, the limit of each. In transaction mode each running job holds an
    advisory lock of the limit. A suspect (it ran when its relay died) has such a lock and a lease, and counts once.

    Indexes: job_leased and job_group_state, as many rows as there are leased jobs.
    """
    return text(_RUNNING.format(job=qualified(schema, "job"))).bindparams(locks=lock_class(schema))


def rates_ahead(schema: str) -> TextClause:
    """Select, for each queue with a rate, the seconds by which relays have reserved its tokens in advance.

    A token is the permission to begin one job. Reads the table `rate`.
    """
    ahead = "extract(epoch FROM tat - pg_catalog.clock_timestamp())::float8 AS ahead_seconds"
    return text(f"SELECT name AS queue, {ahead} FROM {qualified(schema, 'rate')}")
