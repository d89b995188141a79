"""What axe-core finds on the pages: nothing that is serious or critical, in either theme and at any width."""

import pytest
from playwright.sync_api import Browser, Page
from sqlalchemy import Engine

from outboxq.dashboard import Role, TokenLogin, create_app
from tests.support.browser import findings, open_page
from tests.support.dashboard import action_path, as_user, path_of, screens, stage_actions, stage_dashboard
from tests.support.http_server import serve
from tests.support.posted import FORMS, every_answer, send

THEMES = ("light", "dark")
# Colours are those of a theme, whatever the width: each theme at one width is each theme and each width.
LOOKS = (("light", 390), ("dark", 1280))


@pytest.fixture
def staged(engine: Engine) -> Engine:
    stage_dashboard(engine)
    return engine


def _look(browser: Browser, theme: str, width: int, addresses: list[str]) -> dict[str, list[str]]:
    """The findings of each page that has some."""
    settings = {"color_scheme": theme, "viewport": {"width": width, "height": 844}}
    with open_page(browser, **settings) as page:
        return {address: found for address in addresses if (found := _findings(page, address))}


def _findings(page: Page, address: str) -> list[str]:
    page.goto(address)
    return _findings_here(page)


def _findings_here(page: Page) -> list[str]:
    found = findings(page)
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return found + ([f"the page is {overflow} px wider than its window"] if overflow > 0 else [])


@pytest.mark.wide
@pytest.mark.parametrize("theme", THEMES)
def test_the_overview_can_be_used_by_all(theme: str, browser: Browser, staged: Engine) -> None:
    """Names, roles, contrast: on the page that everybody sees."""
    with serve(create_app({"orders": staged}, auth=as_user(Role.ADMIN))) as address:
        assert _look(browser, theme, 1280, [f"{address}/orders/"]) == {}


@pytest.mark.wide
def test_a_page_with_a_button_without_a_name_is_noticed(browser: Browser, staged: Engine) -> None:
    """The tests here would find what is wrong."""
    with serve(create_app({"orders": staged}, auth=as_user(Role.ADMIN))) as address, open_page(browser) as page:
        page.goto(f"{address}/orders/")
        page.evaluate("document.querySelector('main').append(document.createElement('button'))")
        assert any("button-name" in each for each in findings(page))


@pytest.mark.wide
@pytest.mark.parametrize(("theme", "width"), LOOKS)
def test_every_page_can_be_used_by_all(theme: str, width: int, browser: Browser, staged: Engine) -> None:
    """Every screen with something on it, the start, a page that is refused, and one that is not there."""
    app = create_app({"orders": staged, "billing": staged}, auth=as_user(Role.ADMIN), environment="production")
    paths = [path_of(screen, staged, "orders") for screen in screens()]
    paths += ["/", "/orders/nothing", "/nowhere/", "/orders/jobs?kind=none", "/orders/jobs?q=account:7&columns=account"]
    with serve(app) as address:
        assert _look(browser, theme, width, [f"{address}{path}" for path in paths]) == {}


@pytest.mark.wide
@pytest.mark.parametrize(("theme", "width"), LOOKS)
def test_every_form_can_be_used_by_all(theme: str, width: int, browser: Browser, engine: Engine) -> None:
    """The form of each action, as it is at first and as it was refused, and what changes of many rows would do.

    They are made of the same parts: each is looked at once, and they take turns with the looks.
    """
    turn = LOOKS.index((theme, width))
    stage_actions(engine)
    app = create_app({"orders": engine}, auth=as_user(Role.ADMIN), environment="production")
    settings = {"color_scheme": theme, "viewport": {"width": width, "height": 844}}
    with serve(app) as address, open_page(browser, **settings) as page:
        for action in list(FORMS)[turn :: len(LOOKS)]:
            assert _findings(page, f"{address}{action_path(action)}") == [], action.path
        # By twos, as a preview with rows stands in front of the same one without any.
        for posted in [each for number, each in enumerate(every_answer()) if number // 2 % len(LOOKS) == turn]:
            send(page, address, posted)
            assert _findings_here(page) == [], posted


@pytest.mark.wide
@pytest.mark.parametrize("theme", THEMES)
def test_every_empty_page_can_be_used_by_all(theme: str, browser: Browser, engine: Engine) -> None:
    """A database without a row, and the page that asks who one is."""
    lists = [f"/orders/{screen.path}" for screen in screens() if "{" not in screen.path]
    with serve(create_app({"orders": engine}, auth=as_user(Role.READER))) as address:
        assert _look(browser, theme, 390, [f"{address}{path}" for path in lists]) == {}
    with serve(create_app({"orders": engine}, auth=TokenLogin("x" * 20, role=Role.READER))) as address:
        assert _look(browser, theme, 390, [f"{address}/login"]) == {}
