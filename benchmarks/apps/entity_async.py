"""The handler of `entity` as a coroutine."""

from benchmarks.apps.accounts import Account
from benchmarks.apps.counting import COUNTER
from outboxq import AsyncContext, Jobs

jobs = Jobs()


@jobs.handler(queue="bench", kind="job", batchable=True)
async def credit(ctx: AsyncContext, account: Account, cents: int, reference: str) -> None:
    """Change the account."""
    account.balance += cents
    COUNTER[0] += 1
