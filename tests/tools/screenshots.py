"""Take pictures of every page of the dashboard: in both themes, on a telephone, on a desk, and on a wide screen."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, Page
from sqlalchemy import create_engine
from sqlalchemy.engine import Engine

from outboxq.dashboard import Role, create_app
from outboxq.migrations.runner import migrate
from outboxq.postgres import start_embedded
from tests.support.browser import open_browser, open_page
from tests.support.dashboard import as_user, path_of, screens, stage_dashboard
from tests.support.http_server import serve

DOCS = Path(__file__).parents[2] / "docs" / "dashboard"
THEMES = ("light", "dark")
WIDTHS = (1280, 390, 2560)
_HEIGHTS = {390: 844, 2560: 1300}
_SETTLE_MS = 400
_DOCS_SIZE = {"width": 1280, "height": 860}

_HELP = """\
examples:
  python -m tests.tools.screenshots /tmp/pictures                 # every page, in both themes, at 1280, 390 and 2560 px
  python -m tests.tools.screenshots /tmp/pictures --only dead     # the pages whose name has this in it
  python -m tests.tools.screenshots --docs                        # those that docs/dashboard.md shows

Starts a PostgreSQL server of its own, fills a database with something of everything, and needs Chromium."""


@dataclass(frozen=True)
class Shot:
    """A picture that the documentation has."""

    name: str
    screen: str
    theme: str = "light"


SHOTS = (
    Shot("overview", ""),
    Shot("job", "jobs/{job_id}"),
    Shot("dead", "dead/{job_id}", "dark"),
)


@contextmanager
def staged_dashboard(*, empty: bool = False) -> Iterator[tuple[str, Engine]]:
    """A dashboard with something on every page, or with nothing on any; its address, and the engine of its database."""
    with start_embedded() as server, server.create_database() as database:
        engine = create_engine(database.url, use_native_hstore=False)
        try:
            with engine.begin() as connection:
                migrate(connection)
            if not empty:
                stage_dashboard(engine)
            app = create_app({"orders": engine}, auth=as_user(Role.ADMIN), environment="production", live_seconds=2)
            with serve(app) as address:
                yield address, engine
        finally:
            engine.dispose()


def paths(engine: Engine, *, empty: bool) -> dict[str, str]:
    """The path of each page, by a name for its picture."""
    wanted = [screen for screen in screens() if not (empty and "{" in screen.path)]
    found = {screen.path or "overview": path_of(screen, engine, "orders") for screen in wanted}
    return {name.replace("/", "-").replace("{", "").replace("}", ""): path for name, path in found.items()}


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


def take_docs(browser: Browser) -> None:
    """The pictures of the documentation."""
    DOCS.mkdir(exist_ok=True)
    with staged_dashboard() as (address, engine):
        by_screen = {screen.path: path_of(screen, engine, "orders") for screen in screens()}
        for shot in SHOTS:
            with open_page(browser, viewport=_DOCS_SIZE, color_scheme=shot.theme) as page:
                take(page, f"{address}{by_screen[shot.screen]}", DOCS / f"{shot.name}.png", whole=False)


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
