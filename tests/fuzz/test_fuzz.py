"""Random batches of random handlers come to what their jobs come to alone: rows, outcomes, what each handler saw."""

from collections.abc import Iterator
from unittest import mock

import pytest

from outboxq.handlers import row_writes
from outboxq.postgres import Server
from tests.fuzz import program
from tests.fuzz.compare import Differs
from tests.fuzz.explore import explore, run_and_compare
from tests.fuzz.lanes import ALONE, LONE, SAVEPOINTS, SHARED, Lane, open_lanes
from tests.fuzz.plants import PLANTS
from tests.fuzz.seen import SEEN
from tests.fuzz.shown import SHOWN
from tests.support.matrices import sampled

# Hundreds of batches, on a machine that may have other things to do.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def lanes(outboxq_server: Server) -> Iterator[dict[str, Lane]]:
    """A lane of each mode."""
    with open_lanes(outboxq_server, ALONE, LONE, SHARED, SAVEPOINTS) as opened:
        yield {lane.mode.name: lane for lane in opened}


@pytest.fixture(scope="module")
def forgetful(outboxq_server: Server) -> Iterator[list[Lane]]:
    """Lanes that read what is known of tables anew for each batch."""
    with (
        mock.patch.object(row_writes, "FRESH_SECONDS", -1.0),
        open_lanes(outboxq_server, ALONE, LONE, SHARED) as opened,
    ):
        yield opened


@pytest.mark.wide
def test_a_difference_is_found_and_told(lanes: dict[str, Lane]) -> None:
    """In a database in which one trigger is missing; the report is a program that can be run again."""
    lanes["savepoints"].execute("ALTER TABLE till DISABLE TRIGGER till_changed")
    try:
        with pytest.raises(Differs) as found:
            # These seeds soon draw one that writes a till.
            explore([lanes["alone"], lanes["savepoints"]], 500, start=2, shrinks=False)
    finally:
        lanes["savepoints"].execute("ALTER TABLE till ENABLE TRIGGER till_changed")
    told = str(found.value)
    assert "rows.branch[" in told
    again = eval(told[: told.index("\n)\n") + 2], vars(program))
    assert repr(again) in told


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "start"), [("jobs_are_lost", 0), ("jobs_are_turned_round", 1), ("statements_keep_rows", 0)]
)
def test_a_bug_in_the_mechanism_is_found(name: str, start: int, lanes: dict[str, Lane]) -> None:
    """Three of those that `python -m tests.fuzz --plant all` plants, each within 500 batches."""
    with PLANTS[name].planted(), pytest.raises(Differs):
        explore([lanes["alone"], lanes["shared"]], 500, start=start, shrinks=False)


@pytest.mark.large
@pytest.mark.parametrize("name", sampled(PLANTS, 3))
def test_each_bug_makes_a_difference(name: str, forgetful: list[Lane]) -> None:
    """To a batch of two or three jobs, which come to the same without it."""
    run_and_compare(forgetful, SHOWN[name])
    with PLANTS[name].planted(), pytest.raises(Differs):
        run_and_compare(forgetful, SHOWN[name])


@pytest.mark.parametrize(("start", "count"), [(0, 10), pytest.param(1, 290, marks=pytest.mark.wide)])
def test_jobs_in_company_come_to_what_they_come_to_alone(start: int, count: int, lanes: dict[str, Lane]) -> None:
    """Alone without listeners, in savepoints of one transaction, and shared; 300 random batches, always the same ones.

    `python -m tests.fuzz` draws others.
    """
    explore([*lanes.values()], count, start=start)


@pytest.mark.first_and_last
@pytest.mark.parametrize("name", SEEN)
def test_batches_that_once_differed_do_not(name: str, lanes: dict[str, Lane]) -> None:
    """Alone, in savepoints and shared."""
    run_and_compare([*lanes.values()], SEEN[name])
