"""Draw batches, run each in every lane, and shrink the first that differs."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count as count_from_zero

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import FlakyFailure, HypothesisDeprecationWarning
from sqlalchemy.exc import SAWarning

from tests.fuzz.compare import Differs, check
from tests.fuzz.lanes import Lane
from tests.fuzz.program import Batch
from tests.fuzz.strategies import batches

# Hypothesis begins with the simplest batch, which is left out. If it is to make ten or more, the second is as simple;
# from the eleventh on, each is followed by five that are nearly the same.
BATCHES_PER_SEED = 8
_CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)


@dataclass
class Tally:
    """How many batches were run, and in how many every handler ran once: those that stood as they were shared."""

    batches: int = 0
    jobs: int = 0
    undisturbed: int = 0
    # Of the first that differed; those behind it are smaller ones.
    found_at: int | None = None


def run_and_compare(lanes: Sequence[Lane], batch: Batch, tally: Tally | None = None) -> None:
    """Run a batch in each lane; the first is what the others are held against.

    Raises:
        Differs: one of them came to something else.
    """
    with quiet(), ThreadPoolExecutor(len(lanes)) as pool:
        alone, *others = pool.map(lambda lane: lane.run(batch), lanes)
    if tally is not None:
        tally.batches += 1
        tally.jobs += len(batch.tasks)
        tally.undisturbed += all(other.calls == alone.calls for other in others)
    for lane, other in zip(lanes[1:], others, strict=True):
        check(alone, other, lane.mode.name)


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings that mean nothing here."""
    with warnings.catch_warnings():
        # The relays' threads draw from it too, for their pauses.
        warnings.filterwarnings("ignore", "Do not use the `random` module", HypothesisDeprecationWarning)
        # Programs do what SQLAlchemy warns of.
        warnings.simplefilter("ignore", SAWarning)
        yield


def explore(
    lanes: Sequence[Lane],
    count: int,
    *,
    start: int,
    tally: Tally | None = None,
    shrinks: bool = True,
    before_each: Callable[[], None] = lambda: None,
) -> None:
    """Run `count` random batches, drawn from the seeds that follow `start`.

    Raises:
        Differs: with the smallest batch that still does.
    """
    for done in range(0, count, BATCHES_PER_SEED):
        number = min(BATCHES_PER_SEED, count - done)
        _explore(lanes, number, start + done // BATCHES_PER_SEED, tally, shrinks, before_each)


def _explore(
    lanes: Sequence[Lane],
    count: int,
    start: int,
    tally: Tally | None,
    shrinks: bool,
    before_each: Callable[[], None],
) -> None:
    smallest: list[tuple[Batch, Differs]] = []
    drawn = count_from_zero()
    phases = (Phase.generate, Phase.shrink) if shrinks else (Phase.generate,)

    @settings(
        max_examples=count + 1,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=_CHECKS,
        print_blob=False,
        report_multiple_bugs=False,
    )
    @given(batches())
    def run(batch: Batch) -> None:
        if next(drawn) == 0:
            return
        if not smallest:
            before_each()
        try:
            run_and_compare(lanes, batch, tally)
        except Differs as error:
            smallest[:] = [(batch, error)]
            if tally is not None and tally.found_at is None:
                tally.found_at = tally.batches
            raise

    try:
        with quiet():
            seed(start)(run)()
    except (Differs, FlakyFailure):
        if not smallest:
            # Another error than a difference, which did not come back.
            raise
        # One that differed once counts, even if it does not when it is run again.
        batch, error = smallest[0]
        raise Differs(f"{batch!r}\n{error}") from None
