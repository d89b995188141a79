"""What of a wide matrix is in every run."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.support.matrices import covering, diagonal


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2, 2), (2, 2, 3), (3, 2, 2), (5, 5, 2), (2, 20, 2)])
def test_each_value_of_each_dimension_is_in_every_run(sizes: tuple[int, ...]) -> None:
    """By as many cases as the longest dimension has values; the others are wide."""
    dimensions = [pytest.mark.parametrize(f"n{place}", range(size)) for place, size in enumerate(sizes)]
    names, cases = diagonal(*dimensions).args
    assert names == [f"n{place}" for place in range(len(sizes))]
    assert len({case.values for case in cases}) == len(cases)
    in_every_run = [case.values for case in cases if not case.marks]
    assert len(in_every_run) == max(sizes)
    assert [len(set(values)) for values in zip(*in_every_run, strict=True)] == list(sizes)
    assert {mark.name for case in cases for mark in case.marks} == {"wide"}


def test_short_dimensions_go_through_their_own_combinations() -> None:
    """Else a flavour would meet one size alone."""
    flavours, sizes = pytest.mark.parametrize("flavour", ["sync", "async"]), pytest.mark.parametrize("size", [1, 50])
    _, cases = diagonal(pytest.mark.parametrize("misdeed", range(4)), flavours, sizes).args
    in_every_run = [case for case in cases if not case.marks]
    assert len({case.values[1:] for case in in_every_run}) == 4
    assert in_every_run[1].id == "1-async-1"


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (2, 2, 3), (5, 5, 2), (2, 20, 2)])
def test_few_cases_have_each_value_of_each_argument(sizes: tuple[int, ...]) -> None:
    """As many as the argument with the most values has; a value that one case alone has is among them."""
    values = [[f"{place}" for place in range(size)] for size in sizes]
    named = [{f"n{place}": value for place, value in enumerate(case)} for case in product(*values)]
    chosen = covering(named)
    assert len(chosen) == max(sizes)
    for place, size in enumerate(sizes):
        assert len({named[case][f"n{place}"] for case in chosen}) == size
    assert len(named) in covering([*named, named[0] | {"n0": "alone"}])


@pytest.mark.wide
def test_what_is_wide_does_not_depend_on_what_is_asked_for() -> None:
    """A case that is run by its name, or as one that failed, is as wide as among the others."""
    several = Path(__file__).parents[1] / "cli" / "test_kinds.py"
    wide = _wide_cases(several)
    assert len(wide) > 1
    assert _wide_cases(f"{several}::{wide[0]}") == wide[:1]


@pytest.mark.wide
def test_the_parts_of_what_is_wide_are_all_of_it() -> None:
    """The number of a part goes on for ever: after as many runs as there are parts each case was run."""
    several = Path(__file__).parents[1] / "cli" / "test_kinds.py"
    parts = [_wide_cases(several, "--part", part) for part in ("6/2", "7/2")]
    assert all(parts)
    assert sorted(parts[0] + parts[1]) == sorted(_wide_cases(several))


def _wide_cases(asked: Path | str, *options: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-q", "-m", "wide", *options]
    listed = subprocess.run([*command, asked], capture_output=True, text=True, check=True)
    names = [line.rpartition("::")[2] for line in listed.stdout.splitlines()]
    return [name for name in names if name.startswith("test_the_other_kinds_of_its_queue_go_on")]
