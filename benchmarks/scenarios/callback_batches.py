"""Row 20: the cost of looking, after each COMMIT, if a job was the last one of its batch."""

import time
from collections.abc import Callable
from functools import partial

from sqlalchemy import Engine, create_engine

from benchmarks.bench import Bench, Workbench
from benchmarks.figures import Comparison, Unsupported
from outboxq import Context, Jobs, OutboxSession, Relay, RelayConfig

jobs = Jobs()


@jobs.handler(queue="bench", kind="noop")
def noop(ctx: Context) -> None:
    """Do nothing."""


def callback_batches(bench: Bench) -> list[Comparison | Unsupported]:
    """All jobs are members of one batch, and no job is, by turns."""
    found: list[Comparison | Unsupported] = []
    with bench.database() as workbench:
        engine = create_engine(workbench.url)
        for batch_size, slots in ((1, 1), (1, 8), (50, 1)):
            how = f"batches of {batch_size}, {slots} {'slot' if slots == 1 else 'slots'}"
            members, alone = f"no-op jobs of one batch, {how}", f"no-op jobs, {how}"
            measures: dict[str, Callable[[], float]] = {
                alone: partial(_drained, bench, workbench, engine, batch_size, slots, in_batch=False),
                members: partial(_drained, bench, workbench, engine, batch_size, slots, in_batch=True),
            }
            rates = bench.alternate(measures, "jobs/s")
            found.append(
                Comparison(20, "job-batches", members, rates[members], rates[alone], alone, 0.8, is_paired=True)
            )
        engine.dispose()
    return found


def _drained(
    bench: Bench, workbench: Workbench, engine: Engine, batch_size: int, slots: int, *, in_batch: bool
) -> float:
    workbench.fill(0)
    number = int(bench.size.seconds * (400 if batch_size == 1 else 4_000))
    with OutboxSession(engine) as session:
        if in_batch:
            with jobs.batch(session, on_done=noop.job()) as batch:
                batch.add_jobs(noop.job() for _ in range(number))
        else:
            session.add_jobs(noop.job() for _ in range(number))
        session.commit()
    config = RelayConfig(slots_per_queue=slots, batch_size=batch_size)
    begun = time.perf_counter()
    Relay(engine, jobs, config).drain()
    return number / (time.perf_counter() - begun)
