"""The breadth of a job's way: calls, functions and files of the package that one thread passes."""

import logging
import sys
from collections import Counter
from pathlib import Path
from statistics import median_low
from types import CodeType, FrameType
from typing import NamedTuple, TypeAlias

from sqlalchemy import create_engine, text

import outboxq
from outboxq import Backoff, Context, Jobs, OutboxSession, Relay, RelayConfig
from tests.support.limits import FOLLOW_ON, with_limits

PACKAGE = Path(outboxq.__file__).parent
PRODUCER = "producer"
# The options of the handler whose jobs take each way. A handler with `retry` fails.
WAYS: dict[str, dict[str, object]] = {
    PRODUCER: {},
    "plain job, transaction mode": {},
    "plain job, lease mode": {"claim": "lease"},
    "retry": {"retry": Backoff(max_attempts=2, first_seconds=3600)},
    "dead letter": {"retry": Backoff(max_attempts=1)},
    "grouped job": {"group": lambda name: name},
}
# The first jobs fill caches.
_WARM_UP, _MEASURED = 5, 21


# The functions that a way calls in each file, and how often.
Files: TypeAlias = dict[str, Counter[str]]


class Way(NamedTuple):
    """Calls of Python functions of the package, the distinct functions, and their files."""

    calls: int
    functions: int
    files: int

    def __str__(self) -> str:
        return f"{self.calls} calls of {self.functions} functions in {self.files} files"


class _Profile:
    """The calls of the package's functions in this thread, from each `begin` to the next `end`."""

    def __init__(self) -> None:
        self._ways: list[list[CodeType]] = []

    def begin(self) -> None:
        called: list[CodeType] = []
        self._ways.append(called)
        package = str(PACKAGE)

        def record(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(package):
                called.append(frame.f_code)

        sys.setprofile(record)

    def end(self) -> None:
        sys.setprofile(None)

    def median(self) -> tuple[Way, Files]:
        """The median of each figure, and the files of one way: work that is done now and then does not count."""
        measured = self._ways[_WARM_UP : _WARM_UP + _MEASURED]
        files: Files = {}
        for code in sorted(measured, key=len)[len(measured) // 2]:
            files.setdefault(Path(code.co_filename).relative_to(PACKAGE).as_posix(), Counter())[code.co_qualname] += 1
        way = Way(
            median_low(len(called) for called in measured),
            median_low(
                len({(code.co_filename, code.co_firstlineno, code.co_qualname) for code in called})
                for called in measured
            ),
            median_low(len({code.co_filename for code in called}) for called in measured),
        )
        return way, files


def measure_way(url: str, name: str) -> tuple[Way, Files]:
    """Measure one of WAYS, and list its files, in a database with the tables of `tests/support/app.py` and no jobs.

    A producer's way leads from `add_job` to the end of COMMIT, the others from one handler's body to the next one's in
    the thread of the only slot, while more jobs wait. Each handler executes one statement. Events become log records,
    as they do by default, which are dropped.
    """
    produced, ran, jobs, options = _Profile(), _Profile(), Jobs(), WAYS[name]

    def run(ctx: Context, name: str) -> None:
        ran.end()
        ran.begin()
        ctx.session.execute(text("INSERT INTO effect_ledger (name) VALUES (:name)"), {"name": name})
        if "retry" in options:
            raise ValueError("no")

    # A failure's log record has the path of this file, and each of its characters is a call: it is the same everywhere.
    run.__code__ = run.__code__.replace(co_filename="jobs.py", co_firstlineno=100)
    insert = jobs.handler(queue="q", **options)(run)

    engine = create_engine(url)
    # One more than are measured: no handler comes after the last one's.
    for _ in range(_WARM_UP + _MEASURED + 1):
        with OutboxSession(engine) as session:
            produced.begin()
            session.add_job(insert, name="Anna")
            session.commit()
            produced.end()
    engine.dispose()
    if name == PRODUCER:
        return produced.median()
    config = RelayConfig(slots_per_queue=1, prune_seconds=0, stats_seconds=0)
    logger = logging.getLogger("outboxq.relay")
    logger.addFilter(_drop)
    try:
        with_limits(Relay(url, jobs, config), FOLLOW_ON).drain()
    finally:
        logger.removeFilter(_drop)
    return ran.median()


def _drop(_: logging.LogRecord) -> bool:
    return False
