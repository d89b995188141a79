"""Step 13: checks on rows of the other tables: times, numbers, and callbacks that can become jobs. Frozen.

One row that cannot be read, or whose numbers overflow, would stop the work on all others. The checks apply to rows
written from now on; step 14, a separate transaction, repairs earlier rows.
"""

from outboxq.migrations.step_07_checks import LOCK

# The times that Python's datetime can represent in any time zone.
FIRST, LAST = "timestamptz '0001-01-03 00:00:00+00'", "timestamptz '9999-12-29 00:00:00+00'"
# Sums of such numbers cannot overflow; infinity and NaN are not below it.
MOST = "1000000000000000"

TIMES: dict[str, tuple[str, ...]] = {
    # First, because claims hold it for as long as their handlers run, and nothing else may be locked during the wait.
    "queue": ("paused_at",),
    "unique_key": ("kept_until",),
    "batch": ("created_at",),
    "inbox": ("seen_at", "expires_at"),
    "effect": ("locked_until", "first_called_at", "changed_at", "expires_at"),
    "done_job": ("created_at", "claimed_at", "finished_at", "expires_at"),
    "dead_job": ("created_at", "died_at"),
    "schedule": ("last_at", "paused_at", "created_at"),
    "cancel_request": ("requested_at",),
    "paused_kind": ("paused_at",),
    "relay": ("alive_until", "started_at"),
    "relay_status": ("started_at", "seen_at"),
    "progress": ("noted_at",),
    "stat": ("at",),
    "gauge": ("at",),
    "audit": ("at", "finished_at", "stopped_at"),
}
_COUNTS = ("done", "retried", "died", "snoozed", "discarded", "crashed", "lost")
_SUMS = ("wait_seconds", "run_seconds")


def _bounded(*columns: str, first: str = FIRST, last: str = LAST) -> str:
    return "\n        AND ".join(f"{column} BETWEEN {first} AND {last}" for column in columns)


def _bucket(column: str) -> str:
    return (
        f"array_ndims({column}) = 1 AND array_lower({column}, 1) = 1 AND array_position({column}, NULL) IS NULL "
        f"AND 0 <= ALL ({column}) AND {MOST} >= ALL ({column})"
    )


# The casts are the same as when the callback becomes a job, so that a value which a cast refuses is refused here.
CALLBACK = f"""\
(jsonb_typeof(callback -> 'kind') = 'string') IS TRUE
        AND (jsonb_typeof(callback -> 'queue') = 'string') IS TRUE
        AND octet_length(callback ->> 'kind') BETWEEN 1 AND 63
        AND octet_length(callback ->> 'queue') BETWEEN 1 AND 63
        AND coalesce(jsonb_typeof(callback -> 'args'), 'null') IN ('object', 'null')
        AND coalesce(jsonb_typeof(callback -> 'headers'), 'null') IN ('object', 'null')
        AND coalesce(octet_length((callback -> 'args')::text), 0) <= 16777216
        AND coalesce(octet_length((callback -> 'headers')::text), 0) <= 1048000
        AND coalesce((callback ->> 'priority')::smallint, 0) > -32768
        AND coalesce((callback ->> 'max_attempts')::smallint, 1) >= 1
        AND coalesce((callback ->> 'run_at')::timestamptz, {FIRST}) BETWEEN {FIRST} AND {LAST}
        AND coalesce((callback ->> 'delay_seconds')::float8, 0) BETWEEN 0 AND 3153600000
        AND coalesce((callback ->> 'expires_seconds')::float8, 0) BETWEEN 0 AND 3153600000
        AND coalesce(octet_length(callback ->> 'coalesce'), 0) <= 1024
        AND coalesce(octet_length(callback ->> 'group'), 0) <= 1024"""

# By table: the names and the conditions of its new checks.
CHECKS: dict[str, dict[str, str]] = {table: {f"{table}_ranges": _bounded(*columns)} for table, columns in TIMES.items()}
CHECKS["batch"]["batch_callback_job"] = CALLBACK
CHECKS["done_job"]["done_job_seconds"] = _bounded("seconds", first=f"-{MOST}", last=MOST)
CHECKS["gauge"]["gauge_seconds"] = _bounded("oldest_seconds", first=f"-{MOST}", last=MOST)
CHECKS["stat"]["stat_counts"] = _bounded(*_COUNTS, first="0", last=MOST)
CHECKS["stat"]["stat_seconds"] = _bounded(*_SUMS, first=f"-{MOST}", last=MOST)
CHECKS["stat"]["stat_bucket_counts"] = f"{_bucket('wait')}\n        AND {_bucket('run')}"
CHECKS["relay_status"]["relay_status_names"] = (
    # array_position() raises an error for an array of two dimensions.
    "coalesce(array_ndims(queues), 1) = 1 AND array_position(queues, NULL) IS NULL "
    "AND coalesce(array_ndims(kinds), 1) = 1 AND array_position(kinds, NULL) IS NULL "
    "AND coalesce(array_ndims(free), 1) = 1 AND array_position(free, NULL) IS NULL"
)
# It may be as far ahead as its queue's burst allows, and is only compared with the clock.
CHECKS["rate"] = {"rate_ranges": "isfinite(tat)"}

_NAMES = ", ".join(f"@schema@.{table}" for table in CHECKS)
_CLASSES = ", ".join(f"to_regclass(@schema_identifier_literal@ || '.{table}')" for table in CHECKS)
# Either all tables are locked at once, or none.
LOCK_ALL = (
    LOCK.replace("LOCK TABLE @schema@.job IN", f"LOCK TABLE {_NAMES} IN")
    .replace("relation = to_regclass(@schema_identifier_literal@ || '.job')", f"relation IN ({_CLASSES})")
    .replace("@schema_identifier_literal@ || '.job'", "'the tables of ' || @schema_identifier_literal@")
)

ADD = "\n".join(
    f"    ALTER TABLE @schema@.{table}\n"
    + ",\n".join(
        f"      ADD CONSTRAINT {name} CHECK (\n        {condition}\n      ) NOT VALID"
        for name, condition in checks.items()
    )
    + ";"
    for table, checks in CHECKS.items()
)
DROP = "\n".join(
    f"    ALTER TABLE @schema@.{table} " + ", ".join(f"DROP CONSTRAINT {name}" for name in checks) + ";"
    for table, checks in CHECKS.items()
)

UP = f"{LOCK_ALL}\n{ADD}"
DOWN = f"{LOCK_ALL}\n{DROP}"
