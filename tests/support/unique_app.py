"""Handlers of unique jobs that leave a row for each run: some fail first, and some add a job of another key."""

from sqlalchemy import text

from outboxq import Backoff, Context, Jobs
from outboxq.handlers.handler import AnyHandler

jobs = Jobs()
QUICK = Backoff(max_attempts=1_000, first_seconds=0.0, jitter=0.0)
LEDGER = "CREATE TABLE IF NOT EXISTS ran (job_id uuid NOT NULL, successor uuid, key text)"
_NOTE = text("INSERT INTO ran (job_id, successor, key) VALUES (:job_id, :successor, :key)")
_PAUSE = text("SELECT pg_sleep(:seconds)")


def _run(ctx: Context, kind: AnyHandler, fails: int, seconds: float, then: str | None) -> None:
    added = None
    if then is not None:
        added = ctx.session.add_job(kind.options(unique=then), 0, seconds, None)
        ctx.session.flush()
    ctx.session.execute(_PAUSE, {"seconds": seconds})
    if ctx.job.attempt <= fails:
        raise ValueError("not yet")
    successor = None if added is None else added.id
    ctx.session.execute(_NOTE, {"job_id": ctx.job.id, "successor": successor, "key": then})


@jobs.handler(queue="unique", retry=QUICK)
def work(ctx: Context, fails: int, seconds: float, then: str | None) -> None:
    """Run in transaction mode."""
    _run(ctx, work, fails, seconds, then)


@jobs.handler(queue="unique-leased", retry=QUICK, claim="lease")
def work_leased(ctx: Context, fails: int, seconds: float, then: str | None) -> None:
    """Run under a lease."""
    _run(ctx, work_leased, fails, seconds, then)
