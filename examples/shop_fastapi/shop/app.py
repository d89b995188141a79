"""The HTTP side: `uvicorn --factory shop.app:create_app`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from outboxq import AsyncOutboxSession
from outboxq.http import Idempotency, IdempotencyMiddleware, by_authorization
from outboxq.http.starlette import idempotency

from .jobs import confirm_order
from .models import Order, OrderLine, Product, Status
from .settings import read_settings


class NewOrder(BaseModel):
    """What a customer sends: an address, and how many of which product."""

    email: str
    lines: dict[str, Annotated[int, Field(gt=0, le=1_000)]] = Field(min_length=1)


class OrderState(BaseModel):
    """What a customer sees."""

    id: int
    status: Status
    total_cents: int


router = APIRouter()


def get_sessions(request: Request) -> async_sessionmaker[AsyncOutboxSession]:
    """What makes sessions. Not a session: its commit must come before the response, and may fail."""
    sessions: async_sessionmaker[AsyncOutboxSession] = request.app.state.sessions
    return sessions


Sessions = Annotated[async_sessionmaker[AsyncOutboxSession], Depends(get_sessions)]
Guarded = Annotated[Idempotency, Depends(idempotency)]


@router.post("/orders", status_code=201, response_model=OrderState)
async def place_order(new: NewOrder, sessions: Sessions, guarded: Guarded) -> JSONResponse:
    """Write the order, its job and the response in one transaction. An error rolls all of them back.

    A request that comes again with the same Idempotency-Key gets the recorded response, and orders nothing.
    """
    async with sessions.begin() as session:
        order = Order(email=new.email, status="accepted")
        session.add(order)
        session.add_job(confirm_order, order=order)
        await session.flush()
        total_cents = 0
        for sku, quantity in new.lines.items():
            product = await session.get(Product, sku)
            if product is None:
                raise no_such_product(sku)
            # A later price is not this order's.
            session.add(OrderLine(order_id=order.id, sku=sku, quantity=quantity, price_cents=product.price_cents))
            total_cents += quantity * product.price_cents
        state = OrderState(id=order.id, status=order.status, total_cents=total_cents)
        response = JSONResponse(state.model_dump(), 201)
        await guarded.record(session, response)
    # Committed: from here on the job is the relay's.
    return response


@router.get("/orders/{order_id}")
async def show_order(order_id: int, sessions: Sessions) -> OrderState:
    """Show what became of an order."""
    async with sessions() as session:
        found = await session.execute(
            select(Order.status, func.sum(OrderLine.quantity * OrderLine.price_cents).label("total_cents"))
            .join(OrderLine, OrderLine.order_id == Order.id)
            .where(Order.id == order_id)
            .group_by(Order.id)
        )
        row = found.first()
    if row is None:
        raise HTTPException(404, f"no order {order_id}")
    return OrderState(id=order_id, status=row.status, total_cents=row.total_cents)


@router.get("/health")
async def health(sessions: Sessions) -> dict[str, str]:
    """200 while the database answers: for what decides whether requests are sent here."""
    try:
        async with sessions() as session:
            await session.execute(select(1))
    except (SQLAlchemyError, OSError) as error:
        raise HTTPException(503, "the database does not answer") from error
    return {"status": "ok"}


def no_such_product(sku: str) -> RequestValidationError:
    """422, in the form that FastAPI gives to everything else that is wrong with a body."""
    message = f"there is no product {sku!r}"
    return RequestValidationError(
        [{"type": "unknown_product", "loc": ("body", "lines", sku), "msg": message, "input": sku}]
    )


def create_app(database_url: str | None = None) -> FastAPI:
    """The application on a database, by default the one that the settings name."""
    engine = create_async_engine(database_url or read_settings().database_url)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.sessions = async_sessionmaker(engine, class_=AsyncOutboxSession, expire_on_commit=False)
        yield
        await engine.dispose()

    app = FastAPI(title="Shop", lifespan=lifespan)
    app.include_router(router)
    app.add_middleware(
        IdempotencyMiddleware,
        engine=engine,
        # Customers who sign in by a token have keys of their own. With cookies give a function of the session.
        principal=by_authorization,
        # `place_order` writes rows in one transaction, and does nothing else.
        in_transaction=lambda scope: scope["path"] == "/orders",
    )
    return app
