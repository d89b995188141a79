"""The dashboard in Chromium: pages that are made to be broken out of, and pages as people use them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlencode

import pytest
from jinja2 import FileSystemLoader
from playwright.sync_api import Browser, expect
from sqlalchemy import Engine
from starlette.applications import Starlette
from starlette.routing import Mount

from outboxq.dashboard import DashboardApp, Role, create_app
from outboxq.dashboard.segments import as_segment
from tests.support.browser import Watch, open_page
from tests.support.crawl import Crawl
from tests.support.dashboard import as_user, screens, stage_dashboard
from tests.support.hostile_rows import PAYLOADS, as_text, fill_hostile
from tests.support.http_server import serve
from tests.support.posted import Posted, hostile_answers, send

LISTS = [f"/orders/{screen.path}" for screen in screens() if "{" not in screen.path]


@contextmanager
def mounted(app: DashboardApp) -> Iterator[str]:
    """The dashboard in an application, behind a prefix; its address."""
    with serve(Starlette(routes=[Mount("/ops", app=app)])) as address:
        yield f"{address}/ops"


def _hostile_app(engine: Engine, environment: str = PAYLOADS[3]) -> DashboardApp:
    user = as_user(Role.ADMIN, PAYLOADS[1])
    databases = {"orders": engine, PAYLOADS[0]: engine}
    return create_app(databases, auth=user, title=PAYLOADS[2], environment=environment, payloads="shown")


def _reflected() -> Iterator[str]:
    """Pages that repeat what was asked for."""
    for payload in PAYLOADS:
        short = payload[:63].encode()[:63].decode(errors="ignore").strip("\x7f")
        yield "/orders/jobs?" + urlencode({"queue": short, "group": payload, "q": f"{payload}:1", "columns": payload})
        yield "/orders/dead?" + urlencode({"kind": short, "error": payload, "reason": payload})
        yield "/orders/audit?" + urlencode({"actor": payload, "action": short})
        yield "/orders/inbox?" + urlencode({"consumer": payload, "message_id": payload})


@pytest.mark.wide
def test_a_page_in_a_browser_is_live_and_breaks_no_rule(browser: Browser, engine: Engine) -> None:
    """Behind a prefix, scripts, styles and the stream are loaded under the policy, and an action says what it did."""
    stage_dashboard(engine)
    app = create_app({"orders": engine}, auth=as_user(Role.OPERATOR), live_seconds=2)
    with mounted(app) as root, open_page(browser) as page:
        watch = Watch(page.context, root)
        page.goto(f"{root}/orders/")
        expect(page.locator("#live")).to_have_text("Live, every 2 s")
        page.get_by_role("link", name="accounts").first.click()
        expect(page.locator(".plot").first).to_be_visible()
        page.get_by_role("link", name="Pause…").click()
        page.get_by_label("Reason").fill("the bank is down")
        page.get_by_role("button", name="Pause").click()
        expect(page.get_by_role("status")).to_contain_text("accounts is paused")
        page.keyboard.press("g")
        page.keyboard.press("r")
        expect(page.get_by_role("heading", level=1)).to_have_text("Relays")
        assert watch.problems == []


@pytest.mark.wide
def test_a_page_that_escapes_too_little_is_noticed(browser: Browser, engine: Engine, tmp_path: Path) -> None:
    """With `safe` planted in one template, the reason of a dead letter is a script that the policy refuses."""
    fill_hostile(engine)
    templates = tmp_path / "templates"
    shutil.copytree(str(files("outboxq.dashboard").joinpath("templates")), templates)
    macros = (templates / "macros.html").read_text()
    planted = macros.replace("{{ text|visible }}</div>", "{{ text|safe }}</div>")
    assert planted != macros
    (templates / "macros.html").write_text(planted)
    app = _hostile_app(engine)
    app.dashboard.renderer._environment.loader = FileSystemLoader(templates)
    with mounted(app) as root, open_page(browser) as page:
        watch = Watch(page.context, root)
        page.goto(f"{root}/orders/dead")
        assert any("Content Security Policy" in problem for problem in watch.problems)


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_no_text_breaks_out_of_any_page(browser: Browser, engine: Engine) -> None:
    """Forty payloads in each text of lists, and of a third of what they lead to: no dialog, no script, no odd link."""
    fill_hostile(engine)
    app = _hostile_app(engine)
    with mounted(app) as root, open_page(browser) as page:
        watch = Watch(page.context, root)
        crawl = Crawl(root, inside=f"{root}/orders/")
        other = f"/{as_segment(PAYLOADS[0])}/"
        for address in crawl.walk(page, ["/", other, *LISTS, *_reflected()]):
            assert watch.problems == [], address
        assert crawl.foreign == set()
        assert 300 < len(crawl.seen) < crawl.most
        # Of each list rows were opened, and so were names.
        for part in ("jobs/", "dead/", "done/", "effects/", "inbox/", "queues/", "kinds/", "schedules/", "audit/"):
            assert sum(f"/orders/{part}" in address for address in crawl.seen) >= len(PAYLOADS) / 8, part


@pytest.mark.wide
@pytest.mark.timeout(900)
def test_no_text_breaks_out_of_a_page_that_answers_to_a_form(browser: Browser, engine: Engine) -> None:
    """Previews, and forms that are refused, with forty payloads in what they name and in all that was filled in."""
    fill_hostile(engine)
    app = _hostile_app(engine, "production")
    with mounted(app) as root, open_page(browser) as page:
        watch = Watch(page.context, root)
        page.goto(f"{root}/orders/queues")
        for number, posted in enumerate(hostile_answers(engine)):
            send(page, root, posted)
            assert watch.problems == [], posted
            assert page.locator("h1").count() == 1
            intent = page.locator("input[name=intent]")
            if intent.count():
                payload = as_text(PAYLOADS[number % len(PAYLOADS)])
                fields = {"intent": intent.input_value(), "typed": payload[:100], "reason": payload}
                send(page, root, Posted("/orders/bulk/apply", fields, 400))
                assert watch.problems == [], fields
                assert page.get_by_label("Reason").input_value() == payload
