"""What of a wide matrix is in every run."""

import pytest

from tests.support.matrices import diagonal


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2, 2), (2, 2, 3), (3, 2, 2), (5, 5, 2), (2, 20, 2)])
def test_each_value_of_each_dimension_is_in_every_run(sizes: tuple[int, ...]) -> None:
    """By as many cases as the longest dimension has values; the others are there with the large tests."""
    dimensions = [pytest.mark.parametrize(f"n{place}", range(size)) for place, size in enumerate(sizes)]
    names, cases = diagonal(*dimensions).args
    assert names == [f"n{place}" for place in range(len(sizes))]
    assert len({case.values for case in cases}) == len(cases)
    in_every_run = [case.values for case in cases if not case.marks]
    assert len(in_every_run) == max(sizes)
    assert [len(set(values)) for values in zip(*in_every_run, strict=True)] == list(sizes)
    assert {mark.name for case in cases for mark in case.marks} == {"large"}


def test_short_dimensions_go_through_their_own_combinations() -> None:
    """Else a flavour would meet one size alone."""
    flavours, sizes = pytest.mark.parametrize("flavour", ["sync", "async"]), pytest.mark.parametrize("size", [1, 50])
    _, cases = diagonal(pytest.mark.parametrize("misdeed", range(4)), flavours, sizes).args
    in_every_run = [case for case in cases if not case.marks]
    assert len({case.values[1:] for case in in_every_run}) == 4
    assert in_every_run[1].id == "1-async-1"
