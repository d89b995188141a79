"""Step 12: indexes on calls that are not settled, and on dead letters by time of death. Frozen.

While the indexes are built, writes to `effect` and `dead_job` wait: about a second for a million rows of each.
"""

from outboxq.migrations.step_07_checks import LOCK

# Calls, and endpoints that record theirs, may be in progress for long: either both tables are locked at once, or none.
_LOCK = (
    LOCK.replace(
        "LOCK TABLE @schema@.job IN ACCESS EXCLUSIVE MODE",
        "LOCK TABLE @schema@.effect, @schema@.dead_job IN SHARE MODE",
    )
    .replace(
        "relation = to_regclass(@schema_identifier_literal@ || '.job')",
        "relation IN (to_regclass(@schema_identifier_literal@ || '.effect'), "
        "to_regclass(@schema_identifier_literal@ || '.dead_job'))",
    )
    .replace("|| '.job'", "|| '.effect or dead_job'")
)

UP = f"""\
{_LOCK}
    -- Of calls under way or in doubt: a call leaves it when it is settled, or becomes one of effect_unknown.
    CREATE INDEX effect_open ON @schema@.effect (locked_until) WHERE expires_at IS NULL AND status <> 'unknown';
    -- An expression, so that no statement on one queue, which has an index of its own, comes to walk over all of them.
    CREATE INDEX dead_job_died ON @schema@.dead_job ((died_at AT TIME ZONE 'UTC'));"""

DOWN = f"""\
{_LOCK.replace("IN SHARE MODE", "IN ACCESS EXCLUSIVE MODE")}
    DROP INDEX @schema@.effect_open, @schema@.dead_job_died;"""
