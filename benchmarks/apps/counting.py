"""The number of jobs that this process has run; the benchmark can read it at any moment without a query.

A query would disturb the measurement. At the end the table shows if the jobs are gone.
"""

import mmap
import os
from pathlib import Path

DIRECTORY_VARIABLE = "OUTBOXQ_BENCHMARK_COUNTERS"
COUNTER_BYTES = 8


def _open_counter() -> memoryview:
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory is None:
        return memoryview(bytearray(COUNTER_BYTES)).cast("Q")
    with (Path(directory) / f"{os.getpid()}.count").open("w+b") as file:
        file.truncate(COUNTER_BYTES)
        return memoryview(mmap.mmap(file.fileno(), COUNTER_BYTES)).cast("Q")


COUNTER = _open_counter()
