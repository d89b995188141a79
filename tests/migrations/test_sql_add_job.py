"""The SQL function `add_job`: for triggers, and for producers in other languages."""

import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import RFC_4122, UUID, uuid4

import psycopg
import pytest
from psycopg.rows import DictRow, dict_row

import outboxq
from outboxq.postgres import Database
from tests.support.urls import libpq_url

KIB = 1024
Connection = psycopg.Connection[DictRow]


@pytest.fixture
def connection(outboxq_database: Database) -> Iterator[Connection]:
    """A plain driver connection to a database with the tables, as a producer without outboxq has it."""
    with psycopg.connect(libpq_url(outboxq_database.url), row_factory=dict_row) as connection:
        yield connection


def add_job(connection: Connection, arguments: str, parameters: list[object] | None = None) -> DictRow:
    """Call `outboxq.add_job(<arguments>)`; the row that it wrote, with the time of the call."""
    job_id = connection.execute(f"SELECT outboxq.add_job({arguments}) AS id", parameters).fetchone()
    assert job_id is not None
    row = connection.execute("SELECT *, now() AS asked_at FROM outboxq.job WHERE id = %s", [job_id["id"]]).fetchone()
    assert row is not None
    return row


def test_a_kind_alone_makes_a_ready_job(connection: Connection) -> None:
    """Everything else has the defaults of Python's add_job."""
    row = add_job(connection, "'greet'")
    expected = {
        "kind": "greet", "queue": "default", "args": {}, "headers": {}, "priority": 0, "state": "ready",
        "attempt": 0, "max_attempts": None, "crashes": 0, "errors": [],
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert row["asked_at"] <= row["run_at"] <= row["asked_at"] + timedelta(seconds=30)


def test_every_argument_has_a_name(connection: Connection) -> None:
    """Named arguments arrive in their columns."""
    row = add_job(
        connection,
        "kind => 'greet', queue => 'mail', args => '{\"user_id\": 7}', priority => 5, max_attempts => 3, "
        'headers => \'{"trace": "abc"}\'',
    )
    expected = {
        "kind": "greet", "queue": "mail", "args": {"user_id": 7}, "headers": {"trace": "abc"}, "priority": 5,
        "max_attempts": 3, "state": "ready",
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected


def test_a_delay_counts_from_the_database_clock(connection: Connection) -> None:
    """A delayed job is scheduled that much later; no delay at all is ready."""
    row = add_job(connection, "'greet', delay => interval '1 hour'")
    assert row["state"] == "scheduled"
    assert timedelta(hours=1) <= row["run_at"] - row["asked_at"] <= timedelta(hours=1, seconds=30)
    assert add_job(connection, "'greet', delay => interval '0'")["state"] == "ready"


def test_run_at_is_kept_as_given(connection: Connection) -> None:
    """Also one in the past, which is due at once."""
    for wanted in (datetime(2100, 1, 1, tzinfo=UTC), datetime(2000, 1, 1, tzinfo=UTC)):
        row = add_job(connection, "'greet', run_at => %s", [wanted])
        assert (row["state"], row["run_at"]) == ("scheduled", wanted)


SECRET = '{"secret": "hunter2"}'


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (f"'k', '{SECRET}', delay => '1 hour', run_at => now()", "delay or run_at, not both"),
        (f"'k', '{SECRET}', delay => '-1 second'", "a delay of 0 to 36500 days, got -00:00:01"),
        (f"'k', '{SECRET}', run_at => '-infinity'", "a run_at in the years 1 to 9999, got -infinity"),
        (f"'k', '{SECRET}', run_at => 'infinity'", "a run_at in the years 1 to 9999, got infinity"),
        (f"'k', '{SECRET}', run_at => '0044-03-15 BC'", "a run_at in the years 1 to 9999, got 0044-03-15"),
        (f"NULL, '{SECRET}'", "no NULL for kind"),
        ("'k', NULL", "no NULL for kind, args"),
        (f"'k', '{SECRET}', queue => NULL", "no NULL for kind, args, queue"),
        (f"'', '{SECRET}'", "a kind of 1 to 63 bytes without control characters, got ''"),
        (f"repeat('ö', 32), '{SECRET}'", "a kind of 1 to 63 bytes"),
        (f"E'a\\nb', '{SECRET}'", "a kind of 1 to 63 bytes without control characters"),
        (f"'k', '{SECRET}', queue => repeat('x', 64)", "a queue of 1 to 63 bytes"),
        (f"'k', '{SECRET}', queue => 'a,b'", "a queue of 1 to 63 bytes"),
        (f"'k', '{SECRET}', queue => ' a'", "a queue of 1 to 63 bytes"),
        ("'k', '[\"hunter2\"]'", "args that are a JSON object, got a JSON array"),
        (f"'k', '{SECRET}', headers => '[]'", "headers that are a JSON object of strings"),
        (f"'k', '{SECRET}', headers => '{{\"a\": 1}}'", "headers that are a JSON object of strings"),
        (f"'k', '{SECRET}', headers => '{{\"a\": [\"b\"]}}'", "headers that are a JSON object of strings"),
        (f"'k', '{SECRET}', priority => -32768", "a priority from -32767 to 32767, got -32768"),
        (f"'k', '{SECRET}', priority => 40000", "a priority from -32767 to 32767, got 40000"),
        (f"'k', '{SECRET}', max_attempts => 0", "max_attempts from 1 to 32767, got 0"),
    ],
)
def test_what_cannot_be_a_job_is_refused_without_showing_the_payload(
    connection: Connection, arguments: str, said: str
) -> None:
    """The error says what add_job takes; the constraints' errors, which hold the whole row, never come up."""
    with pytest.raises(psycopg.errors.InvalidParameterValue) as refused:
        connection.execute(f"SELECT outboxq.add_job({arguments})")
    assert f"add_job takes {said}" in str(refused.value)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(("size", "fits"), [(256 * KIB, True), (256 * KIB + 1, False)])
def test_arguments_may_take_256_kib(connection: Connection, size: int, fits: bool) -> None:
    """One byte more is refused, with what to do instead and without the payload."""
    args = json.dumps({"text": ""})
    args = json.dumps({"text": "x" * (size - len(args))})
    assert len(args) == size
    if fits:
        assert len(add_job(connection, "'k', %s", [args])["args"]["text"]) > 256 * KIB - 100
        return
    with pytest.raises(psycopg.errors.ProgramLimitExceeded) as refused:
        add_job(connection, "'k', %s", [args])
    assert f"up to 256 KiB of JSON, got {size} bytes" in str(refused.value)
    assert "Store the data in a table of yours" in str(refused.value)
    assert "xxx" not in str(refused.value)


@pytest.mark.parametrize(("size", "fits"), [(64 * KIB, True), (64 * KIB + 1, False)])
def test_headers_may_take_64_kib(connection: Connection, size: int, fits: bool) -> None:
    """As in Python: every claim reads them."""
    headers = json.dumps({"text": ""})
    headers = json.dumps({"text": "x" * (size - len(headers))})
    if fits:
        assert len(add_job(connection, "'k', headers => %s", [headers])["headers"]["text"]) > 64 * KIB - 100
        return
    with pytest.raises(psycopg.errors.ProgramLimitExceeded) as refused:
        add_job(connection, "'k', headers => %s", [headers])
    assert f"headers of up to 64 KiB of JSON, got {size} bytes" in str(refused.value)
    assert "xxx" not in str(refused.value)


@pytest.mark.parametrize("moment", ["-infinity", "infinity", "0044-03-15 BC", "20000-01-01"])
@pytest.mark.parametrize("column", ["run_at", "created_at"])
def test_a_time_that_python_cannot_read_never_enters_the_table(
    connection: Connection, column: str, moment: str
) -> None:
    """However a job is written: one that a claim cannot read would stand before its queue for ever."""
    with pytest.raises(psycopg.errors.CheckViolation, match="job_times"):
        connection.execute(
            f"INSERT INTO outboxq.job (id, queue, kind, args, {column}) "
            "VALUES (gen_random_uuid(), 'q', 'k', '{}', %s::text::timestamptz)",
            [moment],
        )


def test_ids_are_uuids_of_version_7_in_the_order_of_time(connection: Connection) -> None:
    """Well-formed, stamped with the database's milliseconds, and growing from one millisecond to the next."""
    ids: list[UUID] = []
    for _ in range(20):
        before_ms = _clock_milliseconds(connection)
        job_id = add_job(connection, "'k'")["id"]
        assert before_ms <= job_id.int >> 80 <= _clock_milliseconds(connection)
        assert (job_id.version, job_id.variant) == (7, RFC_4122)
        ids.append(job_id)
        while _clock_milliseconds(connection) <= job_id.int >> 80:
            pass  # two ids of one millisecond are in no order
    assert ids == sorted(ids)
    assert time.time() - (ids[-1].int >> 80) / 1000 < 3600


def test_many_ids_of_one_statement_differ(connection: Connection) -> None:
    """74 random bits tell the jobs of one millisecond apart."""
    rows = connection.execute("SELECT outboxq.add_job('k') AS id FROM generate_series(1, 2000)").fetchall()
    assert len({row["id"] for row in rows}) == 2000
    assert {row["id"].version for row in rows} == {7}


def test_an_id_of_the_callers_own_is_taken_once(connection: Connection) -> None:
    """With it a producer may repeat a call of unknown outcome: the second is refused as a duplicate."""
    job_id = uuid4()
    assert add_job(connection, "'k', id => %s", [job_id])["id"] == job_id
    with pytest.raises(psycopg.errors.UniqueViolation):
        add_job(connection, "'k', id => %s", [job_id])


ORDERS = "CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, status text NOT NULL)"


def documented_trigger() -> str:
    """The example in the documentation."""
    page = (Path(outboxq.__file__).parents[1] / "docs" / "migrations.md").read_text(encoding="utf-8")
    (example,) = (sql for sql in re.findall(r"```sql\n(.*?)```", page, flags=re.DOTALL) if "CREATE TRIGGER" in sql)
    return example


def test_a_trigger_of_the_user_adds_jobs_in_the_transaction_of_the_row(connection: Connection) -> None:
    """The job is there if and only if the row is: a rollback, of a savepoint too, takes both."""
    connection.execute(ORDERS)
    connection.execute(documented_trigger())
    connection.commit()

    connection.execute("INSERT INTO orders (status) VALUES ('new'), ('paid')")
    connection.rollback()
    assert _ordered(connection) == []

    connection.execute("INSERT INTO orders (status) VALUES ('new'), ('paid')")
    connection.execute("SAVEPOINT later")
    connection.execute("UPDATE orders SET status = 'paid' WHERE status = 'new'")
    assert len(_ordered(connection)) == 2
    connection.execute("ROLLBACK TO SAVEPOINT later")
    connection.commit()
    paid = connection.execute("SELECT id FROM orders WHERE status = 'paid'").fetchall()
    assert _ordered(connection) == [{"order_id": row["id"]} for row in paid]
    assert len(paid) == 1


def _ordered(connection: Connection) -> list[object]:
    query = "SELECT args FROM outboxq.job WHERE kind = 'ship_order' AND queue = 'shipping' ORDER BY seq"
    return [row["args"] for row in connection.execute(query)]


def _clock_milliseconds(connection: Connection) -> int:
    row = connection.execute("SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint AS ms").fetchone()
    assert row is not None
    return int(row["ms"])
