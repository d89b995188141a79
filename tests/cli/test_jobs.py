"""`outboxq jobs`: what waits and runs, one job in full, and cancelling."""

import threading
from datetime import timedelta
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, func, select, text
from sqlalchemy.orm import sessionmaker

from outboxq import Context, Jobs, OutboxSession, external
from outboxq.events import JobDone
from outboxq.outbox.handle import JobHandle
from outboxq.postgres import Database
from outboxq.tables import job
from tests.conftest import StartRelay
from tests.support import app
from tests.support.cli import Outcome, call, run
from tests.support.waiting import PATIENCE, wait_until

ship = external("ship", queue="depot")
ODD = "a'b\"; DROP TABLE outboxq.job; --[red]"


@pytest.fixture
def waiting(sessions: sessionmaker[OutboxSession]) -> dict[str, JobHandle]:
    """Four jobs: two in `ledger`, one of them for later, one of an external kind, one with an odd kind."""
    with sessions.begin() as session:
        return {
            "first": session.add_job(app.record, name="first"),
            "later": session.add_job(app.record.options(delay=timedelta(hours=1)), name="later"),
            "ship": session.add_job(ship, order_id=7),
            "odd": session.add_job(external(ODD, queue="odd;queue'"), note="\x1b[31m"),
        }


def stored(engine: Engine) -> set[UUID]:
    with engine.connect() as connection:
        return set(connection.execute(select(job.c.id)).scalars())


def listed(*options: object, url: str) -> list[str]:
    return [row["id"] for row in call("jobs", "list", "--json", *options, url=url).ok().json["jobs"]]


def test_the_list_is_a_table_with_whole_ids(outboxq_database: Database, waiting: dict[str, JobHandle]) -> None:
    """Where no terminal sets a width nothing is cut off, so that ids can be piped on."""
    said = run("jobs", "list", url=outboxq_database.url).ok().stdout
    for handle in waiting.values():
        (line,) = [line for line in said.splitlines() if str(handle.id) in line]
        assert handle.kind in line.split("\t")


def test_filters_narrow_the_list(outboxq_database: Database, waiting: dict[str, JobHandle]) -> None:
    """Queue, kind and state each match exactly, and quotes in them are data."""
    url = outboxq_database.url
    names = {name: str(handle.id) for name, handle in waiting.items()}
    assert listed(url=url) == list(names.values())
    assert listed("--queue", "ledger", url=url) == [names["first"], names["later"]]
    assert listed("--kind", "ship", url=url) == [names["ship"]]
    assert listed("--kind", ODD, "--queue", "odd;queue'", url=url) == [names["odd"]]
    assert listed("--state", "scheduled", url=url) == [names["later"]]
    assert listed("--queue", "ledger", "--state", "ready", url=url) == [names["first"]]
    assert listed("--queue", "x' OR ''='", url=url) == []


def test_the_list_says_when_there_is_more(outboxq_database: Database, waiting: dict[str, JobHandle]) -> None:
    """`--limit` bounds the list, and JSON says whether it was cut."""
    url = outboxq_database.url
    some = call("jobs", "list", "--limit", 3, "--json", url=url).ok().json
    assert (len(some["jobs"]), some["more"]) == (3, True)
    everything = call("jobs", "list", "--limit", 4, "--json", url=url).ok().json
    assert (len(everything["jobs"]), everything["more"]) == (4, False)
    assert "--limit" in call("jobs", "list", "--limit", 3, url=url).stderr


def test_the_keys_of_the_list_stay(outboxq_database: Database, waiting: dict[str, JobHandle]) -> None:
    """Programs rely on these keys; times and ids are strings, and the payload is not among them."""
    (row,) = call("jobs", "list", "--kind", "ship", "--json", url=outboxq_database.url).ok().json["jobs"]
    assert list(row) == [
        "id", "queue", "kind", "state", "priority", "attempt", "max_attempts", "crashes", "parked", "run_at",
        "created_at", "expires_at", "pid", "running_seconds", "progress", "note",
    ]  # fmt: skip
    assert UUID(row["id"]) == waiting["ship"].id
    assert row["run_at"].endswith("Z")
    assert row["pid"] is None


def test_running_shows_the_backend_and_since_when(
    outboxq_database: Database, waiting: dict[str, JobHandle], engine: Engine, start_relay: StartRelay
) -> None:
    """A job that a relay runs is listed with the pid of that relay's backend, and for how long."""
    begun, go_on, pids = threading.Event(), threading.Event(), list[int]()
    jobs = Jobs()

    @jobs.handler(queue="depot", kind="ship")
    def block(ctx: Context, order_id: int) -> None:
        pids.append(ctx.session.scalars(text("SELECT pg_backend_pid()")).one())
        begun.set()
        assert go_on.wait(PATIENCE)

    url = outboxq_database.url
    assert listed("--running", url=url) == []
    with start_relay(jobs) as running:
        try:
            assert begun.wait(PATIENCE)
            (row,) = run("jobs", "list", "--running", "--json", url=url).ok().json["jobs"]
            shown = call("jobs", "list", "--running", url=url).ok().stdout
            counted = {row["queue"]: row for row in call("stats", "--json", url=url).ok().json["queues"]}
        finally:
            go_on.set()
        wait_until(lambda: running.of(JobDone), "the job to be done")
    assert UUID(row["id"]) == waiting["ship"].id
    assert row["pid"] == pids[0]
    assert 0 <= row["running_seconds"] < 60
    assert f"\t{pids[0]}\t" in shown
    assert (counted["depot"]["running"], counted["depot"]["ready"]) == (1, 0)
    assert listed("--running", url=url) == []


def test_a_relay_that_was_killed_runs_nothing(
    outboxq_database: Database, waiting: dict[str, JobHandle], engine: Engine
) -> None:
    """A claim that was rolled back leaves its mark in the row, and is not taken for a running job."""
    with engine.connect() as connection:
        connection.execute(text("DELETE FROM outboxq.job WHERE kind = 'ship'"))
        assert listed("--running", url=outboxq_database.url) == [str(waiting["ship"].id)]
        connection.rollback()
    assert listed("--running", url=outboxq_database.url) == []


def test_show_has_the_arguments_as_they_are_stored(outboxq_database: Database, engine: Engine) -> None:
    """JSON is passed on as text: a number that a float cannot hold stays what it is."""
    with engine.begin() as connection:
        job_id = connection.execute(
            text("SELECT outboxq.add_job('k', '{\"n\": 12345678901234567890.10, \"m\": 1e400}')")
        )
        found = job_id.scalar_one()
    said = call("jobs", "show", found, "--json", url=outboxq_database.url).ok()
    assert '"n": 12345678901234567890.10' in said.stdout
    assert "1" + "0" * 400 in said.stdout
    assert said.json["errors"] == []
    assert said.json["headers"] == {}
    plain = call("jobs", "show", found, url=outboxq_database.url).ok().stdout
    assert plain.splitlines()[0].split() == ["id", str(found)]
    assert '"n": 12345678901234567890.10' in plain


def test_nothing_from_the_database_reaches_the_terminal_as_control(
    outboxq_database: Database, waiting: dict[str, JobHandle], engine: Engine
) -> None:
    """Escape sequences that a producer hid in a name or an argument are printed, not sent."""
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET kind = E'\\x1b]0;owned\\x07' WHERE kind = 'ship'"))
        connection.execute(text("UPDATE outboxq.job SET args = jsonb_build_object('a', chr(155) || chr(8238))"))
    url = outboxq_database.url
    for said in (call("jobs", "list", url=url), call("jobs", "show", waiting["ship"].id, url=url)):
        assert all(character in "\n\t" or character.isprintable() for character in said.ok().stdout)
        assert "\\x1b]0;owned\\x07" in said.stdout


def test_show_knows_where_a_job_went(outboxq_database: Database) -> None:
    """A job that is not there, or a dead letter, ends with 1 and says so."""
    said = call("jobs", "show", uuid4(), url=outboxq_database.url)
    assert said.exit_code == 1
    assert "no job with id" in said.stderr


@pytest.mark.wide
def test_cancel_deletes_jobs_by_id(outboxq_database: Database, waiting: dict[str, JobHandle], engine: Engine) -> None:
    """What is cancelled is gone; an id that is not there is named, and makes the exit code 1."""
    gone, missing = waiting["first"].id, uuid4()
    said = run("jobs", "cancel", gone, gone, missing, "--json", url=outboxq_database.url)
    assert said.exit_code == 1
    assert said.json == {"cancelled": 1, "running": [], "not_found": [str(missing)]}
    assert f"no job {missing}" in said.stderr
    assert stored(engine) == {handle.id for handle in waiting.values()} - {gone}
    assert call("jobs", "cancel", waiting["later"].id, url=outboxq_database.url).ok().stdout == "cancelled 1 job\n"


@pytest.mark.parametrize("by", ["id", "filter"])
def test_cancel_returns_at_once_where_a_transaction_holds_the_job(
    outboxq_database: Database, waiting: dict[str, JobHandle], engine: Engine, by: str
) -> None:
    """A running job is neither waited for nor touched: it is reported, and stays its relay's."""
    held = waiting["first"]
    selection = (held.id, waiting["later"].id) if by == "id" else ("--queue", "ledger")
    with engine.connect() as holder:
        holder.execute(text("DELETE FROM outboxq.job WHERE id = :id"), {"id": held.id})
        said = run("jobs", "cancel", *selection, "--json", url=outboxq_database.url)
        assert said.exit_code == 1
        assert said.json == {"cancelled": 1, "running": [str(held.id)], "not_found": []}
        assert "is running" in said.stderr
        holder.rollback()
    assert stored(engine) == {waiting[name].id for name in ("first", "ship", "odd")}


def test_cancel_by_filter_takes_every_page(outboxq_database: Database, engine: Engine) -> None:
    """More jobs than one transaction takes are all cancelled, and the others stay."""
    with engine.begin() as connection:
        connection.execute(
            text("SELECT outboxq.add_job(k, '{}', 'many') FROM unnest(ARRAY['a', 'b']) k, generate_series(1, 1200)")
        )
    said = call("jobs", "cancel", "--queue", "many", "--kind", "a", "--yes", "--json", url=outboxq_database.url).ok()
    assert said.json == {"cancelled": 1200, "running": [], "not_found": []}
    with engine.connect() as connection:
        left = connection.execute(select(job.c.kind, func.count()).group_by(job.c.kind)).all()
    assert [tuple(row) for row in left] == [("b", 1200)]


def test_cancel_of_everything_needs_two_words(
    outboxq_database: Database, waiting: dict[str, JobHandle], engine: Engine
) -> None:
    """`--all` alone asks; nobody there to answer means no."""
    assert call("jobs", "cancel", "--all", url=outboxq_database.url).exit_code == 2
    assert len(stored(engine)) == 4
    assert call("jobs", "cancel", "--all", "--yes", url=outboxq_database.url).ok().stdout == "cancelled 4 jobs\n"
    assert stored(engine) == set()


def test_a_filter_that_matches_nothing_is_done(outboxq_database: Database, waiting: dict[str, JobHandle]) -> None:
    """A clean-up that finds nothing to clean up has not failed."""
    said: Outcome = call("jobs", "cancel", "--queue", "x' OR true --", url=outboxq_database.url).ok()
    assert said.stdout == "cancelled 0 jobs\n"


@pytest.mark.parametrize("several", [False, True])
def test_a_job_that_an_operator_has_cancelled_is_told_by_the_audit(
    several: bool, outboxq_database: Database, waiting: dict[str, JobHandle]
) -> None:
    """Who did what to it, and when; of a job of which nothing is known, all that it may be."""
    url, job_id = outboxq_database.url, waiting["first"].id
    others = [waiting["ship"].id] if several else []
    call("jobs", "cancel", job_id, *others, url=url).ok()
    said = call("jobs", "show", job_id, url=url)
    assert said.exit_code == 1
    assert "did job.cancel to it at " in said.stderr
    assert "`outboxq audit show " in said.stderr
    assert "it is done, was cancelled, or never existed" in call("jobs", "show", uuid4(), url=url).stderr
