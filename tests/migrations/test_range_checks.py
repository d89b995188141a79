"""Steps 13 and 14: what a row of every other table than `job` may hold, and what becomes of those that were there."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import psycopg
import pytest
from sqlalchemy import Column, DateTime, Engine, Float, Uuid

from outboxq import external
from outboxq.migrations.runner import migrate, migrate_committing
from outboxq.migrations.step_13_ranges import CHECKS
from outboxq.outbox.stored_job import dump
from outboxq.postgres import Database
from outboxq.tables import metadata
from outboxq.tables.columns import Instant, Real
from tests.support.plain_rows import ROWS, insert_row
from tests.support.urls import libpq_url

BEFORE = 12
# The steps write them, and no role of ours may.
_WRITTEN_BY_STEPS = ("migration", "deployment")
_BAD_TIMES = ("'infinity'", "'-infinity'", "'294276-12-31'", "'4713-01-01 BC'")
_BAD_NUMBERS = ("'NaN'", "'infinity'", "'-infinity'")
POISONED = [
    (table.name, column.name, value)
    for table in metadata.sorted_tables
    if table.name not in _WRITTEN_BY_STEPS
    for column in table.columns
    for value in (
        _BAD_TIMES
        if isinstance(column.type, DateTime | Instant)
        else _BAD_NUMBERS
        if isinstance(column.type, Float | Real)
        else ()
    )
    # It may be far ahead, and is never read.
    if not (table.name == "rate" and value[1].isdigit())
]
_NONE = "array_fill(0::bigint, ARRAY[{}])"
BUCKETS = (
    "array_fill(-1::bigint, ARRAY[20])",
    "array_fill(9223372036854775807, ARRAY[20])",
    "array_fill(NULL::bigint, ARRAY[20])",
    "array_fill(0::bigint, ARRAY[4, 5])",
    "array_fill(0::bigint, ARRAY[20], ARRAY[0])",
)
POISONED += [("stat", column, value) for column in ("wait", "run") for value in BUCKETS]
POISONED += [("stat", column, value) for column in ("done", "lost") for value in ("-1", "9223372036854775807")]

CHECKED_BEFORE = {
    "job.run_at", "job.created_at", "job.expires_at", "schedule.next_at", "schedule.jitter_seconds",
    "queue.rate_seconds", "queue.keep_dead_seconds", "progress.fraction", "stat.wait", "stat.run", "effect.expires_at",
}  # fmt: skip
_NAMES = ("queues", "kinds", "free")
POISONED += [("relay_status", column, "'{NULL}'") for column in _NAMES]
POISONED += [("relay_status", column, "'{{a,b},{c,d}}'") for column in _NAMES]
# Columns that are newer than the checks.
ADDED_SINCE = {"schedule.disabled_at"}
_GOOD = {"kind": "k", "queue": "q"}
BAD_CALLBACKS: list[object] = [
    {},
    {"kind": "k"},
    {"queue": "q"},
    *(
        {**_GOOD, **each}
        for each in (
            {"kind": None},
            {"kind": ""},
            {"kind": 1},
            {"kind": "k" * 64},
            {"queue": ["q"]},
            {"queue": "ж" * 32},
            {"args": []},
            {"args": "text"},
            {"headers": [1]},
            {"headers": {"x": "y" * 1_048_000}},
            {"priority": 32_768},
            {"priority": -32_768},
            {"priority": 1.5},
            {"priority": "high"},
            {"priority": {}},
            {"max_attempts": 0},
            {"max_attempts": 10**40},
            {"run_at": "infinity"},
            {"run_at": "-infinity"},
            {"run_at": "2026-02-31T00:00:00Z"},
            {"run_at": "294276-01-01T00:00:00Z"},
            {"run_at": 7},
            {"delay_seconds": "NaN"},
            {"delay_seconds": "Infinity"},
            {"delay_seconds": 1e308},
            {"delay_seconds": -1},
            {"delay_seconds": [1]},
            {"expires_seconds": 1e300},
            {"expires_seconds": "soon"},
            {"coalesce": "k" * 1025},
            {"group": "ж" * 513},
        )
    ),
]


@pytest.fixture
def admin(database: Database) -> Iterator["psycopg.Connection"]:
    with psycopg.connect(libpq_url(database.url), autocommit=True) as connection:
        yield connection


@pytest.fixture
def before(empty_engine: Engine) -> None:
    """The tables at the step before the checks."""
    with empty_engine.begin() as connection:
        migrate(connection, to=BEFORE)


def refused(admin: "psycopg.Connection", statement: str) -> bool:
    """Whether a check refuses a row, or a cast of one does."""
    try:
        admin.execute(statement)
    except (psycopg.errors.CheckViolation, psycopg.errors.DataError):
        return True
    return False


def callback(value: object) -> dict[str, str]:
    return {"callback": "'" + json.dumps(value).replace("'", "''") + "'"}


def test_no_row_holds_a_time_or_a_number_that_cannot_be_read(empty_engine: Engine, admin: "psycopg.Connection") -> None:
    """Every column of a time and of a float, of every table that a role of ours writes: a new one needs its check."""
    with empty_engine.begin() as connection:
        migrate(connection)
    for table in ROWS:
        admin.execute(insert_row(table))
    for table, column, value in POISONED:
        assert refused(admin, insert_row(table, {column: value})), f"{table}.{column} takes {value}"


def test_every_time_is_tried(empty_engine: Engine, admin: "psycopg.Connection") -> None:
    """By the catalog: whatever type of Python's a column has."""
    with empty_engine.begin() as connection:
        migrate(connection)
    times = admin.execute(
        "SELECT table_name, column_name FROM information_schema.columns "
        "WHERE table_schema = 'outboxq' AND data_type = 'timestamp with time zone'"
    ).fetchall()
    tried = {(table, column) for table, column, value in POISONED if value == "'infinity'"}
    assert {each for each in times if each[0] not in _WRITTEN_BY_STEPS} <= tried


def test_no_batch_has_a_callback_that_cannot_become_a_job(empty_engine: Engine, admin: "psycopg.Connection") -> None:
    """By the casts with which it would become one."""
    with empty_engine.begin() as connection:
        migrate(connection)
    for value in BAD_CALLBACKS:
        assert refused(admin, insert_row("batch", callback(value))), f"a batch takes the callback {value}"[:200]


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"priority": 32_767, "max_attempts": 32_767, "delay": timedelta(days=36_500)},
        {"priority": -32_767, "max_attempts": 1, "expires": timedelta(days=36_500), "headers": {"x": "y" * 60_000}},
        {"run_at": datetime(9998, 12, 31, tzinfo=UTC), "coalesce": "k" * 512},
        {"run_at": datetime(2, 1, 4, 1, 2, 3, 4, tzinfo=timezone(timedelta(hours=-5, minutes=30)))},
        {"group": "ж" * 256},
        {"delay": timedelta(microseconds=1)},
    ],
)
def test_every_job_that_can_be_stored_is_taken_as_a_callback(
    empty_engine: Engine, admin: "psycopg.Connection", options: dict[str, Any]
) -> None:
    """The ends of every option: what a producer of before stores is still taken."""
    with empty_engine.begin() as connection:
        migrate(connection)
    stored = dump(external("k", queue="q").options(**options).job(text="x" * 200_000))
    admin.execute(insert_row("batch", {"callback": "%s"}), [msgspec.json.encode(stored).decode()])


@pytest.mark.usefixtures("before")
def test_rows_of_before_are_repaired_or_buried_and_hold_up_no_step(
    empty_engine: Engine, admin: "psycopg.Connection"
) -> None:
    """What can be set is set, history of no time goes, and a callback that cannot run becomes a dead letter."""
    for table, column, value in POISONED:
        if f"{table}.{column}" in ADDED_SINCE:
            continue
        free = {name: "gen_random_uuid()" for name in ("key", "name", "queue") if _is_key(table, name)}
        if refused(admin, insert_row(table, {**free, column: value})):
            # Earlier steps check these; an unknown effect never expires.
            assert f"{table}.{column}" in CHECKED_BEFORE
    for value in (*BAD_CALLBACKS, {**_GOOD, "args": {"order": 7}, "priority": 40_000}):
        admin.execute(insert_row("batch", callback(value)))
    admin.execute(insert_row("batch", callback({**_GOOD, "args": {"order": 8}})))
    # An action that is over, which its trigger keeps.
    admin.execute(insert_row("audit", {"at": "'infinity'", "finished_at": "clock_timestamp()"}))
    counts = {table: _count(admin, table) for table in CHECKS}
    with empty_engine.connect() as connection:
        migrate_committing(connection)
    names = [name for checks in CHECKS.values() for name in checks]
    validated = "SELECT bool_and(convalidated), count(*) FROM pg_constraint WHERE conname = ANY (%s)"
    assert admin.execute(validated, [names]).fetchone() == (True, len(names))
    buried = len(BAD_CALLBACKS) + 1
    kept = counts | {"batch": counts["batch"] - buried, "dead_job": counts["dead_job"] + buried, "stat": 0, "gauge": 0}
    # Arrays of two dimensions, whose relays write their rows again.
    kept["relay_status"] -= len(_NAMES)
    assert {table: _count(admin, table) for table in CHECKS} == kept
    # NULL stays NULL.
    stopped = sum((table, column) == ("audit", "stopped_at") for table, column, _ in POISONED)
    assert admin.execute("SELECT count(stopped_at) FROM outboxq.audit").fetchone() == (stopped,)
    said = "SELECT args FROM outboxq.dead_job WHERE reason = %s AND kind = 'k'"
    reason = "the callback of its batch cannot become a job"
    assert ({"order": 7},) in admin.execute(said, [reason]).fetchall()
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        admin.execute("UPDATE outboxq.audit SET actor = 'b' WHERE finished_at IS NOT NULL")


def _is_key(table: str, name: str) -> bool:
    column: Column[object] | None = metadata.tables[f"outboxq.{table}"].c.get(name)
    return column is not None and column.primary_key and not isinstance(column.type, Uuid)


def _count(admin: "psycopg.Connection", table: str) -> int:
    (count,) = admin.execute(f"SELECT count(*) FROM outboxq.{table}").fetchone() or (0,)
    return int(count)
