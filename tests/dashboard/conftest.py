"""What the tests of the dashboard share."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser
from sqlalchemy import Engine, QueuePool

from outboxq.dashboard import databases
from tests.support.browser import NEEDED, chromium, open_browser
from tests.support.many_dead import until


@pytest.fixture
def engine(engine: Engine) -> Iterator[Engine]:
    """The test's engine, until nothing of its dashboard works on it any more."""
    yield engine
    # A change of many rows that was cut off with its event loop ends behind its page, in a thread of its own.
    pool = engine.pool
    assert isinstance(pool, QueuePool)
    until(lambda: pool.checkedout() == 0)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time that a query of a page may take: a busy machine needs more than a user would wait."""
    monkeypatch.setattr(databases, "_READING", databases._READING.replace("'2s'", "'20s'"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, once for a module: a browser that stayed open would keep later tests from running an event loop."""
    if chromium() is None:
        pytest.skip(NEEDED)
    with open_browser() as opened:
        yield opened
