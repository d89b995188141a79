"""Jobs that do nothing, claimed with a lease."""

from benchmarks.apps.counting import COUNTER
from outboxq import Context, Jobs

jobs = Jobs()


@jobs.handler(queue="bench", kind="job", claim="lease")
def nothing(ctx: Context, account: int, cents: int, reference: str) -> None:
    """Count."""
    COUNTER[0] += 1
