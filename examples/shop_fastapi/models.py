"""Products, and orders with their lines."""

import asyncio
import os
from typing import Literal

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Identity, String
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Status = Literal["accepted", "confirmed", "sold out"]


class Base(DeclarativeBase):
    """The application's tables. outboxq's are in a PostgreSQL schema of their own."""


class Product(Base):
    """What is sold, and how much of it is left."""

    __tablename__ = "product"
    __table_args__ = (CheckConstraint("stock >= 0", name="product_never_oversold"),)

    sku: Mapped[str] = mapped_column(String, primary_key=True)
    price_cents: Mapped[int]
    stock: Mapped[int]


class Order(Base):
    """What a customer ordered, and what became of it."""

    __tablename__ = "order"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    email: Mapped[str]
    status: Mapped[Status] = mapped_column(String, default="accepted")


class OrderLine(Base):
    """So many of one product."""

    __tablename__ = "order_line"

    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id), primary_key=True)
    sku: Mapped[str] = mapped_column(ForeignKey(Product.sku), primary_key=True)
    quantity: Mapped[int]


class Invoice(Base):
    """What a confirmed order costs."""

    __tablename__ = "invoice"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id))
    total_cents: Mapped[int]


async def create_tables(url: str) -> None:
    """Make the application's tables, and put something on the shelves."""
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with AsyncSession(engine) as session, session.begin():
        session.add(Product(sku="cup", price_cents=4_50, stock=100))
        session.add(Product(sku="teapot", price_cents=39_00, stock=5))
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(create_tables(os.environ["OUTBOXQ_DATABASE_URL"]))
