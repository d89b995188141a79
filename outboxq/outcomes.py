"""Outcomes of a handler, and the backoff by which a failed job runs again."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from outboxq.errors import ConfigError
from outboxq.names import named_fields

# A hundred years: PostgreSQL can still add this to the present time.
MAX_DELAY = timedelta(days=36_500)


@dataclass(frozen=True, slots=True)
class Done:
    """An outcome: the handler has finished, and its rows are committed together with the removal of the job.

    Returning None means the same.
    """


@dataclass(frozen=True, slots=True)
class Retry:
    """An outcome: run the job again after `delay` (None: the handler's backoff); the handler's rows are undone.

    Counts as an attempt. After the last attempt the job becomes a dead letter, as after an error.
    """

    delay: timedelta | None = None
    reason: str = "the handler asked for a retry"

    def __post_init__(self) -> None:
        if self.delay is not None:
            object.__setattr__(self, "delay", _plain("Retry", self.delay))


@dataclass(frozen=True, slots=True)
class Snooze:
    """An outcome: run the job again after `delay`, without counting an attempt. The handler's rows are undone."""

    delay: timedelta

    def __post_init__(self) -> None:
        object.__setattr__(self, "delay", _plain("Snooze", self.delay))


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An outcome: give up at once; the job moves to the dead letters with `reason`. The handler's rows are undone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Discard:
    """An outcome: drop the job without a dead letter. The handler's rows are undone; `reason` is logged."""

    reason: str


def _plain(outcome: str, delay: timedelta) -> timedelta:
    if not isinstance(delay, timedelta):
        raise ConfigError(f"{outcome} takes a timedelta, such as timedelta(seconds=60), got {type(delay).__name__}")
    # If it is a subclass, whose methods are the user's, only the value is used.
    delay = timedelta.__pos__(delay)
    # Below zero, as in "the deadline minus now", means at once.
    if abs(delay) > MAX_DELAY:
        raise ConfigError(f"{outcome} takes a delay of up to {MAX_DELAY.days:,} days, got {delay}")
    return delay


Outcome = Done | Retry | Snooze | DeadLetter | Discard


@named_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential backoff with jitter and a cap.

    The pause after failed attempt n is `first_seconds * factor ** (n - 1)`, capped at `cap_seconds`, then shortened by
    up to `jitter` (a fraction from 0 to 1), so that jobs which failed together do not return together, and no pause
    exceeds the cap.

    The defaults give up after 15 attempts, about four hours.
    """

    max_attempts: int = 15
    first_seconds: float = 2.0
    factor: float = 2.0
    cap_seconds: float = 3600.0
    jitter: float = 0.25

    def __post_init__(self) -> None:
        if not 1 <= self.max_attempts <= 32_767:
            raise ConfigError(f"Backoff(max_attempts=...) takes 1 to 32767, got {self.max_attempts}")
        longest = MAX_DELAY.total_seconds()
        if not (0 <= self.first_seconds <= longest and 0 <= self.cap_seconds <= longest):
            raise ConfigError(
                f"Backoff takes first_seconds and cap_seconds from 0 to {longest:,.0f}, "
                f"got {self.first_seconds} and {self.cap_seconds}"
            )
        if not 1 <= self.factor < math.inf:
            raise ConfigError(f"Backoff(factor=...) takes a number from 1, got {self.factor}")
        if not 0 <= self.jitter <= 1:
            raise ConfigError(f"Backoff(jitter=...) takes a fraction from 0 to 1, got {self.jitter}")

    def delay(self, attempt: int, uniform: Callable[[], float] = random.random) -> timedelta:
        """The pause after failed attempt number `attempt` (from 1); `uniform` draws from [0, 1)."""
        return timedelta(seconds=self._pause_seconds(attempt) * (1 - self.jitter * uniform()))

    def horizon(self, max_attempts: int | None = None, timeout_seconds: float | None = None) -> timedelta:
        """The longest time from the start of the first attempt to the end of the last; at most a hundred years.

        It counts all pauses in full, without jitter, and every attempt with its deadline. It cannot count unknown
        times: how long a due job waits for a slot, pauses that a handler requests (`Retry(delay)`, `Snooze`), and
        retried dead letters.

        Args:
            max_attempts: The job's own number; by default the policy's.
            timeout_seconds: The deadline of an attempt; None, for a handler without one, counts as 0.
        """
        attempts = self.max_attempts if max_attempts is None else max_attempts
        total_seconds = attempts * (timeout_seconds or 0.0) + self._pauses_seconds(attempts - 1)
        return timedelta(seconds=min(total_seconds, MAX_DELAY.total_seconds()))

    def _pauses_seconds(self, count: int) -> float:
        """The sum of the first `count` pauses."""
        total_seconds = 0.0
        for made in range(count):
            pause_seconds = self._pause_seconds(made + 1)
            # All later pauses are equal.
            if self.factor == 1 or pause_seconds in (0.0, self.cap_seconds):
                return total_seconds + pause_seconds * (count - made)
            total_seconds += pause_seconds
        return total_seconds

    def _pause_seconds(self, attempt: int) -> float:
        try:
            return min(self.cap_seconds, self.first_seconds * float(self.factor) ** (attempt - 1))
        except OverflowError:
            # An overflow, as of 2.0 ** 5000, means that the cap was reached long before.
            return self.cap_seconds if self.first_seconds else 0.0
