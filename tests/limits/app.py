"""Jobs of queues with limits, which note when they begin and how many of them run at that moment.

A job that runs holds an advisory lock: in transaction mode in its own transaction, which ends with the job whatever
happens to its process; under a lease on a connection of its own.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from sqlalchemy import text
from sqlalchemy.orm import Session

from outboxq import Context, Jobs

RUNNING = 4242
CREATE = """
CREATE TABLE run (number integer NOT NULL, running integer NOT NULL);
CREATE TABLE start (at timestamptz NOT NULL);
"""
COUNT = (
    f"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = {RUNNING} AND granted AND database = ("
)
COUNT += "SELECT oid FROM pg_database WHERE datname = current_database())"

jobs = Jobs()


@jobs.handler(queue="slots", timeout_seconds=60)
def in_transaction(ctx: Context, number: int, seconds: float) -> None:
    ctx.session.execute(text(f"SELECT pg_advisory_xact_lock({RUNNING}, :number)"), {"number": number})
    running = ctx.session.scalar(text(COUNT))
    # The time at which the job's transaction began, right before its claim.
    began_at = ctx.session.scalar(text("SELECT now()"))
    with beside(ctx.session) as connection:
        connection.execute("INSERT INTO start VALUES (%s)", [began_at])
    time.sleep(seconds)
    _write(ctx.session, number, running)


@jobs.handler(queue="leases", claim="lease", timeout_seconds=60)
def under_lease(ctx: Context, number: int, seconds: float) -> None:
    with beside(ctx.session) as connection:
        connection.execute("INSERT INTO start VALUES (clock_timestamp())")
        connection.execute("SELECT pg_advisory_lock(%s, %s)", [RUNNING, number])
        row = connection.execute(COUNT).fetchone()
        time.sleep(seconds)
        # A backend goes on for a moment after its client has closed the connection: this waits for it.
        connection.execute("SELECT pg_advisory_unlock(%s, %s)", [RUNNING, number])
    assert row is not None
    _write(ctx.session, number, row[0])


def _write(session: Session, number: int, running: int | None) -> None:
    session.execute(text("INSERT INTO run VALUES (:number, :running)"), {"number": number, "running": running})


@contextmanager
def beside(session: Session) -> Iterator[psycopg.Connection]:
    """A connection that neither the relay nor those who end its sessions know."""
    url = session.get_bind().engine.url.set(drivername="postgresql")  # type: ignore[union-attr]  # a bind that has an engine
    given = url.update_query_dict({"application_name": f"beside {os.getpid()}"})
    with psycopg.connect(given.render_as_string(hide_password=False), autocommit=True) as connection:
        yield connection
