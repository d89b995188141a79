"""Sleeping and waking: no wake is missed, and nothing is notified while nobody sleeps.

Every relay here polls once in ten minutes, so what happens sooner happened by waking.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, create_engine, func, select, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Backoff, Context, Jobs, OutboxSession, RelayConfig, SlotGroup, external
from outboxq.events import JobDone, RelayStarted
from outboxq.outbox.insert import QUEUES_ANNOUNCED
from outboxq.postgres import Database
from outboxq.relay.idle import FIRST_PAUSE_SECONDS, UNFLAGGED_PAUSE_SECONDS, SlotSleep
from outboxq.relay.limits import HistoryLimits, RelayLimits
from outboxq.relay.listener import IdleSlot, Listener
from outboxq.relay.poller import SharedPoller
from outboxq.relay.state import RelayState
from outboxq.statements.wake import ALL_QUEUES
from tests.conftest import RunningRelay, StartRelay
from tests.support import app
from tests.support.matrices import sampled
from tests.support.notifications import notifications
from tests.support.slots import make_slot, slot_connection_on
from tests.support.waiting import PATIENCE, wait_until

PATIENT = RelayConfig(groups=(SlotGroup(("ledger",)),), poll_seconds=600)
FLAGS = """
SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND granted
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
AND classid::bigint = hashtext('outboxq_outboxq')::bigint & 4294967295
AND objid::bigint = hashtext(:queue)::bigint & 4294967295
"""


def sleeps(engine: Engine, queue: str = "ledger") -> int | None:
    """The server process that holds the queue's sleep flag, if any."""
    with engine.connect() as connection:
        return connection.execute(text(FLAGS), {"queue": queue}).scalar_one_or_none()


def wait_until_asleep(engine: Engine, queue: str = "ledger") -> int:
    """The server process that holds the flag then."""
    return wait_until(lambda: sleeps(engine, queue), f"a relay that sleeps on {queue}")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each pause that a slot has begun, whether it sleeps under its flags."""
    pause_seconds, begun = SlotSleep.pause_seconds, []

    def note(sleep: SlotSleep, *, flagged: bool) -> float:
        begun.append(flagged)
        return pause_seconds(sleep, flagged=flagged)

    monkeypatch.setattr(SlotSleep, "pause_seconds", note)
    return begun


def wait_until_done(running: RunningRelay, count: int = 1) -> None:
    # A slot that is not woken polls after eight minutes at the earliest.
    wait_until(lambda: len(running.of(JobDone)) >= count, f"{count} jobs done")


@pytest.mark.parametrize(("kind", "queue"), [(app.record, "ledger"), (app.record_async, "ledger-async")])
def test_a_sleeping_relay_is_woken_by_a_commit(
    kind: object, queue: str, engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """The trigger notifies because the sleep flag is up."""
    config = RelayConfig(groups=(SlotGroup((queue,)),), poll_seconds=600)
    with start_relay(config=config) as running:
        for count in (1, 2, 3):
            wait_until_asleep(engine, queue)
            with sessions.begin() as session:
                session.add_job(kind, name=f"job {count}")
            wait_until_done(running, count)


@pytest.mark.parametrize("is_async", sampled([False, True]))
def test_jobs_for_more_queues_than_a_transaction_has_locks_for_wake_every_relay(
    is_async: bool, engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """One notification stands for all queues, also for those that only other relays serve."""
    jobs, names = Jobs(), [f"queue {number:03}" for number in range(QUEUES_ANNOUNCED + 2)]

    def note(ctx: Context) -> None: ...

    async def note_async(ctx: AsyncContext) -> None: ...

    kinds = [jobs.handler(queue=name, kind=name)(note_async if is_async else note) for name in names]
    halves = [RelayConfig(groups=(SlotGroup(tuple(names[place::2])),), poll_seconds=600) for place in (0, 1)]
    with start_relay(jobs, halves[0]) as even, start_relay(jobs, halves[1]) as odd:
        for count in (1, 2, 3):
            wait_until_asleep(engine, names[0])
            wait_until_asleep(engine, names[1])
            with sessions.begin() as session:
                session.add_jobs([kind.job() for kind in kinds])
            wait_until_done(even, count * len(kinds) // 2)
            wait_until_done(odd, count * len(kinds) // 2)


def test_a_look_that_began_before_all_queues_were_called_is_not_trusted() -> None:
    """It may have come too early, whenever it comes back."""
    poller = SharedPoller("outboxq", ("a", "b"))
    asleep_since = poller.latest
    early = poller.begin()
    poller.record_call(ALL_QUEUES)
    poller.record(early, [])
    assert not poller.has_polled("a", asleep_since)
    assert poller.polled_at("a") == float("-inf")
    poller.record(poller.begin(), [])
    assert poller.has_polled("a", asleep_since)
    assert poller.polled_at("a") > float("-inf")


@pytest.mark.parametrize(("number", "setting", "expected"), [(64, "on", []), (65, "on", [""]), (65, "off", [])])
def test_more_queues_than_a_transaction_has_locks_for_are_one_notification(
    number: int,
    setting: str,
    expected: list[str],
    outboxq_database: Database,
    sessions: sessionmaker[OutboxSession],
) -> None:
    """Unless the caller wants none."""
    with notifications(outboxq_database) as heard:
        with sessions.begin() as session:
            session.execute(text("SELECT set_config('outboxq.notify', :setting, true)"), {"setting": setting})
            session.add_jobs([external("told", queue=f"queue {place}").job() for place in range(number)])
        assert heard() == expected


def test_a_relay_sleeps_on_a_queue_by_its_name_whatever_encoding_clients_have(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """The trigger takes the name as the server has it."""
    jobs, queue = Jobs(), "grüße"

    @jobs.handler(queue=queue)
    def greet(ctx: Context) -> None: ...

    with engine.begin() as connection:
        connection.execute(text(f'ALTER DATABASE "{engine.url.database}" SET client_encoding = LATIN1'))
    with start_relay(jobs, RelayConfig(poll_seconds=600)) as running:
        wait_until_asleep(engine, queue)
        with sessions.begin() as session:
            session.add_job(greet)
        wait_until_done(running)


def test_a_relay_on_an_async_engine_alone_is_woken_too(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """The listener works on whichever engine there is."""
    jobs = Jobs()
    jobs.add(app.record_async)
    config = RelayConfig(poll_seconds=600)
    with start_relay(jobs, config, engine=create_async_engine(outboxq_database.url)) as running:
        wait_until_asleep(engine, "ledger-async")
        with sessions.begin() as session:
            session.add_job(app.record_async, name="job")
        wait_until_done(running)


def test_a_producer_whose_transaction_is_open_while_the_relay_falls_asleep_loses_nothing(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, pauses: list[bool]
) -> None:
    """Its uncommitted insert keeps the flag down, and a relay without the flag keeps polling."""
    with sessions() as session:
        session.add_job(app.record, name="late commit")
        session.flush()
        with start_relay(config=PATIENT) as running:
            wait_until(lambda: len(pauses) > 1, "the slot to have asked for the flag, and to poll again")
            assert not any(pauses)
            assert not sleeps(engine)
            session.commit()
            wait_until_done(running)


def test_a_job_committed_just_before_the_flag_goes_up_is_not_missed(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job came without a notification, so the relay polls once more after it has raised the flag."""
    raise_flag, inserted = Listener.fall_asleep, []

    def insert_then_raise_flag(listener: Listener, sleeper: IdleSlot) -> "Future[bool]":
        if not inserted:
            inserted.append(True)
            with sessions.begin() as session:
                session.add_job(app.record, name="in between")
        return raise_flag(listener, sleeper)

    monkeypatch.setattr(Listener, "fall_asleep", insert_then_raise_flag)
    with start_relay(config=PATIENT) as running:
        wait_until(lambda: inserted, "the moment in between")
        wait_until_done(running)


def test_nothing_is_notified_while_no_relay_of_the_queue_sleeps(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """NOTIFY takes a database-wide lock at COMMIT, so a busy system must not send any."""
    jobs, release = Jobs(), threading.Event()

    @jobs.handler(queue="ledger")
    def block(ctx: Context) -> None:
        release.wait(PATIENCE)

    def add_block() -> None:
        with sessions.begin() as session:
            session.add_job(block)

    with notifications(outboxq_database) as heard:
        add_block()
        assert heard() == [], "no relay runs"
        with start_relay(jobs, PATIENT) as running:
            try:
                release.set()
                wait_until_done(running, 1)
                wait_until_asleep(engine)
                release.clear()
                add_block()
                wait_until(lambda: heard() == ["ledger"], "the notification for a sleeper")
                wait_until(lambda: not sleeps(engine), "the flag to go down, as the only slot has work")
                for _ in range(20):
                    add_block()
                assert heard() == ["ledger"]
            finally:
                release.set()
            wait_until_done(running, 22)


def waiting(engine: Engine) -> bool:
    """Whether a job can be claimed: one that a relay is running is locked."""
    # Committed: a lock that is rolled back would leave the mark of a claim that died.
    with engine.begin() as connection:
        return connection.execute(text("SELECT FROM outboxq.job FOR UPDATE SKIP LOCKED")).first() is not None


def test_a_relay_whose_listener_was_cut_listens_again(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """A lost connection costs one full poll, then waking works as before."""
    with start_relay(config=PATIENT) as running:
        for count in (1, 2):
            first = wait_until_asleep(engine)
            with engine.begin() as connection:
                connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": first})
            wait_until(lambda first=first: sleeps(engine) not in (None, first), "the flag of another process")
            with sessions.begin() as session:
                session.add_job(app.record, name="job")
            wait_until_done(running, count)


def test_a_second_relay_takes_the_flag_over_from_one_that_stopped(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Only one relay can hold a flag; the others poll every second until they get it."""
    with start_relay(config=PATIENT) as survivor:
        with start_relay(config=PATIENT):
            wait_until_asleep(engine)
        wait_until_asleep(engine)
        with sessions.begin() as session:
            session.add_job(app.record, name="job")
        wait_until_done(survivor)


def test_a_scheduled_job_wakes_a_sleeping_relay_when_it_is_due(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """A relay sleeps no longer than until the next scheduled job of its queues, and no shorter."""
    jobs, was_due = Jobs(), []

    @jobs.handler(queue="ledger")
    def look(ctx: Context) -> None:
        was_due.append(ctx.session.scalar(select(func.clock_timestamp())) >= ctx.job.run_at)

    with start_relay(jobs, PATIENT) as running:
        wait_until_asleep(engine)
        with sessions.begin() as session:
            session.add_job(look.options(delay=timedelta(seconds=1)))
        wait_until_done(running)
    assert was_due == [True]


@pytest.mark.large
@pytest.mark.relay_limits(RelayLimits(history=HistoryLimits(first_seconds=3600.0)))
def test_a_sleeping_relay_sends_nothing(engine: Engine, start_relay: StartRelay, pauses: list[bool]) -> None:
    """With the flag up it sleeps for its whole poll interval: nothing but its heart beats."""
    statements = text(
        "SELECT pid, query_start FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = 'outboxq relay'"
    )

    def latest() -> set[tuple[int, datetime]]:
        with engine.connect() as connection:
            return {(pid, moment) for pid, moment in connection.execute(statements)}

    config = replace(PATIENT, lease_seconds=3, heartbeat_seconds=0.25, prune_seconds=0, reindex=False)
    with start_relay(config=config):
        wait_until(lambda: True in pauses, "a slot that sleeps under its flag")
        before = latest()
        seen = set(before)
        # A slot without the flag would have polled twice by then.
        wait_until(lambda: seen.update(latest()) or len(seen) >= len(before) + 10, "ten heartbeats")
    assert len({pid for pid, _ in before}) == len(before) > 1
    assert len({pid for pid, _ in seen - before}) == 1
    assert pauses == [True]


def test_a_due_job_that_cannot_be_claimed_is_no_reason_to_spin(
    engine: Engine, sessions: sessionmaker[OutboxSession], make_state: Callable[..., RelayState]
) -> None:
    """A handler runs a job that was scheduled, say: the pauses grow all the same."""
    with sessions.begin() as session:
        session.add_job(app.record.options(run_at=datetime(2020, 1, 1, tzinfo=UTC)), name="due")
    slot = make_slot(make_state("ledger"))
    with engine.begin() as other, engine.connect() as connection:
        other.execute(text("SELECT FROM outboxq.job FOR UPDATE"))
        slot_connection, pauses = slot_connection_on(connection), []
        for _ in range(10):
            assert not slot.work_seen(slot_connection)
            pauses.append(slot.sleep.pause_seconds(flagged=True))
    assert pauses[0] == FIRST_PAUSE_SECONDS
    assert pauses[-1] == UNFLAGGED_PAUSE_SECONDS


def test_every_slot_of_a_queue_is_woken_by_one_commit_of_many_jobs(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Notifications of one transaction are folded into one, so it wakes all sleepers."""
    jobs, together = Jobs(), threading.Barrier(4)

    @jobs.handler(queue="ledger", retry=Backoff(max_attempts=1))
    def meet(ctx: Context) -> None:
        together.wait(PATIENCE)

    config = RelayConfig(groups=(SlotGroup(("ledger",), 4),), poll_seconds=600)
    with start_relay(jobs, config) as running:
        wait_until_asleep(engine)
        with sessions.begin() as session:
            session.add_jobs(meet.job() for _ in range(4))
        wait_until_done(running, 4)


def test_blocking_sync_handlers_do_not_delay_async_ones(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Sync handlers have threads of their own, and never the event loop."""
    jobs, release, blocking = Jobs(), threading.Event(), threading.Semaphore(0)
    jobs.add(app.record_async)

    @jobs.handler(queue="ledger")
    def block(ctx: Context) -> None:
        blocking.release()
        release.wait(PATIENCE)

    config = RelayConfig(slots_per_queue=2, poll_seconds=600)
    with start_relay(jobs, config) as running:
        try:
            with sessions.begin() as session:
                session.add_jobs(block.job() for _ in range(2))
            for _ in range(2):
                assert blocking.acquire(timeout=PATIENCE)
            with sessions.begin() as session:
                session.add_jobs(app.record_async.job(name=f"async {n}") for n in range(10))
            wait_until_done(running, 10)
            assert [event.job.kind for event in running.of(JobDone)] == ["record_async"] * 10
        finally:
            release.set()


def test_a_relay_without_listening_finds_jobs_by_polling(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Polling is the truth; listening is a shortcut."""
    with start_relay(config=RelayConfig(listen=False, poll_seconds=0.2)) as running:
        wait_until(lambda: running.of(RelayStarted), "the relay's start")
        with sessions.begin() as session:
            session.add_job(app.record, name="job")
        wait_until_done(running)
        assert not sleeps(engine)


def test_a_listen_url_is_used_for_listening(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """For a relay whose own URL leads to a transaction pooler."""
    config = RelayConfig(poll_seconds=600, listen_url=outboxq_database.url)
    own = create_engine(outboxq_database.url, pool_size=10)
    only_sync = Jobs()
    only_sync.add(app.record)
    with start_relay(only_sync, config, engine=own) as running:
        wait_until_asleep(engine)
        with engine.connect() as connection:
            names = connection.execute(
                text("SELECT application_name FROM pg_stat_activity WHERE datname = current_database()")
            ).scalars()
            assert "outboxq listener" in list(names)
        with sessions.begin() as session:
            session.add_job(app.record, name="job")
        wait_until_done(running)
    own.dispose()
