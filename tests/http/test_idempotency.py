"""The Idempotency-Key header: the cases of the draft, against a real server, with concurrent clients."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from sqlalchemy import Engine, text

from outboxq.admin.effects import WasApplied, WasNotApplied, resolve_effect
from outboxq.postgres import Database
from tests.support.http_app import make_app
from tests.support.http_server import closed_gate, is_replay, problem, seen, serve, wait_at_gate
from tests.support.ledger import ledger
from tests.support.waiting import wait_until

KEY = {"Idempotency-Key": '"8e03978e-40d5-43e8-bc93-6894a57f9324"'}


@pytest.fixture(params=["async", "sync"])
def client(outboxq_database: Database, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A client of the application, its middleware on either kind of engine."""
    with (
        serve(make_app(outboxq_database.url, request.param)) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        yield client


@pytest.fixture
def one_client(outboxq_database: Database) -> Iterator[httpx.Client]:
    with serve(make_app(outboxq_database.url)) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


@pytest.mark.wide
def test_concurrent_requests_with_one_key_are_executed_once(client: httpx.Client, engine: Engine) -> None:
    """One of 16 clients executes, the others are told to come back, and every retry gets the same bytes."""

    def post(_number: int) -> httpx.Response:
        return httpx.post(client.base_url.join("/orders?gate=1"), headers=KEY, timeout=60)

    with ThreadPoolExecutor(16) as clients:
        with closed_gate(engine):
            pending = [clients.submit(post, number) for number in range(16)]
            wait_at_gate(engine)
            late = client.post("/orders?gate=1", headers=KEY)
            assert problem(late) == "in-progress"
            assert late.headers["retry-after"] == "1"
        answers = [one.result() for one in pending]

    first = [answer for answer in answers if answer.status_code == 201 and not is_replay(answer)]
    assert len(first) == 1
    for answer in answers:
        if answer.status_code == 409:
            assert problem(answer) == "in-progress"
            assert int(answer.headers["retry-after"]) >= 1
        else:
            assert seen(answer) == seen(first[0])
    for _ in range(3):
        retry = client.post("/orders?gate=1", headers=KEY)
        assert is_replay(retry)
        assert seen(retry) == seen(first[0])
    assert ledger(engine) == Counter(order=1)


def test_a_retry_gets_the_first_answer(client: httpx.Client, engine: Engine) -> None:
    """Status, headers and body come again byte for byte; a cookie and what belongs to the connection do not."""
    first = client.post("/orders", headers=KEY, json={"cents": 5})
    retry = client.post("/orders", headers=KEY, json={"cents": 5})

    assert (first.status_code, is_replay(first)) == (201, False)
    assert seen(retry) == seen(first)
    assert is_replay(retry)
    assert (first.headers["set-cookie"], first.headers["x-hop"]) == ("session=secret; Path=/; SameSite=lax", "1")
    assert not {"set-cookie", "x-hop"} & set(retry.headers)
    assert ledger(engine) == Counter(order=1)


@pytest.mark.first_and_last
@pytest.mark.parametrize("status", [200, 302, 400, 404, 422, 500, 503])
def test_an_error_is_an_outcome_too(one_client: httpx.Client, engine: Engine, status: int) -> None:
    """Nobody knows what an endpoint did before it answered with an error: it is replayed, and not executed again."""
    first = one_client.post(f"/orders?status={status}", headers=KEY)
    retry = one_client.post(f"/orders?status={status}", headers=KEY)

    assert (first.status_code, is_replay(retry)) == (status, True)
    assert seen(retry) == seen(first)
    assert ledger(engine) == Counter(order=1)


@pytest.mark.first_and_last
@pytest.mark.parametrize("status", [401, 403, 408, 409, 425, 429])
def test_what_was_not_processed_is_processed_by_a_retry(one_client: httpx.Client, engine: Engine, status: int) -> None:
    """An answer that says that nothing was done leaves the key free, and is told as it is."""
    first = one_client.post(f"/orders?status={status}", headers=KEY)
    retry = one_client.post(f"/orders?status={status}", headers=KEY)

    assert first.status_code == retry.status_code == status
    assert not is_replay(retry)
    assert ledger(engine) == Counter(order=2)


def test_an_endpoint_that_raised_is_not_executed_again(client: httpx.Client, engine: Engine) -> None:
    """Nobody knows how far it came: its retries get the same 500."""
    address = client.base_url.join("/orders?raise=1")
    # On connections of their own: the server closes the one of a request that raised.
    first, retry = httpx.post(address, headers=KEY, timeout=60), httpx.post(address, headers=KEY, timeout=60)

    assert (first.status_code, problem(first)) == (500, "failed")
    assert seen(retry) == seen(first)
    assert ledger(engine) == Counter(order=1)


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    "header",
    [
        b"",
        b'""',
        b'"open',
        b'"a" "b"',
        b'"a","b"',
        b"a,b",
        b"two words",
        b'"two words"',
        b'a"b',
        "größe".encode(),
        b"x" * 256,
        b'"' + b"x" * 256 + b'"',
        b'"a\\b"',
    ],
)
def test_a_malformed_key_is_refused(one_client: httpx.Client, engine: Engine, header: bytes) -> None:
    """400 for what is no key, before anything is executed or written."""
    answer = one_client.post("/orders", headers={b"Idempotency-Key": header})

    assert (answer.status_code, problem(answer)) == (400, "key-malformed")
    assert ledger(engine) == Counter()
    assert effects(engine) == 0


def test_two_keys_are_refused(one_client: httpx.Client, engine: Engine) -> None:
    """400 for two Idempotency-Key headers, also where they are the same."""
    answer = one_client.post("/orders", headers=[("Idempotency-Key", "a"), ("Idempotency-Key", "a")])

    assert problem(answer) == "key-malformed"
    assert ledger(engine) == Counter()


def test_a_key_is_the_same_with_and_without_quotes(one_client: httpx.Client, engine: Engine) -> None:
    """The draft's String and the bare value that Stripe takes name one key; 255 characters are not too many."""
    key = "k" * 253 + '"'
    first = one_client.post("/orders", headers={"Idempotency-Key": '"' + "k" * 255 + '"'})
    retry = one_client.post("/orders", headers={"Idempotency-Key": "k" * 255})
    escaped = one_client.post("/orders", headers={"Idempotency-Key": '"' + key.replace('"', '\\"') + '"'})

    assert is_replay(retry)
    assert seen(retry) == seen(first)
    assert not is_replay(escaped)
    assert ledger(engine) == Counter(order=2)


def test_a_key_for_another_request_is_refused(one_client: httpx.Client, engine: Engine) -> None:
    """422 for another body, media type or query under a key that was used; the first answer stays."""
    first = one_client.post("/orders?name=a", headers=KEY, json={"cents": 5})
    others = {
        "body": one_client.post("/orders?name=a", headers=KEY, json={"cents": 6}),
        "media type": one_client.post(
            "/orders?name=a", headers=KEY | {"content-type": "text/plain"}, content=b'{"cents":5}'
        ),
        "query": one_client.post("/orders?name=b", headers=KEY, json={"cents": 5}),
    }
    retry = one_client.post(
        "/orders?name=a", headers=KEY | {"content-type": "Application/JSON; charset=utf-8"}, content=b'{"cents":5}'
    )

    assert {name: problem(other) for name, other in others.items()} == dict.fromkeys(others, "key-reused")
    assert {other.status_code for other in others.values()} == {422}
    assert seen(retry) == seen(first)
    assert ledger(engine) == Counter(a=1)


def test_a_key_for_another_request_is_refused_while_the_first_runs(one_client: httpx.Client, engine: Engine) -> None:
    """422, and not 409: coming back later would not help."""
    with ThreadPoolExecutor(1) as clients, closed_gate(engine):
        pending = clients.submit(one_client.post, "/orders?gate=1", headers=KEY)
        wait_at_gate(engine)
        assert problem(one_client.post("/orders?gate=1", headers=KEY, content=b"other")) == "key-reused"
    assert pending.result().status_code == 201


def test_a_key_belongs_to_its_principal_method_and_route(one_client: httpx.Client, engine: Engine) -> None:
    """The same key of another principal, for another method or on another route is another key."""
    answers = [
        one_client.post("/orders", headers=KEY),
        one_client.post("/orders", headers=KEY | {"x-user": "ada"}),
        one_client.post("/orders", headers=KEY | {"x-user": "bob"}),
        one_client.post("/orders", headers=KEY | {"x-user": "sha256:ada"}),
        one_client.post("/orders", headers=KEY | {"x-user": "a" * 600}),
        one_client.post("/orders", headers=KEY | {"x-user": "b" * 600}),
        one_client.patch("/orders", headers=KEY),
        one_client.post("/other", headers=KEY),
        one_client.post("/below/orders", headers=KEY),
        one_client.post("/below/orders/../orders", headers=KEY),
    ]
    retried = one_client.post("/orders", headers=KEY | {"x-user": "b" * 600})

    assert not any(is_replay(answer) for answer in answers[:-1])
    assert is_replay(answers[-1])
    assert seen(retried) == seen(answers[5])
    assert ledger(engine) == Counter(order=len(answers) - 1)


def test_a_key_is_required_where_the_application_says_so(outboxq_database: Database, engine: Engine) -> None:
    """400 with a link to the documentation for a request without a key, and for those alone that need one."""
    app = make_app(
        outboxq_database.url,
        required=lambda scope: scope["path"] == "/orders",
        documentation="https://example.com/docs/idempotency",
    )
    with serve(app) as address, httpx.Client(base_url=address, timeout=60) as client:
        refused = client.post("/orders")
        assert client.post("/other").status_code == 201
        assert client.get("/orders").status_code == 201
        assert client.post("/orders", headers=KEY).status_code == 201

    assert refused.status_code == 400
    assert problem(refused) == "https://example.com/docs/idempotency#key-missing"
    assert refused.headers["link"] == '<https://example.com/docs/idempotency>; rel="describedby"; type="text/html"'
    assert ledger(engine) == Counter(order=3)


def test_other_methods_pass_through(one_client: httpx.Client, engine: Engine) -> None:
    """A key on a method that is idempotent by itself is not looked at."""
    answers = [one_client.request(method, "/orders", headers=KEY) for method in ("GET", "GET", "PUT", "PUT")]

    assert not any(is_replay(answer) for answer in answers)
    assert ledger(engine) == Counter(order=4)
    assert effects(engine) == 0


def test_an_operator_settles_what_nobody_knows(one_client: httpx.Client, engine: Engine) -> None:
    """Resolved as applied it stays refused, with no hint to come back; resolved as not applied it is executed."""
    one_client.post("/orders", headers=KEY)
    scope, key = "POST /orders", KEY["Idempotency-Key"].strip('"')

    def resolve(verdict: WasApplied | WasNotApplied) -> httpx.Response:
        with engine.begin() as connection:
            connection.execute(text("UPDATE outboxq.effect SET status = 'unknown', result = NULL, expires_at = NULL"))
        unknown = one_client.post("/orders", headers=KEY)
        assert (unknown.status_code, problem(unknown)) == (409, "outcome-unknown")
        assert "retry-after" not in unknown.headers
        with engine.begin() as connection:
            resolve_effect(connection, scope, key, verdict)
        return one_client.post("/orders", headers=KEY)

    applied, with_a_result = resolve(WasApplied()), resolve(WasApplied('{"charge": 7}'))
    assert (applied.status_code, problem(applied)) == (409, "response-not-kept")
    assert problem(with_a_result) == "response-not-kept"
    assert "retry-after" not in applied.headers
    assert ledger(engine) == Counter(order=1)
    assert resolve(WasNotApplied()).status_code == 201
    assert ledger(engine) == Counter(order=2)


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_a_server_that_ends_leaves_no_connection(outboxq_database: Database, engine: Engine, kind: str) -> None:
    """The middleware's pool is closed with the lifespan, before the server ends its event loop."""
    app = make_app(outboxq_database.url, kind)
    with serve(app) as address:
        httpx.post(f"{address}/orders", headers=KEY, timeout=60)
        assert others(engine) > 0
    wait_until(lambda: others(engine) == 0, "the application's backends to end")


def others(engine: Engine) -> int:
    """How many others are connected to this test's database."""
    query = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )
    with engine.connect() as connection:
        return connection.execute(query).scalar_one()


def effects(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(text("SELECT count(*) FROM outboxq.effect")).scalar_one()
