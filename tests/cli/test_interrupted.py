"""Operators' changes that are rolled back: no job is taken for one whose relay died, and looking leaves no trace."""

import signal
import subprocess

import pytest
from sqlalchemy import Engine, text

from outboxq.postgres import Database
from tests.support.cli import call, command, environment
from tests.support.waiting import PATIENCE, wait_until

JOBS = 450


@pytest.fixture
def waiting(engine: Engine) -> list[str]:
    """Jobs for more than two pages; their ids."""
    with engine.begin() as connection:
        rows = connection.execute(
            text(
                "INSERT INTO outboxq.job (id, queue, kind, args) SELECT gen_random_uuid(), 'many', 'a', '{}' "
                "FROM generate_series(1, :jobs) RETURNING id"
            ),
            {"jobs": JOBS},
        )
        return [str(job_id) for (job_id,) in rows]


def on_delete(engine: Engine, body: str, *, deferred: bool = False) -> None:
    """Run PL/pgSQL for each job that is deleted, at once or at COMMIT."""
    when = "CONSTRAINT TRIGGER on_delete AFTER" if deferred else "TRIGGER on_delete BEFORE"
    how = "DEFERRABLE INITIALLY DEFERRED" if deferred else ""
    with engine.begin() as connection:
        connection.exec_driver_sql(
            f"CREATE FUNCTION on_delete() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {body}; RETURN OLD; END$$; "
            f"CREATE {when} DELETE ON outboxq.job {how} FOR EACH ROW EXECUTE FUNCTION on_delete()"
        )


def sleep_at(job_id: str) -> str:
    # Not for as long as a test waits: the driver gives up cancelling after five seconds, which a busy machine may take.
    return f"IF OLD.id = '{job_id}' THEN PERFORM pg_sleep(20); END IF"


def traces(engine: Engine) -> tuple[int, int]:
    """How many jobs are there, and how many of them a claim would take for one whose relay died."""
    marked = "count(*) FILTER (WHERE xmax <> '0'::xid AND pg_xact_status(xmax::text::xid8) = 'aborted')"
    with engine.connect() as connection:
        return tuple(connection.exec_driver_sql(f"SELECT count(*), {marked} FROM outboxq.job").one())


def selection(by: str, waiting: list[str]) -> list[str]:
    return ["--queue", "many", "--yes"] if by == "filter" else sorted(waiting)


@pytest.mark.parametrize("by", ["id", "filter"])
def test_a_refused_commit_of_a_cancellation_makes_no_suspects(
    outboxq_database: Database, engine: Engine, waiting: list[str], by: str
) -> None:
    """The pages before it stand; what the refused one had locked is as it was."""
    last = max(waiting)
    on_delete(engine, f"IF OLD.id = '{last}' THEN RAISE 'not this one'; END IF", deferred=True)
    said = call("jobs", "cancel", *selection(by, waiting), url=outboxq_database.url)
    assert said.exit_code == 1
    assert "not this one" in said.stderr
    assert traces(engine) == (50, 0)


@pytest.mark.wide
@pytest.mark.parametrize("by", ["id", "filter"])
def test_a_cancellation_that_runs_into_a_time_out_makes_no_suspects(
    outboxq_database: Database, engine: Engine, waiting: list[str], by: str
) -> None:
    """In the middle of a page, with rows locked."""
    on_delete(engine, sleep_at(sorted(waiting)[100]))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        name = connection.exec_driver_sql("SELECT current_database()").scalar_one()
        connection.exec_driver_sql(f'ALTER DATABASE "{name}" SET statement_timeout = 2000')
    said = call("jobs", "cancel", *selection(by, waiting), url=outboxq_database.url)
    assert said.exit_code == 1
    assert "57014" in said.stderr
    assert traces(engine) == (JOBS, 0)


@pytest.mark.parametrize("how", ["ctrl-c", "session ended"])
def test_a_cancellation_that_is_cut_off_makes_no_suspects(
    outboxq_database: Database, engine: Engine, waiting: list[str], how: str
) -> None:
    """By Ctrl-C, or by the end of its session, in the middle of its third page: what was committed stands."""
    on_delete(engine, sleep_at(sorted(waiting)[420]))
    process = subprocess.Popen(
        command("jobs", "cancel", "--queue", "many", "--yes"),
        env=environment(outboxq_database.url),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )

    def find() -> int | None:
        with engine.connect() as connection:
            asleep = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"
            return connection.exec_driver_sql(asleep).scalar()

    try:
        pid = wait_until(find, "the page that hangs", 40)
        if how == "ctrl-c":
            process.send_signal(signal.SIGINT)
        else:
            with engine.connect() as connection:
                connection.exec_driver_sql(f"SELECT pg_terminate_backend({pid})")
        _, said = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0
    assert "stopped after 400 cancelled: those stand" in said
    assert traces(engine) == (50, 0)


def test_no_transaction_changes_more_than_a_page(
    outboxq_database: Database, engine: Engine, waiting: list[str]
) -> None:
    """Two hundred rows, by id and by filter: so much is what an interruption can leave."""
    on_delete(engine, "INSERT INTO changed VALUES (pg_current_xact_id()::text)")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE changed (xid text)")
    call("jobs", "cancel", *waiting[:250], url=outboxq_database.url).ok()
    call("jobs", "cancel", "--queue", "many", "--yes", url=outboxq_database.url).ok()
    with engine.connect() as connection:
        counts = "SELECT count(*) FROM changed GROUP BY xid ORDER BY 1"
        assert connection.exec_driver_sql(counts).scalars().all() == [50, 200, 200]


def test_what_only_looks_locks_no_row(outboxq_database: Database, engine: Engine, waiting: list[str]) -> None:
    """Lists, details, counts and the doctor leave every row as it was, down to its last locker."""
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, priority, attempt, crashes, errors, reason, "
            "created_at) VALUES (gen_random_uuid(), 'q', 'k', '{}', '{}', 0, 1, 0, '[]', 'no', now())"
        )
    for words in (
        ("jobs", "list"),
        ("jobs", "list", "--running"),
        ("jobs", "show", waiting[0]),
        ("dead", "list"),
        ("stats",),
        ("queues", "list"),
        ("doctor",),
    ):
        call(*words, url=outboxq_database.url)
    with engine.connect() as connection:
        for table in ("job", "dead_job"):
            locked = f"SELECT count(*) FROM outboxq.{table} WHERE xmax <> '0'::xid"
            assert connection.exec_driver_sql(locked).scalar_one() == 0
