"""An HTTP application whose endpoints write to the ledger: `uvicorn --factory tests.support.http_app:create_app`.

Every response holds a random number, so that a second execution cannot look like a replay.
"""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any
from uuid import uuid4

from fastapi import BackgroundTasks, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from outboxq.http import Idempotency, IdempotencyMiddleware
from outboxq.http.starlette import idempotency
from tests.support.app import Effect

# Endpoints with `?gate=1` wait for this advisory lock after they have written.
GATE = 4711

Guarded = Annotated[Idempotency, Depends(idempotency)]


def by_user(scope: Any) -> str | None:
    """The principal of these tests: a header of its own."""
    return next((value.decode() for name, value in scope["headers"] if name == b"x-user"), None)


def create_app() -> FastAPI:
    """As a server process makes it, from its environment."""
    return make_app(
        os.environ["HTTP_APP_URL"],
        os.environ.get("HTTP_APP_ENGINE", "async"),
        lease_seconds=float(os.environ.get("HTTP_APP_LEASE", "30")),
    )


def make_app(url: str, engine_kind: str = "async", **settings: Any) -> FastAPI:
    """The application, its middleware on an engine of the given kind."""
    own_engine = create_async_engine(url)
    sync_engine = create_engine(url)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await own_engine.dispose()
        sync_engine.dispose()

    app = FastAPI(lifespan=lifespan)
    app.state.sessions = async_sessionmaker(own_engine)
    app.state.sync_sessions = sessionmaker(sync_engine)
    for path, endpoint in _PLAIN.items():
        app.add_api_route(path, endpoint, methods=["GET", "POST", "PATCH", "PUT"])
    for path, endpoint in _RECORDING.items():
        app.add_api_route(path, endpoint, methods=["POST"])
    below = FastAPI()
    below.add_api_route("/orders", order, methods=["POST"])
    below.state = app.state
    app.mount("/below", below)
    given = {"principal": by_user, "in_transaction": lambda scope: scope["path"].startswith("/tx/")} | settings
    app.add_middleware(IdempotencyMiddleware, engine=own_engine if engine_kind == "async" else sync_engine, **given)
    return app


async def write(request: Request, session: AsyncSession) -> None:
    """One row in the ledger, and a wait at the gate."""
    session.add(Effect(name=request.query_params.get("name", "order")))
    await session.flush()


async def pass_gate(request: Request, session: AsyncSession) -> None:
    if "gate" in request.query_params:
        await session.execute(text("SELECT pg_advisory_xact_lock_shared(:gate)"), {"gate": GATE})


def answer(request: Request, status: int = 201) -> JSONResponse:
    headers = {"x-order": uuid4().hex, "connection": "keep-alive, x-hop", "x-hop": "1"}
    status = int(request.query_params.get("status", status))
    response = JSONResponse({"order": uuid4().hex, "text": "größe"}, status, headers)
    response.set_cookie("session", "secret")
    return response


async def order(request: Request) -> Response:
    """Writes, commits, waits at the gate, answers."""
    async with request.app.state.sessions() as session:
        await write(request, session)
        await session.commit()
        await pass_gate(request, session)
    if "raise" in request.query_params:
        raise RuntimeError("raised by the test")
    return answer(request)


async def stream(request: Request) -> Response:
    async with request.app.state.sessions.begin() as session:
        await write(request, session)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"one "
        async with request.app.state.sessions() as session:
            await pass_gate(request, session)
        yield uuid4().bytes

    return StreamingResponse(pieces())


async def sized(request: Request) -> Response:
    """A body of `?bytes=` random bytes."""
    async with request.app.state.sessions.begin() as session:
        await write(request, session)
    return Response(os.urandom(int(request.query_params["bytes"])), media_type="application/octet-stream")


async def with_background(request: Request, background: BackgroundTasks) -> dict[str, str]:
    """Its background task waits at the gate, and writes."""

    async def later() -> None:
        async with request.app.state.sessions.begin() as session:
            await pass_gate(request, session)
            session.add(Effect(name="background"))

    background.add_task(later)
    return {"order": uuid4().hex}


async def echo(request: Request) -> dict[str, int]:
    async with request.app.state.sessions.begin() as session:
        await write(request, session)
    return {"bytes": len(await request.body())}


async def order_with_record(request: Request, guarded: Guarded) -> Response:
    """Records in the transaction of its row; the gate is before the record, or with `?gate=late` after it."""
    async with request.app.state.sessions.begin() as session:
        await write(request, session)
        if request.query_params.get("gate") != "late":
            await pass_gate(request, session)
        response = answer(request)
        await guarded.record(session, response)
        if request.query_params.get("gate") == "late":
            await pass_gate(request, session)
        if "lost" in request.query_params:
            # Committed, and the session never hears of it: as when the answer to COMMIT is lost.
            await session.execute(text("COMMIT"))
        if {"raise", "lost"} & set(request.query_params):
            raise RuntimeError("raised by the test")
    if "raise-late" in request.query_params:
        raise RuntimeError("raised by the test")
    return answer(request) if "other" in request.query_params else response


def order_sync(request: Request, guarded: Guarded) -> Response:
    with request.app.state.sync_sessions.begin() as session:
        session.add(Effect(name="order"))
        response = answer(request)
        guarded.record(session, response)
    return response


async def order_unrecorded(request: Request) -> Response:
    async with request.app.state.sessions.begin() as session:
        await write(request, session)
        if int(request.query_params.get("status", 201)) >= 400:
            await session.rollback()
    return answer(request)


async def order_rolled_back(request: Request, guarded: Guarded) -> Response:
    """Records, rolls back (its transaction, or the savepoint around the record), and answers with success."""
    response = answer(request)
    async with request.app.state.sessions() as session:
        if "savepoint" in request.query_params:
            savepoint = await session.begin_nested()
            await write(request, session)
            await guarded.record(session, response)
            await savepoint.rollback()
            await session.commit()
        else:
            await write(request, session)
            await guarded.record(session, response)
            await session.rollback()
    return response


async def a_session(request: Request) -> AsyncIterator[AsyncSession]:
    """FastAPI ends it after the response was sent."""
    async with request.app.state.sessions.begin() as session:
        yield session
        if "fail-commit" in request.query_params:
            raise RuntimeError("raised by the test")


async def order_committed_late(
    request: Request, guarded: Guarded, session: Annotated[AsyncSession, Depends(a_session)]
) -> Response:
    await write(request, session)
    response = answer(request)
    await guarded.record(session, response)
    return response


def a_sync_session(request: Request) -> Iterator[Session]:
    with request.app.state.sync_sessions.begin() as session:
        yield session


def order_committed_late_sync(
    request: Request, guarded: Guarded, session: Annotated[Session, Depends(a_sync_session)]
) -> Response:
    session.add(Effect(name="order"))
    response = answer(request)
    guarded.record(session, response)
    return response


async def record_anyway(request: Request, guarded: Guarded) -> Response:
    """An endpoint that records, where the middleware was not told."""
    response = answer(request)
    async with request.app.state.sessions.begin() as session:
        await write(request, session)
        await guarded.record(session, response)
    return response


_PLAIN = {
    "/orders": order,
    "/other": order,
    "/stream": stream,
    "/sized": sized,
    "/background": with_background,
    "/echo": echo,
    "/record-anyway": record_anyway,
}
_RECORDING = {
    "/tx/orders": order_with_record,
    "/tx/sync": order_sync,
    "/tx/unrecorded": order_unrecorded,
    "/tx/rolled-back": order_rolled_back,
    "/tx/late": order_committed_late,
    "/tx/late-sync": order_committed_late_sync,
}
