"""Real processes, real SIGKILLs: a committed job takes effect exactly once, a rolled back one never."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session, sessionmaker

from outboxq import OutboxSession
from outboxq.postgres import Database
from tests.support import app
from tests.support.app import Effect
from tests.support.ledger import waiting
from tests.support.waiting import PATIENCE, wait_until

JOBS = 10_000
RELAYS = 4
SIGKILLS = 12
TERMINATED_BACKENDS = 12


@contextmanager
def relay_process(url: str, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
    """The command line's relay, with the tests' application; ended at the end."""
    command = [sys.executable, "-m", "outboxq", "relay", "tests.support.app:jobs", *options]
    process = subprocess.Popen(
        command, env={**os.environ, "OUTBOXQ_DATABASE_URL": url}, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()


@pytest.mark.large
@pytest.mark.timeout(1_200)
def test_10_000_jobs_survive_killed_relays_and_terminated_backends(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """The ledger has no unique constraint: it holds each committed job once, and none that was rolled back."""
    chance = random.Random(20_26)
    with ThreadPoolExecutor(2) as pool:
        committed = {name for part in pool.map(lambda part: enqueue_part(sessions, part), range(10)) for name in part}
    with ExitStack() as stack:
        options = ("--queue", "ledger=2", "--queue", "ledger-async=2", "--batch-size", "5", "--log-level", "error")
        relays = [stack.enter_context(relay_process(outboxq_database.url, *options)) for _ in range(RELAYS)]
        for step in range(SIGKILLS + TERMINATED_BACKENDS):
            # One fault each time the ledger has grown by its share, so that faults meet work from start to end.
            share = len(committed) * (step + 1) // (SIGKILLS + TERMINATED_BACKENDS + 2)
            wait_until(lambda share=share: ledger_size(engine) >= share, f"{share} effects", 5 * PATIENCE)
            if step % 2:
                terminate_a_working_backend(engine)
            else:
                victim = chance.choice([relay for relay in relays if relay.poll() is None])
                victim.send_signal(signal.SIGKILL)
                relays.append(stack.enter_context(relay_process(outboxq_database.url, *options)))
        wait_until(lambda: waiting(engine) == 0, "the queue to empty", 10 * PATIENCE)
    with Session(engine) as session:
        ledger = Counter(session.scalars(select(Effect.name)))
    assert {name: count for name, count in ledger.items() if count > 1} == {}, "doubled"
    assert committed - ledger.keys() == set(), "lost"
    assert ledger.keys() - committed == set(), "effects of jobs that were rolled back"


def enqueue_part(sessions: sessionmaker[OutboxSession], part: int) -> set[str]:
    """A tenth of the jobs, in transactions and savepoints of which some are rolled back; the committed names."""
    chance = random.Random(part)
    committed: set[str] = set()
    for number in range(0, JOBS // 10, 10):
        with sessions() as session:
            names = [f"{part}-{number + offset}" for offset in range(10)]
            for name in names:
                session.add_job(chance.choice([app.record, app.record_async]), name=name)
            with session.begin_nested() as savepoint:
                session.add_job(app.record, name=f"{part}-{number}-savepoint-rolled-back")
                savepoint.rollback()
            session.commit()
            committed.update(names)
            session.add_job(app.record, name=f"{part}-{number}-rolled-back")
            session.flush()
            session.rollback()
    return committed


def ledger_size(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(text("SELECT count(*) FROM effect_ledger")).scalar_one()


def terminate_a_working_backend(engine: Engine) -> None:
    """Ends one relay connection that has written in its open transaction."""
    end = text(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
        "AND backend_xid IS NOT NULL AND pid <> pg_backend_pid() LIMIT 1"
    )
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with engine.begin() as connection:
            if connection.execute(end).first() is not None:
                return
    raise AssertionError("no backend was at work")
