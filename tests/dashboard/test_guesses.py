"""What is hidden cannot be guessed: no list, search or preview answers a right guess otherwise than a wrong one."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text
from starlette.testclient import TestClient

from outboxq.dashboard import Role, create_app
from outboxq.dashboard.payloads import MASK
from tests.support.dashboard import ORIGIN, as_user, client_of, preview_of, stage_dashboard, token_for
from tests.support.staged import numbered

_JSON = {"accept": "application/json"}
_CARD = "4242424242424242"
_URL = "postgres://bob:hunter22@host/db"
_REASON = f"another attempt cannot help: E: {_CARD} was declined, password=hunter22 is wrong"


@pytest.fixture
def staged(engine: Engine) -> Engine:
    stage_dashboard(engine)
    args = json.dumps({"card": _CARD, "url": _URL, "order_id": 7})
    note = {"job": numbered(6), "note": f"paying by {_CARD}"}
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET args = CAST(:args AS jsonb)"), {"args": args})
        connection.execute(
            text("UPDATE outboxq.dead_job SET args = CAST(:args AS jsonb), reason = :reason, kind = 'credit'"),
            {"args": args, "reason": _REASON},
        )
        connection.execute(text("UPDATE outboxq.dead_job SET errors = '[]' WHERE queue = 'mail'"))
        connection.execute(text(
            "INSERT INTO outboxq.progress (job_id, attempt, fraction, note, relay) "
            "VALUES (:job, 1, 0.5, :note, gen_random_uuid())"), note)  # fmt: skip
    return engine


@pytest.fixture
def client(staged: Engine) -> Iterator[TestClient]:
    with client_of(create_app({"orders": staged}, auth=as_user(Role.OPERATOR))) as client:
        yield client


def _answer(client: TestClient, path: str, **asked: str) -> tuple[int, Any]:
    answer = client.get(f"/orders/{path}", params=asked, headers=_JSON)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("limit", ["1", "50"])
def test_a_part_of_a_reason_is_found_if_it_can_be_seen(limit: str, client: TestClient) -> None:
    """A guess at what is hidden is answered like any other, also in what it says of a next page."""
    right = [_answer(client, "dead", reason=guess, limit=limit) for guess in ("hunter22", "password=h", _CARD)]
    assert right == [_answer(client, "dead", reason="of nobody", limit=limit)] * 3
    assert right[0][1]["dead"] == []
    found = _answer(client, "dead", reason="WAS declined", limit=limit)[1]
    assert (
        found["dead"][0]["reason"] == f"another attempt cannot help: E: {MASK} was declined, password={MASK} is wrong"
    )


@pytest.mark.first_and_last
@pytest.mark.parametrize("limit", ["1", "2", "50"])
def test_pages_of_a_search_have_every_row_that_can_be_seen(limit: str, client: TestClient, staged: Engine) -> None:
    """Rows that are left out between them do not end a page, and begin none."""
    with staged.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET args = args || '{\"url\": \"postgres://bob@host/db\"}' "
            "WHERE id IN (SELECT id FROM outboxq.job ORDER BY id LIMIT 3 OFFSET 2)"))  # fmt: skip
    guess = "url:postgres://bob@host/db"
    seen, before = list[str](), None
    for _ in range(4):
        status, found = _answer(client, "jobs", q=guess, limit=limit, **({"before": before} if before else {}))
        assert status == 200
        seen += [each["id"] for each in found["jobs"]]
        before = found["next_before"]
        assert before is None or before == seen[-1]
        if before is None:
            break
    assert len(seen) == len(set(seen)) == 3


@pytest.mark.parametrize("limit", ["1", "50"])
def test_a_search_for_a_hidden_value_is_answered_like_any_other(limit: str, client: TestClient) -> None:
    """Whether its name or its form gives it away."""
    right, wrong = (_answer(client, "jobs", q=f"url:{each}", limit=limit) for each in (_URL, _URL.replace("2", "3")))
    assert right == wrong
    assert right[1]["jobs"] == []
    right, wrong = (_answer(client, "jobs", q=f"card:{each}", limit=limit) for each in (_CARD, "4111111111111111"))
    assert right == wrong
    assert right[0] == 400


def test_the_number_of_a_preview_tells_nothing_of_reasons(client: TestClient, staged: Engine) -> None:
    """A part of a reason is taken only if reasons are shown as they are."""
    token = token_for(client)
    assert preview_of(client, token, what="dead.retry", contains="hunter22")["status"] == 400
    shown: Any = create_app({"orders": staged}, auth=as_user(Role.OPERATOR), payloads="shown")
    with client_of(shown) as other:
        found = preview_of(other, token_for(other), what="dead.retry", contains="HUNTER22")
    assert found["count"] > 0
    assert "whose reason contains 'HUNTER22'" in found["words"]


@pytest.mark.parametrize("errors", ["[]", '[{"type": "outboxq.DeadLetter", "message": "declined"}]'])
def test_the_whole_of_a_hidden_reason_is_no_name_of_an_error(client: TestClient, staged: Engine, errors: str) -> None:
    """A guess at all of it finds as little as a wrong one, in lists and in previews."""
    with staged.begin() as connection:
        connection.execute(text("UPDATE outboxq.dead_job SET errors = CAST(:errors AS jsonb)"), {"errors": errors})
    token, wrong = token_for(client), _REASON.replace("4242", "4343")
    right, other = (_answer(client, "dead", error=guess) for guess in (_REASON, wrong))
    assert right == other
    assert right[1]["dead"] == []
    counts = [preview_of(client, token, what="dead.retry", error=guess)["count"] for guess in (_REASON, wrong)]
    assert counts == [0, 0]


@pytest.mark.wide
def test_lists_hide_what_the_page_of_a_job_hides(client: TestClient) -> None:
    """A reason and a note repeat a value of the arguments, whose name says that it is secret."""
    form = {"what": "dead.retry", "kind": "credit", "csrf": token_for(client)}
    for accept in ("text/html", "application/json"):
        headers = {"accept": accept, "origin": ORIGIN}
        pages = ("dead", "kinds/credit", "jobs", "relays", "queues/mail", "queues/accounts", "", f"jobs/{numbered(6)}")
        answers = [client.get(f"/orders/{path}", headers=headers) for path in pages]
        answers.append(client.post("/orders/bulk/preview", data=form, headers=headers))
        for answer in answers:
            assert answer.status_code == 200
            assert _CARD not in answer.text, answer.url
            assert "hunter22" not in answer.text, answer.url
    assert "was declined" in client.get("/orders/dead").text
    relays = _answer(client, "relays")[1]["relays"]
    assert [job["note"] for relay in relays for job in relay["running"]] == [f"paying by {MASK}"]


def test_a_reason_is_shown_without_its_error_if_the_arguments_are_long(client: TestClient, staged: Engine) -> None:
    """They are not read for a list, so what may be in the text of the error is not known."""
    with staged.begin() as connection:
        connection.execute(text("UPDATE outboxq.dead_job SET args = jsonb_build_object('a', repeat('x', 70000))"))
    reasons = {each["reason"] for each in _answer(client, "dead")[1]["dead"]}
    assert reasons == {"another attempt cannot help: E"}
