"""The HTTP side: `uvicorn --factory examples.shop_fastapi.app:create_app`."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel, Field
from sqlalchemy import select
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from examples.shop_fastapi.jobs import confirm_order
from examples.shop_fastapi.models import Invoice, Order, OrderLine, Product, Status
from outboxq import AsyncOutboxSession


class NewOrder(BaseModel):
    """What a customer sends: an address, and how many of which product."""

    email: str
    lines: dict[str, Annotated[int, Field(gt=0, le=1_000)]] = Field(min_length=1)


class OrderState(BaseModel):
    """What a customer sees."""

    id: int
    status: Status
    total_cents: int | None = None


router = APIRouter()


def get_sessions(request: Request) -> async_sessionmaker[AsyncOutboxSession]:
    """What makes sessions. Not a session: its commit must come before the response, and may fail."""
    sessions: async_sessionmaker[AsyncOutboxSession] = request.app.state.sessions
    return sessions


Sessions = Annotated[async_sessionmaker[AsyncOutboxSession], Depends(get_sessions)]


@router.post("/orders", status_code=201)
async def place_order(new: NewOrder, sessions: Sessions) -> OrderState:
    """Write the order and its job in one transaction. An error rolls both back."""
    async with sessions.begin() as session:
        order = Order(email=new.email, status="accepted")
        session.add(order)
        session.add_job(confirm_order, order=order)
        await session.flush()
        for sku, quantity in new.lines.items():
            if await session.get(Product, sku) is None:
                raise HTTPException(404, f"no product {sku!r}")
            session.add(OrderLine(order_id=order.id, sku=sku, quantity=quantity))
    # Committed: from here on the job is the relay's.
    return OrderState(id=order.id, status=order.status)


@router.get("/orders/{order_id}")
async def show_order(order_id: int, sessions: Sessions) -> OrderState:
    """Show what became of an order."""
    async with sessions() as session:
        found = await session.execute(
            select(Order.status, Invoice.total_cents)
            .join(Invoice, Invoice.order_id == Order.id, isouter=True)
            .where(Order.id == order_id)
        )
        row = found.first()
    if row is None:
        raise HTTPException(404, f"no order {order_id}")
    return OrderState(id=order_id, status=row.status, total_cents=row.total_cents)


def create_app(url: str | None = None) -> FastAPI:
    """The application on the database `url`, with psycopg or asyncpg; by default `OUTBOXQ_DATABASE_URL`."""
    engine = create_async_engine(url or os.environ["OUTBOXQ_DATABASE_URL"])

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.sessions = async_sessionmaker(engine, class_=AsyncOutboxSession, expire_on_commit=False)
        yield
        await engine.dispose()

    app = FastAPI(title="Shop", lifespan=lifespan)
    app.include_router(router)
    return app
