"""How a handler ends, and when a failed job runs again."""

from dataclasses import dataclass
from datetime import timedelta

from outboxq.errors import ConfigError

# A hundred years: what a timestamp of PostgreSQL can still add to now.
MAX_DELAY = timedelta(days=36_500)


@dataclass(frozen=True, slots=True)
class Done:
    """The handler finished: its rows commit together with the disappearance of the job. Returning None means this."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Run again after `delay` (None: the handler's backoff). Counts as an attempt; the handler's rows are undone.

    Past the last attempt the job becomes a dead letter, as after an error.
    """

    delay: timedelta | None = None
    reason: str = "the handler asked for a retry"

    def __post_init__(self) -> None:
        if self.delay is not None:
            object.__setattr__(self, "delay", _plain("Retry", self.delay))


@dataclass(frozen=True, slots=True)
class Snooze:
    """Run again after `delay` without counting an attempt. The handler's rows are undone."""

    delay: timedelta

    def __post_init__(self) -> None:
        object.__setattr__(self, "delay", _plain("Snooze", self.delay))


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Give up at once: the job moves to the dead letters with `reason`. The handler's rows are undone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Discard:
    """Drop the job without a dead letter. The handler's rows are undone; `reason` is logged."""

    reason: str


def _plain(outcome: str, delay: timedelta) -> timedelta:
    if not isinstance(delay, timedelta):
        raise ConfigError(f"{outcome} takes a timedelta, such as timedelta(seconds=60), got {type(delay).__name__}")
    # Of a subclass, whose methods are the user's, no more than its value.
    delay = timedelta.__pos__(delay)
    # Below zero, as after "the deadline minus now", means at once.
    if abs(delay) > MAX_DELAY:
        raise ConfigError(f"{outcome} takes a delay of up to {MAX_DELAY.days:,} days, got {delay}")
    return delay


Outcome = Done | Retry | Snooze | DeadLetter | Discard
