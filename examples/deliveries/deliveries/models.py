"""Endpoints that customers run, events, and what became of each event at each endpoint."""

from datetime import datetime
from typing import Literal

from sqlalchemy import BigInteger, DateTime, ForeignKey, Identity, String, func
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Status = Literal["waiting", "delivered", "refused"]


class Base(DeclarativeBase):
    """The application's tables. outboxq's are in a PostgreSQL schema of their own."""


class Endpoint(Base):
    """An address of a customer's. An inactive one gets no more messages."""

    __tablename__ = "endpoint"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    url: Mapped[str] = mapped_column(String, unique=True)
    is_active: Mapped[bool] = mapped_column(default=True)


class Event(Base):
    """Something that happened, as it is sent."""

    __tablename__ = "event"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    type: Mapped[str] = mapped_column(String)
    body: Mapped[str] = mapped_column(String)


class Delivery(Base):
    """One event for one endpoint."""

    __tablename__ = "delivery"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    event_id: Mapped[int] = mapped_column(ForeignKey(Event.id), index=True)
    endpoint_id: Mapped[int] = mapped_column(ForeignKey(Endpoint.id), index=True)
    status: Mapped[Status] = mapped_column(String, default="waiting")


class Attempt(Base):
    """An answer that settled a delivery.

    No unique constraint keeps a second line of the same delivery out. Nothing but the job does, and the tests count.
    """

    __tablename__ = "attempt"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    delivery_id: Mapped[int] = mapped_column(ForeignKey(Delivery.id), index=True)
    code: Mapped[int]
    answered_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.clock_timestamp())
