"""Plain calls under a lease that wait, each in a thread, and leave their session alone."""

import time

from benchmarks.apps.counting import COUNTER
from outboxq import Context, Jobs

jobs = Jobs()


@jobs.handler(queue="bench", kind="wait", claim="lease")
def wait(ctx: Context, seconds: float) -> None:
    """Wait, as for an answer from elsewhere."""
    time.sleep(seconds)
    COUNTER[0] += 1
