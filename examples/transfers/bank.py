"""The bank's side: opening accounts, ordering transfers, and the books.

`python -m examples.transfers.bank order` orders a thousand transfers, and `... books` shows what became of them.
"""

import os
import random
import sys
from dataclasses import dataclass

from sqlalchemy import create_engine, func, select
from sqlalchemy.orm import Session, sessionmaker

from examples.transfers.jobs import carry_out
from examples.transfers.models import Account, Entry, Transfer
from outboxq import OutboxSession


def open_accounts(session: Session, owners: list[str], cents: int) -> list[int]:
    """An account with `cents` for each owner; their ids."""
    accounts = [Account(owner=owner, balance_cents=cents) for owner in owners]
    session.add_all(accounts)
    session.flush()
    return [account.id for account in accounts]


def order_transfer(session: OutboxSession, source_id: int, target_id: int, cents: int) -> Transfer:
    """Order a transfer: its row and its job are committed by the caller together, or not at all."""
    if source_id == target_id:
        raise ValueError(f"a transfer takes two accounts, got {source_id} twice")
    transfer = Transfer(source_id=source_id, target_id=target_id, cents=cents)
    session.add(transfer)
    # The transfer has no primary key yet: the job is stored with it once it has one.
    session.add_job(carry_out, transfer=transfer)
    return transfer


@dataclass(frozen=True)
class Books:
    """The bank's state, counted in the database."""

    money_cents: int
    transfers: int
    carried_out: int
    doubled: int

    def __str__(self) -> str:
        return (
            f"{self.money_cents / 100:,.2f} in all accounts; {self.carried_out:,} of {self.transfers:,} transfers "
            f"carried out, {self.doubled:,} of them more than once"
        )


def read_books(session: Session) -> Books:
    """Count the money, the transfers, and those that the ledger holds."""
    entries = select(Entry.transfer_id, func.count().label("lines")).group_by(Entry.transfer_id).subquery()
    return Books(
        money_cents=session.scalars(select(func.sum(Account.balance_cents))).one() or 0,
        transfers=session.scalars(select(func.count()).select_from(Transfer)).one(),
        carried_out=session.scalars(select(func.count()).select_from(entries)).one(),
        doubled=session.scalars(select(func.count()).where(entries.c.lines > 2)).one(),
    )


def order_a_thousand(sessions: sessionmaker[OutboxSession]) -> None:
    """Open ten accounts, and order a thousand transfers between them."""
    with sessions.begin() as session:
        accounts = open_accounts(session, [f"customer {number}" for number in range(10)], cents=100_00)
    for _ in range(1_000):
        source_id, target_id = random.sample(accounts, 2)
        with sessions.begin() as session:
            order_transfer(session, source_id, target_id, cents=random.randint(1, 50_00))


def main(command: str) -> None:
    """`order` or `books`."""
    sessions = sessionmaker(create_engine(os.environ["OUTBOXQ_DATABASE_URL"]), class_=OutboxSession)
    if command == "order":
        order_a_thousand(sessions)
    with sessions() as session:
        print(read_books(session))


if __name__ == "__main__":
    main(sys.argv[1])
