"""The HTTP side: `uvicorn --factory examples.webhooks.app:create_app`."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Literal

import msgspec
from fastapi import APIRouter, FastAPI, HTTPException, Request
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from standardwebhooks import Webhook, WebhookVerificationError

from examples.webhooks.jobs import InvoiceChanged, apply_change
from outboxq import AsyncOutboxSession, Inbox
from outboxq.errors import InvalidKey, MessageConflict

# Longer than the sender goes on delivering: an id that comes after that is a new message.
inbox = Inbox("invoice-webhooks", retention=timedelta(days=30))
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
    | 401 | not signed with our secret, or more than 5 minutes ago | the same |
    | 409 | its id was accepted with other content | the same |
    | 500, none | the database is away, the process was killed | delivers again |
    """
    # The bytes as they came: they were signed, and JSON that was read and written again would not be the same.
    body = await request.body()
    message_id = verify(request.app.state.webhook, request, body)
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


def verify(webhook: Webhook, request: Request, body: bytes) -> str:
    """The id of a message that was signed with our secret, not long ago."""
    try:
        webhook.verify(body, dict(request.headers), json_parse=False)
    # ValueError: a signature that is not even well-formed, or a body that is not UTF-8.
    except (WebhookVerificationError, ValueError) as error:
        raise HTTPException(401, "the signature does not fit") from error
    return request.headers["webhook-id"]


def read_change(body: bytes) -> InvoiceChanged | None:
    """What the event says of an invoice; None where it is about something else."""
    try:
        if msgspec.json.decode(body, type=AnyEvent).type != "invoice.changed":
            return None
        return msgspec.json.decode(body, type=InvoiceEvent).data
    except msgspec.DecodeError as error:
        raise HTTPException(400, "this is not an event as invoice.changed promises it") from error


def create_app(url: str | None = None, secret: str | None = None) -> FastAPI:
    """The application on the database `url`; by default `OUTBOXQ_DATABASE_URL`, and the secret `WEBHOOK_SECRET`."""
    engine = create_async_engine(url or os.environ["OUTBOXQ_DATABASE_URL"])

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.sessions = async_sessionmaker(engine, class_=AsyncOutboxSession)
        app.state.webhook = Webhook(secret or os.environ["WEBHOOK_SECRET"])
        yield
        await engine.dispose()

    app = FastAPI(title="Invoices", lifespan=lifespan)
    app.include_router(router)
    return app
