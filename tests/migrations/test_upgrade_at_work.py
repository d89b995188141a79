"""The newest steps come to a table of a million jobs while a producer works, and relays work behind them."""

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from sqlalchemy import Engine

from outboxq.migrations import LATEST
from outboxq.migrations.runner import migrate
from outboxq.postgres import Database
from tests.support import app
from tests.support.cli import REPOSITORY, environment, run
from tests.support.ledger import ledger
from tests.support.urls import libpq_url
from tests.support.waiting import PATIENCE, wait_until

BEFORE = 6
JOBS = 1_000_000
# Adds jobs in Python and in SQL until its standard input ends; then how many, and how long the slowest of them took.
PRODUCER = """
import json, select, sys, time
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker
from outboxq import OutboxSession
from tests.support import app

engine = create_engine(sys.argv[1])
sessions = sessionmaker(engine, class_=OutboxSession)
in_sql = text("SELECT outboxq.add_job('record', jsonb_build_object('name', cast(:name AS text)), 'ledger')")
count, slowest = 0, 0.0
while not select.select([sys.stdin], [], [], 0.002)[0]:
    begun = time.monotonic()
    with sessions.begin() as session:
        session.add_job(app.record, name=f"{count} in Python")
        session.execute(in_sql, {"name": f"{count} in SQL"})
    slowest = max(slowest, time.monotonic() - begun)
    count += 1
print(json.dumps({"count": count, "slowest_seconds": slowest}))
"""
ADDED = "SELECT count(*) FROM (SELECT FROM outboxq.job WHERE queue = 'ledger' LIMIT 20) AS added"
EXCLUSIVE = """
SELECT clock_timestamp() FROM pg_locks WHERE granted AND mode = 'AccessExclusiveLock'
  AND relation = 'outboxq.job'::regclass"""


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


@contextmanager
def watched(url: str) -> Iterator[list[float]]:
    """For how long, at most, the table was locked against everybody: looked at all the time, by the server's clock."""
    longest, stopping = [0.0], threading.Event()

    def watch() -> None:
        since = None
        with psycopg.connect(url, autocommit=True) as connection:
            while not stopping.is_set():
                row = connection.execute(EXCLUSIVE).fetchone()
                since = (since or row[0]) if row else None
                longest[0] = max(longest[0], (row[0] - since).total_seconds() if row else 0.0)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield longest
    finally:
        stopping.set()
        thread.join()


def upgrade_at_work(database: Database, engine: Engine) -> dict[str, float]:
    """Nothing is lost or doubled; how long the lock was seen, and what the producer says."""
    url = libpq_url(database.url)
    with engine.begin() as connection:
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
        with producing(database) as producer, watched(url) as longest:
            wait_until(lambda: admin.execute(ADDED).fetchone() > (10,), "the producer to work")
            outcome = run("migrate", "--json", url=database.url, seconds=300).ok()
            assert outcome.json["after"] == LATEST
            # Today's relays need step 9.
            with relaying(database):
                wait_until(lambda: len(ledger(engine)) > 10, "the relays to work behind it")
                said = json.loads(producer.communicate("enough", timeout=PATIENCE)[0])
                wait_until(lambda: len(ledger(engine)) == 2 * said["count"], "every job")
        waiting = admin.execute("SELECT count(*), min(attempt) FROM outboxq.job WHERE queue = 'later'").fetchone()
        assert waiting == (JOBS + 1, 0)
    names = [f"{number} in {language}" for number in range(said["count"]) for language in ("Python", "SQL")]
    assert ledger(engine) == Counter(names)
    return {"locked_seconds": longest[0], **said}


@pytest.mark.large
def test_a_million_jobs_get_their_checks_while_a_producer_works(database: Database, empty_engine: Engine) -> None:
    """No lock that keeps it waiting is held for a second, and every job that was added meanwhile is done once."""
    assert upgrade_at_work(database, empty_engine)["locked_seconds"] < 1.0
