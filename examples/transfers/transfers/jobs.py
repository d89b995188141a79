"""What the relay runs: `outboxq relay transfers.jobs:jobs`."""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from outboxq import Backoff, Context, Jobs

from .models import Account, Entry, Transfer

jobs = Jobs()


@jobs.handler(queue="transfers", retry=Backoff(max_attempts=8))
def carry_out(ctx: Context, transfer: Transfer) -> None:
    """Move the money of one transfer, in the transaction that removes its job.

    An overdraft is refused. That is an answer, and no failure: the job is done, and the transfer says how it ended.
    """
    source, target = lock_accounts(ctx.session, [transfer.source_id, transfer.target_id])
    if source.balance_cents < transfer.cents:
        transfer.status = "refused"
        return
    source.balance_cents -= transfer.cents
    target.balance_cents += transfer.cents
    transfer.status = "carried out"
    ctx.session.add_all(
        [
            Entry(transfer_id=transfer.id, account_id=source.id, cents=-transfer.cents),
            Entry(transfer_id=transfer.id, account_id=target.id, cents=transfer.cents),
        ]
    )


def lock_accounts(session: Session, ids: Sequence[int]) -> list[Account]:
    """The accounts, in the order of `ids`, their rows locked until the transaction ends.

    Locked in the order of their ids: of two transfers between the same accounts one waits for the other,
    and neither waits for one that waits for it.
    """
    locked = (
        select(Account)
        .where(Account.id.in_(ids))
        .order_by(Account.id)
        # FOR NO KEY UPDATE: an INSERT that refers to an account, such as a new transfer, does not wait for this lock.
        .with_for_update(key_share=True)
        # A balance that this session read before it held the lock is read again.
        .execution_options(populate_existing=True)
    )
    accounts = {account.id: account for account in session.scalars(locked)}
    return [accounts[id_] for id_ in ids]
