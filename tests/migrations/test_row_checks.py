"""Steps 7 and 8: what a row of `job` may hold, for those that were there before, and beside the work."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine

from outboxq.migrations import LATEST
from outboxq.migrations.runner import migrate, migrate_committing
from outboxq.migrations.step_07_checks import CHECKS as CHECKS_SQL
from outboxq.postgres import Database
from tests.migrations.project import run_psql
from tests.support.cli import call, command, environment
from tests.support.own_server import own_server
from tests.support.row_checks import CHECKS, drop_checks
from tests.support.urls import libpq_url
from tests.support.waiting import PATIENCE, wait_until

BEFORE = 6

NUMBER = 2**63 - 1
# Rows of before: what they hold, and what it is set to.
REPAIRED = [
    ("attempt", "-1", 0),
    ("attempt", "-2147483648", 0),
    ("attempt", "2147483647", 2147483646),
    ("crashes", "-32768", 0),
    ("crashes", "32767", 32766),
    ("parked", "-32768", 0),
    ("parked", "32767", 32766),
    ("lease_token", f"{-NUMBER - 1}", 0),
    ("lease_token", f"{NUMBER}", NUMBER - 1),
    ("state", "'leased'", "suspect"),
]
# As long as may be, and longer: a number takes a few bytes, and is a text of a hundred thousand digits.
LONG_JSON = "jsonb_build_object('text', repeat('x', {}))"
BOMB = "jsonb_build_object('numbers', (SELECT jsonb_agg(1e131071::numeric) FROM generate_series(1, {})))"
LONG = {"args": 2**24 - len('{"text": ""}'), "headers": 2**20 - len('{"text": ""}')}
REFUSED = [
    ("args", LONG_JSON.format(LONG["args"] + 1)),
    ("headers", LONG_JSON.format(LONG["headers"] + 1)),
    ("unique_key", "repeat('x', 1025)"),
    ("group_key", "repeat('ж', 513)"),
    ("args", BOMB.format(130)),
]
ALLOWED = [
    ("args", LONG_JSON.format(LONG["args"])),
    ("headers", LONG_JSON.format(LONG["headers"])),
    ("unique_key", "repeat('x', 1024)"),
    ("group_key", "repeat('ж', 512)"),
    ("args", BOMB.format(60)),
    ("attempt", "2147483646"),
    ("crashes", "32766"),
    ("parked", "32766"),
    ("lease_token", f"{NUMBER - 1}"),
    ("state", "'suspect'"),
]


def insert(connection: psycopg.Connection, column: str, value: str) -> None:
    values = {"id": "gen_random_uuid()", "queue": "'q'", "kind": "'k'", "args": "'{}'", column: value}
    connection.execute(f"INSERT INTO outboxq.job ({', '.join(values)}) VALUES ({', '.join(values.values())})")


@pytest.fixture
def admin(database: Database) -> Iterator[psycopg.Connection]:
    with psycopg.connect(libpq_url(database.url), autocommit=True) as connection:
        yield connection


@pytest.fixture
def before(empty_engine: Engine) -> None:
    """The tables at the step before the checks."""
    with empty_engine.begin() as connection:
        migrate(connection, to=BEFORE)


def upgrade(engine: Engine) -> tuple[int, int]:
    with engine.connect() as connection:
        return migrate_committing(connection)


def migrating(database: Database, *options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command("migrate", *options),
        env=environment(database.url),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def validated(admin: psycopg.Connection) -> list[bool]:
    rows = admin.execute("SELECT convalidated FROM pg_constraint WHERE conname = ANY (%s)", [[*CHECKS]]).fetchall()
    return [row[0] for row in rows]


@pytest.mark.usefixtures("before")
@pytest.mark.parametrize("to", [BEFORE + 1, LATEST])
def test_numbers_of_before_are_set_to_what_may_be(empty_engine: Engine, admin: psycopg.Connection, to: int) -> None:
    """By the first of the two steps already: from then on no statement of a relay meets a row that it cannot change."""
    for column, value, _ in REPAIRED:
        insert(admin, column, value)
    insert(admin, "kind", "'well'")
    well = "SELECT to_jsonb(job) - '{batch_id,expires_at}'::text[] FROM outboxq.job WHERE kind = 'well'"
    unchanged = admin.execute(well).fetchone()
    with empty_engine.begin() as connection:
        migrate(connection, to=to)
    columns = "attempt, crashes, parked, lease_token, state"
    names = columns.split(", ")
    rows = admin.execute(f"SELECT {columns} FROM outboxq.job WHERE kind = 'k' ORDER BY seq").fetchall()
    usual = dict(zip(names, (0, 0, 0, 0, "ready"), strict=True))
    assert [dict(zip(names, row, strict=True)) for row in rows] == [
        usual | {column: repaired} for column, _, repaired in REPAIRED
    ]
    assert admin.execute(well).fetchone() == unchanged


@pytest.mark.large
@pytest.mark.usefixtures("before")
def test_what_no_relay_can_read_becomes_a_dead_letter(empty_engine: Engine, admin: psycopg.Connection) -> None:
    """Whole, with a reason; `dead retry` leaves it where it is, and takes the others."""
    for column, value in (*REFUSED, *ALLOWED):
        insert(admin, column, value)
    assert upgrade(empty_engine) == (BEFORE, LATEST)
    assert validated(admin) == [True] * 3
    assert admin.execute("SELECT count(*) FROM outboxq.job").fetchone() == (len(ALLOWED),)
    dead = admin.execute("SELECT reason, queue, kind, attempt FROM outboxq.dead_job").fetchall()
    assert dead == [("its arguments, headers or keys are longer than a relay reads", "q", "k", 0)] * len(REFUSED)
    url = empty_engine.url.render_as_string(hide_password=False)
    admin.execute("UPDATE outboxq.dead_job SET unique_key = NULL WHERE unique_key IS NOT NULL")
    outcome = call("dead", "retry", "--all", "--yes", "--json", url=url)
    assert outcome.exit_code == 1, outcome
    assert (outcome.json["retried"], len(outcome.json["refused"])) == (1, len(REFUSED) - 1)


@pytest.mark.wide
@pytest.mark.usefixtures("before")
def test_what_has_no_text_at_all_becomes_a_dead_letter(empty_engine: Engine, admin: psycopg.Connection) -> None:
    """160 kB that would come to more text than PostgreSQL can hold."""
    insert(admin, "args", BOMB.format(10_000))
    with pytest.raises((psycopg.errors.ProgramLimitExceeded, psycopg.errors.InternalError_)):
        admin.execute("SELECT octet_length(args::text) FROM outboxq.job")
    upgrade(empty_engine)
    ((reason, args),) = admin.execute("SELECT reason, args::text FROM outboxq.dead_job").fetchall()
    assert (reason.partition(", and ")[2], args) == ("than PostgreSQL can show: they were dropped", "{}")


@pytest.mark.usefixtures("before")
def test_a_dead_letter_with_the_same_id_is_not_overwritten(empty_engine: Engine, admin: psycopg.Connection) -> None:
    """A producer chooses ids: the one that is too long gets another."""
    insert(admin, "unique_key", "repeat('x', 1025)")
    admin.execute(
        "INSERT INTO outboxq.dead_job SELECT id, 'other', 'other', args, headers, priority, attempt, max_attempts, "
        "crashes, NULL, NULL, errors, 'first', created_at FROM outboxq.job"
    )
    upgrade(empty_engine)
    assert admin.execute("SELECT queue FROM outboxq.dead_job ORDER BY queue").fetchall() == [("other",), ("q",)]


@pytest.mark.first_and_last
@pytest.mark.parametrize(("column", "value"), [*((column, value) for column, value, _ in REPAIRED), *REFUSED])
def test_a_row_that_would_stop_others_is_refused(outboxq_database: Database, column: str, value: str) -> None:
    """By the table itself, whichever role writes it."""
    with (
        psycopg.connect(libpq_url(outboxq_database.url), autocommit=True) as connection,
        pytest.raises((psycopg.errors.CheckViolation, psycopg.errors.ProgramLimitExceeded, psycopg.errors.OutOfMemory)),
    ):
        insert(connection, column, value)


@pytest.mark.first_and_last
@pytest.mark.parametrize(("column", "value"), ALLOWED)
def test_a_row_at_its_bounds_is_let_in(outboxq_database: Database, column: str, value: str) -> None:
    """What the arithmetic of relays comes to is allowed."""
    with psycopg.connect(libpq_url(outboxq_database.url), autocommit=True) as connection:
        insert(connection, column, value)


@pytest.mark.usefixtures("before")
def test_while_transactions_are_open_the_step_waits_and_lets_others_through(
    database: Database, admin: psycopg.Connection
) -> None:
    """It asks for its lock a moment at a time, says that it waits, and goes on when the transaction has ended."""
    holder = psycopg.connect(libpq_url(database.url))
    insert(holder, "kind", "'held'")
    # The holder ends first, whatever becomes of the test.
    with migrating(database, "--json") as process, holder:
        assert process.stderr is not None
        said = process.stderr.readline()
        pid = holder.info.backend_pid
        waited_for = f'waiting for a moment without an open transaction on "outboxq".job, which is in use by pid {pid}'
        assert json.loads(said) == {"notice": waited_for}
        # Never for as long as this, were the lock waited for without an end.
        admin.execute("SET statement_timeout = '20s'")
        for _ in range(3):
            insert(admin, "kind", "'meanwhile'")
        assert process.poll() is None
        holder.commit()
        out, more = process.communicate(timeout=PATIENCE)
    assert (process.returncode, more) == (0, "")
    assert json.loads(out) == {"schema": "outboxq", "before": BEFORE, "after": LATEST}
    assert validated(admin) == [True] * 3


@pytest.mark.wide
@pytest.mark.usefixtures("before")
def test_for_a_row_that_is_held_the_first_of_the_two_steps_does_not_wait(
    database: Database, admin: psycopg.Connection
) -> None:
    """A handler may hold its row for minutes: the row is left to the step that waits beside the work."""
    insert(admin, "attempt", "-5")
    insert(admin, "unique_key", "repeat('x', 1025)")
    holder = psycopg.connect(libpq_url(database.url))
    # Ends the test, were the row waited for.
    holder.execute("SET idle_in_transaction_session_timeout = '20s'")
    holder.execute("SELECT FROM outboxq.job FOR UPDATE")
    with migrating(database) as process, holder:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("waiting for a moment without an open transaction")
        holder.rollback()
        assert process.wait(PATIENCE) == 0
    assert admin.execute("SELECT attempt FROM outboxq.job").fetchall() == [(0,)]
    assert admin.execute("SELECT count(*) FROM outboxq.dead_job").fetchone() == (1,)
    assert validated(admin) == [True] * 3


def insert_between(engine: Engine, admin: psycopg.Connection, values: dict[str, str]) -> None:
    """A row that came between the repair of step 7 and its lock."""
    with engine.begin() as connection:
        migrate(connection, to=BEFORE + 1)
    drop_checks(engine)
    values = {"id": "gen_random_uuid()", "queue": "'q'", "kind": "'k'", "args": "'{}'"} | values
    admin.execute(f"INSERT INTO outboxq.job ({', '.join(values)}) VALUES ({', '.join(values.values())})")
    admin.execute(f"ALTER TABLE outboxq.job {CHECKS_SQL}")


@pytest.mark.usefixtures("before")
def test_a_row_that_breaks_two_checks_does_not_stop_the_second_step(
    empty_engine: Engine, admin: psycopg.Connection
) -> None:
    """An UPDATE of its numbers would be refused for its length: it becomes a dead letter first, with numbers mended."""
    args = LONG_JSON.format(LONG["args"] + 1)
    insert_between(empty_engine, admin, {"attempt": "-5", "crashes": "32767", "args": args})
    assert upgrade(empty_engine) == (BEFORE + 1, LATEST)
    assert admin.execute("SELECT attempt, crashes FROM outboxq.dead_job").fetchall() == [(0, 32766)]
    assert admin.execute("SELECT count(*) FROM outboxq.job").fetchone() == (0,)


@pytest.mark.usefixtures("before")
@pytest.mark.parametrize(
    ("column", "value", "left"), [("attempt", "-5", [(0,), (0,)]), ("unique_key", "repeat('x', 1025)", [(0,)])]
)
def test_the_table_is_read_while_others_write(
    database: Database, empty_engine: Engine, admin: psycopg.Connection, column: str, value: str, left: list[object]
) -> None:
    """The lock of step 7 is given up before step 8 waits for a row that is held, and says so: no producer waits."""
    insert_between(empty_engine, admin, {column: value})
    holder = psycopg.connect(libpq_url(database.url))
    holder.execute("SELECT FROM outboxq.job FOR UPDATE")
    with migrating(database) as process, holder:
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'DO %'"
        wait_until(lambda: admin.execute(waits).fetchone() == (1,), "the step to meet the row")
        admin.execute("SET lock_timeout = '20s'")
        insert(admin, "kind", "'meanwhile'")
        holder.rollback()
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert said == ('waiting for the end of a transaction that holds a row of "outboxq".job which must be repaired\n')
    assert admin.execute("SELECT attempt FROM outboxq.job ORDER BY seq").fetchall() == left
    assert validated(admin) == [True] * 3


@pytest.mark.wide
@pytest.mark.parametrize("to", [BEFORE, BEFORE + 1])
def test_on_the_way_down_the_lock_is_asked_for_a_moment_at_a_time(
    database: Database, empty_engine: Engine, admin: psycopg.Connection, to: int
) -> None:
    """While a transaction is open, producers go on in both directions."""
    with empty_engine.begin() as connection:
        migrate(connection, to=to + 1)
    holder = psycopg.connect(libpq_url(database.url))
    # Ends the test, were the lock waited for without a word.
    holder.execute("SET idle_in_transaction_session_timeout = '20s'")
    insert(holder, "kind", "'held'")
    with migrating(database, "--to", str(to)) as process, holder:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("waiting for a moment without an open transaction")
        admin.execute("SET lock_timeout = '20s'")
        insert(admin, "kind", "'meanwhile'")
        holder.commit()
        assert process.wait(PATIENCE) == 0
    assert admin.execute("SELECT max(step) FROM outboxq.migration").fetchone() == (to,)


@pytest.mark.wide
def test_a_vacuum_of_the_servers_own_gives_way() -> None:
    """It does so only for a session that waits for as long as deadlock_timeout."""
    settings = {"autovacuum": "on", "autovacuum_naptime": "1s", "track_counts": "on"}
    with (
        own_server(settings) as server,
        server.create_database() as database,
        psycopg.connect(libpq_url(database.url), autocommit=True) as admin,
    ):
        admin.execute(call("migrate", "--sql", "--to", BEFORE).ok().stdout)
        # Minutes of work: a page takes a tenth of a second.
        admin.execute(
            "ALTER TABLE outboxq.job SET (autovacuum_vacuum_cost_delay = 100, autovacuum_vacuum_cost_limit = 1)"
        )
        admin.execute(
            "INSERT INTO outboxq.job (id, queue, kind, args) "
            "SELECT gen_random_uuid(), 'q', 'k', '{}' FROM generate_series(1, 100000)"
        )
        admin.execute("DELETE FROM outboxq.job")
        at_work = (
            "SELECT count(*) FROM pg_stat_activity JOIN pg_locks USING (pid) WHERE granted "
            "AND backend_type = 'autovacuum worker' AND relation = 'outboxq.job'::regclass"
        )
        wait_until(lambda: admin.execute(at_work).fetchone() == (1,), "the server to look after the table")
        with migrating(database) as process:
            try:
                _, said = process.communicate(timeout=PATIENCE)
            finally:
                process.kill()
        assert process.returncode == 0, said
        assert "waiting for a moment" in said
        assert validated(admin) == [True] * 3


@pytest.mark.usefixtures("before")
def test_a_time_out_of_the_session_is_the_same_afterwards(empty_engine: Engine) -> None:
    """What the step sets for its lock, it sets back: users' revisions follow in the same transaction."""
    with empty_engine.begin() as connection:
        connection.exec_driver_sql("SET LOCAL lock_timeout = '77s'")
        migrate(connection, to=LATEST)
        assert connection.exec_driver_sql("SHOW lock_timeout").scalar_one() == "77s"


def test_the_sql_for_psql_commits_between_the_two(
    database: Database, admin: psycopg.Connection, tmp_path: Path
) -> None:
    """One transaction would hold the lock of step 7 while step 8 reads the table."""
    sql = call("migrate", "--sql").ok().stdout
    first, second = sql.split("COMMIT;")[:2]
    assert "job_sizes CHECK" in first
    assert "VALIDATE CONSTRAINT job_sizes" not in first
    assert "VALIDATE CONSTRAINT job_sizes" in second
    run_psql(libpq_url(database.url), sql, tmp_path)
    assert validated(admin) == [True] * 3


@pytest.mark.first_and_last
@pytest.mark.parametrize("to", range(1, LATEST + 1))
def test_the_sql_for_psql_ends_at_its_step(database: Database, admin: psycopg.Connection, to: int) -> None:
    """On both sides of the COMMIT."""
    admin.execute(call("migrate", "--sql", "--to", to).ok().stdout)
    assert admin.execute("SELECT max(step) FROM outboxq.migration").fetchone() == (to,)
