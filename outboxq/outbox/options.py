"""Options of a job, apart from its arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypedDict

from outboxq.errors import ArgumentError
from outboxq.outbox.keys import GroupKey, Key, Unique, check_constant, check_positive
from outboxq.outcomes import MAX_DELAY

MAX_PRIORITY = 32_767


class FlowOptions(TypedDict, total=False):
    """The options that a handler sets for all of its jobs, or `kind.options(...)` for some of them."""

    coalesce: Key | None
    """A key of up to 512 bytes, or a function of the handler's arguments that returns one.

    Waiting jobs of one kind and key run as one, with the newest arguments.
    """
    every: timedelta | None
    """Requires `coalesce`: run at most once in each period of this length, at its end."""
    group: GroupKey | None
    """A key, or a function: jobs of this queue and key run one at a time, in the order in which they were added. A job
    for which the function returns None is in no group.
    """
    unique: Key | Unique | None
    """A key, a function, or `Unique(...)`: a job is not added while one of its kind and key waits, runs or retries."""
    expires: timedelta | None
    """A job is discarded if it has not begun this long after it was added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options of a job, apart from its arguments; `JobKind.options` explains each.

    Raises:
        ArgumentError: a value is of another type or out of its range, or two options exclude each other.
        InvalidKey: a key cannot be stored.
    """

    delay: timedelta | None = None
    run_at: datetime | None = None
    priority: int = 0
    max_attempts: int | None = None
    headers: Mapping[str, str] | None = None
    coalesce: Key | None = None
    every: timedelta | None = None
    group: GroupKey | None = None
    unique: Key | Unique | None = None
    expires: timedelta | None = None

    def __post_init__(self) -> None:
        self._check_time()
        self._check_numbers()
        self._check_keys()

    @property
    def has_keys(self) -> bool:
        """True if jobs with these options have a key: `coalesce`, `group` or `unique` is set."""
        return (self.coalesce, self.group, self.unique) != (None, None, None)

    def _check_time(self) -> None:
        if self.delay is not None and self.run_at is not None:
            raise ArgumentError("options take delay= or run_at=, not both")
        if self.delay is not None and not isinstance(self.delay, timedelta):
            raise ArgumentError(f"delay takes a timedelta, got {type(self.delay).__name__}")
        if self.delay is not None and not timedelta(0) <= self.delay <= MAX_DELAY:
            raise ArgumentError(f"delay takes 0 to {MAX_DELAY.days:,} days, got {self.delay}")
        if self.run_at is not None and (not isinstance(self.run_at, datetime) or self.run_at.utcoffset() is None):
            raise ArgumentError("run_at takes a datetime with a time zone, for example datetime.now(UTC)")
        if self.run_at is not None and not 2 <= self.run_at.year <= 9998:
            raise ArgumentError(f"run_at takes the years 2 to 9998, got {self.run_at}")
        if self.expires is not None:
            check_positive("expires", self.expires)
            if self.delay is not None and self.delay >= self.expires:
                raise ArgumentError(
                    f"a job that runs after {self.delay} and expires after {self.expires} would never run: both count "
                    "from the moment that it is added"
                )

    def _check_numbers(self) -> None:
        if not _is_int(self.priority) or abs(self.priority) > MAX_PRIORITY:
            raise ArgumentError(f"priority takes an int from -{MAX_PRIORITY} to {MAX_PRIORITY}, got {self.priority!r}")
        if self.max_attempts is not None and not (_is_int(self.max_attempts) and 1 <= self.max_attempts <= 32_767):
            raise ArgumentError(f"max_attempts takes an int from 1 to 32767, got {self.max_attempts!r}")

    def _check_keys(self) -> None:
        waits = self.delay is not None or self.run_at is not None
        if self.coalesce is not None:
            check_constant("coalesce", self.coalesce)
        if self.group is not None:
            check_constant("group", self.group)
            if waits:
                raise ArgumentError(
                    "a job of a group runs when its turn comes: leave out delay= and run_at=, or the group"
                )
        if self.unique is not None:
            if not isinstance(self.unique, Unique):
                check_constant("unique", self.unique)
            if self.coalesce is not None:
                raise ArgumentError(
                    "options take coalesce= or unique=, not both: coalesce keeps the newest job, unique the first one"
                )
        if self.coalesce is not None and self.expires is not None:
            raise ArgumentError(
                "options take coalesce= or expires=, not both: one run would be for jobs that expire at different times"
            )
        self._check_every(waits=waits)

    def _check_every(self, *, waits: bool) -> None:
        if self.every is None:
            return
        check_positive("every", self.every)
        if self.coalesce is None:
            raise ArgumentError("every= says how often jobs with the same coalesce= run: give that too")
        if waits or self.group is not None:
            raise ArgumentError("every= sets the time to run at: leave out delay=, run_at= and group=")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


PLAIN_OPTIONS = JobOptions()
