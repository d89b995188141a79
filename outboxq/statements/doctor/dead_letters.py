"""The doctor's statements for the time for which queues keep dead letters, and the age of the oldest. No locks."""

from sqlalchemy import TextClause, text

from outboxq.statements.doctor.sessions import qualified
from outboxq.statements.prune import select_kept

_OVERDUE = """\
SELECT kept.name AS queue, kept.seconds AS keep_seconds, oldest.seconds AS oldest_seconds
FROM ROWS FROM (
  pg_catalog.unnest(CAST(:names AS text[])), pg_catalog.unnest(CAST(:seconds AS float8[]))
) AS kept (name, seconds)
CROSS JOIN LATERAL (
  SELECT extract(epoch FROM pg_catalog.clock_timestamp() - died_at)::float8 AS seconds
  FROM {dead} WHERE queue = kept.name ORDER BY died_at LIMIT 1
) AS oldest
WHERE oldest.seconds > kept.seconds + CAST(:late AS float8) ORDER BY kept.name"""


def kept_queues(schema: str) -> TextClause:
    """Select the queues for which operators have set how long dead letters are kept, with the seconds (0: for ever).

    It is `prune.select_kept` as SQLAlchemy text, for any driver. Reads the small table `queue`.
    """
    return text(select_kept(schema).replace(":", r"\:"))


def overdue(schema: str) -> TextClause:
    """Select the queues whose oldest dead letter should have been deleted more than `late` seconds ago.

    Parameters to bind: `names`, the queues to check; `seconds`, for each queue the time for which it keeps its dead
    letters; `late`. Index: dead_job_queue, one entry a queue.
    """
    return text(_OVERDUE.format(dead=qualified(schema, "dead_job")))
