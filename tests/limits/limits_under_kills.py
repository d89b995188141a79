"""The limit of a queue under kills: never more jobs at a time than it allows, and each job done exactly once.

python -m tests.limits.limits_under_kills --seconds 30 --mode transaction|lease --seed N
"""

from tests.limits.limited_run import Mode, Outcome, Scene, command, play

MOST = 3


def check_limit(mode: Mode, seconds: float, seed: int, url: str) -> Outcome:
    """Run and check; raises AssertionError if more jobs than the limit ran at a time, or one not exactly once."""
    outcome = play(Scene(mode=mode, seconds=seconds, seed=seed, running=MOST), url)
    assert outcome.most_running <= MOST, f"{outcome.most_running} jobs ran at a time, and the limit is {MOST}"
    assert outcome.most_running == MOST, f"never more than {outcome.most_running} jobs ran at a time: nothing was shown"
    assert outcome.done == outcome.added, f"{outcome.added - outcome.done} of {outcome.added} jobs were not done"
    assert not outcome.doubled, f"{outcome.doubled} jobs were done more than once"
    return outcome


def _say(mode: Mode, seconds: float, seed: int, url: str) -> str:
    seen = check_limit(mode, seconds, seed, url)
    return (
        f"{mode}: {seen.done:,} jobs, each once; at most {seen.most_running} of {MOST} at a time; "
        f"{seen.kills} kills, {seen.terminations} sessions ended, {len(seen.starts):,} starts"
    )


if __name__ == "__main__":
    command("limits", _say)
