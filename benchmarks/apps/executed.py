"""The UPDATE of `update`, executed by a batchable handler: the jobs of a batch share a session and a savepoint."""

from benchmarks.apps.counting import COUNTER
from benchmarks.apps.update import ADD
from outboxq import Context, Jobs

jobs = Jobs()


@jobs.handler(queue="bench", kind="job", batchable=True)
def add_now(ctx: Context, account: int, cents: int, reference: str) -> None:
    """Change the account."""
    ctx.session.execute(ADD, {"account": account, "cents": cents})
    COUNTER[0] += 1
