"""For the tests of the package and for those of the examples."""

from collections.abc import Iterator

import pytest

from tests.support.fork_server import forking, fresh


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
