"""Chromium, what a page does in it that it must not do, and what axe-core finds on it.

The pages' own Content-Security-Policy holds here too: scripts are run by the browser's debugger, and nothing is waited
for by a script.
"""

import functools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Dialog, Page, Request, sync_playwright

NEEDED = "Chromium is not installed, no page was tried in a browser: apt-get install --no-install-recommends chromium"
PATIENCE_MS = 30_000
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_AXE = Path(__file__).parents[1] / "dashboard" / "vendor" / "axe.min.js"
# Serious and critical findings are bugs; those that are less are matters of taste.
_GRAVE = ("serious", "critical")


def chromium() -> str | None:
    """The path of Chromium, if it is installed."""
    return next((path for path in map(shutil.which, _NAMES) if path is not None), None)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Chromium without a window. While it is open, this thread can run no event loop of its own.

    Raises:
        FileNotFoundError: it is not installed.
    """
    path = chromium()
    if path is None:
        raise FileNotFoundError(NEEDED)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(browser: Browser, **settings: Any) -> Iterator[Page]:
    """A page in a context of its own: nothing is left of it, and no stream stays open."""
    context = browser.new_context(**settings)
    context.set_default_timeout(PATIENCE_MS)
    try:
        yield context.new_page()
    finally:
        context.close()


class Watch:
    """What pages of one context did that no page may: dialogs, refused scripts, requests to others, errors."""

    def __init__(self, context: BrowserContext, origin: str) -> None:
        self.problems: list[str] = []
        self._origin = urlsplit(origin).netloc
        context.on("dialog", self._dialog)
        context.on("console", self._console)
        context.on("request", self._request)
        context.on("weberror", lambda error: self.problems.append(f"error: {error.error}"))

    def _dialog(self, dialog: Dialog) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _console(self, message: ConsoleMessage) -> None:
        # A page that refuses what is asked says so by its status, which is an error to a browser's console.
        if message.type == "error" and "server responded with a status of 4" not in message.text:
            self.problems.append(f"console: {message.text}")

    def _request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme != "data" and parts.netloc != self._origin:
            self.problems.append(f"request: {request.url}")


@functools.cache
def _axe() -> str:
    return _AXE.read_text()


def findings(page: Page) -> list[str]:
    """What axe-core finds on a page that is serious or critical, a line each."""
    page.evaluate(_axe())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['impact']} {each['id']}: {node['html'][:200]} {node.get('failureSummary', '')[:200]}"
        for each in found["violations"]
        if each["impact"] in _GRAVE
        for node in each["nodes"]
    ]
