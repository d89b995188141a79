"""The clock that durations are measured by."""

import time


def clock() -> float:
    """Seconds that also pass while the machine is suspended, where the system has such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
