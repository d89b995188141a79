"""The limits of a queue: jobs that run at a time, jobs that begin in a time, and how long its dead letters are kept."""

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
    """At most `burst` + n * `jobs` jobs begin in n * `seconds`."""

    jobs: int
    seconds: float
    burst: int

    @property
    def seconds_each(self) -> float:
        """The time from one job to the next, if jobs begin at this rate."""
        return self.seconds / self.jobs

    def __str__(self) -> str:
        """The rate as it can be written, such as 100/min."""
        for unit in ("day", "h", "min"):
            if self.seconds == _UNIT_SECONDS[unit]:
                return f"{self.jobs}/{unit}"
        return f"{self.jobs}/s" if self.seconds == 1 else f"{self.jobs}/{self.seconds:g}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """The limits of a queue: jobs that run at a time, in all and of each group, and jobs that begin in a time.

    None for no limit; `rate_jobs`, `rate_seconds` and `rate_burst` are those of a `Rate`, all three or none.
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
        """These limits, and for those that are None the limits of `other`."""
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
    """Limits of a queue as users write them.

    Args:
        running: How many jobs run at a time, 1 to 10,000.
        per_group: How many jobs of each group run at a time, 1 to 1,000.
        rate: How many jobs begin in a time, as `100/min`: a number, and `s`, `min`, `h`, `day`, or several of them
            as in `5/30s`.
        burst: How many jobs may begin at once after a pause; by default those of a tenth of a second, at least 1.

    Raises:
        ArgumentError: a number out of its range, no such rate, or a burst without a rate.
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
    """The limits of queues as the JSON text of a list: a name and numbers each."""
    return json.dumps([{"name": name, **asdict(each)} for name, each in limits.items()])


def read_limits(rows: Iterable[Any]) -> dict[str, QueueLimits]:
    """The limits of queues, from rows that have a name and numbers each."""
    names = [field.name for field in fields(QueueLimits)]
    return {row.name: QueueLimits(**{name: getattr(row, name) for name in names}) for row in rows}


def limits_in_force(
    by_operators: Mapping[str, QueueLimits], declared: Mapping[str, QueueLimits]
) -> dict[str, QueueLimits]:
    """The limits in force: as operators have set them, limit by limit, and else as the application declares them."""
    names = by_operators.keys() | declared.keys()
    return {name: by_operators.get(name, _NONE).or_else(declared.get(name, _NONE)) for name in names}


def _parse_rate(text: str) -> tuple[int, int]:
    """The jobs and the seconds of a rate."""
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
    """The time for which dead letters are kept, in seconds: `30d`, `12h`, `90m`; 0 for `forever`.

    Raises:
        ArgumentError: no such time, or one below a minute or over 3,653 days.
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
    """The time for which dead letters are kept, as `parse_keep` reads it."""
    for unit, size in _KEPT_SECONDS.items():
        if seconds and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:g}s" if seconds else FOREVER


def kept_in_words(seconds: float | None) -> str:
    """The words after the name of a queue that say how long it keeps dead letters; None as the application declares."""
    if seconds is None:
        return "keeps dead letters as the application declares"
    return f"keeps dead letters {f'for {keep_text(seconds)}' if seconds else 'for ever'}"
