"""For the tests of the package and for those of the examples."""

import gc
import signal
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from zlib import crc32

import pytest

from tests.support.fork_server import forking, fresh
from tests.support.rewriting import rewrite_share

_EXAMPLES = Path(__file__).parent / "examples"

# A script's background jobs ignore SIGINT, and so would all that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Rewrite the files' asserts together with the other workers, then collect."""
    rewrite_share(session.config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as large the examples' tests, whose files are as users copy them, and cases that need not always run."""
    several: dict[tuple[Path, object, str, int], list[pytest.Item]] = {}
    for item in items:
        if item.path.is_relative_to(_EXAMPLES):
            item.add_marker(pytest.mark.large)
        elif isinstance(item, pytest.Function) and not _is_large(item) and (mark := item.get_closest_marker("one_in")):
            several.setdefault((item.path, item.cls, item.originalname, mark.args[0]), []).append(item)
    for (*_, one_in), cases in several.items():
        # Mixed by a checksum, so that those which stay have many values of each argument.
        cases.sort(key=lambda case: crc32(case.name.encode()))
        for case in cases[ceil(len(cases) / one_in) :]:
            case.add_marker(pytest.mark.large)


def _is_large(item: pytest.Item) -> bool:
    return item.get_closest_marker("large") is not None


def pytest_collection_finish() -> None:
    """What thousands of tests are made of stays to the end: the collector need not walk through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _forked_processes() -> Iterator[None]:
    """What tests start by `python -m`, they start by a fork."""
    with forking():
        yield


@pytest.fixture
def fresh_processes() -> Iterator[None]:
    """This test's processes are interpreters of their own from the start."""
    with fresh():
        yield
