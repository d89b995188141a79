"""Accounts, transfers between them, and the ledger."""

from datetime import datetime
from typing import Literal

from sqlalchemy import BigInteger, CheckConstraint, DateTime, ForeignKey, Identity, String, func
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Status = Literal["ordered", "carried out", "refused"]


class Base(DeclarativeBase):
    """The application's tables. outboxq's are in a PostgreSQL schema of their own."""


class Account(Base):
    """The money of one owner."""

    __tablename__ = "account"
    __table_args__ = (CheckConstraint("balance_cents >= 0", name="account_never_overdrawn"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    owner: Mapped[str]
    balance_cents: Mapped[int] = mapped_column(BigInteger)


class Transfer(Base):
    """A customer's order to move money, and what became of it: carried out, or refused for lack of money."""

    __tablename__ = "transfer"
    __table_args__ = (CheckConstraint("cents > 0", name="transfer_moves_something"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    source_id: Mapped[int] = mapped_column(ForeignKey(Account.id))
    target_id: Mapped[int] = mapped_column(ForeignKey(Account.id))
    cents: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[Status] = mapped_column(String)
    ordered_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())


class Entry(Base):
    """A line of the ledger: what one transfer did to one account.

    No unique constraint keeps a second line of the same transfer out. Nothing but the relay's transaction does, and
    the test of this example counts.
    """

    __tablename__ = "entry"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    transfer_id: Mapped[int] = mapped_column(ForeignKey(Transfer.id), index=True)
    account_id: Mapped[int] = mapped_column(ForeignKey(Account.id))
    cents: Mapped[int] = mapped_column(BigInteger)
