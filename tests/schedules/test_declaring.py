"""Schedules that code declares: what is refused, and what relays store of them."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

import pytest
from sqlalchemy import Engine, text

from outboxq import BatchContext, BatchItem, Context, Jobs, schedules
from outboxq.errors import ArgumentError, RegistryError, ScheduleDeclared
from outboxq.events import Event
from tests.support.scheduled import due_since, put


def nightly(ctx: Context, tenant: int = 7, *, fire_time: datetime) -> None: ...


def registry(cron: str = "30 2 * * *", function: Callable[..., None] = nightly, **options: object) -> Jobs:
    jobs = Jobs()
    jobs.schedule(cron, **options)(jobs.handler(queue="reports")(function))
    return jobs


def stored(engine: Engine) -> list[schedules.Schedule]:
    with engine.connect() as connection:
        return schedules.list_schedules(connection)


def test_a_relay_stores_what_its_registry_declares(engine: Engine, drain: Callable[..., list[Event]]) -> None:
    """By name, by default the handler's kind, and with the handler's queue."""
    jobs = Jobs()

    @jobs.schedule("0 8 * * 1", time_zone="Europe/Berlin", missed="skip", jitter=timedelta(minutes=5), name="monday")
    @jobs.schedule("@hourly")
    @jobs.handler(queue="reports")
    def report(ctx: Context) -> None: ...

    drain(jobs)
    found = [
        (each.name, each.kind, each.queue, each.cron, each.time_zone, each.missed, each.jitter_seconds, each.declared)
        for each in stored(engine)
    ]
    assert found == [
        ("monday", "report", "reports", "0 8 * * 1", "Europe/Berlin", "skip", 300, True),
        ("report", "report", "reports", "@hourly", "UTC", "one", 0, True),
    ]
    assert report.kind == "report"


def test_a_start_keeps_times_and_pauses(engine: Engine, drain: Callable[..., list[Event]]) -> None:
    """Unless the cron text or the time zone is another one; a schedule that is paused stays so in any case."""
    drain(registry())
    with engine.begin() as connection:
        schedules.pause(connection, "nightly")
        due = datetime.fromisoformat("2020-01-01T00:00:00+00:00")
        connection.execute(text("UPDATE outboxq.schedule SET next_at = :due, last_at = :due"), {"due": due})
    drain(registry(missed="all", args={"tenant": 8}))
    (kept,) = stored(engine)
    assert (kept.next_at, kept.last_at, kept.missed) == (due, due, "all")
    assert kept.paused_at is not None
    drain(registry(time_zone="Europe/Berlin"))
    (moved,) = stored(engine)
    assert moved.next_at > due
    assert moved.paused_at == kept.paused_at


def test_a_start_that_changes_nothing_writes_nothing(engine: Engine, drain: Callable[..., list[Event]]) -> None:
    """The row is that of the first start."""
    version = text("SELECT ctid::text, cmin::text FROM outboxq.schedule")
    drain(registry())
    with engine.connect() as connection:
        before = connection.execute(version).all()
    drain(registry())
    with engine.connect() as connection:
        assert connection.execute(version).all() == before


def test_code_takes_over_what_was_put(engine: Engine, drain: Callable[..., list[Event]]) -> None:
    """A schedule moves into the code under its name, and is not changed from elsewhere from then on."""
    put(engine, "nightly")
    drain(registry())
    (found,) = stored(engine)
    assert found.declared
    with pytest.raises(ScheduleDeclared, match="'nightly' is declared"):
        put(engine, "nightly")


def test_a_handler_without_a_fire_time_is_given_none(drain: Callable[..., list[Event]], engine: Engine) -> None:
    """Its arguments are those of the schedule, and its defaults."""
    given: list[tuple[object, ...]] = []

    def plain(ctx: Context, name: str, size: int = 3) -> None:
        given.append((name, size, ctx.headers["outboxq.schedule"]))

    jobs = registry(function=plain, args={"name": "x"})
    drain(jobs)
    due_since(engine, "plain", timedelta(0))
    drain(jobs)
    assert given == [("x", 3, "plain")]


def test_a_batch_handler_may_have_a_schedule(drain: Callable[..., list[Event]], engine: Engine) -> None:
    """Its class of arguments may have a `fire_time`."""
    given: list[datetime] = []
    jobs = Jobs()

    @dataclass
    class Args:
        fire_time: datetime

    @jobs.schedule("@daily", missed="all")
    @jobs.batch_handler(Args, queue="reports")
    def report(ctx: BatchContext, items: list[BatchItem[Args]]) -> None:
        given.extend(item.args.fire_time for item in items)

    drain(jobs)
    due = due_since(engine, "report", timedelta(days=2))
    drain(jobs)
    assert given[0] == due
    assert len(given) == 3


def test_included_registries_bring_their_schedules() -> None:
    """Each once, also if a registry is included twice."""
    inner, outer, top = registry(), Jobs(), Jobs()
    outer.include(inner)
    top.include(inner)
    top.include(outer)
    assert [new.name for new in top.resolve().schedules] == ["nightly"]


def takes_text(ctx: Context, *, fire_time: int) -> None: ...


def needs_more(ctx: Context, tenant: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        (needs_more, {}, "schedule 'needs_more'.*'tenant'.*args=.*defined at"),
        (needs_more, {"args": {"tenant": "x"}}, "'tenant'"),
        (needs_more, {"args": {"tenant": 1, "of": 2}}, "unexpected keyword argument 'of'"),
        (takes_text, {}, "fire_time.*is a datetime"),
        (nightly, {"name": ""}, "1 to 255 bytes"),
        (nightly, {"name": "a\nb"}, "control character"),
        (nightly, {"missed": "some"}, "missed takes 'skip' or 'one' or 'all'"),
        (nightly, {"jitter": 5}, "jitter takes a timedelta"),
        (nightly, {"jitter": timedelta(days=2)}, "0 to 24 hours"),
    ],
)
def test_what_cannot_be_scheduled_is_refused_at_the_start(function, options, said) -> None:
    """With the schedule, what is wrong, and where the handler is."""
    with pytest.raises((RegistryError, ArgumentError, ValueError), match=said):
        registry(function=function, **options).resolve()


@pytest.mark.parametrize(("cron", "said"), [("0 0 31 2 *", "never due"), ("0 30 2 * * *", "seconds"), ("x", "fields")])
def test_cron_texts_are_checked_at_the_decorator(cron: str, said: str) -> None:
    """When the module is imported."""
    with pytest.raises(ArgumentError, match=said):
        Jobs().schedule(cron)
    with pytest.raises(ArgumentError, match=f"^schedule 'monthly': .*{said}"):
        Jobs().schedule(cron, name="monthly")


def test_two_schedules_of_one_name_are_refused() -> None:
    """No number is given to the second one: it would change hands when the first goes."""
    jobs = Jobs()
    handler = jobs.schedule("@daily")(jobs.handler(nightly))
    with pytest.raises(RegistryError, match=r"two schedules have the name 'nightly'.*name="):
        jobs.schedule("@hourly")(handler)
    other = registry(function=needs_more, name="nightly", args={"tenant": 1})
    other.include(jobs)
    with pytest.raises(RegistryError, match="two schedules"):
        other.resolve()


def test_a_schedule_below_its_handler_is_refused() -> None:
    """The decorators go the other way round; a handler of another registry is refused at the start."""
    jobs, other = Jobs(), Jobs()
    with pytest.raises(RegistryError, match=r"stands above @jobs\.handler"):
        jobs.schedule("@daily")(nightly)
    jobs.schedule("@daily")(other.handler(nightly))
    jobs.handler(queue="x")(needs_more)
    with pytest.raises(RegistryError, match="'nightly' is not in this registry"):
        jobs.resolve()


def test_a_key_that_is_made_of_the_fire_time_is_refused() -> None:
    """Keys are made when the schedule is stored, and are the same each time."""
    jobs = Jobs()
    with_key = jobs.handler(queue="reports", unique=lambda fire_time: fire_time.isoformat())(nightly)
    jobs.schedule("@daily")(with_key)
    with pytest.raises(RegistryError, match="key of its job is made of fire_time"):
        jobs.resolve()
