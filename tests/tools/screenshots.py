"""Take pictures of every page of the dashboard: in both themes, on a telephone, on a desk, and on a wide screen."""

import argparse
import sys
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, Page
from sqlalchemy import create_engine
from sqlalchemy.engine import Engine

from outboxq.dashboard import Role, TokenLogin, create_app
from outboxq.migrations.runner import migrate
from outboxq.postgres import start_embedded
from tests.support.browser import open_browser, open_page
from tests.support.dashboard import as_user, path_of, screens
from tests.support.http_server import serve
from tests.tools.picture_rows import freshen, stage_pictures

DOCS = Path(__file__).parents[2] / "docs" / "dashboard"
THEMES = ("light", "dark")
WIDTHS = (1280, 390, 2560)
_HEIGHTS = {390: 844, 2560: 1300}
_SETTLE_MS = 400
_QUALITY = 82

_HELP = """\
examples:
  python -m tests.tools.screenshots /tmp/pictures                 # every page, in both themes, at 1280, 390 and 2560 px
  python -m tests.tools.screenshots /tmp/pictures --only dead     # the pages whose name has this in it
  python -m tests.tools.screenshots --docs                        # those that docs/dashboard.md shows

Starts a PostgreSQL server of its own, fills a database with something of everything, and needs Chromium."""


@dataclass(frozen=True)
class Look:
    """A way in which the documentation shows each page."""

    name: str
    theme: str
    width: int
    tallest: int


LOOKS = (Look("light", "light", 1280, 1080), Look("dark", "dark", 1280, 1080), Look("narrow", "light", 390, 1080))
# The forms of which there is a picture: one action, and its refusal; a change of many rows.
FORMS = ("jobs-cancel", "jobs-run-at-refused", "bulk-preview")


@contextmanager
def staged_dashboard(*, empty: bool = False) -> Iterator[tuple[str, Engine]]:
    """A dashboard with something on every page, or with nothing on any; its address, and the engine of its database."""
    with start_embedded() as server, server.create_database() as database:
        engine = create_engine(database.url, use_native_hstore=False)
        try:
            with engine.begin() as connection:
                migrate(connection)
            if not empty:
                stage_pictures(engine)
            app = create_app({"orders": engine}, auth=as_user(Role.ADMIN), environment="production", live_seconds=2)
            with serve(app) as address:
                yield address, engine
        finally:
            engine.dispose()


def paths(engine: Engine, *, empty: bool) -> dict[str, str]:
    """The path of each page, by a name for its picture."""
    wanted = [screen for screen in screens() if not (empty and "{" in screen.path)]
    return {_named(screen.path): path_of(screen, engine, "orders") for screen in wanted}


def _named(path: str) -> str:
    return (path or "overview").replace("/", "-").replace("{", "").replace("}", "")


def take(page: Page, address: str, target: Path, *, whole: bool) -> None:
    """One picture, once charts are drawn and the stream has come."""
    page.goto(address)
    page.wait_for_timeout(_SETTLE_MS)
    page.screenshot(path=target, full_page=whole, animations="disabled")


def take_all(browser: Browser, folder: Path, only: str, themes: list[str], widths: list[int], *, empty: bool) -> int:
    """Every page in every theme and width; how many."""
    taken = 0
    with staged_dashboard(empty=empty) as (address, engine):
        for theme in themes:
            for width in widths:
                size = {"width": width, "height": _HEIGHTS.get(width, 900)}
                with open_page(browser, viewport=size, color_scheme=theme) as page:
                    for name, path in paths(engine, empty=empty).items():
                        if only in name:
                            take(page, f"{address}{path}", folder / f"{name}-{theme}-{width}.png", whole=True)
                            taken += 1
    return taken


def pictures() -> list[str]:
    """The names of the pages that the documentation shows, in the order of the navigation."""
    return ["login", *(_named(screen.path) for screen in screens()), *FORMS]


def take_docs(browser: Browser) -> None:
    """The pictures of the documentation: each page in each of its looks."""
    DOCS.mkdir(exist_ok=True)
    with staged_dashboard() as (address, engine):
        app = create_app({"orders": engine}, auth=TokenLogin("x" * 20, role=Role.READER))
        with serve(app) as closed:
            for look in LOOKS:
                size = {"width": look.width, "height": 640}
                with open_page(browser, viewport=size, color_scheme=look.theme) as page:
                    for name, opened in _opened(page, address, closed, engine):
                        freshen(engine)
                        opened()
                        _keep(page, look, DOCS / f"{name}-{look.name}.webp")


def _opened(page: Page, address: str, closed: str, engine: Engine) -> Iterator[tuple[str, Callable[[], object]]]:
    """What brings a page to each thing that has a picture."""
    yield "login", lambda: page.goto(f"{closed}/login")
    for name, path in paths(engine, empty=False).items():
        yield name, lambda path=path: page.goto(f"{address}{path}")
    job = f"{address}{paths(engine, empty=False)['jobs-job_id']}"
    yield "jobs-cancel", lambda: page.goto(f"{job}/cancel")

    def refuse() -> None:
        page.goto(f"{job}/run-at")
        page.get_by_label("Run at").fill("tomorrow")
        page.get_by_role("button", name="Change time").click()

    def look_before() -> None:
        page.goto(f"{address}/orders/dead")
        page.get_by_role("button", name="Retry all").first.click()

    yield "jobs-run-at-refused", refuse
    yield "bulk-preview", look_before


def _keep(page: Page, look: Look, target: Path) -> None:
    """A picture of a page as WebP, which is a third of a PNG; of its upper part, if it is long."""
    page.wait_for_timeout(_SETTLE_MS)
    height = min(look.tallest, int(page.evaluate("document.documentElement.scrollHeight")))
    clip = {"x": 0, "y": 0, "width": look.width, "height": height, "scale": 1}
    wanted = {"format": "webp", "quality": _QUALITY, "clip": clip, "captureBeyondViewport": True}
    taken = page.context.new_cdp_session(page).send("Page.captureScreenshot", wanted)
    target.write_bytes(b64decode(taken["data"]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="where to")
    parser.add_argument("--docs", action="store_true", help="take those of the documentation")
    parser.add_argument("--only", default="", help="pages whose name has this in it")
    parser.add_argument("--empty", action="store_true", help="of a database without a row")
    parser.add_argument("--theme", action="append", choices=THEMES, help="one theme (default: both)")
    parser.add_argument("--width", action="append", type=int, help="a width (default: 1280, 390 and 2560)")
    given = parser.parse_args()
    if given.folder is None and not given.docs:
        parser.error("name a folder, or pass --docs")
    with open_browser() as browser:
        if given.docs:
            take_docs(browser)
        if given.folder is not None:
            given.folder.mkdir(parents=True, exist_ok=True)
            themes, widths = given.theme or list(THEMES), given.width or list(WIDTHS)
            print(take_all(browser, given.folder, given.only, themes, widths, empty=given.empty), "pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
