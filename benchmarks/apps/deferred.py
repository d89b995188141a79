"""The UPDATE of `update`, deferred: sent for all jobs of the batch together."""

from benchmarks.apps.counting import COUNTER
from benchmarks.apps.update import ADD
from outboxq import Context, Jobs

jobs = Jobs()


@jobs.handler(queue="bench", kind="job", batchable=True)
def add_later(ctx: Context, account: int, cents: int, reference: str) -> None:
    """Change the account with the batch."""
    ctx.defer(ADD, {"account": account, "cents": cents})
    COUNTER[0] += 1
