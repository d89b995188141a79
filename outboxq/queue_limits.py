"""The limits of a queue: how many jobs run at a time and begin in each period, and how long dead letters are kept."""

import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from outboxq.errors import ArgumentError

MAX_RUNNING, MAX_PER_GROUP, MAX_RATE_JOBS = 10_000, 1_000, 1_000_000
MAX_RATE_SECONDS = 31 * 86_400
_RATE = re.compile(r"([0-9]{1,18})\s*/\s*([0-9]{0,18})\s*(s|min|h|day)", re.ASCII)
_UNIT_SECONDS = {"s": 1, "min": 60, "h": 3_600, "day": 86_400}
# One minute, and ten years of 365.3 days.
MIN_KEEP_SECONDS, MAX_KEEP_SECONDS = 60, 3_653 * 86_400
FOREVER = "forever"
_KEPT = re.compile(r"([0-9]{1,9})(m|h|d)", re.ASCII)
_KEPT_SECONDS = {"d": 86_400, "h": 3_600, "m": 60}
# By default a burst of a tenth of a second.
_BURST_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Rate:
    """A limit on the jobs that begin: `jobs` in each `seconds`, and up to `burst` at once.

    In any time of n * `seconds` at most `burst` + n * `jobs` jobs begin.
    """

    jobs: int
    seconds: float
    burst: int

    @property
    def seconds_each(self) -> float:
        """The seconds between two jobs that begin at this rate."""
        return self.seconds / self.jobs

    def __str__(self) -> str:
        """The rate as it can be written, such as 100/min."""
        for unit in ("day", "h", "min"):
            if self.seconds == _UNIT_SECONDS[unit]:
                return f"{self.jobs}/{unit}"
        return f"{self.jobs}/s" if self.seconds == 1 else f"{self.jobs}/{self.seconds:g}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """The limits of a queue: jobs that run at a time, in all and of each group, and jobs that begin in a period.

    None means no limit. `rate_jobs`, `rate_seconds` and `rate_burst` are the fields of a `Rate`: all three are set, or
    none.
    """

    running: int | None = None
    per_group: int | None = None
    rate_jobs: int | None = None
    rate_seconds: float | None = None
    rate_burst: int | None = None

    @property
    def rate(self) -> Rate | None:
        """The rate, if there is one."""
        if self.rate_jobs is None or self.rate_seconds is None or self.rate_burst is None:
            return None
        return Rate(self.rate_jobs, self.rate_seconds, self.rate_burst)

    def or_else(self, other: "QueueLimits") -> "QueueLimits":
        """Return these limits, with the limits of `other` for those that are None here."""
        ours = {field.name: getattr(self, field.name) for field in fields(self)}
        return QueueLimits(**{n: getattr(other, n) if value is None else value for n, value in ours.items()})

    def __str__(self) -> str:
        """The limits in words, for a log line."""
        said = [] if self.running is None else [f"{self.running} at a time"]
        if self.per_group is not None:
            said.append(f"{self.per_group} of a group at a time")
        if self.rate is not None:
            said.append(f"{self.rate} with a burst of {self.rate.burst}")
        return ", ".join(said) or "no limits"


def make_limits(
    *, running: int | None = None, per_group: int | None = None, rate: str | None = None, burst: int | None = None
) -> QueueLimits:
    """Return the limits of a queue, from numbers and the text of a rate, as users write them.

    Args:
        running: How many jobs run at a time, 1 to 10,000.
        per_group: How many jobs of each group run at a time, 1 to 1,000.
        rate: How many jobs begin in a time, such as `100/min`: a number, and `s`, `min`, `h` or `day`, or a multiple of
            these as in `5/30s`.
        burst: How many jobs may begin at once after a pause; by default as many as the rate allows in a tenth of a
            second, at least 1.

    Raises:
        ArgumentError: a number is out of its range, the rate is invalid, or there is a burst without a rate.
    """
    _check("the limit of jobs that run at a time", running, MAX_RUNNING)
    _check("the limit of jobs of a group that run at a time", per_group, MAX_PER_GROUP)
    _check("the burst of a rate", burst, MAX_RATE_JOBS)
    if rate is None:
        if burst is not None:
            raise ArgumentError(f"a burst needs a rate, such as 100/min, and only the burst {burst} was given")
        return QueueLimits(running=running, per_group=per_group)
    jobs, seconds = _parse_rate(rate)
    if burst is None:
        burst = max(1, int(jobs / seconds * _BURST_SECONDS))
    return QueueLimits(
        running=running, per_group=per_group, rate_jobs=jobs, rate_seconds=float(seconds), rate_burst=burst
    )


_NONE = QueueLimits()


def limits_text(limits: Mapping[str, QueueLimits]) -> str:
    """Return the limits of queues as the JSON text of a list of objects, each with the queue's name and the limits."""
    return json.dumps([{"name": name, **asdict(each)} for name, each in limits.items()])


def read_limits(rows: Iterable[Any]) -> dict[str, QueueLimits]:
    """Return the limits of queues, by name, from rows that have the name and the fields of `QueueLimits`."""
    names = [field.name for field in fields(QueueLimits)]
    return {row.name: QueueLimits(**{name: getattr(row, name) for name in names}) for row in rows}


def limits_in_force(
    by_operators: Mapping[str, QueueLimits], declared: Mapping[str, QueueLimits]
) -> dict[str, QueueLimits]:
    """Return the limits in force: each as operators have set it, else as the application declares it."""
    names = by_operators.keys() | declared.keys()
    return {name: by_operators.get(name, _NONE).or_else(declared.get(name, _NONE)) for name in names}


def _parse_rate(text: str) -> tuple[int, int]:
    """Return the number of jobs and the seconds that the text of a rate names, such as 5 and 30 for `5/30s`."""
    found = _RATE.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None:
        raise ArgumentError(
            f"a rate is a number of jobs in a time, such as 10/s, 100/min, 5/30s, 20/h, got {reprlib.repr(text)}"
        )
    jobs, seconds = int(found[1]), int(found[2] or 1) * _UNIT_SECONDS[found[3]]
    if not 1 <= jobs <= MAX_RATE_JOBS:
        advice = "to stop a queue, pause it" if jobs < 1 else "a queue that may be faster needs no rate"
        raise ArgumentError(f"a rate takes 1 to {MAX_RATE_JOBS:,} jobs, got {text!r}: {advice}")
    if not 1 <= seconds <= MAX_RATE_SECONDS:
        raise ArgumentError(f"a rate takes a time of 1 second to 31 days, got {text!r}")
    return jobs, seconds


def _check(what: str, given: int | None, most: int) -> None:
    if given is None:
        return
    if not isinstance(given, int) or isinstance(given, bool):
        raise ArgumentError(f"{what} is a whole number, got {given!r}")
    if not 1 <= given <= most:
        advice = ": to stop a queue, pause it" if given < 1 else ""
        raise ArgumentError(f"{what} is 1 to {most:,}, got {given}{advice}")


def parse_keep(text: str) -> float:
    """Return the time for which dead letters are kept, in seconds, from a text such as `30d` or `90m`; 0 for `forever`.

    Raises:
        ArgumentError: the text is no time, or the time is below a minute or over 3,653 days.
    """
    if text == FOREVER:
        return 0.0
    found = _KEPT.fullmatch(text)
    seconds = int(found[1]) * _KEPT_SECONDS[found[2]] if found else 0
    if not MIN_KEEP_SECONDS <= seconds <= MAX_KEEP_SECONDS:
        raise ArgumentError(
            f"dead letters are kept for a time of 1m to 3653d, such as 30d, 12h or 90m, or {FOREVER}; got "
            f"{reprlib.repr(text)}"
        )
    return float(seconds)


def keep_text(seconds: float) -> str:
    """Return the time for which dead letters are kept, given in seconds, as a text for `parse_keep`."""
    for unit, size in _KEPT_SECONDS.items():
        if seconds and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:g}s" if seconds else FOREVER


def kept_in_words(seconds: float | None) -> str:
    """Return words that follow a queue's name in a message, such as "keeps dead letters for 30d".

    `seconds` is 0 if they are kept for ever, and None if the application's declaration decides.
    """
    if seconds is None:
        return "keeps dead letters as the application declares"
    return f"keeps dead letters {f'for {keep_text(seconds)}' if seconds else 'for ever'}"
