"""`outboxq.schedules`: an application's own schedules, in its own transactions, sync and async."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outboxq import AsyncOutboxSession, Jobs, OutboxSession, external, find_job, schedules
from outboxq.admin.schedules import NewSchedule
from outboxq.cron import Cron
from outboxq.errors import ArgumentError, InvalidKey, ScheduleNotFound
from outboxq.events import Event
from outboxq.postgres import Database
from outboxq.statements import schedules as statements
from tests.support.app import Account
from tests.support.scheduled import due_since, fired, tick

credit = external("credit", queue="ticks")
EXPIRING = tick.options(expires=timedelta(minutes=5))
THROTTLED = tick.options(coalesce="k", every=timedelta(minutes=5))


@pytest.mark.parametrize("session_class", [Session, OutboxSession])
def test_a_schedule_belongs_to_its_transaction(engine: Engine, session_class: type[Session]) -> None:
    """What is rolled back never was, and what is committed is there."""
    with session_class(engine) as session:
        made = schedules.put(session, "report-7", tick.job(), cron="0 8 * * *", time_zone="Europe/Berlin")
        session.rollback()
        assert schedules.list_schedules(session) == []
        assert schedules.put(session, "report-7", tick.job(), cron="0 8 * * *").name == made.name
        session.commit()
        assert [found.name for found in schedules.list_schedules(session, queue="ticks", kind="tick")] == ["report-7"]
        assert schedules.list_schedules(session, kind="other") == []
        assert schedules.remove(session, "report-7", "none") == ("report-7",)


@pytest.mark.parametrize("how", ["session", "outbox session", "connection"])
def test_async_sessions_and_connections_await_the_result(outboxq_database: Database, how: str) -> None:
    """Every function, with the same names and results."""

    async def main() -> None:
        engine = create_async_engine(outboxq_database.url)
        opened = {
            "session": lambda: AsyncSession(engine),
            "outbox session": lambda: AsyncOutboxSession(engine),
            "connection": engine.connect,
        }[how]
        async with opened() as it:
            made = await schedules.put(it, "report-7", tick.job(tenant=7), cron="@daily")
            assert made.next_at > datetime.now(UTC)
            assert await schedules.pause(it, "report-7") == ("report-7",)
            assert await schedules.resume(it, "report-7") == ("report-7",)
            handle = await schedules.run_now(it, "report-7")
            assert (handle.kind, handle.queue) == ("tick", "ticks")
            await it.commit()
            found = await find_job(it, handle)
            assert found is not None
            assert [each.name for each in await schedules.list_schedules(it)] == ["report-7"]
            assert await schedules.remove(it, "report-7") == ("report-7",)
            await it.rollback()
        await engine.dispose()

    asyncio.run(main())


def test_putting_it_again_changes_it_and_keeps_its_time(engine: Engine) -> None:
    """The time that it is due next changes with its cron text or its time zone alone; its pause does not change."""
    with engine.begin() as connection:
        schedules.put(connection, "it", tick.job(), cron="@daily")
    due = due_since(engine, "it", timedelta(hours=5))
    with engine.begin() as connection:
        schedules.pause(connection, "it")
        kept = schedules.put(connection, "it", credit.job(cents=5), cron="@daily", missed="all")
        assert (kept.kind, kept.missed, kept.next_at) == ("credit", "all", due)
        assert kept.paused_at is not None
        moved = schedules.put(connection, "it", credit.job(cents=5), cron="@hourly", missed="all")
        assert moved.next_at > due
        assert moved.paused_at == kept.paused_at


def ahead(engine: Engine, name: str, by: timedelta, last: timedelta | None = None) -> datetime:
    """Have a schedule be due so much later, as if it had been computed by a clock that was ahead; its time before."""
    with engine.begin() as connection:
        (before,) = connection.execute(
            text("SELECT next_at FROM outboxq.schedule WHERE name = :name"), {"name": name}
        ).one()
        change = "UPDATE outboxq.schedule SET next_at = next_at + :by, last_at = next_at + CAST(:last AS interval)"
        connection.execute(text(f"{change} WHERE name = :name"), {"by": by, "last": last, "name": name})
    return before


@pytest.mark.first_and_last
@pytest.mark.parametrize("when", [{"cron": "@daily"}, {"every": timedelta(hours=1)}])
@pytest.mark.parametrize("how", ["put", "declared", "resume"])
def test_a_time_of_a_clock_that_was_ahead_is_computed_again(
    engine: Engine, drain: Callable[..., list[Event]], when: dict[str, object], how: str
) -> None:
    """By whatever computes the next time, although nothing else of the schedule changes."""
    jobs = Jobs()
    declare = jobs.schedule(name="it", **when)
    declare(jobs.handler(queue="ticks", kind="tick")(lambda ctx: None))

    def again() -> None:
        if how == "declared":
            drain(jobs)
            return
        with engine.begin() as connection:
            if how == "resume" and schedules.pause(connection, "it"):
                schedules.resume(connection, "it")
            else:
                schedules.put(connection, "it", tick.job(), **when)

    again()
    for last in (None, timedelta(days=-1), timedelta(days=364)):
        before = ahead(engine, "it", timedelta(days=365), last)
        again()
        with engine.connect() as connection:
            (found,) = schedules.list_schedules(connection)
        # Another one, if its time has come meanwhile.
        assert before <= found.next_at <= before + timedelta(days=1)


@pytest.mark.parametrize("how", ["put", "resume"])
def test_a_clock_that_went_back_a_little_has_nothing_fired_twice(engine: Engine, how: str) -> None:
    """What it has fired in the minutes that come again is not due once more."""
    with engine.begin() as connection:
        schedules.put(connection, "it", tick.job(), every=timedelta(minutes=20))
    before = ahead(engine, "it", timedelta(minutes=20), timedelta(0))
    with engine.begin() as connection:
        if how == "put":
            schedules.put(connection, "it", tick.job(), every=timedelta(minutes=20))
        else:
            schedules.pause(connection, "it")
            schedules.resume(connection, "it")
        (found,) = schedules.list_schedules(connection)
    assert (found.next_at, found.last_at) == (before + timedelta(minutes=20), before)


def test_a_time_that_came_while_a_schedule_was_put_is_not_fired_twice(engine: Engine) -> None:
    """A relay has fired it after `put` looked at the clock, and before it locked the row: the later time stays."""
    with engine.begin() as connection:
        schedules.put(connection, "it", tick.job(), every=timedelta(seconds=1))
        due = connection.execute(text("SELECT clock_timestamp() - interval '1 second'")).scalar_one()
    new = NewSchedule(name="it", job=tick.job(), cron=Cron("@every 1s"))
    later = ahead(engine, "it", timedelta(hours=1))
    with engine.begin() as connection:
        row = new.as_row(due - timedelta(seconds=1), declared=False)
        connection.execute(statements.put([row], keep_declared=True))
        assert schedules.list_schedules(connection)[0].next_at == later + timedelta(hours=1)


def test_run_now_adds_the_job_once_more(engine: Engine) -> None:
    """With this moment as its time, also while it is paused; its next time stays."""
    with engine.begin() as connection:
        made = schedules.put(connection, "it", tick.job(at=schedules.FIRE_TIME), cron="@daily", time_zone="Asia/Tokyo")
        schedules.pause(connection, "it")
        schedules.run_now(connection, "it")
        assert schedules.list_schedules(connection)[0].next_at == made.next_at
    (at,) = fired(engine, "it")
    assert timedelta(0) <= datetime.now(UTC) - at < timedelta(minutes=1)
    assert at.utcoffset() == timedelta(hours=9)


def test_many_transactions_put_the_same_schedules(engine: Engine) -> None:
    """One after the other, whichever commits first."""
    with engine.connect() as one, engine.connect() as other:
        schedules.put(one, "a", tick.job(), cron="@daily")
        one.commit()
        schedules.put(other, "a", tick.job(), cron="@hourly")
        other.commit()
        assert schedules.put(one, "a", tick.job(), cron="@hourly").cron == "@hourly"


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"cron": "0 0 31 2 *"}, ArgumentError, "never due"),
        ({"time_zone": "Europe/Berln"}, ArgumentError, "did you mean"),
        ({"missed": "none"}, ArgumentError, "missed takes"),
        ({"jitter": timedelta(seconds=-1)}, ArgumentError, "jitter takes"),
        ({"name": ""}, InvalidKey, "1 to 255"),
        ({"name": 7}, InvalidKey, "is a string"),
        ({"job": tick}, ArgumentError, "made by kind.job"),
        ({"job": tick.options(run_at=datetime(2027, 1, 1, tzinfo=UTC)).job()}, ArgumentError, "leave run_at= out"),
        ({"job": tick.options(group="g").job(), "jitter": timedelta(seconds=1)}, ArgumentError, "group.*jitter"),
        ({"job": THROTTLED.job(), "jitter": timedelta(seconds=1)}, ArgumentError, "every=.*jitter"),
        ({"job": EXPIRING.job(), "jitter": timedelta(minutes=5)}, ArgumentError, "expires after 0:05:00"),
        (
            {"job": EXPIRING.options(delay=timedelta(minutes=3)).job(), "jitter": timedelta(minutes=2)},
            ArgumentError,
            "up to 0:05:00 later",
        ),
        ({"every": timedelta(seconds=5)}, ArgumentError, "one of the two"),
        ({"cron": None}, ArgumentError, "one of the two"),
        ({"cron": None, "every": timedelta(milliseconds=5)}, ArgumentError, "whole seconds"),
        (
            {"cron": None, "every": timedelta(seconds=30), "jitter": timedelta(seconds=30)},
            ArgumentError,
            "no shorter than the interval",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_the_call(engine: Engine, arguments, error, said) -> None:
    """Nothing is written."""
    given = {"name": "it", "job": tick.job(), "cron": "@daily", **arguments}
    with engine.begin() as connection:
        with pytest.raises(error, match=said):
            schedules.put(connection, given.pop("name"), given.pop("job"), **given)
        assert schedules.list_schedules(connection) == []


def test_an_expiry_behind_the_latest_time_is_taken(engine: Engine) -> None:
    """A job that has some time left when it runs at the latest."""
    with engine.begin() as connection:
        schedules.put(connection, "it", EXPIRING.job(), cron="@daily", jitter=timedelta(seconds=299))


def test_an_entity_without_a_key_is_refused(engine: Engine) -> None:
    """A schedule keeps keys, and this one has none yet."""
    with Session(engine) as session:
        account = Account()
        session.add(account)
        with pytest.raises(ArgumentError, match="flush the session before"):
            schedules.put(session, "it", external("x", queue="q").job(account=account), cron="@daily")
        session.flush()
        schedules.put(session, "it", external("x", queue="q").job(account=account), cron="@daily")


def test_names_of_schedules_that_are_not_there(engine: Engine, drain: Callable[..., list[Event]]) -> None:
    """`run_now` raises; the others return which were there."""
    with engine.begin() as connection:
        with pytest.raises(ScheduleNotFound, match="no schedule 'none'"):
            schedules.run_now(connection, "none")
        assert schedules.pause(connection, "none") == ()
        assert schedules.resume(connection, "none") == ()
        assert schedules.remove(connection, "none") == ()
