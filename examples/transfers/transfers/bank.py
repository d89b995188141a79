"""The bank's side: opening accounts, ordering transfers, and the books."""

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from outboxq import OutboxSession

from .jobs import carry_out
from .models import Account, Entry, Transfer


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
    transfer = Transfer(source_id=source_id, target_id=target_id, cents=cents, status="ordered")
    session.add(transfer)
    # The transfer has no primary key yet: the job is stored with it once it has one.
    session.add_job(carry_out, transfer=transfer)
    return transfer


@dataclass(frozen=True)
class Books:
    """The bank's state, counted in the database.

    Args:
        in_ledger: The transfers that the ledger has entries of.
        doubled: Those of them with more than their two entries.
    """

    money_cents: int
    transfers: int
    refused: int
    in_ledger: int
    doubled: int

    @property
    def settled(self) -> int:
        """The transfers that are carried out or refused."""
        return self.in_ledger + self.refused

    def __str__(self) -> str:
        return (
            f"{self.money_cents / 100:,.2f} in all accounts; of {self.transfers:,} transfers "
            f"{self.in_ledger:,} carried out, {self.refused:,} refused, {self.doubled:,} carried out twice"
        )


def read_books(session: Session) -> Books:
    """Count the money, and the transfers by what became of them."""
    entries = select(Entry.transfer_id, func.count().label("lines")).group_by(Entry.transfer_id).subquery()
    is_refused = Transfer.status == "refused"
    # One statement: the relay may be at work, and the counts are to be of one moment.
    found = session.execute(
        select(
            select(func.coalesce(func.sum(Account.balance_cents), 0)).scalar_subquery(),
            select(func.count()).select_from(Transfer).scalar_subquery(),
            select(func.count()).select_from(Transfer).where(is_refused).scalar_subquery(),
            select(func.count()).select_from(entries).scalar_subquery(),
            select(func.count()).where(entries.c.lines > 2).scalar_subquery(),
        )
    ).one()
    return Books(*(int(number) for number in found))
