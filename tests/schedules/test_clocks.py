"""Cron texts on the days on which clocks change, against a reference that looks at each minute of the wall's clock."""

import zoneinfo
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache

import pytest

from outboxq.cron import Cron
from tests.support.matrices import sampled

MINUTE, AROUND = timedelta(minutes=1), timedelta(hours=30)
# One change of each sort that zones have had: by the time on the wall, and by how far the clocks are moved.
CHANGES = (
    ("Australia/Lord_Howe", "2026-04-04T15:00"),  # half an hour
    ("Pacific/Apia", "2011-12-30T10:00"),  # a whole day is left out
    ("America/St_Johns", "2006-10-29T02:31"),  # a minute past midnight, to the day before
    ("Australia/Lord_Howe", "2026-10-03T15:30"),
    ("Antarctica/Troll", "2024-03-31T01:00"),  # two hours
    ("Antarctica/Troll", "2024-10-27T01:00"),
    ("America/St_Johns", "2006-04-02T03:31"),
    ("Africa/Cairo", "2025-04-24T22:00"),  # at midnight
    ("Africa/Cairo", "2025-10-30T21:00"),
    ("America/Nuuk", "2025-03-30T01:00"),
    ("America/Havana", "2025-11-02T05:00"),
    ("Pacific/Easter", "2025-04-06T03:00"),
    ("Pacific/Easter", "2025-09-07T04:00"),
    ("Pacific/Chatham", "2025-04-05T14:00"),  # at a quarter to an hour
    ("Pacific/Chatham", "2025-09-27T14:00"),
    ("Pacific/Apia", "2011-04-02T14:00"),
    ("Pacific/Apia", "2011-09-24T14:00"),
    ("Africa/Casablanca", "2030-02-10T02:00"),
    ("Africa/Casablanca", "2030-12-22T02:00"),
    ("Atlantic/Canary", "2025-03-30T01:00"),
    ("America/New_York", "2025-11-02T06:00"),
    ("Europe/Berlin", "2026-03-29T01:00"),
    ("Europe/Berlin", "2026-10-25T01:00"),
)


@dataclass(frozen=True)
class Change:
    """A change of the clocks of a zone: what they showed before it, and what they show then."""

    zone: str
    at: datetime

    @property
    def before(self) -> datetime:
        return self._shown(self.at - MINUTE) + MINUTE

    @property
    def then(self) -> datetime:
        return self._shown(self.at)

    def _shown(self, at: datetime) -> datetime:
        return at.astimezone(zoneinfo.ZoneInfo(self.zone)).replace(tzinfo=None)


ODD_CASES = [Change(zone, datetime.fromisoformat(at).replace(tzinfo=UTC)) for zone, at in CHANGES]


def texts_for(change: Change) -> list[str]:
    """Times of the hours that are left out or come twice, and of the hours beside them, named and by stars."""
    first, last = sorted((change.before, change.then))
    hours = sorted({(first + timedelta(minutes=m)).hour for m in (-60, 0, 30, 60)} | {last.hour})
    named = ",".join(map(str, hours))
    texts = [f"*/30 {hour} * * *" for hour in hours]
    texts += [f"{minute} {hour} * * *" for hour in hours for minute in ("0", "30", "5,50")]
    return [*texts, "30 * * * *", "*/7 * * * *", "0 */2 * * *", f"*/15 {named} * * *", f"1,15-17,45 {named} * * *"]


def values(text: str, number: int) -> set[int]:
    """What a field of `texts_for` stands for."""
    found = set[int]()
    for part in text.split(","):
        base, _, step = part.partition("/")
        first, _, last = base.partition("-")
        found |= set(range(number)) if base == "*" else set(range(int(first), int(last or first) + 1))
        found = {each for each in found if each % int(step or 1) == 0}
    return found


@cache
def walls(change: Change) -> list[tuple[datetime, datetime]]:
    """Each minute around a change, and what the clocks show."""
    tz = zoneinfo.ZoneInfo(change.zone)
    minutes = [change.at + number * MINUTE for number in range(-AROUND // MINUTE, AROUND // MINUTE)]
    return [(minute, minute.astimezone(tz).replace(tzinfo=None)) for minute in minutes]


def reference(text: str, change: Change) -> list[datetime]:
    """When a text is due around a change, by looking at every minute.

    With a star, whenever the clocks show such a time. Named times once a day: the first time that the clocks show them,
    or if they are left out, when the clocks have been changed.
    """
    minute, hour, *_ = text.split()
    minutes, hours = values(minute, 60), values(hour, 24)
    shown = [at for at, wall in walls(change) if wall.minute in minutes and wall.hour in hours]
    if text[0] == "*" or hour[0] == "*":
        return shown
    first: dict[datetime, datetime] = {}
    for at, wall in walls(change):
        first.setdefault(wall, at)
    due = {first[wall] for _, wall in walls(change) if wall.minute in minutes and wall.hour in hours}
    left_out = (change.before + number * MINUTE for number in range((change.then - change.before) // MINUTE))
    if any(wall.minute in minutes and wall.hour in hours for wall in left_out):
        due.add(change.at)
    return sorted(due)


def test_there_are_cases_of_every_sort() -> None:
    """Half hours, two hours, whole days, and changes at midnight are among them; in each the clocks are moved."""
    moved = {change.then - change.before for change in ODD_CASES}
    assert {timedelta(minutes=30), timedelta(hours=-1), timedelta(hours=2), timedelta(days=1)} <= moved
    assert timedelta(0) not in moved
    assert {0, 2, 3} <= {change.before.hour for change in ODD_CASES}
    assert sum(len(texts_for(change)) for change in ODD_CASES) >= 360


@pytest.mark.parametrize("change", sampled(ODD_CASES, 3))
def test_each_time_around_a_change_is_that_of_the_reference(change: Change) -> None:
    """All texts: walked through at once, and computed from the time before."""
    wrong = {}
    for text in texts_for(change):
        cron, expected = Cron(text, change.zone), reference(text, change)
        begin, end = change.at - AROUND, change.at + AROUND - MINUTE
        at_once = cron.due_times(cron.after(begin - MINUTE), end, 10_000)
        step_by_step = [at for at in (cron.after(each - MINUTE / 2) for each in expected) if at <= end]
        if at_once != expected or step_by_step != expected:
            wrong[text] = (at_once, step_by_step, expected)
    assert wrong == {}


def test_on_lord_howe_the_hour_after_the_half_hour_that_comes_twice_begins() -> None:
    """The clocks go from 02:00 back to 01:30 and show 02:00 half an hour later: that is the first time of the hour."""
    cron = Cron("*/30 2 * * *", "Australia/Lord_Howe")
    midnight = datetime(2026, 4, 4, 13, tzinfo=UTC)
    due = cron.due_times(cron.after(midnight), midnight + timedelta(hours=20), 10)
    assert [f"{cron.local(at):%H:%M%z}" for at in due] == ["02:00+1030", "02:30+1030"]
