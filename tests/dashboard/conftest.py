"""The browser of a module's tests."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.browser import NEEDED, chromium, open_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, once for a module: a browser that stayed open would keep later tests from running an event loop."""
    if chromium() is None:
        pytest.skip(NEEDED)
    with open_browser() as opened:
        yield opened
