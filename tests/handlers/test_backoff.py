"""Backoff, and the outcomes that a handler returns."""

import dataclasses
import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outboxq import Backoff, DeadLetter, Discard, Done, Retry, Snooze
from outboxq.errors import ConfigError

HUNDRED_YEARS_SECONDS = 36_500 * 86_400.0

backoffs = st.builds(
    Backoff,
    max_attempts=st.integers(1, 32_767),
    first_seconds=st.floats(0, HUNDRED_YEARS_SECONDS),
    factor=st.floats(1, 1e300),
    cap_seconds=st.floats(0, HUNDRED_YEARS_SECONDS),
    jitter=st.floats(0, 1),
)
attempts = st.integers(1, 32_767)
draws = st.floats(0, 1, exclude_max=True)


def seconds(policy: Backoff, attempt: int, draw: float) -> float:
    return policy.delay(attempt, lambda: draw).total_seconds()


@given(backoffs, attempts, draws)
def test_a_pause_is_never_negative_and_never_above_the_cap(policy: Backoff, attempt: int, draw: float) -> None:
    """Whatever the policy, the attempt and the draw. A timedelta counts whole microseconds."""
    assert 0 <= seconds(policy, attempt, draw) <= policy.cap_seconds + 1e-6


@given(backoffs, attempts, draws)
def test_jitter_takes_away_no_more_than_its_fraction(policy: Backoff, attempt: int, draw: float) -> None:
    """A jittered pause is between (1 - jitter) of the full one and the full one."""
    full = seconds(policy, attempt, 0.0)
    assert full * (1 - policy.jitter) - 2e-6 <= seconds(policy, attempt, draw) <= full


@given(backoffs, attempts)
def test_pauses_never_shrink_from_one_attempt_to_the_next(policy: Backoff, attempt: int) -> None:
    """Without jitter the pauses only grow, up to the cap, and stay there."""
    assert seconds(policy, attempt, 0.0) <= seconds(policy, attempt + 1, 0.0)


@given(st.floats(0.001, 1000), st.floats(1, 4), st.integers(1, 200))
def test_a_pause_below_the_cap_is_the_power_that_the_policy_states(
    first_seconds: float, factor: float, attempt: int
) -> None:
    """first_seconds * factor ** (n - 1), for slowly growing policies after many attempts too."""
    policy = Backoff(first_seconds=first_seconds, factor=factor, cap_seconds=1e9, jitter=0)
    expected = min(1e9, first_seconds * factor ** (attempt - 1))
    assert seconds(policy, attempt, 0.5) == pytest.approx(expected, abs=1e-6)


def test_the_defaults_give_up_after_about_four_hours() -> None:
    """The pauses between 15 attempts, with half of the jitter."""
    policy = Backoff()
    hours = sum(seconds(policy, attempt, 0.5) for attempt in range(1, policy.max_attempts)) / 3600
    assert 3 < hours < 5


@pytest.mark.wide
@given(backoffs, st.integers(1, 60), st.none() | st.floats(0.001, 604_800), st.lists(draws, min_size=60, max_size=60))
def test_no_job_retries_beyond_the_horizon(
    policy: Backoff, attempts: int, timeout_seconds: float | None, drawn: list[float]
) -> None:
    """However the draws fall, pauses and full attempts together stay within it, or it is a hundred years."""
    took = sum(seconds(policy, attempt, drawn[attempt - 1]) for attempt in range(1, attempts))
    took += attempts * (timeout_seconds or 0.0)
    horizon = policy.horizon(attempts, timeout_seconds).total_seconds()
    assert horizon == HUNDRED_YEARS_SECONDS or took <= horizon * (1 + 1e-9) + 1e-3


@given(backoffs, st.integers(1, 60), st.none() | st.floats(0.001, 604_800))
def test_the_horizon_is_the_longest_way_and_no_longer(
    policy: Backoff, attempts: int, timeout_seconds: float | None
) -> None:
    """Every pause in full, one less than attempts, and every attempt as long as its deadline."""
    full = sum(seconds(policy, attempt, 0.0) for attempt in range(1, attempts)) + attempts * (timeout_seconds or 0.0)
    horizon = policy.horizon(attempts, timeout_seconds).total_seconds()
    assert horizon == pytest.approx(min(full, HUNDRED_YEARS_SECONDS), rel=1e-9, abs=1e-3)


def test_the_horizon_takes_the_policys_own_attempts() -> None:
    """A job's own number wins; without a deadline only the pauses count."""
    policy = Backoff(max_attempts=4, first_seconds=10, factor=2, cap_seconds=30)
    assert policy.horizon() == timedelta(seconds=10 + 20 + 30)
    assert policy.horizon(timeout_seconds=5) == timedelta(seconds=60 + 4 * 5)
    assert policy.horizon(6, 5) == timedelta(seconds=60 + 30 + 30 + 6 * 5)
    assert policy.horizon(1) == timedelta(0)


@pytest.mark.parametrize(
    "policy",
    [
        Backoff(first_seconds=HUNDRED_YEARS_SECONDS, cap_seconds=HUNDRED_YEARS_SECONDS),
        Backoff(first_seconds=5e-324, factor=1e300, cap_seconds=HUNDRED_YEARS_SECONDS),
        Backoff(first_seconds=1, factor=10**400, cap_seconds=HUNDRED_YEARS_SECONDS),
        Backoff(first_seconds=100_000, factor=1, cap_seconds=HUNDRED_YEARS_SECONDS),
    ],
    ids=repr,
)
def test_a_silly_policy_has_a_horizon_of_a_hundred_years(policy: Backoff) -> None:
    """Neither a float nor a timedelta overflows, nor a timestamp that it is added to."""
    assert policy.horizon(32_767, 604_800) == timedelta(days=36_500)


def test_the_horizon_of_many_attempts_is_not_counted_one_by_one() -> None:
    """Pauses that are all alike from some point on are drawn together: 32,767 attempts, 15 different pauses."""

    asked: list[int] = []

    class Watched(Backoff):
        __slots__ = ()

        def _pause_seconds(self, attempt: int) -> float:
            asked.append(attempt)
            return super()._pause_seconds(attempt)

    for policy in (Watched(), Watched(factor=1), Watched(first_seconds=0), Watched(cap_seconds=0)):
        asked.clear()
        policy.horizon(32_767)
        assert len(asked) < 20


def test_jitter_spreads_jobs_that_failed_together() -> None:
    """The draw is random by default."""
    assert len({Backoff().delay(5) for _ in range(50)}) > 40


@pytest.mark.parametrize(
    "settings",
    [
        {"max_attempts": 0},
        {"max_attempts": 32_768},
        {"first_seconds": -1},
        {"first_seconds": math.nan},
        {"first_seconds": math.inf},
        {"factor": 0.5},
        {"factor": math.nan},
        {"factor": math.inf},
        {"cap_seconds": -1},
        {"cap_seconds": math.nan},
        {"cap_seconds": math.inf},
        {"cap_seconds": HUNDRED_YEARS_SECONDS + 1},
        {"jitter": -0.1},
        {"jitter": 1.1},
        {"jitter": math.nan},
    ],
    ids=str,
)
def test_a_policy_that_makes_no_sense_is_refused(settings: dict[str, float]) -> None:
    """When it is written down, and not when the first job fails."""
    with pytest.raises(ConfigError, match="Backoff"):
        Backoff(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("outcome", [Retry, Snooze])
@pytest.mark.parametrize("delay", [60, 1.5, "1h"], ids=repr)
def test_an_outcome_takes_a_timedelta_and_no_number(outcome: type, delay: object) -> None:
    """`return Snooze(60)` fails where it is written, and names what is expected."""
    with pytest.raises(ConfigError, match=rf"{outcome.__name__} takes a timedelta, .* got {type(delay).__name__}"):
        outcome(delay)


@pytest.mark.parametrize("outcome", [Retry, Snooze])
def test_an_outcome_takes_no_delay_that_a_timestamp_cannot_hold(outcome: type) -> None:
    """Up to a hundred years; below zero means at once."""
    assert outcome(timedelta(seconds=-5)).delay == timedelta(seconds=-5)
    for delay in (timedelta(days=36_501), timedelta.min):
        with pytest.raises(ConfigError, match="36,500 days"):
            outcome(delay)


@pytest.mark.parametrize(
    "outcome",
    [Done(), Retry(), Snooze(timedelta(1)), DeadLetter("why"), Discard("why")],
    ids=lambda o: type(o).__name__,
)
def test_an_outcome_is_a_value(outcome: object) -> None:
    """Outcomes compare by their content and cannot be changed."""
    assert outcome == dataclasses.replace(outcome)  # type: ignore[type-var]
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        outcome.reason = "another"  # type: ignore[attr-defined]


def test_a_delay_of_a_class_of_the_users_is_no_more_than_its_value() -> None:
    """Its methods would run where the relay settles the job."""

    class Odd(timedelta):
        def total_seconds(self) -> float:
            raise ValueError

        def __pos__(self) -> timedelta:
            raise ValueError

    for outcome in (Snooze(Odd(seconds=5)), Retry(Odd(seconds=5))):
        assert type(outcome.delay) is timedelta
        assert outcome.delay == timedelta(seconds=5)
