"""The history that relays write: what their jobs came to, how the queues stood, and which relays live."""

import logging
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Context, Jobs, OutboxSession, Relay, RelayConfig, SlotGroup, external
from outboxq.admin.history import read_history
from outboxq.admin.relays import ConnectionWait, list_relays
from outboxq.events import Event, JobDone
from outboxq.migrations.runner import migrate
from outboxq.observability.gauges import write_gauges
from outboxq.observability.history import prune, roll_up_one_hour
from outboxq.observability.metrics.counter import EventCounter
from outboxq.postgres import Database
from outboxq.relay.limits import HistoryLimits, RelayLimits
from outboxq.relay.metrics import read_relay
from outboxq.statements.history import BUCKETS
from outboxq.testing import RelayProcess
from tests.conftest import StartRelay
from tests.support import app
from tests.support.ledger import effects, enqueue, rows, waiting
from tests.support.waiting import wait_until

QUICK = RelayLimits(history=HistoryLimits(first_seconds=0.1, flush_seconds=0.1, gauges_after_seconds=0.0))
DONE = "SELECT coalesce(sum(done), 0)::bigint FROM outboxq.stat"


def sums(engine: Engine) -> dict[str, tuple[int, ...]]:
    found = rows(
        engine,
        "SELECT kind, sum(done)::int, sum(retried)::int, sum(died)::int, sum(snoozed)::int, sum(discarded)::int "
        "FROM outboxq.stat GROUP BY kind",
    )
    return {str(kind): tuple(int(str(number)) for number in numbers) for kind, *numbers in found}


def test_a_drain_leaves_what_it_did(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Callable[..., list[Event]]
) -> None:
    """Of each kind, every outcome, with its times; and no relay, because it has ended."""
    enqueue(engine, map(str, range(10)), both_flavours=False)
    with sessions.begin() as session:
        for how in ("dead", "discard", "snooze"):
            session.add_job(app.end, how=how)
    drain(stats_seconds=15)
    found = sums(engine)
    assert found["record"] == (10, 0, 0, 0, 0)
    assert found["end"] == (0, 0, 1, 1, 1)
    with engine.connect() as connection:
        (kind,) = read_history(connection, kind="record", by="kind")
        assert (kind.wait_p50_seconds or 0) > 0
        assert (kind.run_p50_seconds or 0) > 0
        assert list_relays(connection) == []


def test_a_relay_says_what_runs(engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay) -> None:
    """Its slots, its queues, and the jobs that have run for longer than a second, with their backends."""
    jobs, gate = Jobs(), threading.Event()

    @jobs.handler(queue="q")
    def slow(ctx: Context) -> None:
        gate.wait(120)

    with sessions.begin() as session:
        session.add_job(slow)
    try:
        with start_relay(jobs, RelayConfig(slots_per_queue=3), limits=QUICK), engine.connect() as connection:
            connection = connection.execution_options(isolation_level="AUTOCOMMIT")
            (relay,) = wait_until(lambda: [each for each in list_relays(connection) if each.running], "a long job")
            assert (relay.state, relay.queues, relay.kinds) == ("serving", ("q",), ("slow",))
            assert (relay.slots, relay.busy, relay.listens) == (3, 1, True)
            (running,) = relay.running
            assert (running.kind, running.attempt) == ("slow", 1)
            assert running.seconds >= 1.0
            backends = rows(engine, f"SELECT pid FROM pg_stat_activity WHERE pid = {running.pid}")
            assert len(backends) == 1
            gate.set()
    finally:
        gate.set()
    with engine.connect() as connection:
        assert list_relays(connection) == []
    assert sums(engine) == {"slow": (1, 0, 0, 0, 0)}


def test_a_relay_says_which_calls_wait_for_a_connection(
    sessions: sessionmaker[OutboxSession], engine: Engine, start_relay: StartRelay
) -> None:
    """Two calls share a connection, and a third uses none: in the relay's row, and in its metrics, by queue."""
    jobs, gate = Jobs(), threading.Event()

    @jobs.handler(queue="outside", claim="lease")
    def write(ctx: Context) -> None:
        ctx.session.execute(text("SELECT 1"))
        gate.wait(120)

    @jobs.handler(queue="outside", claim="lease")
    def call(ctx: Context) -> None:
        gate.wait(120)

    with sessions.begin() as session:
        session.add_jobs([write.job(), write.job(), call.job()])
    config = RelayConfig(groups=(SlotGroup(("outside",), 5),), call_connections=1)
    try:
        with start_relay(jobs, config, limits=QUICK) as running, engine.connect() as connection:
            connection = connection.execution_options(isolation_level="AUTOCOMMIT")
            (relay,) = wait_until(lambda: [each for each in list_relays(connection) if each.waiting], "a wait")
            assert (relay.slots, relay.busy, relay.free, relay.waiting) == (5, 3, 2, 1)
            assert [each.waits for each in relay.running if each.waits is not None] == [ConnectionWait(1, 1)]
            values = read_relay(running.relay.look(), EventCounter()).values
            assert values["outboxq_calls"] == {("outside", "running"): 2, ("outside", "waiting"): 1}
            assert values["outboxq_free_call_slots"] == {("outside",): 2}
            assert values["outboxq_call_connections"] == {("used",): 1, ("free",): 0}
            gate.set()
            wait_until(lambda: len(running.of(JobDone)) == 3, "all jobs")
            wait_until(lambda: not any(each.running for each in list_relays(connection)), "the relay to be seen again")
            # The connections are given back a moment after the COMMIT.
            idle = {("outside", "running"): 0, ("outside", "waiting"): 0}
            look = lambda: read_relay(running.relay.look(), EventCounter()).values  # noqa: E731
            wait_until(lambda: look()["outboxq_calls"] == idle, "the calls to end")
            wait_until(lambda: look()["outboxq_call_connections"] == {("used",): 0, ("free",): 1}, "the connection")
    finally:
        gate.set()


def test_a_relay_that_is_told_to_stop_loses_nothing(engine: Engine, outboxq_database: Database) -> None:
    """Two processes, stopped by SIGTERM in the middle of their work: the history has what the ledger has."""
    enqueue(engine, map(str, range(400)))
    with RelayProcess("tests.support.app:jobs", outboxq_database.url) as one:
        with RelayProcess("tests.support.app:jobs", outboxq_database.url) as other:
            wait_until(lambda: len(effects(engine)) > 50, "some effects")
            assert other.stop(60) == 0
        assert one.stop(60) == 0
    assert rows(engine, DONE) == [(len(effects(engine)),)]
    assert rows(engine, "SELECT * FROM outboxq.relay_status") == []


@pytest.mark.wide
def test_a_killed_relay_loses_what_it_had_not_flushed_and_doubles_nothing(
    engine: Engine, outboxq_database: Database
) -> None:
    """And it stays listed, until it has been silent for a minute as dead."""
    names = enqueue(engine, map(str, range(60)), both_flavours=False)
    with RelayProcess("tests.support.app:jobs", outboxq_database.url) as relay:
        wait_until(lambda: rows(engine, "SELECT * FROM outboxq.relay_status"), "the relay's row")
        wait_until(lambda: waiting(engine) == 0, "all jobs")
        flushed = rows(engine, DONE)[0][0]
        enqueue(engine, ["later"] * 20, both_flavours=False)
        wait_until(lambda: waiting(engine) == 0, "all jobs")
        relay.kill()
    done = len(effects(engine))
    assert done == len(names) + 20
    counted = rows(engine, DONE)[0][0]
    assert flushed <= counted <= done
    with engine.begin() as connection:
        assert [each.state for each in list_relays(connection)] == ["serving"]
        connection.execute(text("UPDATE outboxq.relay_status SET seen_at = seen_at - interval '61 seconds'"))
        assert [each.state for each in list_relays(connection)] == ["dead"]
        connection.execute(text("UPDATE outboxq.relay_status SET seen_at = seen_at - interval '1 day'"))
        prune(connection, "outboxq")
        assert list_relays(connection) == []


@pytest.mark.wide
def test_a_relay_works_without_the_tables_and_says_so_once(
    engine: Engine, outboxq_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of the step before; when they come, what was counted until then is written."""
    with engine.begin() as connection:
        migrate(connection, to=10)
    enqueue(engine, ["a", "b"], both_flavours=False)
    relay = Relay(outboxq_database.url, app.jobs, RelayConfig())
    relay._limits = QUICK
    running = threading.Thread(target=relay.run)
    with caplog.at_level(logging.WARNING, "outboxq"):
        running.start()
        try:
            wait_until(lambda: len(effects(engine)) == 2, "the jobs")
            wait_until(lambda: caplog.messages, "a warning")
            with engine.begin() as connection:
                migrate(connection)
            wait_until(lambda: rows(engine, DONE) == [(2,)], "the history")
        finally:
            relay.stop()
            running.join(60)
    assert caplog.messages == [
        "the history is not written, and the relay works without it: its tables are missing: run `outboxq migrate`"
    ]


def fill(connection: Connection, hours_ago: int, minutes: int, done: int) -> None:
    """Minutes of one hour, so long ago."""
    connection.execute(
        text(
            "INSERT INTO outboxq.stat (grain, at, queue, kind, done, wait_seconds, run_seconds, wait, run) "
            "SELECT 60, date_bin('1 hour', now(), timestamptz '2000-01-01 00:00:00+00') - make_interval(hours => :ago) "
            "+ make_interval(mins => n), 'q', 'k' || n % 2, :done, 0.5, 0.25, CAST(:buckets AS bigint[]), "
            "CAST(:buckets AS bigint[]) FROM generate_series(0, :minutes - 1) AS n"
        ),
        {"ago": hours_ago, "minutes": minutes, "done": done, "buckets": [done, *[0] * (BUCKETS - 2), 1]},
    )


def test_minutes_become_hours_and_every_number_stands_once(engine: Engine) -> None:
    """Only whole hours older than two days; rolling up again changes nothing, nor does a second session."""
    with engine.begin() as connection:
        for hours_ago in (60, 52, 47, 1):
            fill(connection, hours_ago, 60, 3)
    totals = (
        "SELECT sum(done)::int, sum(wait_seconds), sum(run_seconds), sum(wait[1])::int, sum(run[20])::int "
        "FROM outboxq.stat"
    )
    before = rows(engine, totals)
    assert before == [(720, 120.0, 60.0, 720, 240)]
    with engine.begin() as connection, engine.begin() as other:
        assert roll_up_one_hour(connection, "outboxq")
        assert not roll_up_one_hour(other, "outboxq")
    with engine.begin() as connection:
        assert roll_up_one_hour(connection, "outboxq")
        assert not roll_up_one_hour(connection, "outboxq")
    assert rows(engine, totals) == before
    grains = "SELECT grain, count(*)::int, sum(done)::int FROM outboxq.stat GROUP BY grain ORDER BY grain"
    assert rows(engine, grains) == [(60, 120, 360), (3600, 4, 360)]
    with engine.begin() as connection:
        # A clock that was set back: minutes of an hour that was rolled up already.
        fill(connection, 60, 10, 1)
        assert roll_up_one_hour(connection, "outboxq")
    assert rows(engine, grains) == [(60, 120, 360), (3600, 4, 370)]


def test_old_hours_gauges_and_relays_are_removed(engine: Engine) -> None:
    """Hours after 35 days, gauges after two."""
    with engine.begin() as connection:
        for grain, ago in ((3600, "34 days"), (3600, "36 days"), (60, "1 hour")):
            connection.execute(
                text(
                    f"INSERT INTO outboxq.stat (grain, at, queue, kind, wait, run) VALUES ({grain}, "
                    f"now() - interval '{ago}', 'q', 'k', :none, :none)"
                ),
                {"none": [0] * BUCKETS},
            )
        for ago in ("47 hours", "49 hours"):
            connection.execute(
                text(f"INSERT INTO outboxq.gauge VALUES (now() - interval '{ago}', 'q', 0, 0, 0, 0, 0, 0, true, NULL)")
            )
        prune(connection, "outboxq")
    assert rows(engine, "SELECT count(*) FROM outboxq.stat") == [(2,)]
    assert rows(engine, "SELECT count(*) FROM outboxq.gauge") == [(1,)]


def test_one_relay_writes_the_gauges_of_a_minute(engine: Engine, sessions: sessionmaker[OutboxSession]) -> None:
    """With a row for each queue that has jobs, or that a relay serves."""
    with sessions.begin() as session:
        for _ in range(3):
            session.add_job(external("a", queue="mail"))
        session.add_job(external("a", queue="mail").options(delay=timedelta(hours=1)))
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outboxq.relay_status (id, host, pid, version, schema_step, state, queues, kinds, slots, "
                "busy, listens, running, flush) VALUES (gen_random_uuid(), 'h', 1, '1', 11, 'serving', '{idle}', "
                "'{}', 1, 0, true, '[]', 1)"
            )
        )
    with engine.begin() as one, engine.begin() as other:
        assert write_gauges(one, "outboxq") == 2
        assert write_gauges(other, "outboxq") == 0
    found = rows(engine, "SELECT queue, ready, scheduled, due, leased, dead, exact FROM outboxq.gauge ORDER BY queue")
    assert found == [("idle", 0, 0, 0, 0, 0, True), ("mail", 3, 1, 0, 0, 0, True)]
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.gauge SET at = at - interval '1 minute'"))
        assert write_gauges(connection, "outboxq") == 2


def test_a_relay_writes_gauges_by_itself(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Without any job too: for the queues that it serves."""
    with start_relay(app.jobs, limits=QUICK):
        wait_until(lambda: rows(engine, "SELECT * FROM outboxq.gauge WHERE queue = 'ledger'"), "gauges")


@pytest.mark.wide
def test_an_outage_keeps_what_was_counted(engine: Engine, outboxq_database: Database, start_relay: StartRelay) -> None:
    """The connections of a relay end while it works, all of them, again and again."""
    with start_relay(app.jobs, limits=QUICK):
        for part in range(5):
            enqueue(engine, [f"{part} {number}" for number in range(20)], both_flavours=False)
            wait_until(lambda: waiting(engine) == 0, "the jobs")
            rows(
                engine,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                "AND pid <> pg_backend_pid() AND application_name LIKE 'outboxq%'",
            )
    assert len(effects(engine)) == 100
    assert rows(engine, DONE) == [(100,)]


def test_the_history_is_written_as_often_as_a_setting_says(
    engine: Engine, outboxq_database: Database, start_relay: StartRelay
) -> None:
    """An hour apart, and once more at the end; the relay says that it lives all the same."""
    flush = "SELECT coalesce(max(flush), 0) FROM outboxq.relay_status"
    enqueue(engine, ["a"], both_flavours=False)
    with start_relay(config=RelayConfig(stats_seconds=3_600.0), limits=QUICK) as relay:
        wait_until(lambda: relay.of(JobDone), "the job")
        # The first flush may have come before it, or behind it.
        wait_until(lambda: int(str(rows(engine, flush)[0][0])) > 3, "signs of life")
        enqueue(engine, ["b", "c"], both_flavours=False)
        wait_until(lambda: len(relay.of(JobDone)) == 3, "the other jobs")
        before = int(str(rows(engine, flush)[0][0]))
        wait_until(lambda: int(str(rows(engine, flush)[0][0])) > before + 2, "more signs of life")
        assert int(str(rows(engine, DONE)[0][0])) <= 1
    assert rows(engine, DONE) == [(3,)]


def test_a_history_that_is_turned_off_is_not_written(
    engine: Engine, outboxq_database: Database, start_relay: StartRelay
) -> None:
    """The relay is listed, and says that it lives."""
    flush = "SELECT coalesce(max(flush), 0) FROM outboxq.relay_status"
    enqueue(engine, ["a"], both_flavours=False)
    with start_relay(config=RelayConfig(stats_seconds=0), limits=QUICK) as relay:
        wait_until(lambda: relay.of(JobDone), "the job")
        wait_until(lambda: int(str(rows(engine, flush)[0][0])) > 3, "signs of life")
    assert rows(engine, DONE) == [(0,)]
    assert rows(engine, "SELECT * FROM outboxq.relay_status") == []
    assert rows(engine, "SELECT * FROM outboxq.stat") == []


def test_a_drain_whose_history_is_turned_off_does_not_register(
    engine: Engine, drain: Callable[..., list[Event]], caplog: pytest.LogCaptureFixture
) -> None:
    """It ends before its first sign of life, and so has no row to remove: without the tables nothing is missed."""
    enqueue(engine, ["a"], both_flavours=False)
    with engine.begin() as connection:
        migrate(connection, to=10)
    with caplog.at_level(logging.WARNING, "outboxq"):
        drain(stats_seconds=0)
        assert caplog.messages == []
        enqueue(engine, ["b"], both_flavours=False)
        drain(stats_seconds=15)
    assert [message.startswith("the history is not written") for message in caplog.messages] == [True]
    assert sorted(effects(engine)) == ["a", "b"]
