"""Rows that no code of ours writes, and that a role of ours may: by table, each with what is odd in it.

Tables at step 12 take them all; the checks of step 13 refuse the worst.
"""

from collections.abc import Iterator

from sqlalchemy import DateTime, Engine, Float, String, Uuid

from outboxq.tables import metadata
from outboxq.tables.columns import Instant, Real
from tests.support.plain_rows import ROWS, insert_row

DEEP = "(repeat('[', 3000) || repeat(']', 3000))::jsonb"
_DEEP_OBJECT = "(repeat('{\"a\":', 3000) || '1' || repeat('}', 3000))::jsonb"
HUGE = "jsonb_build_object('n', 1e1000::numeric)"
ODD_TEXT = "E'odd\\n\\x1b[31m\\u202e\\x7f'"
# What our own headers say, beside what cannot be read in one piece.
_OWN_HEADERS = (
    "jsonb_build_object('outboxq.every', '1000', 'outboxq.added', '5', 'outboxq.then', '[]', 'outboxq.batch', '1', "
    "'traceparent', '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01', 'x', {})"
)
_SHAPES = ("'1'", "'null'", "'[]'", "'[1]'", "'[null]'", "'[{}]'", "'{}'", "'{\"x\": {}}'", DEEP, HUGE)

_JSON = {
    "job": ("args", "headers", "errors"),
    "dead_job": ("args", "headers", "errors"),
    "done_job": ("args", "headers", "result"),
    "effect": ("result",),
    "relay_status": ("running", "limits"),
    "audit": ("filter", "change"),
    "batch": ("callback",),
    "schedule": ("args", "options"),
}
# Of single columns, beside times, numbers and shapes of JSON.
_SPECIAL = {
    "job": (
        {"state": "'suspect'"},
        {"state": "'group_suspect'", "group_key": "''"},
        {"state": "'grouped'", "group_key": ODD_TEXT},
        {"expires_at": "'0001-01-03 00:00:00+00'"},
        {"run_at": "'9999-12-29 00:00:00+00'", "state": "'scheduled'"},
        {"created_at": "'0001-01-03 00:00:00+00'"},
        {"max_attempts": "-32768"},
        {"id": "'ffffffff-ffff-ffff-ffff-ffffffffffff'", "batch_id": "'ffffffff-ffff-ffff-ffff-ffffffffffff'"},
        {"attempt": "2147483646", "crashes": "32766", "parked": "32766"},
        {"errors": """'[{"at": "infinity", "attempt": "x", "type": 1, "message": null}]'"""},
        {"headers": """'{"outboxq-chain": "[", "traceparent": 1}'"""},
        {"headers": _OWN_HEADERS.format(DEEP), "unique_key": "'deep'"},
        {"headers": _OWN_HEADERS.format(HUGE), "unique_key": "'huge'"},
        {"headers": _OWN_HEADERS.format(DEEP)},
        {"headers": _OWN_HEADERS.format(HUGE)},
    ),
    "dead_job": (
        {"priority": "-32768", "attempt": "-1", "max_attempts": "-1", "crashes": "-1"},
        {"reason": "repeat('x', 100000)"},
        {"errors": """'[{"at": "infinity", "attempt": "x", "type": 1, "message": null}]'"""},
    ),
    "relay": ({"pid": "-1", "host": ODD_TEXT},),
    "relay_status": (
        {"running": """'[{"id": 1, "queue": 2, "kind": [], "seconds": "x"}]'"""},
        {"running": """'[{"id": "x", "queue": "q", "kind": "k", "attempt": 1, "seconds": 1e300, "pid": 1}]'"""},
        {"limits": """'[{"name": 1}]'"""},
        {"limits": """'[{"name": "q", "running": "x"}]'"""},
        {"limits": """'[{"name": "q", "running": 1e100}]'"""},
        {"limits": """'[{"name": "q", "rate_jobs": 0, "rate_seconds": 0, "rate_burst": 0}]'"""},
        {"queues": "'{NULL}'", "kinds": "'{NULL}'", "free": "'{NULL}'"},
        {"pid": "-1", "slots": "-2147483648", "busy": "2147483647", "schema_step": "-1", "flush": "-1"},
    ),
    "stat": (
        {"done": "9223372036854775807"},
        {"done": "9223372036854775807", "lost": "-1"},
        {"wait": "array_fill(9223372036854775807, ARRAY[20])"},
        {"wait": "array_fill(NULL::bigint, ARRAY[20])"},
        {"wait": "array_fill(0::bigint, ARRAY[4, 5])"},
        {"at": "date_trunc('hour', clock_timestamp()) - interval '60 hours'", "done": "9223372036854775807"},
        {"at": "date_trunc('hour', clock_timestamp()) - interval '60 hours'", "run_seconds": "'NaN'"},
    ),
    "gauge": ({"ready": "-1", "dead": "2147483647"}, {"at": "clock_timestamp() - interval '60 hours'"}),
    "done_job": ({"stands_for": "'{NULL}'"}, {"expires_at": "clock_timestamp() - interval '1 day'"}),
    "effect": (
        {"status": "'started'", "locked_until": "'infinity'", "attempts": "-1"},
        {"status": "'started'", "locked_until": "'-infinity'", "attempts": "2147483647"},
        {"status": "'done'", "expires_at": "'infinity'"},
    ),
    "schedule": (
        {"cron": "'never'", "next_at": "clock_timestamp() - interval '1 minute'"},
        {"time_zone": "'Nowhere/At_All'", "next_at": "clock_timestamp() - interval '1 minute'"},
        {"options": """'{"priority": "x"}'""", "next_at": "clock_timestamp() - interval '1 minute'"},
        {"next_at": "'0001-01-03 00:00:00+00'"},
        {"next_at": "'9999-12-29 00:00:00+00'"},
        {"args": _DEEP_OBJECT},
    ),
    "batch": (
        {"callback": """'{"kind": "k"}'"""},
        {"callback": """'{"kind": "k", "queue": "q", "priority": 99999}'"""},
        {"callback": """'{"kind": "k", "queue": "q", "run_at": "infinity"}'"""},
        {"callback": """'{"kind": "k", "queue": "q", "delay_seconds": 1e308}'"""},
        {"id": "'01929e1c-0000-7000-8000-000000000001'", "parent_id": "'01929e1c-0000-7000-8000-000000000001'"},
        {"created_at": "clock_timestamp() - interval '1 day'", "callback": """'{"kind": ["a"], "queue": {"x": 1}}'"""},
        # A job has its id already, which is a batch's own callback's.
        {"id": "'01929e1c-0000-7000-8000-00000000dead'"},
    ),
    "queue": ({"name": "''"}, {"name": "'mail'", "paused_at": "NULL", "rate_jobs": "1", "rate_seconds": "2678400",
              "rate_burst": "1000000"}),
    "unique_key": ({"key": "'no separator'"}, {"key": ODD_TEXT}),
}  # fmt: skip


def poisons(table: str) -> Iterator[dict[str, str]]:
    """What may be odd in a row of a table: each time, number, text and JSON of it, and more."""
    for column in metadata.tables[f"outboxq.{table}"].columns:
        if isinstance(column.type, DateTime | Instant):
            for value in ("'infinity'", "'-infinity'", "'294276-12-31'", "'4713-01-01 BC'"):
                yield {column.name: value}
        elif isinstance(column.type, Float | Real):
            for value in ("'NaN'", "'infinity'", "'-infinity'", "1e300", "-1"):
                yield {column.name: value}
        elif isinstance(column.type, String):
            yield {column.name: ODD_TEXT}
            yield {column.name: "''"}
    for name in _JSON.get(table, ()):
        for shape in _SHAPES:
            yield {name: shape}
    yield from _SPECIAL.get(table, ())


def plant(engine: Engine, table: str) -> int:
    """Plant every poison of a table that it takes; how many it took."""
    taken = 0
    keys = [
        column.name
        for column in metadata.tables[f"outboxq.{table}"].primary_key
        if not isinstance(column.type, Uuid | DateTime | Instant) and column.name != "grain"
    ]
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(
            "INSERT INTO outboxq.job (id, queue, kind, args) "
            "VALUES ('01929e1c-0000-7000-8000-00000000dead', 'elsewhere', 'k', '{}') ON CONFLICT DO NOTHING"
        )
        for values in poisons(table):
            # A key of its own, so that all of them are there at once.
            free = {name: "gen_random_uuid()" for name in keys[:1] if name not in values and table != "audit"}
            try:
                connection.exec_driver_sql(insert_row(table, {**free, **values}).replace("%", "%%"))
            except Exception as error:  # what the table refuses does no harm
                if not hasattr(error, "orig"):
                    raise
            else:
                taken += 1
    return taken


TABLES = tuple(ROWS)
