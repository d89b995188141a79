"""Calls that wait under a lease, and one that kills its process each time it runs."""

import asyncio
import os
import signal
import time
from pathlib import Path

from sqlalchemy import text

from outboxq import AsyncContext, Jobs
from outboxq.torture.starts import record_start

QUEUE = "calls"
# No unique constraint: a call that counts twice leaves two rows.
SCHEMA = "CREATE TABLE done (job_id uuid NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp())"

_DONE = text("INSERT INTO done (job_id) VALUES (:job_id)")

jobs = Jobs()


@jobs.handler(queue=QUEUE, claim="lease")
async def innocent(ctx: AsyncContext, seconds: float, starts: str) -> None:
    """Wait without the session, then write the effect."""
    record_start(ctx.job, starts)
    await asyncio.sleep(seconds)
    await ctx.session.execute(_DONE, {"job_id": ctx.job.id})


@jobs.handler(queue=QUEUE, claim="lease")
async def killer(ctx: AsyncContext, seconds: float, starts: str, deaths: str) -> None:
    """Kill the process, in the middle of the calls that began with it, and record when."""
    record_start(ctx.job, starts)
    await asyncio.sleep(seconds / 2)
    _die(Path(deaths))


def _die(deaths: Path) -> None:
    with deaths.open("ab", buffering=0) as file:
        file.write(f"{time.time()!r}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)
