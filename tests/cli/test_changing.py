"""`outboxq jobs change`: what waits runs now, later, sooner than others, or with other arguments."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, RelayConfig
from outboxq.admin import jobs as admin
from outboxq.errors import ArgumentError
from outboxq.events import Event, JobDone, JobsSuspected
from outboxq.outbox.handle import JobHandle
from outboxq.postgres import Database
from tests.conftest import StartRelay
from tests.support import app
from tests.support.cli import call
from tests.support.ledger import ledger, rows
from tests.support.waiting import wait_until

Drain = Callable[..., list[Event]]
LATER = timedelta(hours=1)
APP = "tests.support.app:jobs"


def add(sessions: sessionmaker[OutboxSession], *names: str, delay: timedelta | None = None) -> list[JobHandle]:
    kind = app.record if delay is None else app.record.options(delay=delay)
    with sessions.begin() as session:
        return [session.add_job(kind, name=name) for name in names]


def test_what_waits_for_its_time_runs_now(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """At once, by relays that sleep: an UPDATE wakes none by itself."""
    add(sessions, "a", "b", delay=LATER)
    with start_relay(config=RelayConfig(poll_seconds=3600)) as running:
        said = call("jobs", "change", "--queue", "ledger", "--run-now", "--json", url=outboxq_database.url).ok().json
        wait_until(lambda: len(running.of(JobDone)) == 2, "the jobs to be done")
    assert said == {"changed": 2, "running": [], "refused": [], "not_found": []}
    assert ledger(engine) == {"a": 1, "b": 1}


def test_a_job_moves_to_another_time(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A ready job is put off; a time that has passed makes it ready."""
    (handle,) = add(sessions, "a")
    moment = datetime.now(UTC) + LATER
    call("jobs", "change", handle.id, "--run-at", moment.isoformat(), url=outboxq_database.url).ok()
    assert rows(engine, "SELECT state, run_at FROM outboxq.job") == [("scheduled", moment)]
    drain()
    assert ledger(engine) == {}
    call("jobs", "change", handle.id, "--run-at", "2020-01-01", url=outboxq_database.url).ok()
    assert rows(engine, "SELECT state FROM outboxq.job") == [("ready",)]
    drain()
    assert ledger(engine) == {"a": 1}


def test_a_suspect_is_put_off_and_keeps_its_crashes(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """It waits for its time, as a ready job does; for a time that has passed it stays a suspect, which runs alone."""
    (handle,) = add(sessions, "a")
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET state = 'suspect', crashes = 2"))
    url = outboxq_database.url
    call("jobs", "change", handle.id, "--run-at", "2020-01-01", url=url).ok()
    assert rows(engine, "SELECT state, crashes FROM outboxq.job") == [("suspect", 2)]
    moment = datetime.now(UTC) + LATER
    said = call("jobs", "change", handle.id, "--run-at", moment.isoformat(), "--json", url=url).ok().json
    assert said["changed"] == 1
    assert rows(engine, "SELECT state, run_at, crashes FROM outboxq.job") == [("scheduled", moment, 2)]
    drain()
    assert ledger(engine) == {}
    call("jobs", "change", handle.id, "--run-now", url=url).ok()
    drain()
    assert ledger(engine) == {"a": 1}


def test_a_higher_priority_runs_first(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Among jobs of a priority the order stays that in which they were added."""
    first, second, third = add(sessions, "a", "b", "c")
    call("jobs", "change", second.id, third.id, "--priority", 5, url=outboxq_database.url).ok()
    events = drain(slots_per_queue=1)
    done = [event.job.id for event in events if isinstance(event, JobDone)]
    assert done == [second.id, third.id, first.id]


def test_arguments_have_to_fit_their_handler(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The registry says so before anything is changed; what is unchecked is said to be so."""
    (handle,) = add(sessions, "a")
    url = outboxq_database.url
    for wrong, options in (
        ('{"name": 7}', ("--app", APP)),
        ('{"other": "x"}', ("--app", APP)),
        ("[]", ("--unchecked",)),
        ('{"name": "b"}', ()),
        ('{"name": "b"}', ("--app", APP, "--unchecked")),
    ):
        said = call("jobs", "change", handle.id, "--args", wrong, *options, url=url)
        assert said.exit_code == 2, said
    assert rows(engine, "SELECT args->>'name' FROM outboxq.job") == [("a",)]
    call("jobs", "change", handle.id, "--args", json.dumps({"name": "b"}), "--app", APP, url=url).ok()
    drain()
    assert ledger(engine) == {"b": 1}


def test_what_runs_is_neither_changed_nor_waited_for(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """A job that a transaction has, and one under a lease: both are named."""
    held, leased, free = add(sessions, "a", "b", "c")
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE outboxq.job SET state = 'leased', lease_owner = gen_random_uuid() WHERE id = :id"),
            {"id": leased.id},
        )
    with engine.connect() as relay:
        relay.execute(text("DELETE FROM outboxq.job WHERE id = :id"), {"id": held.id})
        said = call("jobs", "change", "--all", "--yes", "--priority", 7, "--json", url=outboxq_database.url)
        relay.rollback()
    assert (said.exit_code, said.json["changed"]) == (1, 1)
    assert set(said.json["running"]) == {str(held.id), str(leased.id)}
    assert rows(engine, "SELECT id FROM outboxq.job WHERE priority = 7") == [(free.id,)]


def test_a_group_has_neither_priorities_nor_times(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """Its jobs run in their order: that is refused, with the reason; a head that waits can run now."""
    (handle,) = add(sessions, "a")
    url = outboxq_database.url
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE outboxq.job SET state = 'grouped', group_key = 'g', run_at = now() + interval '1 hour'")
        )
    for option in (("--priority", 3), ("--run-at", "2020-01-01")):
        said = call("jobs", "change", handle.id, *option, url=url)
        assert (said.exit_code, "whose jobs run in their order" in said.stderr) == (1, True)
    call("jobs", "change", handle.id, "--run-now", url=url).ok()
    assert rows(engine, "SELECT state, run_at <= now(), priority FROM outboxq.job") == [("grouped", True, 0)]


def test_a_change_leaves_no_mark(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Neither one that is committed, nor one that the database refuses: no job runs alone for it."""
    add(sessions, "a", "b")
    url = outboxq_database.url
    call("jobs", "change", "--queue", "ledger", "--priority", 2, url=url).ok()
    with engine.begin() as connection:
        # Refused at COMMIT, when the rows are locked and changed.
        connection.execute(
            text(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN RAISE EXCEPTION 'not today'; END $$"
            )
        )
        connection.execute(
            text(
                "CREATE CONSTRAINT TRIGGER refuse AFTER UPDATE ON outboxq.job DEFERRABLE INITIALLY DEFERRED "
                "FOR EACH ROW EXECUTE FUNCTION refuse()"
            )
        )
    said = call("jobs", "change", "--queue", "ledger", "--priority", 3, url=url)
    assert (said.exit_code, "not today" in said.stderr) == (1, True)
    with engine.begin() as connection:
        connection.execute(text("DROP TRIGGER refuse ON outboxq.job"))
    events = drain()
    assert not [event for event in events if isinstance(event, JobsSuspected)]
    assert ledger(engine) == {"a": 1, "b": 1}


def test_a_dry_run_changes_nothing(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """It says how many would be."""
    add(sessions, "a", "b")
    said = call("jobs", "change", "--kind", "record", "--priority", 3, "--dry-run", url=outboxq_database.url).ok()
    assert "2 jobs would be changed" in said.stdout
    assert rows(engine, "SELECT DISTINCT priority FROM outboxq.job") == [(0,)]


@pytest.mark.parametrize(
    "change",
    [
        admin.JobChange(),
        admin.JobChange(run_now=True, run_at=datetime.now(UTC)),
        admin.JobChange(priority=40_000),
        admin.JobChange(run_at=datetime(2026, 1, 1)),  # without a time zone
        admin.JobChange(args='{"a": "' + "x" * 300_000 + '"}'),
    ],
)
def test_a_change_that_cannot_be_is_refused(engine: Engine, change: admin.JobChange) -> None:
    """At the call, with what it takes."""
    with engine.begin() as connection, pytest.raises(ArgumentError):
        admin.change_page(connection, admin.JobFilter(), change)
