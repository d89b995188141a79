"""Scheduled handlers, in both claim modes: each run leaves a row, which nothing keeps from being there twice."""

from datetime import datetime

from sqlalchemy import text

from outboxq import Context, Jobs

jobs = Jobs()
LEDGER = "CREATE TABLE fired (name text NOT NULL, at timestamptz NOT NULL)"
_NOTE = text("INSERT INTO fired (name, at) VALUES (:name, :at)")


@jobs.handler(queue="transaction")
def note(ctx: Context, name: str, *, fire_time: datetime) -> None:
    ctx.session.execute(_NOTE, {"name": name, "at": fire_time})


@jobs.handler(queue="lease", claim="lease")
def note_leased(ctx: Context, name: str, *, fire_time: datetime) -> None:
    ctx.session.execute(_NOTE, {"name": name, "at": fire_time})
