"""The order in which workers begin tests."""

import pytest

from tests.support.ordering import longest_first


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 5, 10, 23])
@pytest.mark.parametrize("long", [(), (3,), (0, 4), (1, 2, 3, 4, 5, 6, 7, 8, 9)])
def test_the_longest_are_begun_first_and_nothing_is_left_out(workers: int, count: int, long: tuple[int, ...]) -> None:
    """Each worker begins with a long one, as far as there are any; the others keep their order."""
    seconds = [float(place) if place in long else 0.0 for place in range(count)]
    ordered = longest_first(range(count), seconds, workers)
    assert sorted(ordered) == list(range(count))
    assert [each for each in ordered if not seconds[each]] == [each for each in range(count) if not seconds[each]]
    # The worker's shares, as pytest-xdist sends them.
    at, firsts = 0, []
    for worker in range(workers):
        if at < count:
            firsts.append(ordered[at])
        at += (count - at) // (workers - worker)
    if len(long) < count // workers:
        wanted = sorted((each for each in range(count) if seconds[each]), reverse=True)[:workers]
        assert set(wanted) <= set(firsts)
