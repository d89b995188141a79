"""Calls in lease mode that wait for a file, with their session in use or without."""

import asyncio
from pathlib import Path

from sqlalchemy import text

from outboxq import AsyncContext, Jobs

jobs = Jobs()


@jobs.handler(queue="mail", claim="lease")
async def wait_at_gate(ctx: AsyncContext, folder: str, uses_session: bool) -> None:
    """Make a file of the job's name in `folder`, and stay until the file `gate` is there."""
    here = Path(folder)
    (here / f"{ctx.job.id}").touch()
    if uses_session:
        await ctx.session.execute(text("SELECT 1"))
    while not (here / "gate").exists():  # noqa: ASYNC110  # another process makes the file
        await asyncio.sleep(0.02)
