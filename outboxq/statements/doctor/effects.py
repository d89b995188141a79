"""Effects that wait to be resolved, or to be called again.

Bounded: 10,000 entries of an index, and a table that is only read while it is small. No locks.
"""

from sqlalchemy import TextClause, text

from outboxq.statements.doctor.sessions import qualified, schema_name

MAX_EFFECTS = 10_000
# About a million effects without results, read within a second.
MAX_READ_BYTES = 256 * 1024**2


def unknown_effects(schema: str) -> TextClause:
    """How many effects are unknown, and for how long the oldest. Index: effect_unknown, 10,000 entries of it."""
    return text(
        f"""\
SELECT pg_catalog.count(*) AS effects,
  extract(epoch FROM pg_catalog.clock_timestamp() - pg_catalog.min(changed_at))::float8 AS oldest_seconds
FROM (
  SELECT changed_at FROM {qualified(schema, "effect")} WHERE status = 'unknown' ORDER BY changed_at LIMIT :max_effects
) AS found"""
    ).bindparams(max_effects=MAX_EFFECTS)


def bytes_to_read(schema: str) -> TextClause:
    """The size of the table `effect`, without what is stored out of line."""
    return text(
        "SELECT pg_catalog.pg_relation_size(class.oid) FROM pg_catalog.pg_class AS class "
        "JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace "
        "WHERE namespace.nspname = :schema AND class.relname = 'effect'"
    ).bindparams(schema_name(schema))


def abandoned_effects(schema: str, grace_seconds: float) -> TextClause:
    """How many calls are open, with a lock that ran out `grace_seconds` ago, and for how long the oldest. No index."""
    return text(
        f"""\
SELECT pg_catalog.count(*) AS effects,
  extract(epoch FROM pg_catalog.clock_timestamp() - pg_catalog.min(locked_until))::float8 AS oldest_seconds
FROM {qualified(schema, "effect")}
WHERE expires_at IS NULL AND (status = 'started' OR status = 'retryable' AND in_doubt)
  AND locked_until < pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => :grace_seconds)"""
    ).bindparams(grace_seconds=grace_seconds)
