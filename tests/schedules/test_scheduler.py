"""The scheduler: jobs of schedules are added when their time comes, once, by whichever relay is there."""

import asyncio
import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine

from outboxq import AsyncContext, Context, Jobs, RelayConfig, schedules
from outboxq.events import Event, JobDone, ScheduleFired
from outboxq.postgres import Database
from tests.conftest import StartRelay
from tests.support.scheduled import due_since, fired, put, tick
from tests.support.waiting import wait_until

MINUTE = timedelta(minutes=1)


def no_kinds() -> Jobs:
    """A registry that knows none of the scheduled kinds."""
    jobs = Jobs()

    @jobs.handler(queue="other")
    def other(ctx: Context) -> None: ...

    return jobs


def minutes_since(due: datetime, number: int) -> list[datetime]:
    return [due + number * MINUTE for number in range(number)]


def test_a_relay_fires_a_schedule_whose_kind_it_does_not_know(engine: Engine, start_relay: StartRelay) -> None:
    """Any relay adds the job: another one may know its handler."""
    put(engine, missed="all")
    due = due_since(engine, "tick", timedelta(0))
    with start_relay(no_kinds()) as running:
        event = wait_until(lambda: running.of(ScheduleFired), "the event")[0]
    # Another one, if a minute has begun meanwhile.
    assert fired(engine)[0] == due
    assert (event.name, event.kind, event.queue, event.fire_time) == ("tick", "tick", "ticks", due)
    assert 0 <= event.late_seconds < 120


def test_a_schedule_that_comes_while_a_relay_runs_is_fired_by_it(engine: Engine, start_relay: StartRelay) -> None:
    """The relay sees it with its next heartbeat, and starts the scheduler then; a slot that sleeps runs its job."""
    jobs, ran = Jobs(), threading.Event()

    @jobs.handler(queue="ticks")
    def tick(ctx: Context) -> None:
        ran.set()

    with start_relay(jobs, RelayConfig(heartbeat_seconds=0.1, poll_seconds=3600)):
        assert "outboxq-scheduler" not in {thread.name for thread in threading.enumerate()}
        put(engine)
        due_since(engine, "tick", timedelta(0))
        assert ran.wait(60)


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("missed", "ago", "expected"),
    [
        ("all", 5 * MINUTE, slice(None)),
        ("one", 5 * MINUTE, slice(-1, None)),
        ("one", timedelta(days=400), slice(-1, None)),
        ("skip", 5 * MINUTE, slice(-1, None)),
    ],
)
def test_times_that_were_missed_are_made_up_for_as_the_schedule_says(engine, drain, missed, ago, expected) -> None:
    """All of them; the newest alone; or, if they are to be skipped, what is less than a minute late."""
    put(engine, missed=missed)
    due = due_since(engine, "tick", ago)
    drain(no_kinds())
    found = fired(engine)
    all_of_them = minutes_since(due, ago // MINUTE + 1)
    # The drain may come in the next minute.
    assert found in (all_of_them[expected], minutes_since(due, ago // MINUTE + 2)[expected])


def test_what_is_skipped_runs_at_its_next_time(engine: Engine, drain: Callable[..., list[Event]]) -> None:
    """A daily schedule that is an hour late adds nothing, and is due tomorrow."""
    put(engine, cron="0 0 1 1 *", missed="skip")
    due_since(engine, "tick", timedelta(hours=1))
    assert [e for e in drain(no_kinds()) if isinstance(e, ScheduleFired)] == []
    with engine.connect() as connection:
        (found,) = schedules.list_schedules(connection)
    assert found.next_at > datetime.now(UTC) - timedelta(minutes=1)
    assert found.last_at is None
    assert fired(engine) == []


def test_a_long_backlog_comes_in_pieces(engine: Engine, drain: Callable[..., list[Event]]) -> None:
    """More times than one transaction adds are all fired, in their order, by one drain."""
    put(engine, missed="all")
    due = due_since(engine, "tick", 2_500 * MINUTE)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE added (rows bigint)"))
        connection.execute(
            text(
                "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
                "INSERT INTO added SELECT count(*) FROM new_jobs; RETURN NULL; END $$"
            )
        )
        connection.execute(
            text(
                "CREATE TRIGGER note AFTER INSERT ON outboxq.job REFERENCING NEW TABLE AS new_jobs "
                "FOR EACH STATEMENT EXECUTE FUNCTION note()"
            )
        )
    drain(no_kinds())
    found = fired(engine)
    assert found == minutes_since(due, len(found))
    assert len(found) in (2_501, 2_502)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT max(rows) FROM added")).scalar_one() == 1_000


def test_a_drain_fires_what_is_due_and_runs_it(engine: Engine, drain: Callable[..., list[Event]]) -> None:
    """A drain may be the only relay there is: it fires when it begins, and nothing after that."""
    jobs, given = Jobs(), []

    @jobs.schedule("0 0 * * *", time_zone="Asia/Kathmandu", name="daily")
    @jobs.handler(queue="ticks")
    def tick(ctx: Context, *, fire_time: datetime) -> None:
        given.append((fire_time, ctx.headers))

    assert [type(e) for e in drain(jobs) if isinstance(e, ScheduleFired | JobDone)] == []
    due = due_since(engine, "daily", timedelta(0))
    assert [type(e) for e in drain(jobs) if isinstance(e, ScheduleFired | JobDone)] == [ScheduleFired, JobDone]
    ((fire_time, headers),) = given
    assert fire_time == due
    assert fire_time.utcoffset() == timedelta(hours=5, minutes=45)
    assert headers == {"outboxq.schedule": "daily", "outboxq.fire_time": fire_time.isoformat()}
    assert drain(jobs)
    assert len(given) == 1


def test_an_async_engine_alone_is_enough(outboxq_database: Database, engine: Engine, start_relay: StartRelay) -> None:
    """A relay without a sync engine fires through its event loop."""
    jobs, ran = Jobs(), threading.Event()

    @jobs.schedule("* * * * *")
    @jobs.handler(queue="ticks")
    async def tick(ctx: AsyncContext, *, fire_time: datetime) -> None:
        ran.set()

    asynchronous = create_async_engine(outboxq_database.url)
    with start_relay(jobs, RelayConfig(heartbeat_seconds=0.1), engine=asynchronous) as running:
        wait_until(lambda: list_of(engine), "the schedule")
        due = due_since(engine, "tick", timedelta(0))
        assert ran.wait(60)
        assert due in [e.fire_time for e in wait_until(lambda: running.of(ScheduleFired), "the event")]
    asyncio.run(asynchronous.dispose())


def list_of(engine: Engine) -> list[schedules.Schedule]:
    with engine.connect() as connection:
        return schedules.list_schedules(connection)


def looked_at(engine: Engine) -> list[datetime]:
    """When relays last looked at what operators have set, in a heartbeat."""
    # The beginning of the statement: the view shows no more of it.
    looks = "query LIKE 'SELECT ''suspects''%' AND pid <> pg_backend_pid()"
    with engine.connect() as connection:
        return list(connection.execute(text(f"SELECT query_start FROM pg_stat_activity WHERE {looks}")).scalars())


@pytest.mark.wide
def test_an_engine_whose_pool_is_in_use_does_not_hold_schedules_up(
    outboxq_database: Database, engine: Engine, start_relay: StartRelay
) -> None:
    """Slots that work take all of the engine's connections, and schedules have one beside them."""
    jobs, entered, leave = Jobs(), threading.Event(), threading.Event()

    @jobs.handler(queue="ledger")
    def hold(ctx: Context) -> None:
        ctx.session.execute(text("SELECT 1"))
        entered.set()
        leave.wait(60)

    small = create_engine(outboxq_database.url, pool_size=5, max_overflow=0)
    with engine.begin() as connection:
        connection.execute(text("SELECT outboxq.add_job('hold', '{}', 'ledger') FROM generate_series(1, 4)"))
    config = RelayConfig(heartbeat_seconds=0.1, slots_per_queue=4, listen=False)
    with start_relay(jobs, config, engine=small):
        try:
            assert entered.wait(60)
            wait_until(lambda: small.pool.checkedout() == 4, "all slots")
            own = small.connect()
            put(engine)
            due = due_since(engine, "tick", timedelta(0))
            wait_until(lambda: due in fired(engine), "the job")
        finally:
            leave.set()
    own.close()
    small.dispose()


def test_jitter_runs_a_job_later_and_not_earlier(engine: Engine, drain: Callable[..., list[Event]]) -> None:
    """Within the given time after the one that it is due, each at another one; `fire_time` is not moved."""
    put(engine, missed="all", jitter=timedelta(hours=1), job=tick.options(delay=timedelta(hours=2)).job())
    due = due_since(engine, "tick", 40 * MINUTE)
    drain(no_kinds())
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT run_at, state FROM outboxq.job ORDER BY seq")).all()
    offsets = [row.run_at - at - timedelta(hours=2) for row, at in zip(rows, fired(engine), strict=True)]
    assert all(timedelta(0) <= offset < timedelta(hours=1) for offset in offsets)
    assert len(set(offsets)) > 30
    assert fired(engine)[0] == due
    assert {row.state for row in rows} == {"scheduled"}


def test_options_of_the_job_hold_each_time(engine: Engine, drain: Callable[..., list[Event]]) -> None:
    """Priority, attempts, headers and keys are those of the job that was put."""
    options = {"priority": 5, "max_attempts": 2, "headers": {"tenant": "7"}, "coalesce": "k"}
    put(engine, job=tick.options(**options).job(tenant=7, at=schedules.FIRE_TIME), time_zone="Europe/Berlin")
    due = due_since(engine, "tick", timedelta(0))
    drain(no_kinds())
    with engine.connect() as connection:
        row = connection.execute(
            text("SELECT priority, max_attempts, headers, unique_key, expires_at, args, state FROM outboxq.job")
        ).one()
    assert (row.priority, row.max_attempts, row.headers["tenant"], row.unique_key) == (5, 2, "7", "tick\x1fk")
    assert row.args["tenant"] == 7
    assert datetime.fromisoformat(row.args["at"]) == due
    assert row.expires_at is None


def test_a_unique_key_suppresses_an_overlap(engine: Engine, drain: Callable[..., list[Event]]) -> None:
    """While a job of the key waits no other is added: the time counts as fired, and its event says so."""
    put(engine, missed="all", job=tick.options(unique="tick").job())
    due = due_since(engine, "tick", 3 * MINUTE)
    told = [event for event in drain(no_kinds()) if isinstance(event, ScheduleFired)]
    assert fired(engine) == [due]
    assert [event.added for event in told] == [True, *([False] * (len(told) - 1))]
    with engine.begin() as connection:
        handle = schedules.run_now(connection, "tick")
    assert not handle.added
    assert len(fired(engine)) == 1


def test_jobs_of_a_group_wait_for_their_turn(engine: Engine, drain: Callable[..., list[Event]]) -> None:
    """The times that were missed are in the order of the group."""
    put(engine, missed="all", job=tick.options(group="ticks").job())
    due_since(engine, "tick", 3 * MINUTE)
    drain(no_kinds())
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT state, group_key FROM outboxq.job ORDER BY seq")).all()
    assert {tuple(row) for row in rows} == {("grouped", "ticks")}
    assert fired(engine) == sorted(fired(engine))


def test_a_schedule_that_cannot_be_fired_holds_no_other_up(
    engine: Engine, drain: Callable[..., list[Event]], caplog: pytest.LogCaptureFixture
) -> None:
    """Of a zone that is not known here, of a job that cannot be read or added: each is logged and passed over."""
    for number in range(12):
        put(engine, f"broken-{number}")
        due_since(engine, f"broken-{number}", timedelta(hours=1))
    put(engine, missed="all")
    due = due_since(engine, "tick", timedelta(0))
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.schedule SET time_zone = 'Mars/Olympus' WHERE name LIKE 'broken-%'"))
        connection.execute(text("UPDATE outboxq.schedule SET options = '{\"weight\": 1}' WHERE name = 'broken-3'"))
        refused = "UPDATE outboxq.schedule SET kind = 'refused', time_zone = 'UTC' WHERE name = 'broken-4'"
        connection.execute(text(refused))
        connection.execute(text("ALTER TABLE outboxq.job ADD CONSTRAINT refusing CHECK (kind <> 'refused')"))
    with caplog.at_level(logging.ERROR, "outboxq.scheduler"):
        drain(no_kinds())
    assert fired(engine) in ([due], [due, due + MINUTE])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 12
    assert sum("Mars/Olympus" in line for line in said) == 10
    assert sum("newer version" in line for line in said) == 1
    assert sum("IntegrityError" in line and "23514" in line for line in said) == 1


def test_a_paused_schedule_is_not_fired(engine: Engine, drain: Callable[..., list[Event]]) -> None:
    """Not while it is paused, and what it missed is not made up for when it is resumed."""
    put(engine, missed="all")
    due_since(engine, "tick", 10 * MINUTE)
    with engine.begin() as connection:
        assert schedules.pause(connection, "tick", "none") == ("tick",)
    drain(no_kinds())
    assert fired(engine) == []
    with engine.begin() as connection:
        assert schedules.resume(connection, "tick") == ("tick",)
        assert schedules.resume(connection, "tick") == ()
    drain(no_kinds())
    assert fired(engine) == []


def test_a_relay_without_schedules_sends_nothing_more(
    outboxq_database: Database, engine: Engine, start_relay: StartRelay
) -> None:
    """A statement that it sends anyway says that there is none: neither a thread nor a connection is for schedules."""
    sent: list[str] = []
    own = create_engine(outboxq_database.url)
    event.listen(own, "before_cursor_execute", lambda _c, _cu, statement, *_: sent.append(statement))
    with start_relay(no_kinds(), RelayConfig(heartbeat_seconds=0.05), engine=own):
        looks: set[object] = set()
        wait_until(lambda: looks.update(looked_at(engine)) or len(looks) > 3, "some heartbeats")
        assert "outboxq-scheduler" not in {thread.name for thread in threading.enumerate()}
    # At its start it asks for those that its code declared once.
    assert len([statement for statement in sent if "outboxq.schedule" in statement]) == 1
    own.dispose()


@pytest.mark.wide
def test_an_interval_of_a_second_is_fired_at_each_second(
    engine: Engine, outboxq_database: Database, start_relay: StartRelay
) -> None:
    """Each once, by relays side by side, which keep their connection from one to the next."""
    with engine.begin() as connection:
        schedules.put(connection, "tick", tick.job(), every=timedelta(seconds=1), missed="all")
    opened: list[object] = []
    own = create_engine(outboxq_database.url, connect_args={"application_name": "own"})
    event.listen(own, "connect", lambda *_: opened.append(None))
    with start_relay(no_kinds(), engine=own), start_relay(no_kinds()):
        wait_until(lambda: len(fired(engine)) > 1, "some seconds")
        before = len(opened)
        wait_until(lambda: len(fired(engine)) > 9, "some seconds more")
        # The history has connections of its own.
        assert len(opened) <= before + 3
    found = fired(engine)
    assert found == [found[0] + number * timedelta(seconds=1) for number in range(len(found))]
    own.dispose()
