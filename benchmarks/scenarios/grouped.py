"""Row 18: the cost of groups for a relay, with as many groups as jobs, with a hundred, and with one."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from sqlalchemy import Engine, create_engine

from benchmarks.bench import Bench, Workbench
from benchmarks.figures import Comparison, Unsupported
from outboxq import Context, JobKind, Jobs, OutboxSession, Relay, RelayConfig

jobs = Jobs()


@jobs.handler(queue="bench", kind="plain", batchable=True)
def plain(ctx: Context, account: int) -> None:
    """Do nothing."""


@jobs.handler(queue="bench", kind="grouped", batchable=True, group=lambda account: f"account-{account}")
def grouped(ctx: Context, account: int) -> None:
    """Do nothing, one job of an account at a time."""


def groups(bench: Bench) -> list[Comparison | Unsupported]:
    """The same jobs with groups and without."""
    found: list[Comparison | Unsupported] = []
    with bench.database() as workbench:
        engine = create_engine(workbench.url)
        alone = "without groups, batches of 50, one slot"
        for name, accounts in (("a group each", 1_000_000), ("100 groups", 100), ("one group", 1)):
            ran = f"no-op jobs of {name}, batches of 50, one slot"
            measures: dict[str, Callable[[], float]] = {
                alone: partial(_drained, bench, workbench, engine, plain, accounts),
                ran: partial(_drained, bench, workbench, engine, grouped, accounts),
            }
            rates = bench.alternate(measures, "jobs/s")
            found.append(Comparison(18, "groups", ran, rates[ran], rates[alone], alone, 0.5, is_paired=True))
        engine.dispose()
    return found


def _drained(bench: Bench, workbench: Workbench, engine: Engine, kind: JobKind[Any], accounts: int) -> float:
    workbench.fill(0)
    number = int(bench.size.seconds * 4_000)
    with OutboxSession(engine) as session:
        session.add_jobs(kind.job(account=each % accounts) for each in range(number))
        session.commit()
    begun = time.perf_counter()
    Relay(engine, jobs, RelayConfig(slots_per_queue=1, batch_size=50)).drain()
    return number / (time.perf_counter() - begun)
