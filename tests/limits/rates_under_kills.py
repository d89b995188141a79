"""The rate of a queue under kills: never more starts than it allows, in any stretch of time, and each job done once.

python -m tests.limits.rates_under_kills --seconds 30 --mode transaction|lease --seed N
"""

from tests.limits.limited_run import Mode, Outcome, Scene, command, lead, play

RATE, JOBS, SECONDS, BURST = "60/s", 60, 1.0, 12
# A job begins a moment after its token was reserved: the claim comes between, and under a lease the handler's call.
LATE_SECONDS = {"transaction": 0.15, "lease": 0.3}


def check_rate(mode: Mode, seconds: float, seed: int, url: str) -> tuple[Outcome, float]:
    """Run and check; raises AssertionError if jobs began faster than the rate, or one was not done exactly once."""
    scene = Scene(mode=mode, seconds=seconds, seed=seed, rate=RATE, burst=BURST, job_seconds=0.005)
    outcome = play(scene, url)
    ahead = lead(outcome.starts, JOBS, SECONDS, BURST)
    assert ahead <= JOBS / SECONDS * LATE_SECONDS[mode], f"{ahead:.1f} jobs more than the rate allows have begun"
    assert ahead > -BURST, f"jobs began so seldom ({ahead:.1f}) that the rate never held: nothing was shown"
    assert outcome.done == outcome.added, f"{outcome.added - outcome.done} of {outcome.added} jobs were not done"
    assert not outcome.doubled, f"{outcome.doubled} jobs were done more than once"
    return outcome, ahead


def _say(mode: Mode, seconds: float, seed: int, url: str) -> str:
    seen, ahead = check_rate(mode, seconds, seed, url)
    took = seen.starts[-1] - seen.starts[0]
    return (
        f"{mode}: {seen.done:,} jobs, each once; {len(seen.starts):,} starts in {took:.1f} s at {RATE} with a burst of "
        f"{BURST}: at most {ahead:+.1f} jobs beside the bound; {seen.kills} kills, {seen.terminations} sessions ended"
    )


if __name__ == "__main__":
    command("rates", _say)
