"""Products, and orders with their lines and invoices."""

from typing import Literal

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Identity, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Status = Literal["accepted", "confirmed", "sold out"]


class Base(DeclarativeBase):
    """The application's tables. outboxq's are in a PostgreSQL schema of their own."""


class Product(Base):
    """What is sold, what it costs today, and how much of it is left."""

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
    status: Mapped[Status] = mapped_column(String)


class OrderLine(Base):
    """So many of one product, at the price of the moment in which it was ordered."""

    __tablename__ = "order_line"

    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id), primary_key=True)
    sku: Mapped[str] = mapped_column(ForeignKey(Product.sku), primary_key=True)
    quantity: Mapped[int]
    price_cents: Mapped[int]


class Invoice(Base):
    """What a confirmed order costs."""

    __tablename__ = "invoice"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id))
    total_cents: Mapped[int]
