"""Jobs of groups that find out whether they run in order, and one at a time: each wants the number of the one before.

A job reads its group's last number, waits a moment, and writes its own: two at a time would read the same.
"""

import random
import time

from sqlalchemy import text

from outboxq import Backoff, Context, Jobs

TABLES = """
CREATE TABLE ledger (key text PRIMARY KEY, last integer NOT NULL);
CREATE TABLE applied (key text NOT NULL, number integer NOT NULL);
CREATE TABLE wrong (key text NOT NULL, number integer NOT NULL, found integer NOT NULL);
"""
_RETRY = Backoff(max_attempts=1_000, first_seconds=0.02, cap_seconds=0.1)

jobs = Jobs()


def _apply(ctx: Context, key: str, number: int) -> None:
    session = ctx.session
    last = session.execute(text("SELECT last FROM ledger WHERE key = :key"), {"key": key}).scalar_one()
    time.sleep(random.uniform(0.0, 0.004))
    if random.random() < 0.05:
        raise RuntimeError("it fails now and then")
    values = {"key": key, "number": number, "found": last}
    if last != number - 1:
        session.execute(text("INSERT INTO wrong VALUES (:key, :number, :found)"), values)
    session.execute(text("UPDATE ledger SET last = :number WHERE key = :key"), values)
    session.execute(text("INSERT INTO applied VALUES (:key, :number)"), values)


@jobs.handler(queue="book", retry=_RETRY, group=lambda key: key)
def apply(ctx: Context, key: str, number: int) -> None:
    """In transaction mode."""
    _apply(ctx, key, number)


@jobs.handler(queue="leased_book", claim="lease", retry=_RETRY, group=lambda key: key)
def apply_leased(ctx: Context, key: str, number: int) -> None:
    """In lease mode."""
    _apply(ctx, key, number)
