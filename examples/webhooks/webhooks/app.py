"""The HTTP side: `uvicorn --factory webhooks.app:create_app`."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Literal

import msgspec
from fastapi import APIRouter, FastAPI, HTTPException, Request
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from outboxq import AsyncOutboxSession
from outboxq.errors import InvalidKey, MessageConflict

from .jobs import InvoiceChanged, apply_change, inbox
from .settings import read_secrets, read_settings
from .signatures import BadSignature, Verifier

# An event is a few hundred bytes. What is verified has to be read first, so what is read has to end somewhere.
MAX_BODY_BYTES = 64 * 1024

router = APIRouter()


class AnyEvent(msgspec.Struct):
    """What every event says of itself."""

    type: str


class InvoiceEvent(msgspec.Struct):
    """An event of the one type that is of interest here."""

    data: InvoiceChanged


@router.post("/webhooks")
async def receive(request: Request) -> dict[Literal["status"], Literal["accepted", "duplicate", "ignored"]]:
    """Take a message in: its id and its job are committed together, and only then is it answered with 200.

    | Status | When | What the sender does |
    |---|---|---|
    | 200 | accepted, accepted earlier, or of a type that is of no interest | is done with it |
    | 400 | signed, but not what its type promises | goes on delivering, and shows its people that it fails |
    | 401 | not signed with a secret of ours, or more than 5 minutes ago | the same |
    | 409 | its id was accepted with other content | the same |
    | 413 | longer than an event can be | the same |
    | 500, none | the database is away, the process was killed | delivers again |
    """
    # The bytes as they came: they were signed, and JSON that was read and written again would not be the same.
    body = await read_body(request)
    try:
        message_id = request.app.state.verifier.verify(body, request.headers)
    except BadSignature as error:
        raise HTTPException(401, str(error)) from error
    change = read_change(body)
    if change is None:
        return {"status": "ignored"}
    try:
        async with request.app.state.sessions.begin() as session:
            job = await inbox.accept_job(session, message_id, apply_change.job(invoice=change), payload=body)
    except MessageConflict as conflict:
        raise HTTPException(409, str(conflict)) from conflict
    except InvalidKey as error:
        raise HTTPException(400, str(error)) from error
    # Committed. If this answer is lost, the message comes again, and is a duplicate.
    return {"status": "duplicate" if job is None else "accepted"}


async def read_body(request: Request) -> bytes:
    """The body, which is no longer read once it is too long."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"an event has at most {MAX_BODY_BYTES:,} bytes")
    return bytes(body)


def read_change(body: bytes) -> InvoiceChanged | None:
    """What the event says of an invoice; None if it is about something else."""
    try:
        if msgspec.json.decode(body, type=AnyEvent).type != "invoice.changed":
            return None
        return msgspec.json.decode(body, type=InvoiceEvent).data
    except msgspec.DecodeError as error:
        raise HTTPException(400, "this is not an event as invoice.changed promises it") from error


def create_app(database_url: str | None = None, secrets: Iterable[str] | None = None) -> FastAPI:
    """The application, on what the settings name unless it is given."""
    engine = create_async_engine(database_url or read_settings().database_url)
    verifier = Verifier(secrets or read_secrets())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.sessions = async_sessionmaker(engine, class_=AsyncOutboxSession)
        app.state.verifier = verifier
        yield
        await engine.dispose()

    app = FastAPI(title="Invoices", lifespan=lifespan)
    app.include_router(router)
    return app
