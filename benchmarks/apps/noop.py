"""Jobs that do nothing: what outboxq itself costs."""

from benchmarks.apps.counting import COUNTER
from outboxq import Context, Jobs

jobs = Jobs()


@jobs.handler(queue="bench", kind="job")
def nothing(ctx: Context, account: int, cents: int, reference: str) -> None:
    """Count."""
    COUNTER[0] += 1
