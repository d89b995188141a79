"""The limits and rates of queues, and whether they keep jobs waiting at this moment. No locks."""

from sqlalchemy import TextClause, text

from outboxq.statements.doctor.sessions import qualified
from outboxq.statements.limit import lock_class
from outboxq.statements.render import quote_literal

# The names of advisory locks in pg_locks are numbers without a sign.
_RUNNING = """\
SELECT limited.name AS queue, limited.most, (
    SELECT pg_catalog.count(*) FROM pg_catalog.pg_locks AS held
    WHERE held.locktype = 'advisory' AND held.granted AND held.objsubid = 2
      AND held.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
      AND held.classid::bigint = (pg_catalog.hashtext({locks})::bigint & 4294967295::bigint)
      AND held.objid::bigint IN (
        SELECT pg_catalog.hashtext(limited.name || pg_catalog.chr(31) || place::text)::bigint & 4294967295::bigint
        FROM pg_catalog.generate_series(0, limited.most - 1) AS place)
  ) + (
    SELECT pg_catalog.count(*) FROM {job} WHERE state = 'leased' AND queue = limited.name
  ) + (
    SELECT pg_catalog.count(*) FROM {job} WHERE state = 'group_leased' AND queue = limited.name
  ) AS running
FROM ROWS FROM (
  pg_catalog.unnest(CAST(:names AS text[])), pg_catalog.unnest(CAST(:most AS integer[]))
) AS limited (name, most)"""


def queue_limits(schema: str) -> TextClause:
    """The limits that operators have set, a row for each queue that has some. Reads the small table `queue`."""
    return text(
        "SELECT name, max_running AS running, max_per_group AS per_group, rate_jobs, rate_seconds, rate_burst "
        f"FROM {qualified(schema, 'queue')} WHERE max_running IS NOT NULL OR rate_jobs IS NOT NULL"
    )


def running(schema: str) -> TextClause:
    """How many slots of queues' limits are taken, those of jobs under leases included; a row for each of `names`.

    Indexes: job_leased and job_group_state, as many rows as run under leases.
    """
    return text(_RUNNING.format(locks=quote_literal(lock_class(schema)), job=qualified(schema, "job")))


def rates_ahead(schema: str) -> TextClause:
    """By how many seconds the reserved tokens are ahead, for each queue with a rate. Reads the table `rate`."""
    ahead = "extract(epoch FROM tat - pg_catalog.clock_timestamp())::float8 AS ahead_seconds"
    return text(f"SELECT name AS queue, {ahead} FROM {qualified(schema, 'rate')}")
