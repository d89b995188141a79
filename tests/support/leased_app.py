"""Leased handlers that write nothing, and meet faults.

What they do, they do outside: a line in a file for each run.
"""

import asyncio
import os
import signal
import time
from pathlib import Path

from outboxq import AsyncContext, Backoff, Context, Jobs
from outboxq.job import Job

jobs = Jobs()
QUICK = Backoff(max_attempts=3, first_seconds=0.0, jitter=0.0)


@jobs.handler(queue="held", claim="lease", retry=QUICK)
def call(ctx: Context, name: str, directory: str, fault: str = "") -> None:
    """Leave a line, then meet the fault: the first time alone, but for "poison"."""
    if _begin(ctx.job, name, Path(directory), fault):
        while not (Path(directory) / "gate").exists():
            time.sleep(0.01)


@jobs.handler(queue="held-async", claim="lease", retry=QUICK)
async def call_async(ctx: AsyncContext, name: str, directory: str, fault: str = "") -> None:
    """As `call`."""
    if _begin(ctx.job, name, Path(directory), fault):
        while not (Path(directory) / "gate").exists():  # noqa: ASYNC110  # another process makes it
            await asyncio.sleep(0.01)


@jobs.handler(queue="held", claim="lease", retry=QUICK)
def call_once(ctx: Context, name: str, directory: str) -> None:
    """As `call`, once for the name."""
    ctx.once("line", key=name, call=lambda _: _begin(ctx.job, name, Path(directory), ""))


def _begin(job: Job, name: str, directory: Path, fault: str) -> bool:
    """Return True if the call is to wait for the gate."""
    with (directory / "lines").open("a") as lines:
        lines.write(f"{name} {job.attempt} {job.crashes}\n")
    met = directory / f"met {name}"
    if not fault or (met.exists() and fault != "poison"):
        return False
    met.touch()
    if fault in ("kill", "poison"):
        os.kill(os.getpid(), signal.SIGKILL)
    return True
