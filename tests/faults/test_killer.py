"""The run of a killer among calls: its bounds are seen to be exceeded, and a short one keeps them."""

from collections.abc import Sequence
from uuid import UUID

import pytest
from sqlalchemy import Engine

from outboxq.torture.starts import Start
from tests.faults.killer import Figures, KillerOptions, run_killer

KILLER = UUID(int=1)
# Calls of a second: four innocents, of which each relay may run two suspects at a time.
OPTIONS = KillerOptions(calls=5, seconds=1.0, company=2, most_deaths=4, most_reruns=1, max_crashes=2)
FIRST, SECOND, THIRD = 11, 12, 13


def start(job: int, at: float, pid: int) -> Start:
    return Start(UUID(int=job), int(at), pid, at)


# The first death takes all with it, the second one innocent; then the killer is alone, twice.
KEPT = [
    *(start(job, 0.0, FIRST) for job in range(1, 6)),
    *(start(job, 10.0, SECOND) for job in (1, 2)),
    *(start(job, at, THIRD) for job, at in ((2, 20.0), (3, 20.0), (4, 21.0), (5, 21.0))),
    start(1, 22.1, THIRD),
    start(1, 30.0, 14),
]
ENDS = {UUID(int=job): at for job, at in ((2, 21.0), (3, 21.0), (4, 22.0), (5, 22.0))}


def figures(starts: Sequence[Start], ends: dict[int, float] | None = None) -> Figures:
    given = {UUID(int=job): at for job, at in (ends or {}).items()}
    deaths = [each.at + 0.5 for each in starts if each.job_id == KILLER]
    return Figures(OPTIONS, KILLER, starts, deaths, ENDS | given)


def test_a_history_that_keeps_the_bounds_breaks_none() -> None:
    """Four deaths, one innocent that began once more than the first death made necessary, two and a half lengths."""
    found = figures(KEPT)
    assert list(found.broken()) == []
    assert (len(found.deaths), found.killed_at_work(), found.reruns(), found.beside_charged()) == (4, 4, 1, 0)
    # From the start at 10.0 to its death at 10.5, and from the next start at 20.0 to 22.0.
    assert found.lengths() == 2.5


@pytest.mark.parametrize(
    ("more", "ends", "problem"),
    [
        ([start(1, 40.0, 15)], {}, "5 deaths, at most 4"),
        ([start(3, 10.0, SECOND)], {}, "2 reruns of innocents, at most 1"),
        ([], {5: 40.5}, "13.6 lengths of a call until the innocents were done, at most 13.5"),
        ([start(5, 30.1, 14)], {5: 50.0}, "2 innocents beside a killer that was charged, at most 0"),
        ([], {4: 22.3}, "1 innocents beside a killer that was charged, at most 0"),
    ],
    ids=["deaths", "reruns", "lengths", "began-beside", "still-at-work"],
)
def test_each_bound_that_is_exceeded_is_named(more: list[Start], ends: dict[int, float], problem: str) -> None:
    """With the number, and the bound."""
    assert any(found.startswith(problem) for found in figures([*KEPT, *more], ends).broken())


@pytest.mark.large
@pytest.mark.timeout(300)
def test_a_killer_among_calls_is_dead_in_the_end_and_takes_few_with_it(engine: Engine) -> None:
    """Each innocent is done once; how long that took is left out, as this machine may be busy."""
    report = run_killer(KillerOptions(calls=16, slots=16, seconds=0.1, lease_seconds=1.0, minutes=4), engine)
    assert [problem for problem in report.problems if "lengths" not in problem] == []
    assert report.deaths > 3, "one in company, and as many alone as make a dead letter"


@pytest.mark.large
@pytest.mark.timeout(300)
def test_calls_whose_relay_was_killed_run_again_once_each(engine: Engine) -> None:
    """None of them is to blame, and none is charged."""
    options = KillerOptions(calls=40, slots=40, killers=0, seconds=0.1, lease_seconds=1.0, minutes=4)
    report = run_killer(options, engine)
    assert [problem for problem in report.problems if "lengths" not in problem] == []
    assert (report.deaths, report.reruns) == (1, 0)
