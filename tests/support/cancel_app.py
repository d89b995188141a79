"""Handlers that work for a while and then write a row: some look whether they were cancelled."""

import time

from sqlalchemy import text

from outboxq import Backoff, Context, Jobs

jobs = Jobs()
QUICK = Backoff(max_attempts=1_000, first_seconds=0.0, jitter=0.0)
LEDGER = "CREATE TABLE IF NOT EXISTS ran (job_id uuid NOT NULL)"
_NOTE = text("INSERT INTO ran (job_id) VALUES (:job_id)")
_PAUSE = text("SELECT pg_sleep(:seconds)")


def _run(ctx: Context, seconds: float, how: str) -> None:
    end = time.monotonic() + seconds
    if how == "sends":
        ctx.session.execute(_PAUSE, {"seconds": seconds})
    while time.monotonic() < end:
        if how == "looks" and ctx.cancelled:
            return
        time.sleep(0.01)
    ctx.session.execute(_NOTE, {"job_id": ctx.job.id})
    # A cancellation may come behind the row, too.
    ctx.session.execute(_PAUSE, {"seconds": seconds / 10})


@jobs.handler(queue="cancelled", retry=QUICK)
def work(ctx: Context, seconds: float, how: str) -> None:
    """Run in transaction mode."""
    _run(ctx, seconds, how)


@jobs.handler(queue="cancelled-leased", retry=QUICK, claim="lease")
def work_leased(ctx: Context, seconds: float, how: str) -> None:
    """Run under a lease."""
    _run(ctx, seconds, how)
