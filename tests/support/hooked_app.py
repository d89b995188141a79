"""An application with hooks and arounds that misbehave, for relay processes."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import text

from outboxq import Backoff, Context, Jobs
from outboxq.events import JobDied, JobDone
from tests.support.app import Effect

TOLD = Path(os.environ.get("HOOKED_TOLD", "/dev/null"))
included = Jobs()
jobs = Jobs()


@included.on(JobDone)
def tell(event: JobDone) -> None:
    with TOLD.open("a") as file:
        file.write(f"{os.getpid()} {event.job.id}\n")


@jobs.on(JobDone, JobDied)
def misbehave(event: JobDone | JobDied) -> None:
    if os.environ.get("HOOKED_MISDEED") == "raise":
        raise SystemExit("in a hook")
    if os.environ.get("HOOKED_MISDEED") == "block":
        threading.Event().wait()


@jobs.around
def wrap(ctx: Context) -> Iterator[None]:
    if "raising" in ctx.job.args:
        raise ValueError("in an around")
    if "blocking" in ctx.job.args:
        ctx.session.execute(text("SELECT pg_sleep(60)"))
    yield
    ctx.session.add(Effect(name="wrapped"))


@jobs.handler(queue="q", retry=Backoff(max_attempts=1), timeout_seconds=2)
def act(ctx: Context, name: str) -> None:
    ctx.session.add(Effect(name=name))


jobs.include(included)
