"""Forks in users' code: the child ends when it comes back, and the outcome of the job is its parent's."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession
from outboxq.postgres import Database
from tests.relay.test_shutdown import started
from tests.support import forking_app
from tests.support.ledger import dead, ledger, waiting
from tests.support.waiting import PATIENCE, wait_until

TARGET = "tests.support.forking_app:jobs"
QUEUES = [part for queue in ("sync", "together", "lease", "async") for part in ("--queue", f"{queue}=2")]
CODES = {"return": 0, "raise": 1, "exit": 7, "interrupt": 1}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the application tells what became of children that were forked beside any session."""
    monkeypatch.setenv(forking_app.RESULTS, str(tmp_path))
    return tmp_path


@pytest.mark.large
def test_a_child_that_comes_back_to_the_relay_ends_and_the_job_is_its_parents(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], results: Path
) -> None:
    """It runs no job, commits nothing and calls nothing; its exit code is the one that its error would have had."""
    kinds = [forking_app.alone, forking_app.shared, forking_app.together, forking_app.leased, forking_app.once]
    kinds += [forking_app.task, forking_app.subtask]
    # One that goes back to the event loop never comes to its end.
    ended = [(kind, way, 1 if kind is forking_app.subtask else code) for kind in kinds for way, code in CODES.items()]
    expected = Counter(f"{kind.kind} {way} {code}" for kind, way, code in ended)
    expected["task await 1"] = 1
    with sessions.begin() as session:
        session.add_jobs(kind.job(way=way) for kind in kinds for way in CODES)
        session.add_job(forking_app.task, way="await")
    with started(*QUEUES, "--batch-size", 3, url=outboxq_database.url, target=TARGET) as process:
        wait_until(lambda: waiting(engine) == 0, "the jobs")
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert Counter(ledger(engine)) == expected, errors
    assert dead(engine) == 0
    assert "4111" not in errors


def test_a_child_reaches_nothing_of_its_parents(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], results: Path
) -> None:
    """What it sends in the session is refused, and what it closes is its own: the parent commits."""
    kinds = [forking_app.alone, forking_app.leased, forking_app.task]
    with sessions.begin() as session:
        session.add_jobs(kind.job(way=way) for kind in kinds for way in ("write", "close"))
    with started(*QUEUES, url=outboxq_database.url, target=TARGET) as process:
        wait_until(lambda: waiting(engine) == 0, "the jobs")
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE)
    # Under a lease the session has not begun, and begins by sending something: that is refused on a connection of the
    # parent's, and where none is free the child has made one of its own, whose rows end with it.
    found = Counter(re.sub(r"^(leased \w+) [01]$", r"\1", name) for name in ledger(engine).elements())
    expected = {"alone write 1", "task write 1", "leased write", "alone close 0", "leased close", "task close 0"}
    assert (process.returncode, found, dead(engine)) == (0, dict.fromkeys(expected, 1), 0), errors


def test_children_of_arounds_hooks_and_lifespans_end_too(
    outboxq_database: Database,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    results: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a child would run the handler, tell other hooks, or be a relay of its own."""
    monkeypatch.setenv(forking_app.LIFESPAN, "1")
    with sessions.begin() as session:
        session.add_job(forking_app.surrounded, way="")
        session.add_job(forking_app.discarded, way="")
    with started(*QUEUES, url=outboxq_database.url, target=TARGET) as process:
        wait_until(lambda: waiting(engine) == 0, "the jobs")
        wait_until((results / "heard exit 7").exists, "the hook")
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert ledger(engine) == {"entered raise 1": 1, "surrounded": 1, "left return 0": 1}
    assert sorted(os.listdir(results)) == ["enter raise 1", "heard exit 7", "leave of a child", "leave return 0"]


@pytest.mark.large
def test_a_signal_to_a_child_ends_the_child_and_not_the_relay(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], results: Path
) -> None:
    """Also one that comes as the child begins: it means there what it meant before the relay took it over."""
    with sessions.begin() as session:
        for way in ("terminate", "interrupt"):
            session.add_job(forking_app.multiprocess, way=way)
    with started(*QUEUES, url=outboxq_database.url, target=TARGET) as process:
        wait_until(lambda: waiting(engine) == 0, "the jobs")
        assert process.poll() is None
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, ledger(engine)) == (0, {"terminate {-15}": 1, "interrupt {1}": 1}), errors
    assert errors.count("relay is stopping") == 1
