"""Interrupted: what a stopping relay does with handlers that do not end within the time to drain."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

import outboxq.relay.deadlines as deadlines
from outboxq import AsyncContext, Backoff, Context, Jobs, OutboxSession, Relay, RelayConfig
from outboxq.events import (
    Event,
    JobCrashed,
    JobDone,
    JobInterrupted,
    JobRetried,
    JobsSuspected,
    RelayStopped,
)
from outboxq.execution.batch_state import Ownership
from outboxq.execution.seized import FREE_INTERRUPTIONS
from outboxq.fault_points import FaultPoint, fault_action
from outboxq.postgres import Database
from outboxq.relay.limits import RelayLimits
from tests.support.app import Effect
from tests.support.ledger import effects, of, rows
from tests.support.limits import many_at_once, with_limits
from tests.support.waiting import PATIENCE, wait_until

Drain = Callable[..., list[Event]]
TWICE = Backoff(max_attempts=2, first_seconds=0.0, jitter=0.0)
QUICKLY = RelayConfig(slots_per_queue=1, batch_size=3, drain_seconds=0.1, poll_seconds=0.1)
# Longer than anything is waited for: what happens meanwhile does not wait for it.
LONG = 10 * PATIENCE


# A relay that takes all the time that it may have does not end within a test.
ABORTS_LONG = RelayLimits(abort_seconds=LONG)
# One that has no way to end a transaction gives up soon.
ABORTS_SOON = RelayLimits(abort_seconds=1.0)


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets handlers that hang go on, at the end of the test at the latest, and waits for their threads."""
    event = threading.Event()
    yield event
    event.set()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("outboxq-")], "threads to end")


class Hanging:
    """Three jobs, of which the second hangs at its first run."""

    def __init__(self, flavour: str, claim: str, release: threading.Event) -> None:
        self.jobs = Jobs()
        self.entered = threading.Event()
        self._release = release
        if flavour == "sync":
            self._register_sync(claim)
        else:
            self._register_async(claim)

    def _register_sync(self, claim: str) -> None:
        @self.jobs.handler(kind="write", queue="work", claim=claim, retry=TWICE)
        def write(ctx: Context, name: str) -> None:
            ctx.session.add(Effect(name=name))
            ctx.session.flush()
            if self._hangs(name):
                self._release.wait(LONG)

    def _register_async(self, claim: str) -> None:
        @self.jobs.handler(kind="write", queue="work", claim=claim, retry=TWICE)
        async def write(ctx: AsyncContext, name: str) -> None:
            ctx.session.add(Effect(name=name))
            await ctx.session.flush()
            while self._hangs(name):  # noqa: ASYNC110  # released by a thread
                await asyncio.sleep(0.02)

    def _hangs(self, name: str) -> bool:
        hangs = name == "hang" and not self._release.is_set()
        if hangs:
            self.entered.set()
        return hangs

    def enqueue(self, sessions: sessionmaker[OutboxSession], *names: str) -> None:
        kind = self.jobs.resolve().find("write")
        with sessions.begin() as session:
            session.add_jobs(kind.job(name=name) for name in names)


Running: TypeAlias = tuple[Relay, list[Event], threading.Thread]


@contextmanager
def running(
    database: Database, jobs: Jobs, config: RelayConfig, limits: RelayLimits = ABORTS_LONG
) -> Iterator[Running]:
    """A relay in a thread, which has ended by itself at the end of the block."""
    events: list[Event] = []
    relay = with_limits(Relay(database.url, jobs, many_at_once(jobs, config), hooks=[events.append]), limits)
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        yield relay, events, thread
    finally:
        relay.stop()
        thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_transaction_that_is_not_done_in_time_is_rolled_back(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    drain: Drain,
    release: threading.Event,
    flavour: str,
) -> None:
    """Its whole batch waits again as it was, uncharged and unmarked: the next claim takes it as it takes any other."""
    hanging = Hanging(flavour, "transaction", release)
    hanging.enqueue(sessions, "first", "hang", "last")
    with running(outboxq_database, hanging.jobs, QUICKLY) as (relay, events, thread):
        assert hanging.entered.wait(PATIENCE)
        relay.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive(), "it waits for the handler, or for its time to interrupt to be over"
    assert effects(engine) == []
    assert rows(engine, "SELECT state, attempt, crashes FROM outboxq.job") == [("ready", 0, 0)] * 3
    assert len(of(events, JobInterrupted)) == 1
    assert [event.abandoned for event in of(events, RelayStopped)] == [3]
    assert (
        rows(engine, "SELECT FROM pg_stat_activity WHERE datname = current_database() AND backend_xid IS NOT NULL")
        == []
    )
    release.set()
    after = drain(hanging.jobs, batch_size=3, slots_per_queue=1)
    assert not of(after, JobsSuspected)
    assert [(event.job.attempt, event.job.crashes, event.job.lease_token) for event in of(after, JobDone)] == [
        (1, 0, None)
    ] * 3
    assert effects(engine) == ["first", "hang", "last"]


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_lease_is_released(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    drain: Drain,
    release: threading.Event,
    flavour: str,
) -> None:
    """Ready again at once, its attempt not counted, and what its handler writes later is refused."""
    hanging = Hanging(flavour, "lease", release)
    hanging.enqueue(sessions, "hang")
    with running(outboxq_database, hanging.jobs, QUICKLY) as (relay, events, thread):
        assert hanging.entered.wait(PATIENCE)
        assert rows(engine, "SELECT state, attempt FROM outboxq.job") == [("leased", 1)]
        relay.stop()
        thread.join(PATIENCE)
    assert rows(engine, "SELECT state, attempt, crashes FROM outboxq.job") == [("ready", 0, 0)]
    assert rows(engine, "SELECT FROM outboxq.relay") == []
    assert len(of(events, JobInterrupted)) == 1
    assert not of(events, JobCrashed)
    release.set()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("outboxq-")], "the threads to end")
    assert effects(engine) == []
    after = drain(hanging.jobs)
    assert [(event.job.attempt, event.job.crashes) for event in of(after, JobDone)] == [(1, 0)]
    assert effects(engine) == ["hang"]


def test_a_suspect_is_released_without_its_crash(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    drain: Drain,
    release: threading.Event,
) -> None:
    """The crash that was counted with its claim did not happen."""
    hanging = Hanging("sync", "transaction", release)
    hanging.enqueue(sessions, "hang")
    with engine.connect() as connection, connection.begin() as transaction:
        connection.execute(text("DELETE FROM outboxq.job"))
        transaction.rollback()
    with running(outboxq_database, hanging.jobs, QUICKLY) as (relay, events, thread):
        assert hanging.entered.wait(PATIENCE)
        assert rows(engine, "SELECT state, crashes FROM outboxq.job") == [("leased", 1)]
        relay.stop()
        thread.join(PATIENCE)
    assert rows(engine, "SELECT state, attempt, crashes FROM outboxq.job") == [("ready", 0, 0)]
    assert len(of(events, JobInterrupted)) == 1
    release.set()
    assert len(of(drain(hanging.jobs), JobDone)) == 1


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_job_whose_relays_stop_again_and_again_runs_as_a_suspect_and_ends(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    release: threading.Event,
    claim: str,
) -> None:
    """A job may be what stops them, by a signal to its own process: without a bound nothing would ever count."""
    hanging = Hanging("sync", claim, release)
    hanging.enqueue(sessions, "hang")
    note_earlier(engine, FREE_INTERRUPTIONS - 1)
    states, config = [], replace(QUICKLY, batch_size=1, max_crashes=1)
    # In lease mode it runs in company once, which counts nothing, before it runs alone.
    for _ in range(3 if claim == "transaction" else 4):
        hanging.entered.clear()
        with running(outboxq_database, hanging.jobs, config) as (relay, _events, thread):
            assert hanging.entered.wait(PATIENCE)
            relay.stop()
            thread.join(PATIENCE)
        states += rows(
            engine, "SELECT state, attempt, jsonb_array_length(errors), errors->-1->>'type' FROM outboxq.job"
        )
    noted = ("ready", 0, FREE_INTERRUPTIONS, "outboxq.Interrupted")
    # In transaction mode the mark of its claim makes it a suspect.
    counted = ("suspect", 0, FREE_INTERRUPTIONS + 1, "outboxq.RelayDied")
    more = ("suspect", 0, FREE_INTERRUPTIONS + 2, "outboxq.RelayDied")
    assert states == [noted, *([noted] if claim == "transaction" else [counted, more])]
    assert rows(engine, "SELECT attempt, crashes, reason FROM outboxq.dead_job") == [
        (0, 1, "crashed 1 of 1 times while it ran alone")
    ]


def test_the_others_of_the_batch_of_a_job_that_is_interrupted_too_often_are_no_suspects(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database, release: threading.Event
) -> None:
    """Only the mark of the one that ran stays: the others never began, or were undone with it."""
    hanging = Hanging("sync", "transaction", release)
    hanging.enqueue(sessions, "first", "hang", "last")
    note_earlier(engine, FREE_INTERRUPTIONS)
    with running(outboxq_database, hanging.jobs, QUICKLY) as (relay, _events, thread):
        assert hanging.entered.wait(PATIENCE)
        relay.stop()
        thread.join(PATIENCE)
    assert marked(engine) == ["hang"]


def test_a_row_that_refuses_the_note_of_its_interruption_leaves_no_marks(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database, release: threading.Event
) -> None:
    """A trigger of users' may do so; the note is not worth the whole batch."""
    hanging = Hanging("sync", "transaction", release)
    hanging.enqueue(sessions, "first", "hang", "last")
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
                "$$BEGIN RAISE EXCEPTION 'no' USING ERRCODE = 'check_violation'; END$$"
            )
        )
        connection.execute(
            text(
                "CREATE TRIGGER refuse BEFORE UPDATE OF errors ON outboxq.job FOR EACH ROW "
                "WHEN (NEW.errors <> OLD.errors) EXECUTE FUNCTION refuse()"
            )
        )
    with running(outboxq_database, hanging.jobs, QUICKLY) as (relay, events, thread):
        assert hanging.entered.wait(PATIENCE)
        relay.stop()
        thread.join(PATIENCE)
    assert (marked(engine), len(of(events, JobInterrupted))) == ([], 1)


def note_earlier(engine: Engine, times: int) -> None:
    """Each job was interrupted so often before."""
    noted = "jsonb_build_object('attempt', 0, 'type', 'outboxq.Interrupted', 'message', 'earlier')"
    with engine.begin() as connection:
        connection.execute(
            text(f"UPDATE outboxq.job SET errors = (SELECT jsonb_agg({noted}) FROM generate_series(1, {times}))")
        )


def marked(engine: Engine) -> list[str]:
    """The jobs with the mark of a claim that was rolled back: the next claim takes them for suspects."""
    # A lock that was committed is no mark.
    aborted = "xmax <> 0 AND pg_xact_status(xmax::text::xid8) = 'aborted'"
    found = rows(engine, f"SELECT args->>'name' FROM outboxq.job WHERE {aborted} ORDER BY 1")
    return [name for (name,) in found]


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_handler_that_ends_within_the_time_to_drain_is_done(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    release: threading.Event,
    flavour: str,
) -> None:
    """Nothing is interrupted, and nothing more is claimed."""
    hanging = Hanging(flavour, "transaction", release)
    hanging.enqueue(sessions, "hang", "waits")
    config = RelayConfig(slots_per_queue=1, drain_seconds=20)
    with running(outboxq_database, hanging.jobs, config) as (relay, events, thread):
        assert hanging.entered.wait(PATIENCE)
        relay.stop()
        release.set()
        thread.join(PATIENCE)
    assert effects(engine) == ["hang"]
    assert not of(events, JobInterrupted)
    assert rows(engine, "SELECT state, attempt FROM outboxq.job") == [("ready", 0)]


def test_a_job_that_is_committing_is_let_finish(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    release: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time to drain is over while its COMMIT waits for an answer: it stands, and it is told."""
    seize, refused = Ownership.seize, []

    def note(owner: Ownership) -> bool:
        refused.append(seize(owner))
        return refused[-1]

    monkeypatch.setattr(Ownership, "seize", note)
    hanging = Hanging("sync", "transaction", release)
    release.set()
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS "
                "$$BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NEW; END$$"
            )
        )
        connection.execute(
            text(
                "CREATE CONSTRAINT TRIGGER slowly AFTER INSERT ON effect_ledger DEFERRABLE INITIALLY DEFERRED "
                "FOR EACH ROW EXECUTE FUNCTION slowly()"
            )
        )
    hanging.enqueue(sessions, "slow")
    waits = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND NOT granted"
    with engine.connect() as holder, running(outboxq_database, hanging.jobs, QUICKLY) as (relay, events, thread):
        with holder.begin():
            holder.execute(text("SELECT pg_advisory_xact_lock(4711)"))
            wait_until(lambda: rows(engine, waits), "COMMIT to wait")
            relay.stop()
            # Past the time to drain: nobody but us holds it up.
            wait_until(lambda: refused.count(False) >= 2, "the relay to ask for the batch, and to ask again")
            assert thread.is_alive()
        thread.join(PATIENCE)
    assert effects(engine) == ["slow"]
    assert len(of(events, JobDone)) == 1
    assert not of(events, JobInterrupted)
    assert rows(engine, "SELECT FROM outboxq.job") == []


def test_a_batch_that_was_taken_away_is_not_committed(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    release: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its slot comes to its COMMIT after the relay took the job back, and before its backend is ended: it gives up."""
    hanging = Hanging("sync", "lease", release)
    release.set()
    at_commit, go_on = threading.Event(), threading.Event()

    def stop_here(point: FaultPoint) -> None:
        if point == "before-commit":
            at_commit.set()
            assert go_on.wait(PATIENCE)

    # As if the server had not got round to it.
    monkeypatch.setattr(deadlines, "end_other_transaction", lambda *_arguments, **_named: None)
    hanging.enqueue(sessions, "late")
    stopping = running(outboxq_database, hanging.jobs, QUICKLY, ABORTS_SOON)
    with fault_action(stop_here), stopping as (relay, events, thread):
        assert at_commit.wait(PATIENCE)
        relay.stop()
        thread.join(PATIENCE)
        go_on.set()
        wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("outboxq-")], "the slot to end")
    assert effects(engine) == []
    assert not of(events, JobDone)
    assert len(rows(engine, "SELECT FROM outboxq.job")) == 1


def test_many_stuck_threads_do_not_keep_a_relay(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database, release: threading.Event
) -> None:
    """However many they are, it ends in bounded time, and every job is ready again."""
    jobs, begun = Jobs(), threading.Barrier(11)

    @jobs.handler(queue="work", timeout_seconds=None)
    def stuck(ctx: Context) -> None:
        ctx.session.add(Effect(name="stuck"))
        ctx.session.flush()
        if not release.is_set():
            begun.wait(PATIENCE)
            release.wait(LONG)

    with sessions.begin() as session:
        session.add_jobs(stuck.job() for _ in range(10))
    config = RelayConfig(slots_per_queue=10, drain_seconds=0)
    with running(outboxq_database, jobs, config) as (relay, events, thread):
        begun.wait(PATIENCE)
        relay.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive(), "it waits for the handlers, or for its time to interrupt to be over"
    assert len(of(events, JobInterrupted)) == 10
    assert rows(engine, "SELECT DISTINCT state, attempt FROM outboxq.job") == [("ready", 0)]
    assert effects(engine) == []
    assert not of(events, JobRetried)


def test_a_relay_that_cannot_reach_the_database_ends_all_the_same(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    drain: Drain,
    release: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing can be taken back: the job's claim dies with its thread, and the job runs alone after that."""
    hanging = Hanging("sync", "transaction", release)

    def connect(*_arguments: object) -> None:
        raise OSError("no way to the database")

    hanging.enqueue(sessions, "hang")
    with running(outboxq_database, hanging.jobs, QUICKLY, ABORTS_SOON) as (relay, events, thread):
        assert hanging.entered.wait(PATIENCE)
        monkeypatch.setattr(deadlines, "connection_options", connect)
        relay.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert not of(events, JobInterrupted)
    release.set()
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("outboxq-")], "the slot to end")
    assert effects(engine) == []
    after = drain(hanging.jobs)
    assert len(of(after, JobsSuspected)) == 1
    assert [(event.job.attempt, event.job.crashes) for event in of(after, JobDone)] == [(1, 0)]
