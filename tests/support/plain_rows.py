"""A plain row of each table, as SQL, to put something of one's own into."""

from collections.abc import Mapping

_ID = "gen_random_uuid()"
_BUCKETS = "array_fill(0::bigint, ARRAY[20])"
ROWS: Mapping[str, Mapping[str, str]] = {
    "job": {"id": _ID, "queue": "'q'", "kind": "'k'", "args": "'{}'"},
    "dead_job": {
        "id": _ID, "queue": "'q'", "kind": "'k'", "args": "'{}'", "headers": "'{}'", "priority": "0", "attempt": "1",
        "crashes": "0", "errors": "'[]'", "reason": "'gave up'", "created_at": "clock_timestamp()",
    },
    "queue": {"name": "'q'"},
    "relay": {"id": _ID, "alive_until": "clock_timestamp() - interval '1 hour'"},
    "inbox": {"consumer": "'c'", "message_id": _ID, "expires_at": "clock_timestamp() + interval '1 day'"},
    "effect": {
        "scope": "'pay'", "key": _ID, "status": "'unknown'", "provider_key": _ID, "lock_token": _ID,
        "locked_until": "clock_timestamp()",
    },
    "schedule": {
        "name": _ID, "kind": "'k'", "queue": "'q'", "cron": "'0 6 * * 1'", "time_zone": "'UTC'", "missed": "'skip'",
        "next_at": "clock_timestamp() + interval '1 day'",
    },
    "unique_key": {"key": _ID, "job_id": _ID},
    "rate": {"name": _ID, "tat": "clock_timestamp()"},
    "batch": {"id": _ID, "callback": """'{"kind": "k", "queue": "q"}'"""},
    "cancel_request": {"job_id": _ID},
    "paused_kind": {"queue": "'q'", "kind": _ID},
    "relay_status": {
        "id": _ID, "host": "'h'", "pid": "1", "version": "'1'", "schema_step": "14", "state": "'serving'",
        "queues": "'{q}'", "kinds": "'{k}'", "slots": "1", "busy": "0", "listens": "true", "running": "'[]'",
        "flush": "1",
    },
    "stat": {
        "grain": "60", "at": "date_trunc('minute', clock_timestamp())", "queue": "'q'", "kind": _ID, "wait": _BUCKETS,
        "run": _BUCKETS,
    },
    "gauge": {
        "at": "date_trunc('minute', clock_timestamp())", "queue": _ID, "ready": "0", "scheduled": "0", "due": "0",
        "leased": "0", "suspect": "0", "dead": "0", "exact": "true",
    },
    "done_job": {
        "id": _ID, "queue": "'q'", "kind": "'k'", "outcome": "'done'", "attempt": "1",
        "created_at": "clock_timestamp()", "seconds": "0.1", "expires_at": "clock_timestamp() + interval '1 day'",
    },
    "progress": {"job_id": _ID, "attempt": "1", "fraction": "0.5", "note": "'half'", "relay": _ID},
    "audit": {"id": _ID, "actor": "'a'", "via": "'cli'", "action": "'cancel'"},
}  # fmt: skip


def insert_row(table: str, values: Mapping[str, str] | None = None) -> str:
    """An INSERT of a plain row, with these values, as SQL, in place of its own."""
    row = {**ROWS[table], **(values or {})}
    return f"INSERT INTO outboxq.{table} ({', '.join(row)}) VALUES ({', '.join(row.values())})"
