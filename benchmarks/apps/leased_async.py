"""Jobs that do nothing, claimed with a lease, by async handlers."""

from benchmarks.apps.counting import COUNTER
from outboxq import AsyncContext, Jobs

jobs = Jobs()


@jobs.handler(queue="bench", kind="job", claim="lease")
async def nothing(ctx: AsyncContext, account: int, cents: int, reference: str) -> None:
    """Count."""
    COUNTER[0] += 1
