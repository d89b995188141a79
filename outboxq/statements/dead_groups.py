"""Dead letters with the same cause, counted together."""

from sqlalchemy import TextualSelect, text

from outboxq.statements.doctor.sessions import qualified
from outboxq.tables import Instant

# A job without an error, such as one that crashed its relays, is grouped by its reason up to the first colon.
_GROUPS = """\
WITH newest AS MATERIALIZED (
  SELECT queue, kind, died_at, COALESCE(
      pg_catalog.jsonb_extract_path_text(errors, '-1', 'type'), pg_catalog.split_part(reason, ':', 1)
    ) AS error,
    pg_catalog.jsonb_extract_path_text(errors, '-1', 'where', '-1') AS line
  FROM {dead} ORDER BY id DESC LIMIT :newest
)
SELECT queue, kind, error, line, pg_catalog.count(*) AS jobs,
  extract(epoch FROM pg_catalog.min(died_at)) AS first_died_at,
  extract(epoch FROM pg_catalog.max(died_at)) AS last_died_at
FROM newest GROUP BY queue, kind, error, line
ORDER BY jobs DESC, queue, kind, error, line LIMIT :limit"""


def group_newest(schema: str, *, newest: int, limit: int) -> TextualSelect:
    """Count the newest `newest` dead letters by queue, kind, last error's type, and innermost line of its traceback.

    It returns up to `limit` rows, the largest group first: queue, kind, error, line, jobs, first_died_at, last_died_at.
    Index: the primary key backwards, whose ids are in the order of adding; `newest` rows. No locks.
    """
    statement = text(_GROUPS.format(dead=qualified(schema, "dead_job"))).bindparams(newest=newest, limit=limit)
    return statement.columns(first_died_at=Instant(), last_died_at=Instant())
