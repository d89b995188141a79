"""Jobs that do nothing, and leave a row when they are done: for a week, without their arguments or a result."""

from datetime import timedelta

from benchmarks.apps.counting import COUNTER
from outboxq import Context, Jobs

jobs = Jobs()


@jobs.handler(queue="bench", kind="job", keep=timedelta(days=7))
def nothing(ctx: Context, account: int, cents: int, reference: str) -> None:
    """Count."""
    COUNTER[0] += 1
