"""Fixtures and hooks for the tests of the package and of the examples."""

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.support.fork_server import forking, fresh
from tests.support.matrices import covering
from tests.support.ordering import longest_first
from tests.support.rewriting import rewrite_share

Collected: TypeAlias = pytest.Item | pytest.Collector | list[pytest.Item | pytest.Collector] | None
_EXAMPLES = Path(__file__).parent / "examples"

# For all processes that the tests start: a crash shows its stacks. pytest does it for its own process.
os.environ["PYTHONFAULTHANDLER"] = "1"

# A script's background jobs ignore SIGINT, and so would all processes that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Rewrite the files' asserts together with the other workers, then collect."""
    rewrite_share(session.config)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Collected, Collected]:
    """Mark those cases as wide that are not in every run, of tests marked `each_value` or `first_and_last`."""
    made = yield
    cases = [case for case in made if isinstance(case, pytest.Function)] if isinstance(made, list) else []
    marks = {mark.name for mark in cases[0].iter_markers()} if cases else set()
    cases = [case for case in cases if not case.get_closest_marker("wide")]
    if "each_value" in marks:
        cases = [case for case in cases if not case.get_closest_marker("large")]
        needed = covering([case.callspec.params for case in cases])
    elif "first_and_last" in marks:
        needed = {0, len(cases) - 1}
    else:
        return made
    for place, case in enumerate(cases):
        if place not in needed:
            case.add_marker(pytest.mark.wide)
    return made


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that selects wide cases."""
    parser.addoption("--part", metavar="N/M", help="of the wide cases only every M-th one, from the N-th (modulo M) on")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the examples as large, because their files stay as users copy them; select wide cases.

    The longest, which have a time-out of their own, come first in the workers' shares: if it began last, such a test
    would keep one worker busy for minutes after the others have ended.
    """
    for item in items:
        if item.path.is_relative_to(_EXAMPLES):
            item.add_marker(pytest.mark.large)
    if config.getoption("--part"):
        number, parts = map(int, config.getoption("--part").split("/"))
        wide = [item for item in items if item.get_closest_marker("wide")]
        others = {item for place, item in enumerate(wide) if (place - number) % parts}
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=list(others))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = longest_first(items, [_seconds(item, config) for item in items], workers)


def _seconds(item: pytest.Item, config: pytest.Config) -> float:
    """Return a test's own time-out; 0 if it has the one of all tests, or a shorter one."""
    mark = item.get_closest_marker("timeout")
    seconds = 0.0 if mark is None else float(mark.args[0])
    return seconds if seconds > float(config.getini("timeout")) else 0.0


def pytest_collection_finish() -> None:
    """Freeze the collected objects, which stay to the end: the garbage collector need not walk them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _forked_processes() -> Iterator[None]:
    """Start by a fork all processes that tests start by `python -m`."""
    with forking():
        yield


@pytest.fixture
def fresh_processes() -> Iterator[None]:
    """Start this test's processes as new interpreters."""
    with fresh():
        yield
