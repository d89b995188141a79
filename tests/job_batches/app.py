"""The application of the batches' tests: members, callbacks and chains, whose rows say what ran."""

import threading
from pathlib import Path

from sqlalchemy import text

from outboxq import Backoff, Context, DeadLetter, Discard, Jobs, Retry
from tests.support.app import Effect
from tests.support.waiting import wait_until

jobs = Jobs()
_BOTH = threading.Barrier(2)
_MANY_TABLES = """
DO $$ BEGIN FOR n IN 1..200 LOOP
  EXECUTE format('CREATE TEMP TABLE oq_many_%s (id int PRIMARY KEY, name text) ON COMMIT DROP', n);
END LOOP; END $$
"""
_SOON = Backoff(max_attempts=3, first_seconds=0.01, jitter=0.0)


def _ran(ctx: Context, name: str) -> None:
    ctx.session.add(Effect(name=name))


@jobs.handler(queue="members", retry=_SOON)
def member(ctx: Context, batch: int, number: int) -> object:
    """Most are done at once; some fail first, some die, are discarded, or add another member."""
    _ran(ctx, f"member {batch} {number}")
    if number % 7 == 3 and ctx.job.attempt == 1:
        return Retry()
    if number % 11 == 5:
        return DeadLetter("one of eleven")
    if number % 13 == 7:
        return Discard("one of thirteen")
    if number % 5 == 4 and number < 1_000:
        assert ctx.batch is not None
        ctx.batch.add_job(member, batch=batch, number=number + 1_000)
    return None


@jobs.handler(queue="leased-members", claim="lease", retry=_SOON)
def leased_member(ctx: Context, batch: int, number: int) -> object:
    """The same under a lease; some write nothing, and are removed together."""
    if number % 2:
        _ran(ctx, f"member {batch} {number}")
    if number % 7 == 3 and ctx.job.attempt == 1:
        return Retry()
    if number % 11 == 5:
        return DeadLetter("one of eleven")
    if number % 5 == 4 and number < 1_000:
        assert ctx.batch is not None
        ctx.batch.add_job(leased_member, batch=batch, number=number + 1_000)
    return None


@jobs.handler(queue="reports")
def report(ctx: Context, batch: int) -> None:
    """Its row counts the members that are left, which must be none, and says how many are dead."""
    finished = ctx.finished_batch
    assert finished is not None
    left = text("SELECT count(*) FROM outboxq.job WHERE batch_id = :id")
    number = ctx.session.execute(left, {"id": finished.id}).scalar_one()
    _ran(ctx, f"report {batch} left {number} failed {finished.failed}")


@jobs.handler(queue="members")
def gated(ctx: Context, name: str, gate: str) -> None:
    """Stays until the file `gate` is there."""
    _ran(ctx, name)
    ctx.session.flush()
    wait_until(Path(gate).exists, f"the file {gate}")


@jobs.handler(queue="members")
def meeting(ctx: Context, name: str) -> None:
    """Two of them end at the same time, and their COMMITs take long: these drop many tables."""
    _ran(ctx, name)
    ctx.session.flush()
    ctx.session.execute(text(_MANY_TABLES))
    _BOTH.wait(60)


@jobs.handler(queue="members")
def note(ctx: Context, name: str) -> None:
    _ran(ctx, name)


@jobs.handler(queue="leased-members", claim="lease")
def leased_note(ctx: Context, name: str, writes: bool = True) -> None:
    if writes:
        _ran(ctx, name)


@jobs.handler(queue="shared", batchable=True)
def shared_note(ctx: Context, name: str) -> None:
    _ran(ctx, name)
