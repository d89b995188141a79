"""An ordinary ORM handler: it receives an entity and changes a column. The jobs of a batch share what they may."""

from benchmarks.apps.accounts import Account
from benchmarks.apps.counting import COUNTER
from outboxq import Context, Jobs

jobs = Jobs()


@jobs.handler(queue="bench", kind="job", batchable=True)
def credit(ctx: Context, account: Account, cents: int, reference: str) -> None:
    """Change the account."""
    account.balance += cents
    COUNTER[0] += 1
