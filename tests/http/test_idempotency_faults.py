"""Requests that end where nobody expects it, applications that do what the specification just allows, and operators."""

import asyncio
from collections import Counter
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from starlette.responses import JSONResponse

from outboxq.admin.effects import WasApplied, resolve_effect
from outboxq.effects.transactions import AsyncEngineTransactions
from outboxq.errors import ConfigError, SchemaError
from outboxq.http import IdempotencyMiddleware, idempotency_of, nobody
from outboxq.http.responses import NOT_REPLAYABLE
from outboxq.postgres import Database
from outboxq.testing import CommitProxy
from tests.support.app import Effect
from tests.support.http_direct import answered, answers_with, call, cancel_in_its_claim, guarding, settled, stored
from tests.support.ledger import ledger
from tests.support.waiting import wait_until

NOWHERE = "postgresql+psycopg://nobody@127.0.0.1:1/nothing"


def test_a_doubt_outlives_a_retry_that_was_cancelled(outboxq_database: Database, engine: Engine) -> None:
    """What a killed server may have done is not done again after a retry that gave up while it claimed."""
    executed: list[str] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        executed.append("once")
        await answers_with(b"executed")(scope, receive, send)

    async def run() -> None:
        async with guarding(outboxq_database.url, application) as middleware:
            await call(middleware, key="a")
            leave_as_killed(engine)
            await cancel_in_its_claim(middleware, key="a")
            assert (stored(engine).status, stored(engine).in_doubt) == ("retryable", True)
            assert stored(engine).expires_at is None
            status, body, _ = await answered(middleware, key="a")
            assert (status, b"outcome-unknown" in body) == (409, True)

    asyncio.run(run())
    assert executed == ["once"]
    assert stored(engine).status == "unknown"


def test_unavailable_leaves_nothing_behind(outboxq_database: Database, engine: Engine) -> None:
    """A claim that was committed, and whose client was told 503, is given back: its retry is executed."""

    async def run(proxy: CommitProxy) -> None:
        async with guarding(proxy.url, answers_with(b"executed")) as middleware:
            await call(middleware, key=None)
            await middleware._runner.deployment()
            trap = proxy.cut_after_commit(times=2)
            status, body, _ = await answered(middleware, key="a")
            assert (status, b"unavailable" in body, trap.count) == (503, True, 2)
            await settled(middleware)
            assert (stored(engine).status, stored(engine).in_doubt) == ("retryable", False)
            assert (await answered(middleware, key="a"))[:2] == (200, b"executed")

    with CommitProxy(outboxq_database.url) as proxy:
        asyncio.run(run(proxy))


def test_a_commit_within_somebody_elses_transaction_is_none(outboxq_database: Database, engine: Engine) -> None:
    """A session in a connection's own transaction commits nothing: a rollback of that is not answered with success."""

    async def run() -> None:
        own = create_async_engine(outboxq_database.url)

        async def application(scope: Any, receive: Any, send: Any) -> None:
            async with own.connect() as connection:
                outer = await connection.begin()
                async with AsyncSession(connection) as session:
                    response = await order_and_record(scope, session)
                    await session.commit()
                await response(scope, receive, send)
                await (outer.commit() if keeps else outer.rollback())

        async with guarding(outboxq_database.url, application, in_transaction=True) as middleware:
            keeps = False
            status, body, _ = await answered(middleware, key="a")
            assert (status, b"rolled-back" in body) == (500, True)
            assert ledger(engine) == Counter()
            keeps = True
            first, retry = await answered(middleware, key="a"), await answered(middleware, key="a")
            assert (first[0], retry[:2]) == (201, first[:2])
        await own.dispose()

    asyncio.run(run())
    assert ledger(engine) == Counter(order=1)


def test_a_transaction_that_is_still_open_may_yet_be_committed(outboxq_database: Database, engine: Engine) -> None:
    """Where the endpoint has returned before its transaction ended nobody is told that nothing was changed."""

    async def run() -> None:
        own = create_async_engine(outboxq_database.url)
        session = AsyncSession(own)

        async def application(scope: Any, receive: Any, send: Any) -> None:
            response = await order_and_record(scope, session)
            await response(scope, receive, send)

        async with guarding(outboxq_database.url, application, in_transaction=True) as middleware:
            status, body, headers = await answered(middleware, key="a")
            assert (status, b"in-progress" in body) == (409, True)
            assert b"retry-after" in headers
            await session.commit()
            status, _, headers = await answered(middleware, key="a")
            assert (status, headers[b"idempotent-replayed"]) == (201, b"true")
        await session.close()
        await own.dispose()

    asyncio.run(run())
    assert ledger(engine) == Counter(order=1)


@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_middleware_that_was_added_twice_guards_once(
    outboxq_database: Database, engine: Engine, in_transaction: bool
) -> None:
    """The inner one leaves to the outer one what that has claimed, and does not wait for it."""

    async def run() -> None:
        url = outboxq_database.url
        application = records(url) if in_transaction else answers_with(b"executed")
        async with (
            guarding(url, application, in_transaction=in_transaction) as inner,
            guarding(url, inner, in_transaction=in_transaction) as outer,
        ):
            first, retry = await answered(outer, key="a"), await answered(outer, key="a")
            assert (first[0] // 100, retry[1], retry[2][b"idempotent-replayed"]) == (2, first[1], b"true")

    asyncio.run(run())
    assert stored(engine).attempts == 1


@pytest.mark.parametrize("streams", [False, True])
def test_headers_that_can_be_read_once_are_kept(outboxq_database: Database, streams: bool) -> None:
    """The specification allows any iterable of headers: all of them arrive, and are replayed where that is possible."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"x-order", b"1"), *([] if streams else [(b"content-length", b"2")])]
        await send({"type": "http.response.start", "status": 200, "headers": iter(headers)})
        await send({"type": "http.response.body", "body": b"o", "more_body": True})
        await send({"type": "http.response.body", "body": b"k"})

    async def run() -> None:
        async with guarding(outboxq_database.url, application) as middleware:
            first, retry = await answered(middleware, key="a"), await answered(middleware, key="a")
        assert (first[0], first[1], first[2][b"x-order"]) == (200, b"ok", b"1")
        assert (b"x-order" in retry[2]) is not streams

    asyncio.run(run())


@pytest.mark.parametrize("given", [7, b"alice", UUID(int=7)])
def test_a_principal_is_a_text(outboxq_database: Database, engine: Engine, given: object) -> None:
    """A function that returns something else is told what it returns, and nothing is executed for it."""

    async def run() -> None:
        principal = lambda _scope: given  # noqa: E731
        async with guarding(outboxq_database.url, answers_with(b"executed"), principal=principal) as middleware:
            with pytest.raises(ConfigError, match=f"principal returns a str.* got {type(given).__name__}"):
                await call(middleware, key="a")

    asyncio.run(run())


def test_requests_that_wait_for_a_claim_cost_no_other_request_its_lease(
    outboxq_database: Database, engine: Engine
) -> None:
    """Where every connection for claims is taken, requests that are under way keep their keys."""
    reached, leaves = asyncio.Event(), asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        reached.set()
        await leaves.wait()
        await answers_with(b"executed")(scope, receive, send)

    async def run() -> None:
        settings = {"pool_size": 1, "lease_seconds": 0.5}
        async with guarding(outboxq_database.url, application, **settings) as middleware:
            await middleware._runner.deployment()
            running = asyncio.create_task(call(middleware, key="a"))
            await reached.wait()
            transactions = middleware._transactions
            assert isinstance(transactions, AsyncEngineTransactions)
            async with AsyncEngine(transactions._transactions._claims.engine).connect() as taken:
                await taken.execute(text("SELECT 1"))
                before = stored(engine)
                # Later than the first lease: it was extended meanwhile, and more than once.
                extended = lambda: stored(engine).locked_until > before.locked_until + 2 * lease(before)  # noqa: E731
                await asyncio.to_thread(wait_until, extended, "the lease to be extended")
            leaves.set()
            assert (await running)[0]["status"] == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    "url", ["https://example.org/schlüssel", "https://example.org/a b", "x\r\ny", 'a>; rel="x"', ""]
)
def test_a_documentation_that_no_header_can_hold_is_refused(url: str) -> None:
    """When the application is made, and not with the first client's error."""
    with pytest.raises(ConfigError, match="documentation takes a URL"):
        IdempotencyMiddleware(answers_with(b""), create_async_engine(NOWHERE), principal=nobody, documentation=url)
    IdempotencyMiddleware(
        answers_with(b""), create_async_engine(NOWHERE), principal=nobody, documentation="https://example.org/a%20b#c"
    )


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    "result",
    [
        "null",
        '{"order": 7}',
        '{"status": 7, "headers": []}',
        '{"status": 100, "headers": []}',
        '{"status": 600, "headers": []}',
        '{"status": "201", "headers": []}',
        '{"status": 201, "headers": [["a b", "c"]]}',
        '{"status": 201, "headers": [["x-a", "c\\r\\nx-b: d"]]}',
        '{"status": 201, "headers": [["x-a", "\u20ac"]]}',
        '{"status": 201, "headers": [["content-length", "3"]], "text": "four"}',
        '{"status": 204, "headers": [], "text": "four"}',
        '{"status": 201, "headers": [], "base64": "?"}',
        '{"status": 201, "headers": [], "text": 4}',
    ],
)
def test_a_result_that_is_no_response_is_not_sent(outboxq_database: Database, engine: Engine, result: str) -> None:
    """An operator's result that no server can send is answered as one that was not kept."""
    status, body, _ = asyncio.run(retry_of(outboxq_database.url, engine, result))
    assert (status, b"response-not-kept" in body) == (409, True)


def test_a_result_that_is_a_response_is_replayed(outboxq_database: Database, engine: Engine) -> None:
    """An operator who knows what the client would have got can give that; not how the connection goes on."""
    result = (
        '{"status": 201, "headers": [["content-type", " text/plain "], ["connection", "close"], '
        '["transfer-encoding", "chunked"]], "text": "größe"}'
    )
    status, body, headers = asyncio.run(retry_of(outboxq_database.url, engine, result))
    assert (status, body.decode()) == (201, "größe")
    assert headers == {b"content-type": b"text/plain", b"idempotent-replayed": b"true"}


@pytest.mark.parametrize("missing", ["effect", "deployment"])
def test_missing_tables_are_told_with_the_command_that_makes_them(
    outboxq_database: Database, engine: Engine, missing: str
) -> None:
    """On a database of an earlier step nothing is executed, and whoever reads the log knows what to do."""
    with engine.begin() as connection:
        connection.execute(text(f"DROP TABLE outboxq.{missing}"))

    async def run() -> None:
        async with guarding(outboxq_database.url, answers_with(b"executed")) as middleware:
            with pytest.raises(SchemaError, match="outboxq migrate"):
                await call(middleware, key="a")

    asyncio.run(run())


async def order_and_record(scope: Any, session: AsyncSession) -> JSONResponse:
    """A row and its response, in a transaction that stays open."""
    session.add(Effect(name="order"))
    await session.flush()
    response = JSONResponse({"order": uuid4().hex}, 201)
    await idempotency_of(scope).record(session, response)
    return response


def records(url: str) -> Any:
    """An application that records."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        own = create_async_engine(url)
        async with AsyncSession(own) as session, session.begin():
            response = await order_and_record(scope, session)
        await own.dispose()
        await response(scope, receive, send)

    return application


async def retry_of(url: str, engine: Engine, result: str) -> tuple[int, bytes, dict[bytes, bytes]]:
    """What a client gets whose request was unknown, and was resolved with this result."""
    async with guarding(url, answers_with(b"executed")) as middleware:
        await call(middleware, key="a")
        with engine.begin() as connection:
            connection.execute(text("UPDATE outboxq.effect SET status = 'unknown', result = NULL, expires_at = NULL"))
            resolve_effect(connection, "POST /", "a", WasApplied(result))
        return await answered(middleware, key="a")


def leave_as_killed(engine: Engine) -> None:
    """The effect as a server leaves it that was killed in its endpoint, once its lease has run out."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE outboxq.effect SET status = 'started', result = NULL, expires_at = NULL, "
                "lock_token = gen_random_uuid(), locked_until = clock_timestamp() - interval '1 s'"
            )
        )


def lease(row: Any) -> Any:
    return row.locked_until - row.changed_at


def test_a_response_that_the_database_refuses_is_executed_once_and_says_so(
    outboxq_database: Database, engine: Engine
) -> None:
    """A connection that sends Western European texts only: the client is told that its retries get no replay."""
    narrow = make_url(outboxq_database.url).update_query_dict({"client_encoding": "latin1"})

    async def run() -> None:
        async with guarding(narrow.render_as_string(hide_password=False), answers_with("Ж".encode())) as middleware:
            first, later = await call(middleware, key="a"), await call(middleware, key="a")
            assert first[0]["status"] == 200
            assert NOT_REPLAYABLE in first[0]["headers"]
            assert later[0]["status"] == 409

    asyncio.run(run())
    assert stored(engine).status == "done"
