"""The doctor's statements for effects (recorded calls of other services) that wait for an operator or for a new call.

Bounded: 10,000 entries of an index. No locks.
"""

from sqlalchemy import TextClause, text

from outboxq.statements.doctor.sessions import qualified

MAX_EFFECTS = 10_000


def unknown_effects(schema: str) -> TextClause:
    """Count the effects of unknown outcome, with the age of the oldest. Index: effect_unknown, 10,000 entries of it."""
    return text(
        f"""\
SELECT pg_catalog.count(*) AS effects,
  extract(epoch FROM pg_catalog.clock_timestamp() - pg_catalog.min(changed_at))::float8 AS oldest_seconds
FROM (
  SELECT changed_at FROM {qualified(schema, "effect")} WHERE status = 'unknown' ORDER BY changed_at LIMIT :max_effects
) AS found"""
    ).bindparams(max_effects=MAX_EFFECTS)


def abandoned_effects(schema: str, grace_seconds: float) -> TextClause:
    """Count the calls that were abandoned: those in progress or in doubt whose lock expired over `grace_seconds` ago.

    No other caller has taken them over. The row also has the seconds since the first of these locks expired. Index:
    effect_open, from its start.
    """
    return text(
        f"""\
SELECT pg_catalog.count(*) AS effects,
  extract(epoch FROM pg_catalog.clock_timestamp() - pg_catalog.min(locked_until))::float8 AS oldest_seconds
FROM (
  SELECT locked_until FROM {qualified(schema, "effect")}
  WHERE expires_at IS NULL AND status <> 'unknown' AND (status = 'started' OR status = 'retryable' AND in_doubt)
    AND locked_until < pg_catalog.statement_timestamp() - pg_catalog.make_interval(secs => :grace_seconds)
  ORDER BY locked_until LIMIT :max_effects
) AS found"""
    ).bindparams(grace_seconds=grace_seconds, max_effects=MAX_EFFECTS)
