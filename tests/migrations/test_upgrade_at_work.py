"""The newest steps come to a table of many jobs while a producer works, and relays work behind them."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine

from outboxq.migrations import COMMIT_BEHIND, LATEST
from outboxq.migrations.runner import migrate
from outboxq.migrations.step_13_ranges import CHECKS
from outboxq.postgres import Database
from tests.support import app
from tests.support.cli import REPOSITORY, environment, run
from tests.support.ledger import ledger
from tests.support.plain_rows import insert_row
from tests.support.urls import libpq_url
from tests.support.waiting import PATIENCE, wait_until

BEFORE = 6
JOBS = 200_000
# Adds jobs in Python and in SQL until its standard input ends; then says how many.
PRODUCER = """
import select, sys
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker
from outboxq import OutboxSession
from tests.support import app

engine = create_engine(sys.argv[1])
sessions = sessionmaker(engine, class_=OutboxSession)
in_sql = text("SELECT outboxq.add_job('record', jsonb_build_object('name', cast(:name AS text)), 'ledger')")
count = 0
while not select.select([sys.stdin], [], [], 0.002)[0]:
    with sessions.begin() as session:
        session.add_job(app.record, name=f"{count} in Python")
        session.execute(in_sql, {"name": f"{count} in SQL"})
    count += 1
print(count)
"""
ADDED = "SELECT count(*) FROM (SELECT FROM outboxq.job WHERE queue = 'ledger' LIMIT 20) AS added"
FEW_JOBS = 100
# Of the transaction that asks: has it locked `job` against everybody, and how many rows of it did it read in whole?
READ = """
SELECT EXISTS (SELECT FROM pg_locks WHERE pid = pg_backend_pid() AND mode = 'AccessExclusiveLock'
               AND relation = 'outboxq.job'::regclass),
  (SELECT seq_tup_read FROM pg_stat_xact_all_tables WHERE relid = 'outboxq.job'::regclass),
  -- What is not sent yet would be counted for the next transaction too.
  pg_stat_force_next_flush()"""


@contextmanager
def migrating_behind(holder: "psycopg.Connection[Any]", database: Database) -> Iterator[None]:
    """A migration that waits for a transaction while the block runs, and is done once that is over."""
    with subprocess.Popen([sys.executable, "-m", "outboxq", "migrate"], env=_env(database)) as upgrade:
        try:
            yield
            assert upgrade.poll() is None
            holder.rollback()
            assert upgrade.wait(PATIENCE) == 0
        finally:
            upgrade.kill()


@contextmanager
def producing(database: Database) -> Iterator["subprocess.Popen[str]"]:
    """A producer's process."""
    producer = [sys.executable, "-c", PRODUCER, database.url]
    with subprocess.Popen(
        producer, env=_env(database), cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def relaying(database: Database) -> Iterator[None]:
    """Two relays."""
    options = ["--queue", "ledger=2", "--processes", "2"]
    relay = [sys.executable, "-m", "outboxq", "relay", "tests.support.app:jobs", *options]
    with subprocess.Popen(relay, env=_env(database), cwd=REPOSITORY, stderr=subprocess.DEVNULL) as relays:
        try:
            yield
        finally:
            relays.terminate()
            relays.wait(PATIENCE)


def _env(database: Database) -> dict[str, str]:
    return {**environment(database.url), "PYTHONPATH": str(REPOSITORY)}


@pytest.mark.wide
def test_many_jobs_get_their_checks_while_a_producer_works(database: Database, empty_engine: Engine) -> None:
    """Every job that was added meanwhile is done once."""
    url = libpq_url(database.url)
    with empty_engine.begin() as connection:
        migrate(connection, to=BEFORE)
        app.Base.metadata.create_all(connection)
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(
            "INSERT INTO outboxq.job (id, queue, kind, args) SELECT gen_random_uuid(), 'later', 'record', "
            f"jsonb_build_object('name', n) FROM generate_series(1, {JOBS}) AS n"
        )
        admin.execute(
            "INSERT INTO outboxq.job (id, queue, kind, args, attempt) "
            "VALUES (gen_random_uuid(), 'later', 'record', '{}', -1)"
        )
        with producing(database) as producer:
            wait_until(lambda: admin.execute(ADDED).fetchone() > (10,), "the producer to work")
            outcome = run("migrate", "--json", url=database.url, seconds=300).ok()
            assert outcome.json["after"] == LATEST
            # Today's relays need step 9.
            with relaying(database):
                wait_until(lambda: len(ledger(empty_engine)) > 10, "the relays to work behind it")
                count = int(producer.communicate("enough", timeout=PATIENCE)[0])
                wait_until(lambda: len(ledger(empty_engine)) == 2 * count, "every job")
        waiting = admin.execute("SELECT count(*), min(attempt) FROM outboxq.job WHERE queue = 'later'").fetchone()
        assert waiting == (JOBS + 1, 0)
    names = [f"{number} in {language}" for number in range(count) for language in ("Python", "SQL")]
    assert ledger(empty_engine) == Counter(names)


def test_under_its_lock_a_step_reads_the_table_for_its_indexes_only(empty_engine: Engine) -> None:
    """Everybody waits for that lock: the checks of all rows are made in a transaction behind it."""
    with empty_engine.begin() as connection:
        migrate(connection, to=BEFORE)
        connection.exec_driver_sql(
            "INSERT INTO outboxq.job (id, queue, kind, args) "
            f"SELECT gen_random_uuid(), 'later', 'record', '{{}}' FROM generate_series(1, {FEW_JOBS})"
        )
    reads = {}
    for step in range(BEFORE + 1, LATEST + 1):
        with empty_engine.begin() as connection:
            migrate(connection, to=step)
            locked, jobs = connection.exec_driver_sql(READ).one()[:2]
            # A vacuum beside it may have read a row.
            reads[step] = (locked, round(jobs / FEW_JOBS, 1))
    locking = {step: times for step, (locked, times) in reads.items() if locked}
    # Step 7 repairs rows before it locks, by two looks; step 9 makes four indexes.
    assert locking == {7: 2, 9: 4}
    # Step 11 locks `queue`, which every claim reads, and step 13 all tables but `job`.
    assert {*locking, 11, 13} == set(COMMIT_BEHIND)
    assert reads[8][1] > 0
    assert reads[10][1] > 0


def test_who_holds_the_settings_of_queues_holds_up_the_step_and_no_producer(
    database: Database, empty_engine: Engine
) -> None:
    """Claims read that table too, and wait for a moment at a time; jobs are added as ever."""
    with empty_engine.begin() as connection:
        migrate(connection, to=10)
    url = libpq_url(database.url)
    add = "INSERT INTO outboxq.job (id, queue, kind, args) VALUES (gen_random_uuid(), 'q', 'record', '{}')"
    waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'outboxq.queue'::regclass"
    with psycopg.connect(url, autocommit=True) as producer, psycopg.connect(url) as holder:
        producer.execute("SET lock_timeout = '150ms'")
        holder.execute("INSERT INTO outboxq.queue (name) VALUES ('q')")
        with migrating_behind(holder, database):
            wait_until(lambda: producer.execute(waits).fetchone() == (1,), "the step to wait")
            for _ in range(20):
                producer.execute(add)
        assert producer.execute("SELECT count(*) FROM outboxq.job").fetchone() == (20,)


@pytest.mark.wide
def test_who_writes_one_of_many_tables_holds_up_the_step_and_no_other_writer(
    database: Database, empty_engine: Engine
) -> None:
    """Step 13 has all of its tables at once or none, for a moment at a time: the last one's writer stops no other."""
    with empty_engine.begin() as connection:
        migrate(connection, to=12)
    url = libpq_url(database.url)
    *others, last = CHECKS
    waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = %s::regclass"
    with psycopg.connect(url, autocommit=True) as writer, psycopg.connect(url) as holder:
        # Longer than the step waits at a time, on a busy machine too.
        writer.execute("SET lock_timeout = '60s'")
        holder.execute(insert_row(last))
        with migrating_behind(holder, database):
            wait_until(lambda: writer.execute(waits, [f"outboxq.{last}"]).fetchone() == (1,), "the step to wait")
            for table in others:
                writer.execute(insert_row(table))


@pytest.mark.wide
@pytest.mark.parametrize("held", ["effect", "dead_job"])
def test_who_writes_one_of_two_tables_holds_up_the_step_and_no_other_writer(
    database: Database, empty_engine: Engine, held: str
) -> None:
    """Step 12 has both tables at once or neither, for a moment at a time: calls and burials go on while it waits."""
    with empty_engine.begin() as connection:
        migrate(connection, to=11)
    url = libpq_url(database.url)
    writes = {
        "effect": "INSERT INTO outboxq.effect (scope, key, status, provider_key, lock_token, locked_until) "
        "VALUES ('pay', gen_random_uuid()::text, 'started', gen_random_uuid(), gen_random_uuid(), now())",
        "dead_job": "INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, priority, attempt, crashes, errors, "
        "reason, created_at) VALUES (gen_random_uuid(), 'q', 'k', '{}', '{}', 0, 1, 0, '[]', 'gone', now())",
    }
    waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'ShareLock' AND relation = %s::regclass"
    with psycopg.connect(url, autocommit=True) as writer, psycopg.connect(url) as holder:
        # Longer than the step waits at a time, on a busy machine too.
        writer.execute("SET lock_timeout = '60s'")
        holder.execute(writes[held])
        with migrating_behind(holder, database):
            for _ in range(3):
                wait_until(lambda: writer.execute(waits, [f"outboxq.{held}"]).fetchone() == (1,), "the step to wait")
                for statement in writes.values():
                    writer.execute(statement)
        for table in writes:
            assert writer.execute(f"SELECT count(*) FROM outboxq.{table}").fetchone() == (3,)
