"""Invoices as their provider describes them, and the history of what it said."""

from datetime import datetime
from typing import Literal

from sqlalchemy import BigInteger, DateTime, Identity, String, func
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Status = Literal["draft", "open", "paid", "void"]


class Base(DeclarativeBase):
    """The application's tables. outboxq's are in a PostgreSQL schema of their own."""


class Invoice(Base):
    """The newest known state of an invoice. The provider counts its changes in `version`."""

    __tablename__ = "invoice"

    id: Mapped[str] = mapped_column(String, primary_key=True)
    version: Mapped[int]
    status: Mapped[Status] = mapped_column(String)
    cents: Mapped[int] = mapped_column(BigInteger)


class Change(Base):
    """One event that was applied, in the order of arrival; an old one changed nothing (`is_newest` is false).

    No unique constraint keeps a second line of the same event out. Nothing but the inbox does, and the tests count.
    """

    __tablename__ = "change"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    invoice_id: Mapped[str] = mapped_column(String, index=True)
    version: Mapped[int]
    is_newest: Mapped[bool]
    applied_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.clock_timestamp())
