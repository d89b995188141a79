"""Plain calls under a lease that wait, each in a thread, and leave their session alone."""

import threading
import time

from benchmarks.apps.counting import COUNTER
from outboxq import Context, Jobs

jobs = Jobs()
# Hundreds of threads wake at the same time, and a lost count would be waited for.
_counting = threading.Lock()


@jobs.handler(queue="bench", kind="wait", claim="lease")
def wait(ctx: Context, seconds: float) -> None:
    """Wait, as for an answer from elsewhere."""
    time.sleep(seconds)
    with _counting:
        COUNTER[0] += 1
