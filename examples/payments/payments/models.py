"""Orders, and what they cost."""

from typing import Literal

from sqlalchemy import BigInteger, Identity, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Status = Literal["placed", "paid", "declined"]


class Base(DeclarativeBase):
    """The application's tables. outboxq's are in a PostgreSQL schema of their own."""


class Order(Base):
    """What a customer ordered, and whether it is paid."""

    __tablename__ = "order"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    cents: Mapped[int]
    status: Mapped[Status] = mapped_column(String, default="placed")
    charge_id: Mapped[str | None]
