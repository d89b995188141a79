"""Cron texts: when a schedule is due, computed from the last time and in the clocks of its zone."""

import zoneinfo
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outboxq.cron import SHORTHANDS, Cron, cron_of, every_text
from outboxq.errors import ArgumentError

START = datetime(2026, 1, 1, tzinfo=UTC)
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Sydney", "Asia/Kathmandu", "America/Santiago")
MINUTE = st.sampled_from(["*", "*/30", "*/7", "0", "30", "15,45", "5-10"])
HOUR = st.sampled_from(["*", "*/2", "0", "1", "2", "3", "2,3", "1-3"])
DAY = st.sampled_from(["*", "1", "29", "31", "*/2", "L"])
MONTH = st.sampled_from(["*", "2", "3,10", "4"])
WEEKDAY = st.sampled_from(["*", "SUN", "1-5", "0#1"])
TEXTS = st.builds(lambda *fields: " ".join(fields), MINUTE, HOUR, DAY, MONTH, WEEKDAY).filter(
    lambda text: "31 2 *" not in text and "31 4 *" not in text
)
MOMENTS = st.datetimes(datetime(2020, 1, 1), datetime(2030, 1, 1)).map(lambda moment: moment.replace(tzinfo=UTC))


@given(TEXTS, st.sampled_from(ZONES), MOMENTS)
@settings(max_examples=150, deadline=None)
def test_each_time_follows_from_the_one_before_it(text: str, zone: str, moment: datetime) -> None:
    """The next time is later, is the same from wherever between two times it is computed, and none is left out."""
    cron = Cron(text, zone)
    first = cron.after(moment)
    at_once = list(islice(cron.times_from(first), 6))
    step_by_step = [first]
    for _ in range(5):
        step_by_step.append(cron.after(step_by_step[-1]))
    assert at_once == step_by_step
    assert moment < first
    for one, other in pairwise(at_once):
        assert one < other
        assert cron.after(other - (other - one) / 3) == other
        assert cron.after(other - timedelta(seconds=1)) == other


@pytest.mark.wide
@given(TEXTS, st.sampled_from(ZONES), MOMENTS, st.timedeltas(timedelta(0), timedelta(days=500)))
@settings(max_examples=150, deadline=None)
def test_the_newest_of_the_times_that_were_missed_is_found(text, zone, moment, span) -> None:
    """It is the last one up to now that a walk over all of them finds."""
    cron = Cron(text, zone)
    first = cron.after(moment)
    now = first + span
    newest = cron.newest(first, now)
    assert first <= newest <= now
    assert cron.after(newest) > now
    assert newest == first or cron.after(newest - timedelta(seconds=1)) == newest


@pytest.mark.first_and_last
@pytest.mark.parametrize("zone", ZONES)
def test_a_time_of_every_hour_is_what_clocks_on_the_wall_show(zone: str) -> None:
    """With a star for the hour, each minute at which the clocks show such a time is due, over a whole year.

    Their distances from UTC are quarters of hours, so that no other minute can be one.
    """
    cron = Cron("30 * * * *", zone)
    tz = zoneinfo.ZoneInfo(zone)
    minutes = (START + timedelta(minutes=number) for number in range(0, 60 * 24 * 365, 15))
    expected = [minute for minute in minutes if minute.astimezone(tz).minute == 30]
    assert cron.due_times(expected[0], expected[-1], 10_000) == expected


def test_in_the_hour_that_comes_twice_nothing_is_due_in_the_past() -> None:
    """A schedule that is made in the second of the two is due tomorrow, and not at the first one, which is over."""
    cron = Cron("30 2 * * *", "Europe/Berlin")
    in_the_second = datetime(2026, 10, 25, 1, 10, tzinfo=UTC)
    assert cron.after(in_the_second) == datetime(2026, 10, 26, 1, 30, tzinfo=UTC)
    first = datetime(2026, 10, 1, 0, 30, tzinfo=UTC)
    assert cron.newest(first, in_the_second) == datetime(2026, 10, 25, 0, 30, tzinfo=UTC)


def test_times_that_are_missed_are_bounded() -> None:
    """No more than asked for, the oldest first."""
    cron = Cron("* * * * *")
    due = cron.due_times(START, START + timedelta(days=30), 3)
    assert due == [START, START + timedelta(minutes=1), START + timedelta(minutes=2)]


@pytest.mark.parametrize("name", sorted(SHORTHANDS))
def test_shorthands_stand_for_their_fields(name: str) -> None:
    """`@daily` is `0 0 * * *`, in the clocks of the zone, in upper case too."""
    for text in (name, name.upper()):
        assert Cron(text, "Europe/Berlin").after(START) == Cron(SHORTHANDS[name], "Europe/Berlin").after(START)


@pytest.mark.parametrize(
    ("text", "zone", "said"),
    [
        ("0 0 31 2 *", "UTC", "is never due: no month of '2' has a day '31'"),
        ("0 0 31 2,4,6 *", "UTC", "is never due: no month of '2,4,6' has a day '31'"),
        ("0 0 30 2 *", "UTC", "never due"),
        ("0 30 2 * * *", "UTC", "the first of six would mean seconds.*'30 2 \\* \\* \\*'"),
        ("30 2 * *", "UTC", "has 4 fields.*five fields"),
        ("", "UTC", "has 0 fields"),
        ("every day at noon x", "UTC", "cannot be read: its minute is 'every', and takes 0 to 59; a star, or"),
        ("61 * * * *", "UTC", "its minute is '61', and takes 0 to 59"),
        ("0 24 * * *", "UTC", "its hour is '24', and takes 0 to 23"),
        ("0 0 1-32 * *", "UTC", "its day of month is '1-32', and takes 1 to 31, L for"),
        ("0 0 31 13 *", "UTC", "its month is '13', and takes 1 to 12 or JAN to DEC"),
        ("0 0 * * FUNDAY", "UTC", "its day of week is 'FUNDAY', and takes 0 to 7 or SUN to SAT"),
        ("@reboot", "UTC", "lifespan"),
        ("@fortnightly", "UTC", "@hourly"),
        (5, "UTC", "is a text, got int"),
        ("@daily", "Europe/Berln", "did you mean 'Europe/Berlin'"),
        ("@daily", "../../etc/passwd", "no time zone"),
        ("@daily", "Europe", "no time zone"),
        ("@daily", "", "no time zone"),
        ("@daily", None, "name such as"),
    ],
)
def test_what_cannot_be_is_refused(text, zone, said) -> None:
    """With what it would have meant, and what to write."""
    with pytest.raises(ArgumentError, match=said):
        Cron(text, zone)


def test_a_system_without_time_zones_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install; UTC needs none."""
    monkeypatch.setattr(zoneinfo, "available_timezones", set)

    def missing(name: str) -> None:
        raise zoneinfo.ZoneInfoNotFoundError(name)

    monkeypatch.setattr(zoneinfo, "ZoneInfo", missing)
    with pytest.raises(ArgumentError, match="pip install tzdata"):
        Cron("@daily", "Europe/Berlin")
    assert Cron("@daily").after(START) == START + timedelta(days=1)


@given(st.integers(1, 400_000), MOMENTS, st.integers(0, 300))
@settings(max_examples=100, deadline=None)
def test_an_interval_is_due_at_its_multiples(seconds: int, moment: datetime, steps: int) -> None:
    """Whoever asks and whenever: nothing drifts, nothing is left out, and the clocks of a zone move none."""
    every = timedelta(seconds=seconds)
    cron = cron_of(None, every, "Europe/Berlin")
    assert cron == Cron(every_text(every), "Europe/Berlin")
    first = cron.after(moment)
    assert timedelta(0) < first - moment <= every
    assert (first - datetime(1970, 1, 1, tzinfo=UTC)) % every == timedelta(0)
    due = [first + number * every for number in range(steps + 1)]
    assert cron.due_times(first, due[-1], steps + 1) == due
    assert cron.newest(first, due[-1]) == due[-1]
    assert cron.after(due[-1] - timedelta(seconds=1) / 2) == due[-1]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("@every 30s", 30),
        ("@every 1h30m", 5400),
        ("@EVERY 90S", 90),
        ("@every 1d", 86_400),
        (" @every  365d ", 31_536_000),
    ],
)
def test_an_interval_may_be_a_text(text: str, seconds: int) -> None:
    """As the command line takes it, and as it is stored."""
    assert Cron(text).every == timedelta(seconds=seconds)
    assert Cron(every_text(timedelta(seconds=seconds))).every == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text", ["@every", "@every 0s", "@every 30", "@every 1.5s", "@every 366d", "@every 1m 1h", "@every -1s"]
)
def test_an_interval_that_cannot_be_is_refused(text: str) -> None:
    """With what it may be."""
    with pytest.raises(ArgumentError, match="1 second to 365 days, such as '@every 30s'"):
        Cron(text)


@pytest.mark.parametrize(
    "every", [timedelta(0), timedelta(milliseconds=1500), timedelta(days=366), timedelta(seconds=-5), 30, "30s"]
)
def test_an_interval_in_code_is_of_whole_seconds(every: object) -> None:
    """From a second to a year."""
    with pytest.raises(ArgumentError, match="whole seconds, from 1 second to 365 days"):
        cron_of(None, every, "UTC")


def test_a_schedule_has_a_cron_text_or_an_interval() -> None:
    """One of the two."""
    for cron, every in ((None, None), ("@daily", timedelta(seconds=1))):
        with pytest.raises(ArgumentError, match="one of the two"):
            cron_of(cron, every, "UTC")
