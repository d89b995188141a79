"""Progress notes of handlers: seen while their transactions are open, never waited for, and gone with the run."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import msgspec
import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Context, FoundJob, Jobs, OutboxSession, RelayConfig, find_job
from outboxq.admin.jobs import list_jobs, show_job
from outboxq.database.driver import run_script
from outboxq.errors import ArgumentError
from outboxq.events import JobDone
from outboxq.postgres import Database
from outboxq.relay.progress import ProgressWriter
from outboxq.statements.prune import delete_progress
from tests.conftest import StartRelay
from tests.support.app import QUICK, Effect
from tests.support.ledger import ledger, rows
from tests.support.statements import _JOB
from tests.support.waiting import PATIENCE, wait_until

Drain = Callable[..., list[Any]]
Sessions = sessionmaker[OutboxSession]


def noted(engine: Engine) -> list[tuple[object, ...]]:
    """Fraction and note of each row."""
    return rows(engine, "SELECT fraction, note FROM outboxq.progress ORDER BY fraction")


class Gates:
    """Where a handler stands until the test lets it go on."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()

    def stand(self) -> None:
        self.entered.set()
        assert self.leave.wait(PATIENCE)


@pytest.mark.first_and_last
@pytest.mark.parametrize("flavour", ["sync", "async"])
@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_note_is_seen_while_the_handlers_transaction_is_open(
    engine: Engine, sessions: Sessions, start_relay: StartRelay, claim: str, flavour: str
) -> None:
    """By find_job, by the list of jobs and by the job's own page; behind the run there is none."""
    jobs, gates = Jobs(), Gates()
    if flavour == "sync":

        @jobs.handler(claim=claim)
        def work(ctx: Context) -> None:
            ctx.session.add(Effect(name="x"))
            ctx.session.flush()
            ctx.progress(0.4, "4 of 10")
            gates.stand()

    else:

        @jobs.handler(claim=claim)
        async def work(ctx: AsyncContext) -> None:
            ctx.session.add(Effect(name="x"))
            await ctx.session.flush()
            ctx.progress(0.4, "4 of 10")
            await asyncio.to_thread(gates.stand)

    with sessions.begin() as session:
        handle = session.add_job(work)

    def found() -> FoundJob | None:
        with engine.connect() as connection:
            return find_job(connection, handle)

    with start_relay(jobs) as running:
        assert gates.entered.wait(PATIENCE)
        wait_until(lambda: noted(engine), "the note")
        progress = found().progress
        assert (found().state, progress.fraction, progress.note) == ("running", 0.4, "4 of 10")
        with engine.connect() as connection:
            (listed,) = list_jobs(connection, running=True)
            shown = show_job(connection, handle.id).job
        assert [(each.progress, each.note) for each in (listed, shown)] == [(0.4, "4 of 10")] * 2
        assert ledger(engine) == {}
        gates.leave.set()
        wait_until(lambda: running.of(JobDone), "the job")
        wait_until(lambda: not noted(engine), "the row to be deleted")
    assert found() is None


@pytest.mark.large
def test_of_many_notes_the_newest_is_written_and_few_are(
    engine: Engine, sessions: Sessions, start_relay: StartRelay
) -> None:
    """A handler that notes at every turn of a loop costs the database a write each second."""
    jobs, gates = Jobs(), Gates()

    @jobs.handler
    def work(ctx: Context) -> None:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            ctx.progress(0.5, "more")
        ctx.progress(1, "all")
        gates.stand()

    with engine.begin() as connection:
        connection.exec_driver_sql(_COUNT_WRITES)
    with sessions.begin() as session:
        session.add_job(work)
    with start_relay(jobs):
        wait_until(lambda: noted(engine) == [(1.0, "all")], "the last note")
        # At the first note, a second later, and behind the last one.
        assert len(rows(engine, "SELECT FROM written")) <= 3
        gates.leave.set()


_COUNT_WRITES = """
CREATE TABLE written (at timestamptz);
CREATE FUNCTION count_write() RETURNS trigger LANGUAGE plpgsql AS
  'BEGIN INSERT INTO public.written VALUES (clock_timestamp()); RETURN NULL; END';
CREATE TRIGGER count_writes AFTER INSERT ON outboxq.progress FOR EACH STATEMENT EXECUTE FUNCTION count_write();
"""


@pytest.mark.large
@pytest.mark.parametrize("ends", ["returns", "raises"])
def test_no_note_is_left_of_a_run_however_it_ends(engine: Engine, sessions: Sessions, drain: Drain, ends: str) -> None:
    """Also of a shared batch, of a retry, and of a drain, which ends right behind it."""
    jobs = Jobs()

    @jobs.handler(batchable=True, retry=QUICK)
    def work(ctx: Context, number: int) -> None:
        ctx.progress(0.5, str(number))
        wait_until(lambda: number in {int(note) for _, note in noted(engine)} or ctx.job.attempt > 1, "the note")
        if ends == "raises" and ctx.job.attempt == 1:
            raise ValueError

    with sessions.begin() as session:
        session.add_jobs(work.job(number=number) for number in range(3))
    drain(jobs, batch_size=3, slots_per_queue=1)
    assert noted(engine) == []
    assert rows(engine, "SELECT id FROM outboxq.job") == []


@pytest.mark.parametrize("breaks", ["DROP TABLE outboxq.progress", "ALTER TABLE outboxq.progress RENAME TO elsewhere"])
def test_without_the_table_jobs_run_and_one_line_says_so(
    engine: Engine, sessions: Sessions, start_relay: StartRelay, caplog: pytest.LogCaptureFixture, breaks: str
) -> None:
    """Tables of a step before: nothing is shown, and nothing fails."""
    jobs, gates = Jobs(), Gates()

    @jobs.handler
    def work(ctx: Context) -> None:
        ctx.progress(0.1)
        gates.stand()
        ctx.progress(0.2)

    with engine.begin() as connection:
        connection.execute(text(breaks))
    with sessions.begin() as session:
        handle = session.add_job(work)
    with start_relay(jobs) as running:
        wait_until(lambda: [each for each in caplog.records if "progress of handlers" in each.message], "the warning")
        with engine.connect() as connection:
            assert find_job(connection, handle).progress is None
        gates.leave.set()
        wait_until(lambda: running.of(JobDone), "the job")
    assert len([each for each in caplog.records if "outboxq migrate" in each.message]) == 1


def test_a_row_that_is_locked_holds_no_handler_up(engine: Engine, sessions: Sessions, start_relay: StartRelay) -> None:
    """The writer waits, and the handlers do not; what was noted last is there behind it."""
    jobs, gates, last = Jobs(), Gates(), Gates()

    @jobs.handler
    def work(ctx: Context) -> None:
        ctx.progress(0.1, "first")
        gates.stand()
        for number in range(1_000):
            ctx.progress(0.2, str(number))
        last.stand()

    with sessions.begin() as session:
        session.add_job(work)
    with start_relay(jobs):
        wait_until(lambda: noted(engine), "the first note")
        with engine.begin() as connection:
            connection.execute(text("LOCK TABLE outboxq.progress"))
            gates.leave.set()
            assert last.entered.wait(PATIENCE)
        wait_until(lambda: noted(engine) == [(0.2, "999")], "the last note")
        last.leave.set()


@pytest.mark.large
def test_a_connection_that_is_lost_costs_a_second(engine: Engine, sessions: Sessions, start_relay: StartRelay) -> None:
    """The note that could not be written is written by the next one."""
    jobs, gates, last = Jobs(), Gates(), Gates()

    @jobs.handler
    def work(ctx: Context) -> None:
        ctx.progress(0.1, "first")
        gates.stand()
        ctx.progress(0.2, "second")
        last.stand()

    with sessions.begin() as session:
        session.add_job(work)
    with start_relay(jobs):
        wait_until(lambda: noted(engine), "the first note")
        ended = rows(
            engine,
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = current_database() "
            "AND query LIKE '%outboxq\".\"progress%' AND pid <> pg_backend_pid()",
        )
        assert ended == [(True,)]
        gates.leave.set()
        wait_until(lambda: noted(engine) == [(0.2, "second")], "the second note")
        last.leave.set()


def test_a_note_behind_the_end_of_its_handler_is_none(
    engine: Engine, sessions: Sessions, start_relay: StartRelay
) -> None:
    """A thread that a handler left behind notes for nothing."""
    jobs, kept = Jobs(), []

    @jobs.handler
    def work(ctx: Context) -> None:
        kept.append(ctx)
        ctx.progress(0.1)

    with sessions.begin() as session:
        session.add_job(work)
    with start_relay(jobs, RelayConfig()) as running:
        wait_until(lambda: running.of(JobDone), "the job")
        kept[0].progress(0.9, "late")
        with sessions.begin() as session:
            session.add_job(work)
        wait_until(lambda: len(running.of(JobDone)) == 2, "the second job")
        wait_until(lambda: not noted(engine), "the rows to be deleted")


def test_what_a_killed_relay_left_is_pruned_once_its_job_is_gone(engine: Engine, sessions: Sessions) -> None:
    """Not the note of a job that is there: it runs, or will."""
    jobs = Jobs()

    @jobs.handler
    def work(ctx: Context) -> None:
        pass

    with sessions.begin() as session:
        there = session.add_job(work)
    fill = (
        "INSERT INTO outboxq.progress (job_id, attempt, fraction, note, relay, noted_at) "
        "VALUES (:id, 1, :fraction, '', gen_random_uuid(), now() - interval '1 hour')"
    )
    with engine.begin() as connection:
        connection.execute(text(fill), [{"id": there.id, "fraction": 0.1}, {"id": uuid4(), "fraction": 0.2}])
        assert run_script(connection, delete_progress("outboxq", 10)) == [(1,)]
    assert noted(engine) == [(0.1, "")]


def test_an_older_attempt_does_not_write_over_a_newer_one(engine: Engine, outboxq_database: Database) -> None:
    """Nor does a relay delete the note of another."""
    url = outboxq_database.url.replace("+psycopg", "")
    newer, older = (ProgressWriter(lambda: psycopg.connect(url, autocommit=True), "outboxq", uuid4()) for _ in "ab")
    newer.note(_JOB, 0.5, "newer")
    wait_until(lambda: noted(engine), "the note")
    older.note(msgspec.structs.replace(_JOB, attempt=_JOB.attempt - 1), 0.9, "older")
    wait_until(lambda: not older._notes, "the older note to be sent")
    assert noted(engine) == [(0.5, "newer")]
    older.stop()
    assert noted(engine) == [(0.5, "newer")]
    newer.stop()
    assert noted(engine) == []


def test_what_a_dead_relay_left_of_an_earlier_life_gives_way(engine: Engine, outboxq_database: Database) -> None:
    """A dead letter that was put back counts its attempts anew; until a minute is over, its old note may be alive."""
    url = outboxq_database.url.replace("+psycopg", "")
    dead, living = (ProgressWriter(lambda: psycopg.connect(url, autocommit=True), "outboxq", uuid4()) for _ in "ab")
    dead.note(msgspec.structs.replace(_JOB, attempt=3), 0.5, "third attempt")
    wait_until(lambda: noted(engine), "the note")
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.progress SET noted_at = noted_at - interval '2 minutes'"))
    living.note(msgspec.structs.replace(_JOB, attempt=1), 0.1, "first attempt")
    wait_until(lambda: noted(engine) == [(0.1, "first attempt")], "the newer note")
    living.stop()
    assert noted(engine) == []
    dead.stop()


def test_without_a_thread_a_note_is_lost_and_no_job(
    engine: Engine, outboxq_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has no more of them; the next note tries again."""
    url = outboxq_database.url.replace("+psycopg", "")
    writer = ProgressWriter(lambda: psycopg.connect(url, autocommit=True), "outboxq", uuid4())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse)
        writer.note(_JOB, 0.1, "first")
    writer.note(_JOB, 0.2, "second")
    wait_until(lambda: noted(engine) == [(0.2, "second")], "the second note")
    writer.stop()


def _refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), True, "0.5", None])
def test_a_fraction_that_is_none_is_refused(fraction: Any) -> None:
    """At the call, in words that name it."""
    context = Context(_JOB, None, None)
    with pytest.raises(ArgumentError, match="takes a fraction from 0 to 1"):
        context.progress(fraction)
    with pytest.raises(ArgumentError, match="takes a text, got int"):
        context.progress(0.5, 7)
    context.progress(0.5, "without a relay this is all")


def test_a_long_or_strange_text_is_cut_and_stored(engine: Engine, sessions: Sessions, start_relay: StartRelay) -> None:
    """To 200 characters; what the database cannot hold is replaced."""
    jobs, gates = Jobs(), Gates()

    @jobs.handler
    def work(ctx: Context) -> None:
        ctx.progress(0, "\0\ud800" + "ü" * 300)
        gates.stand()

    with sessions.begin() as session:
        session.add_job(work)
    with start_relay(jobs):
        wait_until(lambda: noted(engine), "the note")
        gates.leave.set()
        assert noted(engine) == [(0.0, "\N{REPLACEMENT CHARACTER}?" + "ü" * 198)]
