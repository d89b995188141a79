"""Handlers whose ledger says which process ran each job, and when: for what is counted of them."""

import os

from sqlalchemy import create_engine, text

from outboxq import AsyncContext, BatchContext, BatchItem, Context, Jobs
from tests.support.app import QUICK

jobs = Jobs()

_WRITE = text("INSERT INTO counted (name, kind, pid) VALUES (:name, :kind, :pid)")


class Named:
    def __init__(self, name: str) -> None:
        self.name = name


@jobs.handler(queue="plain", retry=QUICK)
def count(ctx: Context, name: str) -> None:
    ctx.session.execute(_WRITE, {"name": name, "kind": "count", "pid": os.getpid()})


@jobs.handler(queue="async", retry=QUICK)
async def count_async(ctx: AsyncContext, name: str) -> None:
    await ctx.session.execute(_WRITE, {"name": name, "kind": "count_async", "pid": os.getpid()})


@jobs.batch_handler(Named, queue="together", max_size=5, retry=QUICK)
def count_together(ctx: BatchContext, items: list[BatchItem[Named]]) -> None:
    rows = [{"name": item.args.name, "kind": "count_together", "pid": os.getpid()} for item in items]
    ctx.session.execute(_WRITE, rows)


def prepare(url: str) -> None:
    """Make the ledger."""
    engine = create_engine(url, use_native_hstore=False)
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE TABLE counted (name text, kind text, pid int, at timestamptz DEFAULT clock_timestamp(), "
                "PRIMARY KEY (name, kind))"
            )
        )
    engine.dispose()
