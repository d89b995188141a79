"""The handler of `entity`, whose row is locked before it runs: no change of two relays is lost."""

from benchmarks.apps.accounts import Account
from benchmarks.apps.counting import COUNTER
from outboxq import Context, Jobs, Locked

jobs = Jobs()


@jobs.handler(queue="bench", kind="job", batchable=True)
def credit(ctx: Context, account: Locked[Account], cents: int, reference: str) -> None:
    """Change the account."""
    account.balance += cents
    COUNTER[0] += 1
