"""The handler that sends: `outboxq relay deliveries.jobs:jobs`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from sqlalchemy import update

from outboxq import AsyncContext, Backoff, Jobs

from .models import Attempt, Delivery, Endpoint
from .sender import Sender
from .settings import read_master_secret

ANSWER_SECONDS = 20.0
# An endpoint that answers with one of these may take the message later.
COME_BACK = frozenset({408, 425, 429})


class NotDelivered(Exception):
    """The endpoint answered that it cannot take the message now."""


@asynccontextmanager
async def connect() -> AsyncIterator[Sender]:
    """The sender that handlers find as `ctx.state`, with as many connections to endpoints as there are calls."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=ANSWER_SECONDS, limits=limits) as client:
        yield Sender(client, read_master_secret())


jobs = Jobs(lifespan=connect)
RETRY = Backoff(first_seconds=0.5, cap_seconds=3_600, max_attempts=20)


@jobs.handler(queue="deliveries", claim="lease", retry=RETRY, timeout_seconds=30)
async def deliver(ctx: AsyncContext[Sender], delivery_id: int, endpoint_id: int, url: str, body: str) -> None:
    """Send the message, and write down the answer in the transaction that removes the job.

    Everything that the call needs is in the arguments, and the session is used after the answer only: no transaction
    is open while the endpoint takes its time. An error of the connection, or no answer in time, is tried again.
    """
    code = await ctx.state.send(endpoint_id, url, f"msg_{delivery_id}", body)
    if code >= 500 or code in COME_BACK:
        raise NotDelivered(f"the endpoint answered {code}")
    status = "delivered" if httpx.codes.is_success(code) else "refused"
    await ctx.session.execute(update(Delivery).where(Delivery.id == delivery_id).values(status=status))
    ctx.session.add(Attempt(delivery_id=delivery_id, code=code))
    if code == httpx.codes.GONE:
        await ctx.session.execute(update(Endpoint).where(Endpoint.id == endpoint_id).values(is_active=False))
