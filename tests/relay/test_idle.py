"""What a relay sends that has nothing to do, counted on the wire: every statement of every connection of it."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker

from benchmarks.proxy import RunningProxy, running_proxy
from benchmarks.relays import RelayOptions, running_relay
from outboxq import Context, Jobs, OutboxSession, RelayConfig, SlotGroup
from outboxq.database.driver import run_alone
from outboxq.database.settings import OUR_SETTINGS
from outboxq.events import JobDone, RelayStarted
from outboxq.postgres import Database
from outboxq.relay.idle import FIRST_PAUSE_SECONDS, SlotSleep
from outboxq.relay.listener import IdleSlot, Listener
from outboxq.relay.poller import SharedPoller
from outboxq.relay.state import RelayState
from outboxq.statements.wake import poll_queues
from tests.conftest import RunningRelay, StartRelay
from tests.relay.test_wake import wait_until_asleep
from tests.support import app
from tests.support.slots import make_slot, slot_connection_on
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.large

SECONDS = 5
# A flush of the history sets what our transactions need, in one message.
MOST = 3 * SECONDS + len(OUR_SETTINGS)
QUEUES = ("ledger", "ledger-async")


@pytest.fixture
def proxy(outboxq_database: Database) -> Iterator[RunningProxy]:
    with running_proxy(outboxq_database.url, 0.0) as proxy:
        yield proxy


@pytest.fixture
def resting(monkeypatch: pytest.MonkeyPatch) -> set[SlotSleep]:
    """The slots that took no job since their pauses have grown as long as they will."""
    pause_seconds, end, grown = SlotSleep.pause_seconds, SlotSleep.end, set[SlotSleep]()

    def note(sleep: SlotSleep, *, flagged: bool) -> float:
        seconds = pause_seconds(sleep, flagged=flagged)
        if (flagged and seconds > FIRST_PAUSE_SECONDS) or sleep._pause_seconds >= sleep._state.config.poll_seconds:
            grown.add(sleep)
        return seconds

    def forget(sleep: SlotSleep) -> None:
        end(sleep)
        grown.discard(sleep)

    monkeypatch.setattr(SlotSleep, "pause_seconds", note)
    monkeypatch.setattr(SlotSleep, "end", forget)
    return grown


def wait_until_at_rest(running: RunningRelay, resting: set[SlotSleep], sleeps: int | None = None) -> None:
    """From now on its slots do nothing but sleep and poll; those of calls share one sleep."""
    slots = wait_until(lambda: running.of(RelayStarted), "the relay's start")[0].slots
    wait_until(lambda: len(resting) == (sleeps or slots), "every slot to rest")


def sent_in(proxy: RunningProxy, seconds: float) -> int:
    """How many statements were sent meanwhile. A busy machine makes them fewer."""
    before = proxy.count()
    time.sleep(seconds)
    return proxy.count() - before


def one_queue() -> Jobs:
    jobs = Jobs()
    jobs.add(app.record)
    return jobs


def under_leases() -> Jobs:
    jobs = Jobs()

    @jobs.handler(queue="ledger", claim="lease")
    def work(ctx: Context) -> None:
        """Nothing."""

    return jobs


def eight_queues() -> Jobs:
    jobs = Jobs()
    for number in range(8):

        @jobs.handler(queue=f"queue {number}", kind=f"kind {number}")
        def work(ctx: Context) -> None:
            """Nothing."""

    return jobs


@pytest.mark.wide
@pytest.mark.parametrize(
    ("jobs", "config", "seconds"),
    [
        (one_queue(), RelayConfig(), SECONDS),
        (one_queue(), RelayConfig(slots_per_queue=12), SECONDS),
        (one_queue(), RelayConfig(listen=False), SECONDS),
        # A beat of leases is four statements, and a span of five seconds may meet two of them.
        (under_leases(), RelayConfig(), 4 * SECONDS),
        (eight_queues(), RelayConfig(), SECONDS),
    ],
    ids=["two slots", "twelve slots", "without listening", "under leases", "eight queues"],
)
def test_an_idle_relay_sends_three_statements_a_second_at_most(
    jobs: Jobs,
    config: RelayConfig,
    seconds: float,
    proxy: RunningProxy,
    start_relay: StartRelay,
    resting: set[SlotSleep],
) -> None:
    """Whatever the number of its slots and queues: they share their polls."""
    with start_relay(jobs, config, engine=proxy.url) as running:
        wait_until_at_rest(running, resting, 1 if "lease" in jobs.resolve().claims.values() else None)
        assert sent_in(proxy, seconds) <= MOST * seconds / SECONDS


def test_a_relay_that_was_busy_is_as_quiet_afterwards_and_starts_the_next_job_at_once(
    proxy: RunningProxy,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    resting: set[SlotSleep],
) -> None:
    """Jobs leave nothing behind that goes on asking, and who asks seldom is woken."""
    config = RelayConfig(groups=(SlotGroup(("ledger",), 2),), poll_seconds=600)
    with start_relay(one_queue(), config, engine=proxy.url) as running:
        with sessions.begin() as session:
            session.add_jobs(app.record.job(name=f"job {n}") for n in range(100))
        wait_until(lambda: len(running.of(JobDone)) == 100, "the jobs")
        wait_until_at_rest(running, resting)
        assert sent_in(proxy, SECONDS) <= MOST
        wait_until_asleep(engine)
        with sessions.begin() as session:
            session.add_job(app.record, name="the next one")
        wait_until(lambda: len(running.of(JobDone)) == 101, "the next job")


def test_idle_async_slots_send_no_more(
    proxy: RunningProxy, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, resting: set[SlotSleep]
) -> None:
    """Tasks share their polls as threads do, and a job that is committed meanwhile is run."""
    jobs = Jobs()
    jobs.add(app.record_async)
    with start_relay(jobs, RelayConfig(slots_per_queue=4), engine=create_async_engine(proxy.url)) as running:
        wait_until_at_rest(running, resting)
        assert sent_in(proxy, SECONDS) <= MOST
        with sessions.begin() as session:
            session.add_job(app.record_async, name="job")
        wait_until(lambda: running.of(JobDone), "the job")


def test_idle_processes_send_three_statements_a_second_each_at_most(proxy: RunningProxy) -> None:
    """Those that cannot have the sleep flag, because another process holds it, poll no more often."""
    with running_relay(proxy.url, RelayOptions("noop", slots=6, processes=3)) as relay:
        wait_until(lambda: relay.log().count("relay started") == 3, "three processes")
        # Behind their start, of which nothing tells us the end, there is a quiet second, and no loud one any more.
        wait_until(lambda: sent_in(proxy, 1) <= 9, "a quiet second")
        assert sent_in(proxy, SECONDS) <= 3 * MOST


@pytest.mark.parametrize("listen", [False, True])
def test_a_slot_beside_a_suspect_that_runs_long_rests(
    listen: bool,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    resting: set[SlotSleep],
) -> None:
    """The suspect is known to wait until it has run, and is no reason to claim again and again."""
    jobs, begun, release = Jobs(), threading.Event(), threading.Event()

    @jobs.handler(queue="ledger")
    def block(ctx: Context) -> None:
        begun.set()
        release.wait(PATIENCE)

    with sessions.begin() as session:
        session.add_job(block)
        session.flush()
        session.execute(text("UPDATE outboxq.job SET state = 'suspect'"))
    with start_relay(jobs, RelayConfig(listen=listen)):
        try:
            assert begun.wait(PATIENCE)
            wait_until(lambda: resting, "the other slot to rest")
        finally:
            release.set()


def test_a_job_for_which_nobody_notifies_is_found_by_a_look(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """In whichever queue: one that is resumed by hand calls nobody."""
    with sessions.begin() as session:
        for name in QUEUES:
            session.execute(text("INSERT INTO outboxq.queue (name, paused_at) VALUES (:name, now())"), {"name": name})
        session.add_job(app.record, name="paused")
        session.add_job(app.record_async, name="paused too")
    with start_relay(config=RelayConfig()) as running:
        for name in QUEUES:
            wait_until_asleep(engine, name)
        with engine.begin() as operator:
            operator.execute(text("UPDATE outboxq.queue SET paused_at = NULL"))
        wait_until(lambda: len(running.of(JobDone)) == 2, "both jobs")


def test_a_slot_that_has_just_raised_its_flag_does_not_trust_a_look_of_before(
    engine: Engine, sessions: sessionmaker[OutboxSession], make_state: Callable[..., RelayState]
) -> None:
    """A poll that another slot began earlier may have missed a job that came without a notification."""
    state = make_state("ledger")
    first, second = make_slot(state), make_slot(state)
    with engine.connect() as one, engine.connect() as two:
        connections = slot_connection_on(one), slot_connection_on(two)
        assert not first.work_seen(connections[0])
        with sessions.begin() as session:
            session.add_job(app.record, name="in between")
        assert not second.work_seen(connections[1]), "the first slot's poll is shared"
        second.sleep.want_poll()
        assert second.work_seen(connections[1])


def test_a_job_committed_between_two_slots_that_fall_asleep_is_not_missed(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One whose flags go up after a poll has it polled again, although that was of all queues."""
    fall_asleep, saw, seen = Listener.fall_asleep, SharedPoller.record, threading.Event()
    jobs, calls = eight_queues(), itertools.count()

    def insert_before_the_second(listener: Listener, sleeper: IdleSlot) -> "Future[float | None]":
        if next(calls) == 1:
            assert seen.wait(PATIENCE)
            (queue,) = sleeper.queues
            with sessions.begin() as session:
                session.execute(text("SET LOCAL outboxq.notify = 'off'"))
                session.add_job(jobs.resolve().find(queue.replace("queue", "kind")))
        return fall_asleep(listener, sleeper)

    def note(poller: SharedPoller, *found: object) -> None:
        saw(poller, *found)
        seen.set()

    monkeypatch.setattr(Listener, "fall_asleep", insert_before_the_second)
    monkeypatch.setattr(SharedPoller, "record", note)
    with start_relay(jobs, RelayConfig(slots_per_queue=1, poll_seconds=600)) as running:
        wait_until(lambda: running.of(JobDone), "the job")


def test_a_look_that_does_not_come_back_costs_the_others_one_pause(
    engine: Engine, sessions: sessionmaker[OutboxSession], make_state: Callable[..., RelayState]
) -> None:
    """No slot depends on another one's connection."""
    state = make_state("ledger", overdue_seconds=0.5)
    slot = make_slot(state)
    with engine.connect() as connection:
        slot_connection = slot_connection_on(connection)
        with sessions.begin() as session:
            session.add_job(app.record, name="job")
        taken = state.poller.begin_shared("ledger", state.poller.latest)
        assert taken is not None
        assert not slot.sleep.needs_connection()
        assert not slot.work_seen(slot_connection)
        assert slot.sleep.pause_seconds(flagged=True) < 0.5
        wait_until(slot.sleep.needs_connection, "the end of the slot's patience")
        assert time.monotonic() >= taken.begun_at + 0.5
        assert slot.work_seen(slot_connection)


def test_an_older_look_that_comes_back_late_changes_nothing(make_state: Callable[..., RelayState]) -> None:
    """The last poll that was begun is the one to go by."""
    poller = make_state("ledger").poller
    older, newer = poller.begin(), poller.begin()
    poller.record(newer, [("ledger", True, None, None, None, None)])
    poller.record(older, [])
    assert poller.waiting() == {"ledger"}


def test_a_paused_queue_has_nothing_to_see(engine: Engine, sessions: sessionmaker[OutboxSession]) -> None:
    """Nothing of it could be claimed: polling must not lead to claims."""
    statement = poll_queues("outboxq", ("ledger", "other"))
    with sessions.begin() as session:
        session.add_job(app.record, name="job")
    with engine.connect() as connection:
        assert run_alone(connection, statement) == [("ledger", True, None, None, None, None)]
        with engine.begin() as operator:
            operator.execute(text("INSERT INTO outboxq.queue (name, paused_at) VALUES ('ledger', now())"))
        assert run_alone(connection, statement) == []


@pytest.mark.parametrize("begins", [False, True], ids=["alone", "with a listener"])
def test_a_look_is_one_message_unless_somebody_listens_for_transactions(
    begins: bool, outboxq_database: Database
) -> None:
    """Users' listeners on the engine (SET LOCAL ROLE, a tenant) see it begin."""
    engine = create_engine(outboxq_database.url)
    begun: list[object] = []
    if begins:
        event.listen(engine, "begin", begun.append)
    with engine.connect() as connection:
        for _ in range(2):
            if begins:
                run_alone(connection, "SAVEPOINT one")
            else:
                with pytest.raises(psycopg.errors.NoActiveSqlTransaction):
                    run_alone(connection, "SAVEPOINT one")
        # Whatever came of it, the next transaction is one.
        with connection.begin():
            connection.execute(text("SAVEPOINT two"))
    assert len(begun) == (3 if begins else 0)
    engine.dispose()
