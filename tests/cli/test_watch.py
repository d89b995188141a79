"""`outboxq jobs watch`: each state that a job comes to, a line each, and an exit code that tells how it ended."""

import json
import subprocess
from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession
from outboxq.events import Event
from outboxq.postgres import Database
from tests.support import app
from tests.support.cli import call, command, environment
from tests.support.leases import lease
from tests.support.waiting import PATIENCE


def test_a_job_is_watched_until_it_is_gone(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession], drain: Callable[..., list[Event]]
) -> None:
    """First how it waits; after a relay has run it, that it is gone, and exit code 0."""
    with sessions.begin() as session:
        handle = session.add_job(app.record, name="watched")
    watching = subprocess.Popen(
        command("jobs", "watch", handle.id, "--json", "--every", "0.1", "--timeout", PATIENCE),
        env=environment(outboxq_database.url), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        assert (first["id"], first["state"], first["kind"], first["attempt"]) == (str(handle.id), "ready", "record", 0)
        drain()
        states = [json.loads(line)["state"] for line in watching.stdout]
    assert states[-1] == "gone"
    assert watching.returncode == 0


def test_a_job_that_dies_ends_with_1(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession], drain: Callable[..., list[Event]]
) -> None:
    """Also if it is dead already."""
    with sessions.begin() as session:
        handle = session.add_job(app.end, how="dead")
    drain()
    said = call("jobs", "watch", handle.id, url=outboxq_database.url)
    assert said.exit_code == 1
    assert f"{handle.id}  dead  end in " in said.stdout


def test_what_is_left_at_the_time_out_is_said(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession]
) -> None:
    """With an exit code of its own; a scheduled job says when it runs."""
    with sessions.begin() as session:
        session.add_job(app.record.options(delay=timedelta(hours=3)), name="later")
    said = call("jobs", "watch", "--queue", "ledger", "--timeout", "0", url=outboxq_database.url)
    assert said.exit_code == 3
    assert "scheduled" in said.stdout
    assert "runs in " in said.stdout
    assert "1 job is left" in said.stderr


def test_an_id_that_is_in_no_table_is_gone(outboxq_database: Database) -> None:
    """A job that was done before its watcher came looks the same."""
    said = call("jobs", "watch", uuid4(), url=outboxq_database.url).ok()
    assert "gone" in said.stdout


@pytest.mark.parametrize("words", [(), (uuid4(), "--queue", "mail")], ids=["nothing", "both"])
def test_ids_or_filters_are_needed(outboxq_database: Database, words: tuple[object, ...]) -> None:
    """Neither, or both, is wrong usage."""
    said = call("jobs", "watch", *words, url=outboxq_database.url)
    assert said.exit_code == 2
    assert "Give ids, or --queue NAME or --kind NAME" in said.stderr


def test_the_progress_of_a_job_that_runs_is_shown(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """In its line here, in the list of jobs that run, and on its own page; no terminal acts on its text."""
    with sessions.begin() as session:
        handle = session.add_job(app.record, name="x")
    noted = "INSERT INTO outboxq.progress (job_id, attempt, fraction, note, relay) VALUES (:id, 1, 0.4, :note, :id)"
    with engine.begin() as connection:
        lease(connection, handle.id, "1 hour")
        connection.execute(text(noted), {"id": handle.id, "note": "row \x1b[31m 4"})
    watched = call("jobs", "watch", handle.id, "--timeout", "0", url=outboxq_database.url)
    assert "40% row \\x1b[31m 4" in " ".join(watched.stdout.split())
    (row,) = call("jobs", "list", "--running", "--json", url=outboxq_database.url).ok().json["jobs"]
    assert (row["progress"], row["note"]) == (0.4, "row \x1b[31m 4")
    shown = call("jobs", "show", handle.id, url=outboxq_database.url).ok().stdout
    assert "0.4" in shown
    assert "\x1b" not in shown
