"""Rows of a list that are selected: what is meant by them, who may select, and that it takes no script."""

import re
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest
from playwright.sync_api import Browser, expect
from sqlalchemy import Engine, text
from starlette.testclient import TestClient

from outboxq.dashboard import Role, create_app
from tests.support.browser import open_page
from tests.support.dashboard import ORIGIN, as_user, checksums, client_of, stage_dashboard, token_for
from tests.support.http_server import serve
from tests.support.many_dead import add_dead, count_dead, until

_BOX = re.compile(r'<input type="checkbox" form="selected" name="id" value="([0-9a-f-]+)"')


@pytest.fixture
def staged(engine: Engine) -> Engine:
    stage_dashboard(engine)
    return engine


def _preview(client: TestClient, ids: Sequence[object], **asked: str) -> Any:
    form: dict[str, Any] = {"csrf": token_for(client), "id": [str(each) for each in ids], **asked}
    headers = {"origin": ORIGIN, "accept": "application/json"}
    return client.post("/orders/bulk/preview", data=form, headers=headers)


def _apply(client: TestClient, intent: str) -> Any:
    form = {"csrf": token_for(client), "intent": intent, "reason": "as agreed"}
    return client.post("/orders/bulk/apply", data=form, headers={"origin": ORIGIN, "accept": "application/json"})


def _entry(client: TestClient, entry: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/orders/audit/{entry}", headers={"accept": "application/json"}).json()
    return found


def _ids(engine: Engine, of: str) -> list[UUID]:
    with engine.connect() as connection:
        return list(connection.execute(text(f"SELECT id FROM outboxq.{of} ORDER BY id")).scalars())


@pytest.mark.first_and_last
@pytest.mark.parametrize("page", ["jobs", "dead"])
@pytest.mark.parametrize("role", list(Role), ids=lambda role: role.label)
def test_rows_are_selected_by_a_role_that_may_act(role: Role, page: str, staged: Engine) -> None:
    """A box in front of each row, as part of a plain form; a reader sees neither, and discards are an admin's."""
    with client_of(create_app({"orders": staged}, auth=as_user(role))) as client:
        shown = client.get(f"/orders/{page}").text
    rows = {str(each) for each in _ids(staged, "job" if page == "jobs" else "dead_job")}
    assert set(_BOX.findall(shown)) == (rows if role > Role.READER else set())
    assert ('id="selected"' in shown) == (role > Role.READER)
    assert ("Discard selected" in shown) == (role is Role.ADMIN and page == "dead")


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("what", "of", "fields", "words"),
    [
        ("dead.retry", "dead_job", {}, "Retry 2 dead letters that are selected."),
        ("dead.discard", "dead_job", {}, "Discard 2 dead letters that are selected."),
        ("job.cancel", "job", {}, "Cancel 2 jobs that are selected."),
        ("job.cancel_running", "job", {"outcome": "dead"}, "also those that run; a dead letter is left of each."),
        ("job.run_now", "job", {}, "Change 2 jobs that are selected: run them as soon as a relay is free."),
        ("job.priority", "job", {"priority": "9"}, "their priority is 9 then."),
        ("job.run_at", "job", {"run_at": "2030-01-31T08:00:00Z"}, "they run at 2030-01-31T08:00:00Z."),
    ],
)
def test_what_is_selected_is_shown_and_then_changed(
    what: str, of: str, fields: dict[str, str], words: str, staged: Engine
) -> None:
    """These rows and no others, however the list was filtered; the audit has their ids, the reason and who it was."""
    ids = _ids(staged, of)
    picked = [ids[0], ids[-1]]
    with client_of(create_app({"orders": staged}, auth=as_user(Role.ADMIN, "olga"))) as client:
        found = _preview(client, picked, what=what, of="selected", queue="another one", **fields).json()
        assert words in found["words"]
        assert (found["count"], {each["id"] for each in found["samples"]}) == (2, set(map(str, picked)))
        entry = _apply(client, found["intent"]).json()["audit"]
        until(
            lambda: client.get(f"/orders/audit/{entry}", headers={"accept": "application/json"}).json()["finished_at"]
        )
        told = client.get(f"/orders/audit/{entry}", headers={"accept": "application/json"}).json()
    assert (told["actor"], told["reason"], told["filter"]) == (
        "olga",
        "as agreed",
        {"ids": [str(each) for each in picked]},
    )
    assert told["changed"] + told["held"] <= 2
    left = set(_ids(staged, of))
    assert left & set(ids[1:-1]) == set(ids[1:-1])
    if of == "dead_job":
        assert not left & set(picked)


@pytest.mark.wide
def test_a_whole_page_can_be_selected(staged: Engine) -> None:
    """Up to 200 rows, in one transaction; one more is refused."""
    add_dead(staged, 201)
    with client_of(create_app({"orders": staged}, auth=as_user(Role.ADMIN))) as client:
        ids = _BOX.findall(client.get("/orders/dead?kind=bulk&limit=200").text)
        assert len(ids) == 200
        found = _preview(client, ids, what="dead.discard", of="selected").json()
        assert (found["count"], found["typed"]) == (200, [])
        assert _apply(client, found["intent"]).status_code == 200
        until(lambda: count_dead(staged) == 1)
        many = _preview(client, [*ids, _ids(staged, "dead_job")[0]], what="dead.discard", of="selected")
        assert (many.status_code, "200" in many.json()["error"]) == (400, True)


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("ids", "asked", "said"),
    [
        ([], {"of": "selected"}, "No row is selected"),
        ([], {"of": "selected", "kind": "charge"}, "No row is selected"),
        (["one"], {"of": "selected"}, "id takes an id"),
        (["01929e1c-5a7d-7cc3-9a55-000000000065"], {"kind": "charge"}, "of=selected"),
    ],
)
def test_a_selection_is_never_taken_for_a_filter(
    ids: list[str], asked: dict[str, str], said: str, staged: Engine
) -> None:
    """Nothing selected is refused, and not every row; so is what could mean either."""
    with client_of(create_app({"orders": staged}, auth=as_user(Role.ADMIN))) as client:
        before = checksums(staged)
        answer = _preview(client, ids, what="dead.discard", **asked)
        assert (answer.status_code, said in answer.json()["error"]) == (400, True), answer.text
        assert checksums(staged) == before


def test_the_filter_is_meant_if_the_form_says_so(staged: Engine) -> None:
    """Also with rows selected; and ids alone, as a program sends them, mean these rows."""
    add_dead(staged, 3)
    ids = _ids(staged, "dead_job")
    with client_of(create_app({"orders": staged}, auth=as_user(Role.OPERATOR))) as client:
        assert _preview(client, ids[:1], what="dead.retry", of="all", kind="bulk").json()["count"] == 3
        assert _preview(client, ids[:1], what="dead.retry").json()["count"] == 1
        assert _preview(client, ids[:1], what="dead.discard").json()["needs"] == "admin"


@pytest.mark.wide
@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no scripts"])
def test_rows_are_selected_in_a_browser(scripts: bool, browser: Browser, staged: Engine) -> None:
    """A script adds a box that selects all; without it each row is."""
    add_dead(staged, 4)
    app = create_app({"orders": staged}, auth=as_user(Role.ADMIN))
    with serve(app) as address, open_page(browser, java_script_enabled=scripts) as page:
        page.goto(f"{address}/orders/dead?kind=bulk")
        every = page.get_by_label("Select all of this page")
        if scripts:
            every.check()
            page.get_by_label(re.compile("^Select …")).first.uncheck()
        else:
            expect(every).to_be_hidden()
            for place in range(3):
                page.get_by_label(re.compile("^Select …")).nth(place).check()
        page.get_by_role("button", name="Discard selected").click()
        expect(page.locator(".verdict")).to_have_text("Discard 3 dead letters that are selected.")
        page.get_by_role("button", name="Discard 3").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("dead.discard")
    until(lambda: count_dead(staged) == 1)
