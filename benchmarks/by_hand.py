"""Work by hand: SQLAlchemy with a claim of its own, in the transaction of its changes.

No attempt is counted, no failure expected and no deadline kept, and a job that kills the process is run again for ever.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from benchmarks import limits
from benchmarks.apps.accounts import Account
from benchmarks.apps.update import ADD
from benchmarks.bench import Bench, Workbench

_CLAIM = text(limits.claim_by_hand())

# The arguments of claimed jobs.
Claimed: TypeAlias = list[dict[str, Any]]
Change: TypeAlias = Callable[[Session, Claimed], None]


def change_entities(session: Session, claimed: Claimed) -> None:
    """Load the accounts of all jobs in one SELECT, and change each."""
    accounts = select(Account).where(Account.id.in_([args["account"] for args in claimed]))
    by_key = {account.id: account for account in session.scalars(accounts)}
    for args in claimed:
        by_key[args["account"]].balance += args["cents"]


def change_entity(session: Session, claimed: Claimed) -> None:
    """Load the account of each job by itself, and change it."""
    for args in claimed:
        session.get_one(Account, args["account"]).balance += args["cents"]


def execute_updates(session: Session, claimed: Claimed) -> None:
    """Execute an UPDATE for each job."""
    for args in claimed:
        session.execute(ADD, {"account": args["account"], "cents": args["cents"]})


def rate(bench: Bench, workbench: Workbench, batch: int, change: Change, rows: int, *, threads: int = 1) -> float:
    """Jobs a second that threads of this process work off, `batch` a transaction."""
    workbench.fill(rows)
    engine = create_engine(workbench.url, pool_size=threads)
    stopping, done = threading.Event(), [0] * threads
    workers = [threading.Thread(target=_work, args=(engine, batch, change, stopping, done, n)) for n in range(threads)]
    for worker in workers:
        worker.start()
    time.sleep(bench.size.warm_up_seconds)
    before, begun = sum(done), time.perf_counter()
    while time.perf_counter() - begun < bench.size.seconds and sum(done) < rows - batch * threads:
        time.sleep(0.01)
    found = (sum(done) - before) / (time.perf_counter() - begun)
    stopping.set()
    for worker in workers:
        worker.join()
    engine.dispose()
    return found


def _work(engine: Engine, batch: int, change: Change, stopping: threading.Event, done: list[int], number: int) -> None:
    while not stopping.is_set():
        with Session(engine) as session, session.begin():
            claimed = [json.loads(row.args) for row in session.execute(_CLAIM, {"how_many": batch})]
            if not claimed:
                return
            change(session, claimed)
        done[number] += len(claimed)


def async_rate(bench: Bench, workbench: Workbench, rows: int) -> float:
    """Jobs a second of one coroutine that loads the account of each job, and changes it."""
    workbench.fill(rows)
    return asyncio.run(_awaited(bench, workbench))


async def _awaited(bench: Bench, workbench: Workbench) -> float:
    engine, done = create_async_engine(workbench.url), [0]
    working = asyncio.ensure_future(_work_async(lambda: AsyncSession(engine), done))
    await asyncio.sleep(bench.size.warm_up_seconds)
    before, begun = done[0], time.perf_counter()
    await asyncio.wait([working], timeout=bench.size.seconds)
    found = (done[0] - before) / (time.perf_counter() - begun)
    working.cancel()
    with suppress(asyncio.CancelledError):
        await working
    await engine.dispose()
    return found


async def _work_async(made: Callable[[], AsyncSession], done: list[int]) -> None:
    while True:
        async with made() as session, session.begin():
            claimed = [json.loads(row.args) for row in await session.execute(_CLAIM, {"how_many": 1})]
            if not claimed:
                return
            for args in claimed:
                (await session.get_one(Account, args["account"])).balance += args["cents"]
        done[0] += len(claimed)
