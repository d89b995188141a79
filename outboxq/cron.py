"""Cron texts and intervals: the times, in UTC, at which a schedule is due by the clocks of its time zone.

The next time is computed from the last one, and never from now, so that times do not drift and none is left out.
"""

import difflib
import re
import zoneinfo
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import islice, takewhile

from cronsim import CronSim, CronSimError

from outboxq.errors import ArgumentError

SHORTHANDS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
# The values that each field takes, in their order.
_TAKES = {
    "minute": "0 to 59",
    "hour": "0 to 23",
    "day of month": "1 to 31, L for the last day or LW for the last weekday",
    "month": "1 to 12 or JAN to DEC",
    "day of week": "0 to 7 or SUN to SAT, FRI#2 for the second Friday or FRIL for the last one",
}
_FIELDS = tuple(_TAKES)
_FORM = (
    f"a cron text has five fields ({', '.join(_FIELDS)}), such as '30 2 * * *', or is one of {', '.join(SHORTHANDS)}, "
    "or '@every 30s'"
)
# An interval as a text, in the place of a cron text.
_EVERY = re.compile(r"@every\s+(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", re.IGNORECASE)
_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
MIN_EVERY, MAX_EVERY = timedelta(seconds=1), timedelta(days=365)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# No time zone has changed its clocks twice within a week since 1970.
_PROBE = timedelta(days=1)
# Lengths of time that `newest` goes back, one after the other. The first is longer than any change of the clocks.
_FIRST_STRETCH, _GROWTH = timedelta(hours=4), 8


@dataclass(frozen=True, slots=True)
class Cron:
    """The times at which a schedule is due: by a cron text, or by an interval, such as `@every 30s`.

    If the hour and the minute are named (`30 2 * * *`), a time that the clocks skip is due when they have been changed,
    and one that comes twice is due the first time. If one of the two begins with a star (`0 * * * *`), the times are
    those that a clock on the wall shows: none in the skipped hour, and all of them in both passes of the repeated hour.
    An interval is due at its multiples since 1970 in UTC, also if the clocks change.

    Raises:
        ArgumentError: the text has another form or is never due, or there is no such time zone.
    """

    text: str
    time_zone: str = "UTC"
    every: timedelta | None = field(init=False, repr=False, compare=False)
    _fields: str = field(init=False, repr=False, compare=False)
    _zone: tzinfo = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        every = _read_every(self.text)
        object.__setattr__(self, "every", every)
        object.__setattr__(self, "_fields", "" if every else _checked_fields(self.text))
        object.__setattr__(self, "_zone", _find_zone(self.time_zone))
        try:
            self.after(datetime.now(UTC))
        except CronSimError as error:
            raise ArgumentError(f"the cron text {self.text!r} {_explain(str(error), self._fields)}") from None

    def after(self, moment: datetime) -> datetime:
        """Return the first due time after `moment`."""
        for due in self._later(moment):
            return due
        raise ArgumentError(f"the cron text {self.text!r} is not due within 50 years: check its day and its month")

    def due_times(self, first: datetime, now: datetime, most: int) -> list[datetime]:
        """Return the due times from `first`, itself a due time, to `now`, but not more than the earliest `most`."""
        return list(islice(takewhile(lambda due: due <= now, self.times_from(first)), most))

    def times_from(self, first: datetime) -> Iterator[datetime]:
        """Yield `first`, which is due, and all due times that follow it."""
        yield first
        yield from self._later(first)

    def newest(self, first: datetime, now: datetime) -> datetime:
        """Return the latest due time up to `now`; `first`, which is a due time itself, if none follows it.

        Takes few steps even if years have passed since `first`.
        """
        stretch = _FIRST_STRETCH
        while now - first > stretch:
            found = list(takewhile(lambda due: due <= now, self._later(now - stretch)))
            if found:
                return found[-1]
            stretch *= _GROWTH
        found = list(takewhile(lambda due: due <= now, self._later(first)))
        return found[-1] if found else first

    def local(self, moment: datetime) -> datetime:
        """Return a time as the schedule's clocks show it, with their offset from UTC."""
        return moment.astimezone(self._zone)

    def _later(self, moment: datetime) -> Iterator[datetime]:
        last = moment.astimezone(UTC)
        # OverflowError: after the year 9999 there is no time.
        with suppress(OverflowError):
            yield from self._after(last)

    def _after(self, last: datetime) -> Iterator[datetime]:
        if self.every is not None:
            return _multiples(self.every, last)
        minute, hour, *_ = self._fields.split()
        return self._shown(last) if "*" in (minute[0], hour[0]) else self._named(last)

    def _named(self, last: datetime) -> Iterator[datetime]:
        """Yield the due times after `last` for a text that names hour and minute, such as `30 2 * * *`."""
        for found in CronSim(self._fields, last.astimezone(self._zone)):
            due = found.astimezone(UTC)
            # In the repeated hour, the first of two equal times may be due, and it has passed.
            if due > last:
                yield due
                last = due

    def _shown(self, last: datetime) -> Iterator[datetime]:
        """Yield the due times after `last` for a text whose hour or minute begins with a star, such as `0 * * * *`.

        Between two changes of the clocks the offset from UTC is constant.
        """
        changed: datetime | None = last
        wall = self._on_the_wall(last)
        while changed is not None:
            last, offset, changed = changed, self._offset(changed), None
            for shown in CronSim(self._fields, wall):
                due = (shown - offset).replace(tzinfo=UTC)
                changed = self._change(last, due)
                if changed is not None:
                    # The moment of the change itself may be due.
                    wall = self._on_the_wall(changed) - timedelta(seconds=1)
                    break
                yield due
                last = due

    def _change(self, after: datetime, until: datetime) -> datetime | None:
        """Return the first change of the clocks later than `after`, and not later than `until`; None without one."""
        offset, after = self._offset(after), after.replace(microsecond=0)
        while after < until:
            probe = min(after + _PROBE, until)
            if self._offset(probe) != offset:
                while probe - after > timedelta(seconds=1):
                    middle = (after + (probe - after) / 2).replace(microsecond=0)
                    after, probe = (middle, probe) if self._offset(middle) == offset else (after, middle)
                return probe
            after = probe
        return None

    def _offset(self, moment: datetime) -> timedelta:
        return moment.astimezone(self._zone).utcoffset() or timedelta(0)

    def _on_the_wall(self, moment: datetime) -> datetime:
        return moment.astimezone(self._zone).replace(tzinfo=None)


def every_text(every: timedelta) -> str:
    """Return an interval as the text of a schedule, such as `@every 1h30m`.

    Raises:
        ArgumentError: `every` is not a timedelta of whole seconds, from a second to a year.
    """
    if not isinstance(every, timedelta) or not MIN_EVERY <= every <= MAX_EVERY or every.microseconds:
        raise ArgumentError(f"every takes a timedelta of whole seconds, from 1 second to 365 days, got {every!r}")
    left, parts = every // MIN_EVERY, list[str]()
    for unit, seconds in _UNITS:
        number, left = divmod(left, seconds)
        parts += [f"{number}{unit}"] if number else []
    return f"@every {''.join(parts)}"


def every_of(text: str) -> timedelta | None:
    """Return the interval that a stored text names; None if it is a cron text, or this version cannot read it."""
    try:
        return _read_every(text)
    except ArgumentError:
        return None


def _read_every(text: str) -> timedelta | None:
    """Return the interval that a text such as `@every 30s` names; None if the text has cron fields."""
    if not isinstance(text, str) or not text.strip().lower().startswith("@every"):
        return None
    found = _EVERY.fullmatch(text.strip())
    numbers = (int(number or 0) for number in found.groups()) if found else ()
    seconds = sum(number * unit for number, (_, unit) in zip(numbers, _UNITS, strict=False))
    if not MIN_EVERY.total_seconds() <= seconds <= MAX_EVERY.total_seconds():
        raise ArgumentError(
            f"the interval {text[:80]!r} cannot be read: it is '@every' and a time from 1 second to 365 days, such as "
            "'@every 30s' or '@every 1h30m'"
        )
    return timedelta(seconds=seconds)


def _multiples(every: timedelta, last: datetime) -> Iterator[datetime]:
    number = (last - _EPOCH) // every
    while True:
        number += 1
        yield _EPOCH + number * every


def _explain(refusal: str, fields: str) -> str:
    """Return a text for an error that explains why cronsim refused `fields`.

    `refusal` is cronsim's own message, which only names a field, as in "Bad day-of-month".
    """
    name = refusal.removeprefix("Bad ").replace("-", " ")
    values = dict(zip(_FIELDS, fields.split(), strict=True))
    if name not in values:
        return f"cannot be read: {_FORM}"
    if name == "day of month" and _is_read(" ".join({**values, "month": "*"}.values())):
        return f"is never due: no month of {values['month']!r} has a day {values[name]!r}"
    return (
        f"cannot be read: its {name} is {values[name][:80]!r}, and takes {_TAKES[name]}; a star, or a list (1,15), a "
        "range (9-17) or a step (*/5) of such"
    )


def _is_read(fields: str) -> bool:
    try:
        CronSim(fields, datetime.now(UTC))
    except CronSimError:
        return False
    return True


def cron_of(cron: str | None, every: timedelta | None, time_zone: str) -> Cron:
    """Return the `Cron` of a schedule, from a cron text or an interval.

    Raises:
        ArgumentError: neither or both are given, or `Cron` refuses it.
    """
    if (cron is None) == (every is None):
        raise ArgumentError("a schedule takes a cron text or every=timedelta(...), one of the two")
    return Cron(cron if every is None else every_text(every), time_zone)  # type: ignore[arg-type]  # one of them is there


@contextmanager
def of_schedule(name: str | None) -> Iterator[None]:
    """Put the schedule's name, if given, before the message of each `ArgumentError` of the block.

    The block checks the schedule's cron text and time zone; with the name, users see which schedule is wrong.

    Raises:
        ArgumentError: with the name.
    """
    try:
        yield
    except ArgumentError as error:
        if name is None:
            raise
        raise ArgumentError(f"schedule {name!r}: {error}") from error


def _checked_fields(text: str) -> str:
    if not isinstance(text, str):
        raise ArgumentError(f"cron is a text, got {type(text).__name__}: {_FORM}")
    fields = SHORTHANDS.get(text.strip().lower(), text).split()
    if fields == ["@reboot"]:
        raise ArgumentError("@reboot has no time that is due: do in the registry's lifespan what a start needs")
    if len(fields) == 6:
        raise ArgumentError(
            f"the cron text {text!r} has six fields, and the first of six would mean seconds: a cron text is due on "
            f"whole minutes, so leave the seconds out: {' '.join(fields[1:])!r}, or give every=timedelta(seconds=...)"
        )
    if len(fields) != len(_FIELDS):
        raise ArgumentError(f"the cron text {text!r} has {len(fields)} fields: {_FORM}")
    return " ".join(fields)


def _find_zone(name: str) -> tzinfo:
    if not isinstance(name, str):
        raise ArgumentError(f"time_zone is a name such as 'Europe/Berlin', got {type(name).__name__}")
    if name == "UTC":
        # Needs no data.
        return UTC
    try:
        return zoneinfo.ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        known = zoneinfo.available_timezones()
    if not known:
        raise ArgumentError(
            f"the time zone {name!r} cannot be found, for this system has no time zone data: install it, such as with "
            "`pip install tzdata`"
        )
    near = ", ".join(map(repr, difflib.get_close_matches(name, sorted(known), 3))) or "'Europe/Berlin' or 'UTC'"
    raise ArgumentError(
        f"there is no time zone {name[:80]!r}: did you mean {near}? (A new one: `pip install -U tzdata`)"
    )
