"""What must not be seen is on no page, in no JSON and in no search, whichever way it is written down."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies
from sqlalchemy import Engine, text
from starlette.testclient import TestClient

from outboxq.dashboard import Role, create_app
from outboxq.dashboard.documents import read_tree, write_tree
from outboxq.dashboard.payloads import MASK, Payloads, is_secret, redacted, without_secrets
from tests.support.dashboard import (
    ORIGIN,
    action_path,
    as_user,
    client_of,
    path_of,
    screens,
    stage_dashboard,
    token_for,
)
from tests.support.posted import FORMS, PREVIEWS, preview, refused
from tests.support.secrets import CANARY, give_words, stage_secrets
from tests.support.staged import numbered


@pytest.fixture
def staged(engine: Engine) -> Engine:
    stage_secrets(engine)
    return engine


@pytest.fixture(params=["hidden", "redacted"])
def browser(request: pytest.FixtureRequest, staged: Engine) -> Iterator[TestClient]:
    """An admin's, of a dashboard that hides the payloads or redacts them."""
    if request.param == "redacted":
        give_words(staged)
    with client_of(create_app({"orders": staged}, auth=as_user(Role.ADMIN), payloads=request.param)) as client:
        yield client


@pytest.mark.wide
def test_a_secret_is_on_no_page(browser: TestClient, staged: Engine) -> None:
    """It stands in arguments, headers, results, errors and notes, at any depth, and in JSON inside of a string."""
    paths = [path_of(screen, staged, "orders") for screen in screens()]
    paths += [f"/orders/jobs/{numbered(number)}" for number in (6, 101, 102, 301)]
    for path in [*paths, "/orders/queues/mail"]:
        for accept in ("text/html", "application/json"):
            answer = browser.get(path, headers={"accept": accept})
            assert answer.status_code == 200
            assert CANARY not in answer.text, (path, accept)


@pytest.mark.wide
def test_a_secret_is_on_no_form_and_in_no_preview(browser: TestClient) -> None:
    """What a form begins with, what it shows if it is refused, and the rows that a preview shows."""
    token = token_for(browser)
    selected = preview("dead.retry", of="selected", id=str(numbered(101)))
    sent = [*map(preview, PREVIEWS), selected, *(refused(each, "no") for each in FORMS)]
    for accept in ("text/html", "application/json"):
        headers = {"accept": accept, "origin": ORIGIN}
        answers = [browser.get(action_path(action), headers=headers) for action in FORMS]
        forms = ((each.path, {**each.fields, "csrf": token}) for each in sent)
        answers += [browser.post(path, data=form, headers=headers) for path, form in forms]
        assert {each.status_code for each in answers} <= {200, 400, 404}
        assert [str(each.url) for each in answers if CANARY in each.text] == []


def test_shown_payloads_are_shown(staged: Engine) -> None:
    """The test above would see the secret, if it were there."""
    app = create_app({"orders": staged}, auth=as_user(Role.READER), payloads="shown")
    with client_of(app) as client:
        for path in (f"/orders/jobs/{numbered(1)}", "/orders/effects/stripe-charge/order-1001", "/orders/dead"):
            assert CANARY in client.get(path).text


def test_a_search_does_not_tell_what_is_hidden(staged: Engine) -> None:
    """A job is found by what may be seen of it alone: else an answer would say that a guess is right."""

    def hook(kind: str, args: Any) -> Any:
        return {**args, "order_id": MASK}

    found = "…" + str(numbered(1))[-12:]
    for arguments, seen in (({}, True), ({"redact": hook}, False)):
        given_hook: Any = arguments
        app = create_app({"orders": staged}, auth=as_user(Role.READER), **given_hook)
        with client_of(app) as client:
            assert (found in client.get("/orders/jobs?q=order_id:7").text) is seen
            assert found not in client.get(f"/orders/jobs?q=password:{CANARY}").text
            assert found not in client.get(f"/orders/jobs?q=card_number:{CANARY}&columns=card_number,password").text
            assert CANARY not in client.get("/orders/jobs?columns=card_number,password,nested.list").text
    hidden = create_app({"orders": staged}, auth=as_user(Role.READER), payloads="hidden")
    with client_of(hidden) as client:
        assert client.get("/orders/jobs?q=order_id:7").status_code == 400
        assert client.get("/orders/dead?reason=hunter").status_code == 400


def test_columns_show_arguments_of_any_type(staged: Engine) -> None:
    """Numbers with their digits, lists as JSON; each document is redacted once, with no transaction open."""
    calls = list[tuple[str, int]]()

    def hook(kind: str, args: Any) -> Any:
        calls.append((kind, staged.pool.checkedout()))  # type: ignore[attr-defined]  # of a QueuePool
        return args

    app = create_app({"orders": staged}, auth=as_user(Role.READER), redact=hook)
    args = '{"order_id": 10000000000000000000000000000001, "n": 1.50, "list": [1, {"pin": 4711}], "text": "a"}'
    with staged.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET args = CAST(:args AS jsonb)"), {"args": args})
        rows = connection.execute(text(
            "UPDATE outboxq.job SET args = args || jsonb_build_object('long', repeat('x', 70000)) "
            "WHERE queue = 'mail' RETURNING id")).all()  # fmt: skip
    with client_of(app) as client:
        assert client.get("/orders/jobs").status_code == 200
        assert calls == []
        page = client.get("/orders/jobs?columns=order_id,n,list,text,absent,list.deep")
    assert page.status_code == 200
    for cell in ("10000000000000000000000000000001", "1.50", "[1, {&#34;pin&#34;: &#34;•••&#34;}]"):
        assert f">{cell}</td>" in page.text
    assert len(calls) == page.text.count(">1.50</td>") > 0
    assert page.text.count('scope="row"') == len(calls) + len(rows)
    assert {connections for _, connections in calls} == {0}


def test_a_hook_that_fails_hides_everything(staged: Engine) -> None:
    """An error in the application's hook is no reason to show what it was to hide."""

    def hook(kind: str, args: Any) -> Any:
        raise KeyError(args)

    app = create_app({"orders": staged}, auth=as_user(Role.READER), payloads="shown", redact=hook)
    with client_of(app) as client:
        page = client.get(f"/orders/jobs/{numbered(1)}").text
    assert "the hook `redact` failed: KeyError" in page
    assert "order_id" not in page


def test_the_hook_is_asked_about_the_job_that_follows_a_batch(staged: Engine) -> None:
    """About its arguments alone; if it fails, nothing of that job is shown."""
    asked = list[Any]()

    def hook(kind: str, args: Any) -> Any:
        asked.append((kind, args))
        return dict.fromkeys(args, "by the hook")

    def failing(kind: str, args: Any) -> Any:
        raise KeyError(args)

    path = f"/orders/batches/{numbered(201)}"
    for redact, seen in ((hook, {"run": "by the hook"}), (failing, None)):
        with client_of(create_app({"orders": staged}, auth=as_user(Role.READER), redact=redact)) as client:
            callback = client.get(path, headers={"accept": "application/json"}).json()["callback"]
        assert (callback and callback["args"]) == seen
    assert asked == [("report", {"run": 7})]


def test_json_has_documents_as_they_are(staged: Engine) -> None:
    """As --json of the command line has them: arguments, headers, and the filter of an action."""
    with client_of(create_app({"orders": staged}, auth=as_user(Role.READER))) as client:
        found = client.get(f"/orders/jobs/{numbered(1)}", headers={"accept": "application/json"}).json()
        batch = client.get(f"/orders/batches/{numbered(201)}", headers={"accept": "application/json"}).json()
    assert (found["args"]["order_id"], found["args"]["password"]) == (7, MASK)
    assert isinstance(found["errors"], list)
    assert batch["callback"]["args"] == {"run": 7}


def test_numbers_keep_their_digits() -> None:
    """What a float cannot hold is shown as it is stored."""
    document = '{"a": 12345678901234567890123, "b": 0.10000000000000000001, "c": 1e400, "d": 1.50}'
    assert Payloads().document("k", document).raw == document


def test_half_a_pair_of_surrogates_is_shown_as_it_is_stored(engine: Engine) -> None:
    """In JSON inside of a string, as no text of PostgreSQL can have it: the page, its JSON and columns answer."""
    stage_dashboard(engine)
    args = json.dumps({"b": '{"password": "x", "b": "\\ud800"}'})
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET args = CAST(:args AS jsonb)"), {"args": args})
    with client_of(create_app({"orders": engine}, auth=as_user(Role.READER))) as client:
        for path in (f"jobs/{numbered(1)}", "jobs?columns=b"):
            answer = client.get(f"/orders/{path}")
            assert answer.status_code == 200
            assert "ud800" in answer.text
        document = client.get(f"/orders/jobs/{numbered(1)}", headers={"accept": "application/json"})
    assert "ud800" in document.text


def test_a_document_that_is_nested_too_deeply_is_not_shown() -> None:
    """It takes neither the page nor the process down."""
    for depth in (202, 5_000, 200_000):
        shown = Payloads().document("k", "[" * depth + "]" * depth)
        assert (shown.raw, shown.pretty) == ("null", "")


_SECRET = (
    "password", "Password", "db_password", "userPassword", "api_key", "apiKey", "API-KEY", "x-api-key", "accessToken",
    "refresh_tokens", "Authorization", "client.secret", "cardNumber", "iban", "ssn", "pin", "cvv", "session_id",
    "pass", "db_pass", "pw", "accessKey", "access_key",
)  # fmt: skip


@pytest.mark.parametrize("key", _SECRET)
def test_keys_that_look_secret(key: str) -> None:
    """However they are written."""
    assert is_secret(key)


@pytest.mark.parametrize(
    "key", ["order_id", "shipping", "opinion", "pass_through", "author", "key", "name", "spinning", "compass"]
)
def test_keys_that_do_not(key: str) -> None:
    """What only has such letters in it is shown."""
    assert not is_secret(key)


@pytest.mark.parametrize(
    "value",
    [
        '  {"password": "hunter22"}',
        json.dumps(json.dumps({"password": "hunter22"})),
        '{"a": {"password": "hunter22"}, "a": 1}',
        "password=hunter22&x=1",
        "https://host/?access_token=hunter22",
        "--token=hunter22",
        ["--verbose", "--password", "hunter22"],
        ["X-Api-Key", "hunter22"],
        [["Authorization", "hunter22"]],
        {"name": "password", "value": "hunter22"},
        {"key": "X-Api-Key", "values": ["hunter22"]},
        "postgres://bob:p@hunter22@host/db",
        "postgres://bob:a/hunter22@host/db",
        '"password": "ab\\"hunter22"',
    ],
    ids=str,
)
def test_a_secret_is_hidden_however_it_is_named(value: Any) -> None:
    """In JSON inside of a string, in forms, in URLs, in words of a command, in pairs."""
    seen = Payloads().document("k", json.dumps({"it": value}), hook=True)
    assert seen.why is None
    assert "hunter22" not in seen.raw


def test_an_error_may_repeat_what_was_hidden_in_a_string() -> None:
    """What is taken out of JSON inside of a string, or of a pair, is taken out of texts too."""
    body = json.dumps({"body": json.dumps({"password": "hunter22"}), "pair": ["X-Api-Key", "hunter23"]})
    assert set(Payloads().secrets_of(body)) == {"hunter22", "hunter23"}


def test_hiding_takes_a_time_in_proportion_to_what_is_hidden() -> None:
    """A job with very many secrets has none of its texts shown: to look for each in each would take long."""
    many = Payloads().secrets_of(json.dumps({"token": [f"secret {number}" for number in range(100_000)]}))
    started = time.process_time()
    assert Payloads().text("the error" * 1_000, many) == MASK
    assert Payloads().reason("cancelled", many) == "cancelled"
    assert time.process_time() - started < 1


@pytest.mark.wide
@given(
    strategies.recursive(
        strategies.none() | strategies.booleans() | strategies.integers() | strategies.text(),
        lambda each: strategies.lists(each) | strategies.dictionaries(strategies.text(), each),
    )
)
def test_what_is_written_is_what_was_read(tree: Any) -> None:
    """Documents come back as they are, and redacting is done after one go."""
    document = json.dumps(tree, ensure_ascii=False)
    assert json.loads(write_tree(read_tree(document))) == tree
    once = redacted(read_tree(document))
    assert redacted(once) == once


_HOSTILE = (
    "token-", "a-", "token ", "token = ", "token:", 'token="', "token=\\\"", "password: '", "\\\\'", "=", ": ", " ",
    "=>", "bearer ", "basic a", "://a:", "://", "://a:b@", "a" * 64 + ":", '\\"token\\":',
)  # fmt: skip


def _seconds(text: str) -> float:
    started = time.process_time()
    without_secrets(text, ())
    return time.process_time() - started


@pytest.mark.first_and_last
@pytest.mark.parametrize("unit", _HOSTILE)
@pytest.mark.parametrize("start", ["", "["])
def test_a_text_takes_a_time_in_proportion_to_its_length(start: str, unit: str) -> None:
    """Arguments are written by strangers: one text of theirs does not hold up the process."""
    short, long = ((start + unit * size)[:size] for size in (10_000, 80_000))
    once = max(0.01, min(_seconds(short) for _ in range(2)))
    assert once < 2
    # Eight times as long is about eight times the time, or 64 times by a scan inside of a scan: a busy machine is
    # between them.
    assert any(_seconds(long) < 24 * once for _ in range(2))


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        ("password=hunter22 is wrong", "password=••• is wrong"),
        ("db_password: hunter22, user: bob", "db_password: •••, user: bob"),
        ('{"password": "ab\\"cd", "n": 1}', '{"password": •••, "n": 1}'),
        ('{\\"token\\": \\"ab cd\\", \\"n\\": 1}', '{\\"token\\": •••, \\"n\\": 1}'),
        ("secret => 'a b' now", "secret => ••• now"),
        ("token: 'a b", "token: •••"),
        ('message="password=hunter22"', 'message="password=•••'),
        ("x" * 80 + "_token=hunter22", "x" * 80 + "_token=•••"),
        ("Authorization: Bearer abcdefgh.ijk", "Authorization: •••"),
        ("order_id=7, shipping: fast", "order_id=7, shipping: fast"),
    ],
)
def test_what_stands_behind_a_secret_word_is_hidden(said: str, seen: str) -> None:
    """In a text, with and without quotes; what is no secret stays."""
    assert without_secrets(said, ()) == seen
