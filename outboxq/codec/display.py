"""Values as text: `in_full` for programs and detailed views, `in_short` for tables at a terminal."""

from datetime import UTC, datetime

from outboxq.codec.text import printable

_UNITS = (("d", 86_400.0), ("h", 3_600.0), ("m", 60.0))


class Estimate(int):
    """An estimated number: `in_short` rounds it and marks it with `~`."""


class Latency(float):
    """A duration in seconds that `in_short` shows in milliseconds if it is shorter than a second."""


class Rate(float):
    """A number per minute, which `in_short` formats as a number; any other float is formatted as seconds."""


def in_full(value: object) -> str:
    """Format a value for a program or a detailed view: a time as in JSON output, a number without separators."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case Latency():
            return f"{value:.4g}"
        case Rate():
            return f"{value:.1f}"
        case float():
            return f"{value:.1f}"
        case datetime():
            return moment(value)
        case tuple():
            return ", ".join(map(in_full, value))
        case _:
            return printable(str(value))


def in_short(value: object, now: datetime | None) -> str:
    """Format a value for a table: times as distances from `now`, seconds in a fitting unit, thousands as `1,234`."""
    match value:
        case None | False:
            return ""
        case True:
            return "true"
        case Estimate():
            return f"~ {_rounded(value)}"
        case int():
            return f"{value:,}"
        case Latency() if value < 1:
            return f"{value * 1000:.3g} ms"
        case Latency() if value < 10:
            return f"{value:.1f} s"
        case Rate():
            return f"{value:,.0f}" if value >= 10 or value.is_integer() else f"{value:.1f}"
        case float():
            return duration(value)
        case datetime() if now is not None:
            return age(value, now)
        case _:
            return in_full(value)


def _rounded(number: int) -> str:
    """Round a number to millions or thousands: `1.2 M` for 1,234,567."""
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if number >= size:
            return f"{number / size:,.1f} {unit}" if number < 10 * size else f"{number / size:,.0f} {unit}"
    return f"{number:,}"


def moment(value: datetime) -> str:
    """Format a time as JSON output has it, in UTC by RFC 3339: 2026-01-31T08:00:00.123456Z."""
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")


def age(value: datetime, now: datetime) -> str:
    """Format a time by its distance from `now`: `3 m` for three minutes ago, `in 5 m` for in five minutes."""
    seconds = (now - value).total_seconds()
    return f"in {duration(-seconds)}" if seconds < 0 else duration(seconds)


def duration(seconds: float) -> str:
    """Format seconds as `42 s`, `3 m`, `2 h` or `4 d`: the largest unit of which there are at least two."""
    for unit, size in _UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def standby(delay_seconds: float) -> str:
    """Return a note for the reader of a report: its data came from a standby server, and is `delay_seconds` old."""
    return f"read from a standby, {delay_seconds:,.1f} s behind"
