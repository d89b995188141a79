"""Run random batches alone and shared, for as long as it takes to believe that they come to the same.

    python -m tests.fuzz --minutes 60 --seed 1        what every batch comes to; ends with 1 at the first that differs
    python -m tests.fuzz --plant all                  plant each known bug: ends with 1 if one is not found

Uses the server that `OUTBOXQ_TEST_DATABASE_URL` names, or starts one.
"""

import argparse
import logging
import sys
import time

from outboxq import config
from outboxq.postgres import Server, find_server
from tests.fuzz.compare import Differs
from tests.fuzz.explore import BATCHES_PER_SEED, Tally, explore, run_and_compare
from tests.fuzz.lanes import ALONE, LONE, SAVEPOINTS, SHARED, Lane, Mode, open_lanes
from tests.fuzz.plants import PLANTS, Plant
from tests.fuzz.seen import SEEN

_MODES = {mode.name: mode for mode in (LONE, SHARED, SAVEPOINTS)}
_BATCHES_PER_PLANT = 500
_LINE_SECONDS = 10.0


class Progress:
    """Prints a line now and then, and knows when the time is over."""

    def __init__(self, minutes: float, seed: int) -> None:
        self.tally = Tally()
        self.seed = seed
        self._begun = time.monotonic()
        self._ends = self._begun + minutes * 60
        self._said = self._begun

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._ends

    def look(self) -> None:
        """Before each batch. Raises: TimeOver: enough."""
        now = time.monotonic()
        if now - self._said > _LINE_SECONDS:
            self._said = now
            print(self.line(), flush=True)
        if self.is_over:
            raise TimeOver

    def line(self) -> str:
        seconds, tally = time.monotonic() - self._begun, self.tally
        undisturbed = tally.undisturbed / max(tally.batches, 1)
        return (
            f"{seconds:6.0f} s  seed {self.seed}  {tally.batches:,} batches of {tally.jobs:,} jobs, "
            f"{undisturbed:.0%} of them shared to the end, {tally.batches / seconds:.1f} a second"
        )


class TimeOver(BaseException):
    """The minutes are over; no error of a batch."""


def main() -> int:
    """The exit code: 1 if a batch differs, or a planted bug does not show."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=str(__doc__).splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument(
        "--seed", type=int, default=1, help=f"the first seed; each serves for {BATCHES_PER_SEED} batches"
    )
    parser.add_argument(
        "--mode", choices=sorted(_MODES), action="append", help="what is held against alone (lone and shared)"
    )
    parser.add_argument("--plant", metavar="NAME|all", help=f"one of: {', '.join(PLANTS)}")
    order = parser.parse_args()
    modes = [_MODES[name] for name in order.mode or ["lone", "shared"]]
    with find_server(configured_url=config.test_database_url(), binaries=config.local_binaries()) as server:
        if order.plant:
            plants = list(PLANTS.values()) if order.plant == "all" else [PLANTS[order.plant]]
            return _plant_each(server, plants, order.seed)
        return _explore(server, modes, order.minutes, order.seed)


def _explore(server: Server, modes: list[Mode], minutes: float, first_seed: int) -> int:
    with open_lanes(server, ALONE, *modes) as lanes:
        progress = Progress(minutes, first_seed)
        try:
            _run_seen(lanes)
            while True:
                explore(lanes, BATCHES_PER_SEED, start=progress.seed, tally=progress.tally, before_each=progress.look)
                progress.seed += 1
        except TimeOver:
            pass
        except Differs as error:
            print(f"{progress.line()}\n{_place(progress)}:\n{error}")
            return 1
    print(f"{progress.line()}\nseeds {first_seed} to {progress.seed}: none differs")
    return 0


def _place(progress: Progress) -> str:
    found_at = progress.tally.found_at
    return "among the known ones" if found_at is None else f"batch {found_at} (seed {progress.seed}), shrunk"


def _run_seen(lanes: list[Lane]) -> None:
    for name, batch in SEEN.items():
        try:
            run_and_compare(lanes, batch)
        except Differs as error:
            raise Differs(f"{name}\n{batch!r}\n{error}") from None


def _plant_each(server: Server, plants: list[Plant], seed: int) -> int:
    # Where there is none, none was found.
    survived = not plants
    for each in plants:
        tally = Tally()
        with each.planted(), open_lanes(server, ALONE, LONE, SHARED) as lanes:
            found = _is_found(lanes, seed, tally)
        survived += not found
        word = f"found after {tally.found_at} batches" if found else f"NOT FOUND in {tally.batches} batches"
        print(f"{word:28} {each.name}: {each.what}", flush=True)
    return 1 if survived else 0


def _is_found(lanes: list[Lane], seed: int, tally: Tally) -> bool:
    try:
        explore(lanes, _BATCHES_PER_PLANT, start=seed, tally=tally, shrinks=False)
    except Differs:
        return True
    return False


if __name__ == "__main__":
    # Handlers here do all that relays warn of.
    logging.getLogger("outboxq").addHandler(logging.NullHandler())
    sys.exit(main())
