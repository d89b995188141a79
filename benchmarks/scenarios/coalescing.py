"""Row 16: the cost of a coalescing key, for the producer, and for the relay if no other job has it."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from sqlalchemy import Engine, create_engine

from benchmarks.bench import Bench, Workbench
from benchmarks.figures import Comparison, Unsupported
from outboxq import Context, JobKind, Jobs, OutboxSession, Relay, RelayConfig

_BULK = 1_000

jobs = Jobs()


@jobs.handler(queue="bench", kind="plain")
def plain(ctx: Context, account: int) -> None:
    """Do nothing."""


@jobs.handler(queue="bench", kind="keyed", coalesce=lambda account: f"account-{account}")
def keyed(ctx: Context, account: int) -> None:
    """Do nothing, for all jobs of an account that wait."""


def coalesce(bench: Bench) -> list[Comparison | Unsupported]:
    """Each job has a key of its own, so that nothing is saved."""
    found: list[Comparison | Unsupported] = []
    with bench.database() as workbench:
        engine = create_engine(workbench.url)
        for how_many, least in ((1, 0.9), (_BULK, 0.7)):
            added, limit = (f"{how_many:,} jobs {how} a transaction" for how in ("with a key each", "without keys"))
            measures: dict[str, Callable[[], float]] = {
                limit: partial(_added, bench, workbench, engine, plain, how_many),
                added: partial(_added, bench, workbench, engine, keyed, how_many),
            }
            rates = bench.alternate(measures, "jobs/s")
            found.append(Comparison(16, "coalesce", added, rates[added], rates[limit], limit, least, is_paired=True))
        for batch_size, least in ((1, 0.6), (50, 0.8)):
            ran, alone = (f"no-op jobs {how}, batches of {batch_size}, one slot" for how in ("with a key", "without"))
            measures = {
                alone: partial(_drained, bench, workbench, engine, plain, batch_size),
                ran: partial(_drained, bench, workbench, engine, keyed, batch_size),
            }
            rates = bench.alternate(measures, "jobs/s")
            found.append(Comparison(16, "coalesce", ran, rates[ran], rates[alone], alone, least, is_paired=True))
        engine.dispose()
    return found


def _added(bench: Bench, workbench: Workbench, engine: Engine, kind: JobKind[Any], how_many: int) -> float:
    workbench.fill(0)
    number, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < bench.size.seconds:
        _add(engine, kind, range(number, number + how_many))
        number += how_many
    return number / (time.perf_counter() - begun)


def _drained(bench: Bench, workbench: Workbench, engine: Engine, kind: JobKind[Any], batch_size: int) -> float:
    workbench.fill(0)
    number = int(bench.size.seconds * (400 if batch_size == 1 else 4_000))
    _add(engine, kind, range(number))
    config = RelayConfig(slots_per_queue=1, batch_size=batch_size)
    begun = time.perf_counter()
    Relay(engine, jobs, config).drain()
    return number / (time.perf_counter() - begun)


def _add(engine: Engine, kind: JobKind[Any], accounts: range) -> None:
    with OutboxSession(engine) as session:
        session.add_jobs(kind.job(account=account) for account in accounts)
        session.commit()
