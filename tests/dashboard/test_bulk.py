"""Changes of many rows: what a preview shows, what it takes to apply it, and what goes on behind the pages."""

import base64
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.testclient import TestClient

from outboxq.dashboard import Role, create_app
from outboxq.dashboard.app import DashboardApp
from outboxq.dashboard.intents import Intent
from outboxq.dashboard.seals import Seal
from outboxq.postgres import Database
from tests.support.dashboard import ORIGIN, as_user, checksums, client_of, preview_of, stage_dashboard, token_for
from tests.support.many_dead import add_dead, count_dead, slow_down, until

_SECRET = b"a secret of thirty-two bytes, 1!"


@dataclass(frozen=True)
class Operator:
    """A browser of one who changes many rows."""

    client: TestClient
    token: str

    def look(self, **asked: str) -> dict[str, Any]:
        return preview_of(self.client, self.token, **asked)

    def post(self, path: str, **form: str) -> Any:
        headers = {"origin": ORIGIN, "accept": "application/json"}
        return self.client.post(f"/orders/{path}", data={**form, "csrf": self.token}, headers=headers)

    def entry(self, entry: str) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get(f"/orders/audit/{entry}", headers={"accept": "application/json"}).json()
        return found

    def await_end(self, entry: str) -> dict[str, Any]:
        until(lambda: self.entry(entry)["finished_at"] is not None)
        return self.entry(entry)


def _app(engine: Engine, role: Role = Role.ADMIN, name: str = "anna", environment: str | None = None) -> DashboardApp:
    auth: Any = as_user(role, name)
    return create_app({"orders": engine}, auth=auth, secret=_SECRET, environment=environment)


@pytest.fixture
def operator(engine: Engine) -> Iterator[Operator]:
    stage_dashboard(engine)
    with client_of(_app(engine)) as client:
        yield Operator(client, token_for(client))


def test_a_preview_says_what_is_meant_and_locks_nothing(operator: Operator, engine: Engine) -> None:
    """The filter in words, the number by queue and kind, ten of the rows, and the database's clock."""
    add_dead(engine, 12)
    with engine.connect() as connection:
        marks = "SELECT string_agg(xmin::text || xmax::text || ctid::text, ',') FROM outboxq.dead_job"
        before = connection.execute(text(marks)).scalar_one()
        found = operator.look(what="dead.retry", kind="bulk", error="it broke")
        assert connection.execute(text(marks)).scalar_one() == before
    assert (found["count"], found["is_capped"], len(found["samples"])) == (12, False, 10)
    assert found["kinds"] == [{"queue": "many", "kind": "bulk", "count": 12}]
    assert re.fullmatch(
        r"Retry all dead letters of the kind bulk, that died of it broke, given up until [\d:.TZ-]+\.", found["words"]
    ), found["words"]
    assert (found["typed"], found["needs"]) == ([], "operator")


_EVERY_PREVIEW = (
    (
        "dead.retry",
        {"error": "ValueError"},
        "Retry all dead letters of the kind k, in the queue q, that died of ValueError",
    ),
    ("dead.discard", {}, "Discard all dead letters of the kind k, in the queue q"),
    ("job.cancel", {"state": "ready"}, "Cancel all jobs of the kind k, in the queue q, in the state ready"),
    ("job.cancel_running", {"outcome": "dead"}, "also those that run; a dead letter is left of each."),
    ("job.run_now", {}, "run them as soon as a relay is free."),
    ("job.priority", {"priority": "-5"}, "their priority is -5 then."),
    ("job.run_at", {"run_at": "2030-01-31T08:00:00Z"}, "they run at 2030-01-31T08:00:00Z."),
)


@pytest.mark.first_and_last
@pytest.mark.parametrize(("what", "fields", "words"), _EVERY_PREVIEW, ids=[each[0] for each in _EVERY_PREVIEW])
def test_each_change_is_said_in_words(what: str, fields: dict[str, str], words: str, operator: Operator) -> None:
    """Also on the page, without a script."""
    asked = {"what": what, "kind": "k", "queue": "q", **fields}
    assert words in operator.look(**asked)["words"]
    form = {**asked, "csrf": operator.token}
    page = operator.client.post("/orders/bulk/preview", data=form, headers={"origin": ORIGIN})
    assert page.status_code == 200
    assert "Nothing was changed yet" in page.text


def test_a_preview_is_applied_and_what_is_newer_is_left_alone(operator: Operator, engine: Engine) -> None:
    """What dies between the preview and the end stays dead."""
    add_dead(engine, 450)
    found = operator.look(what="dead.discard", kind="bulk")
    with engine.begin() as connection:
        newer = "UPDATE outboxq.dead_job SET kind = 'bulk', died_at = clock_timestamp() WHERE kind = 'send'"
        connection.execute(text(newer))
    done = operator.post("bulk/apply", intent=found["intent"], reason="not needed")
    assert done.status_code == 200, done.text
    entry = operator.await_end(done.json()["audit"])
    assert (entry["changed"], entry["expected"], entry["reason"]) == (450, 450, "not needed")
    assert count_dead(engine) == 1


def test_a_preview_is_applied_once(operator: Operator, engine: Engine) -> None:
    """However often its form is sent."""
    add_dead(engine, 3)
    found = operator.look(what="dead.discard", kind="bulk")
    first = operator.post("bulk/apply", intent=found["intent"]).json()
    operator.await_end(first["audit"])
    add_dead(engine, 2)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.dead_job SET died_at = now() - interval '1 day' WHERE kind = 'bulk'"))
    assert operator.post("bulk/apply", intent=found["intent"]).json()["audit"] == first["audit"]
    assert count_dead(engine) == 2


def _opened(sealed: str) -> Intent:
    body = sealed.partition(".")[0]
    return msgspec.json.decode(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)), type=Intent)


def _sealed(intent: Intent, **changes: object) -> str:
    return Seal(_SECRET).close("intent", msgspec.structs.replace(intent, **changes))


def _changed_by_hand(sealed: str) -> str:
    body, _, mac = sealed.partition(".")
    other = msgspec.json.encode(msgspec.structs.replace(_opened(sealed), filter="{}"))
    assert body
    return f"{base64.urlsafe_b64encode(other).decode().rstrip('=')}.{mac}"


_BREAKS: dict[str, tuple[Callable[[str], str], int]] = {
    "too old": (lambda sealed: _sealed(_opened(sealed), until=time.time() - 1), 409),
    "another filter": (_changed_by_hand, 400),
    "another secret": (lambda sealed: Seal(b"b" * 32).close("intent", _opened(sealed)), 400),
    "another purpose": (lambda sealed: Seal(_SECRET).close("session", _opened(sealed)), 400),
    "another user's": (lambda sealed: _sealed(_opened(sealed), user="bob"), 403),
    "another session's": (lambda sealed: _sealed(_opened(sealed), session="x"), 403),
    "another database's": (lambda sealed: _sealed(_opened(sealed), database="mail"), 403),
    "nothing": (lambda _: "", 400),
}


@pytest.mark.first_and_last
@pytest.mark.parametrize("name", _BREAKS)
def test_a_preview_that_is_not_one_changes_nothing(name: str, operator: Operator, engine: Engine) -> None:
    """It holds for its user, in its session, for its database, for five minutes, as it was shown."""
    add_dead(engine, 3)
    found = operator.look(what="dead.discard", kind="bulk")
    assert 295 < _opened(found["intent"]).until - time.time() <= 300
    spoil, status = _BREAKS[name]
    before = checksums(engine)
    assert operator.post("bulk/apply", intent=spoil(found["intent"])).status_code == status
    assert checksums(engine) == before


def test_a_preview_that_is_too_old_is_shown_as_it_stands_now(operator: Operator, engine: Engine) -> None:
    """The page says so, keeps the reason, and has a form that holds."""
    add_dead(engine, 3)
    old = _sealed(_opened(operator.look(what="dead.discard", kind="bulk")["intent"]), until=time.time() - 1)
    add_dead(engine, 4)
    form = {"csrf": operator.token, "intent": old, "reason": "a reason of mine"}
    page = operator.client.post("/orders/bulk/apply", data=form, headers={"origin": ORIGIN})
    assert page.status_code == 409
    assert "older than five minutes" in page.text
    assert "a reason of mine" in page.text
    assert "Discard 7" in page.text
    renewed = re.search(r'name="intent" value="([^"]+)"', page.text)
    assert renewed is not None
    form = {"csrf": operator.token, "intent": renewed[1]}
    assert operator.client.post("/orders/bulk/apply", data=form, headers={"origin": ORIGIN}).status_code == 303
    until(lambda: count_dead(engine) == 0)


def test_more_than_a_thousand_are_confirmed_by_typing(operator: Operator, engine: Engine) -> None:
    """Their number, or the name of the queue that is meant."""
    add_dead(engine, 1_001)
    found = operator.look(what="dead.discard", kind="bulk", queue="many")
    assert found["typed"] == ["1001", "many"]
    before = checksums(engine)
    for typed in ("", "1000", "mail", "yes"):
        refused = operator.post("bulk/apply", intent=found["intent"], typed=typed)
        assert refused.status_code == 400
        assert "type 1001 or many" in refused.json()["error"]
    assert checksums(engine) == before
    assert operator.post("bulk/apply", intent=found["intent"], typed="1,001").status_code == 200
    until(lambda: count_dead(engine) == 0)


def test_in_production_one_row_is_confirmed_by_typing(engine: Engine) -> None:
    """However few there are."""
    stage_dashboard(engine)
    add_dead(engine, 1)
    with client_of(_app(engine, environment="production")) as client:
        operator = Operator(client, token_for(client))
        found = operator.look(what="dead.retry", kind="bulk")
        assert operator.post("bulk/apply", intent=found["intent"]).status_code == 400
        assert operator.post("bulk/apply", intent=found["intent"], typed="1").status_code == 200


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("what", "number", "status"), [("dead.retry", 10_001, 403), ("dead.discard", 1, 403), ("dead.retry", 1, 200)]
)
def test_an_operator_changes_up_to_ten_thousand_and_discards_none(
    what: str, number: int, status: int, engine: Engine
) -> None:
    """More than that, and what cannot be taken back, takes an admin; the page says so instead of its form."""
    stage_dashboard(engine)
    add_dead(engine, number)
    with client_of(_app(engine, Role.OPERATOR)) as client:
        operator = Operator(client, token_for(client))
        found = operator.look(what=what, kind="bulk")
        assert (found["count"], found["is_capped"]) == (min(number, 10_000), number > 10_000)
        form = {"what": what, "kind": "bulk", "csrf": operator.token}
        page = client.post("/orders/bulk/preview", data=form, headers={"origin": ORIGIN}).text
        assert ("This takes the role admin" in page) == (status == 403)
        typed = str(found["count"])
        assert operator.post("bulk/apply", intent=found["intent"], typed=typed).status_code == status


@pytest.mark.wide
def test_what_goes_on_is_stopped_and_gone_on_with(operator: Operator, engine: Engine) -> None:
    """By its id in the audit, which counts every row that was changed."""
    add_dead(engine, 2_000)
    slow_down(engine, 0.2)
    found = operator.look(what="dead.discard", kind="bulk")
    entry = operator.post("bulk/apply", intent=found["intent"], typed="2000").json()["audit"]
    page = operator.client.get(f"/orders/audit/{entry}").text
    assert f"audit/{entry}/stop" in page
    assert operator.post(f"audit/{entry}/resume").status_code == 409
    assert operator.post(f"audit/{entry}/stop").json()["state"] == "stopped"
    stopped = operator.entry(entry)
    assert 0 < stopped["changed"] < 2_000
    app: Any = operator.client.app
    until(lambda: not app.dashboard.runs.has(app.dashboard.databases["orders"], UUID(entry)))
    assert count_dead(engine) == 2_000 - operator.entry(entry)["changed"]
    assert operator.post(f"audit/{entry}/resume").status_code == 200
    assert operator.await_end(entry)["changed"] == 2_000
    assert count_dead(engine) == 0


@pytest.mark.wide
def test_two_go_on_at_a_time(operator: Operator, engine: Engine) -> None:
    """A third one waits for its user to come again: its preview is shown once more, and nothing was changed by it."""
    slow_down(engine, 0.2)
    for kind in ("one", "two", "three"):
        add_dead(engine, 900, kind)
    looks = {kind: operator.look(what="dead.discard", kind=kind) for kind in ("one", "two", "three")}
    entries = [operator.post("bulk/apply", intent=looks[kind]["intent"]).json()["audit"] for kind in ("one", "two")]
    form = {"csrf": operator.token, "intent": looks["three"]["intent"]}
    third = operator.client.post("/orders/bulk/apply", data=form, headers={"origin": ORIGIN})
    assert third.status_code == 409
    assert "2 changes of many rows go on here already" in third.text
    assert count_dead(engine, "three") == 900
    for entry in entries:
        assert operator.await_end(entry)["changed"] == 900
    assert operator.post("bulk/apply", intent=looks["three"]["intent"]).status_code == 200


def test_an_error_of_the_first_page_is_told_at_once(operator: Operator, engine: Engine) -> None:
    """And nothing is left of it, neither in the rows nor in the audit."""
    add_dead(engine, 3)
    with engine.begin() as connection:
        connection.execute(text("CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$"))
        connection.execute(text("CREATE TRIGGER no BEFORE DELETE ON outboxq.dead_job EXECUTE FUNCTION no()"))
    found = operator.look(what="dead.discard", kind="bulk")
    before = checksums(engine)
    assert operator.post("bulk/apply", intent=found["intent"]).status_code == 503
    assert checksums(engine) == before


def test_without_an_audit_nothing_goes_on_unseen(operator: Operator, engine: Engine) -> None:
    """It is followed and gone on with by its row there, so it is refused, with what to do."""
    add_dead(engine, 3)
    found = operator.look(what="dead.discard", kind="bulk")
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outboxq.audit RENAME TO no_audit"))
    refused = operator.post("bulk/apply", intent=found["intent"])
    assert (refused.status_code, "outboxq migrate" in refused.json()["error"]) == (409, True)
    assert count_dead(engine) == 3


def test_an_async_engine_changes_many_rows_too(engine: Engine, outboxq_database: Database) -> None:
    """In a greenlet of the event loop, which goes on to answer pages."""
    stage_dashboard(engine)
    add_dead(engine, 900)
    slow_down(engine, 0.1)
    asynchronous = create_async_engine(outboxq_database.url, use_native_hstore=False)
    app = create_app({"orders": asynchronous}, auth=as_user(Role.ADMIN))
    with client_of(app) as client:
        operator = Operator(client, token_for(client))
        found = operator.look(what="dead.discard", kind="bulk")
        entry = operator.post("bulk/apply", intent=found["intent"]).json()["audit"]
        assert operator.entry(entry)["changed"] < 900
        assert operator.await_end(entry)["changed"] == 900
        assert client.portal is not None
        client.portal.call(asynchronous.dispose)
    assert count_dead(engine) == 0


@pytest.mark.wide
def test_rows_that_come_after_the_preview_do_not_make_more_of_it_than_was_agreed(engine: Engine) -> None:
    """It ends before it is more than one confirms without typing, or than the role may; an admin may go on."""
    stage_dashboard(engine)
    add_dead(engine, 10)
    with client_of(_app(engine, Role.OPERATOR)) as client:
        operator = Operator(client, token_for(client))
        found = operator.look(what="dead.retry", kind="bulk")
        add_dead(engine, 1_200)
        entry = operator.post("bulk/apply", intent=found["intent"]).json()["audit"]
        until(lambda: operator.entry(entry)["error"] is not None)
        assert "more rows match by now than the 1,000" in operator.entry(entry)["error"]
        assert (operator.entry(entry)["changed"], count_dead(engine)) == (1_000, 210)
        with engine.begin() as connection:
            connection.execute(text("UPDATE outboxq.audit SET changed = 9900 WHERE id = :id"), {"id": entry})
        refused = operator.post(f"audit/{entry}/resume")
        assert (refused.status_code, count_dead(engine)) == (409, 210)
        assert "10,000" in refused.json()["error"]
    app = _app(engine, Role.ADMIN)
    with client_of(app) as client:
        admin = Operator(client, token_for(client))
        assert admin.post(f"audit/{entry}/resume").status_code == 200
        until(lambda: not app.dashboard.runs.has(app.dashboard.databases["orders"], UUID(entry)))
    assert count_dead(engine) == 0
