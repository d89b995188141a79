"""A job that ends its process each time it runs, among many good ones: dead after its limit, and alone in that."""

import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, RelayConfig, SlotGroup
from outboxq.postgres import Database
from outboxq.testing import RelayProcess
from tests.support import cli, faulty
from tests.support.aftermath import assert_nothing_left, expire_leases
from tests.support.ledger import dead, ledger, waiting
from tests.support.matrices import sampled
from tests.support.waiting import PATIENCE, wait_until

GOOD = 200
MAX_CRASHES = 2


@contextmanager
def supervised_relays(url: str, queue: str) -> Iterator[None]:
    """Two processes of eight slots under a supervisor, ended in order."""
    options = ("--queue", f"{queue}=8", "--lease-seconds", 3, "--max-crashes", MAX_CRASHES)
    options += ("--batch-size", 5) if queue == "tx" else ()
    # A process that has met a MemoryError may not come to its end by itself: the supervisor kills it, 20 s after this.
    options += ("--drain-seconds", 5)
    process = subprocess.Popen(
        cli.command("relay", "tests.support.faulty:jobs", "--processes", 2, *options, "--poll-seconds", 0.1),
        env=cli.environment(url),
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 0


def enqueue(sessions: sessionmaker[OutboxSession], kind, fault: str, good: int = GOOD) -> list[str]:
    """The poisonous one stands behind a tenth of the good ones; their names."""
    names = [f"good {number}" for number in range(good)]
    with sessions.begin() as session:
        session.add_jobs(kind.job(name=name) for name in names[: good // 10])
        session.add_job(kind, name="poison", fault=fault)
        session.add_jobs(kind.job(name=name) for name in names[good // 10 :])
    return names


def dead_letter(engine: Engine) -> tuple[object, ...]:
    with engine.connect() as connection:
        (row,) = connection.execute(text("SELECT attempt, crashes, reason, args->>'name' FROM outboxq.dead_job"))
    return tuple(row)


# Each fault in one of the modes: how a process ends is nothing that the mode of its jobs knows.
POISONS = [(faulty.work, "segfault"), (faulty.work_leased, "kill"), (faulty.work_leased, "exit")]


@pytest.mark.large
@pytest.mark.parametrize(
    ("kind", "fault"), sampled(POISONS, 2), ids=["transaction-segfault", "lease-kill", "lease-exit"]
)
def test_a_poisonous_job_among_many_is_dead_after_its_limit_and_charges_nobody(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database, kind, fault: str
) -> None:
    """Exits, segfaults, or is killed as one that exhausts memory is; every other job is done once, uncharged."""
    names = enqueue(sessions, kind, fault)
    with supervised_relays(outboxq_database.url, kind.queue):
        wait_until(lambda: dead(engine) == 1 and waiting(engine) == 0, "every job's end")
    reason = f"crashed {MAX_CRASHES} of {MAX_CRASHES} times while it ran alone"
    assert dead_letter(engine) == (0, MAX_CRASHES, reason, "poison")
    assert ledger(engine) == {faulty.trace(name): 1 for name in names}
    # The first death is that of the batch; of a claim in transaction mode no lease was needed.
    # In lease mode the second one is that of its company.
    assert_nothing_left(engine, dead_letters=1, dead_relays=MAX_CRASHES + (1 if kind.queue == "tx" else 2))


@pytest.mark.large
@pytest.mark.parametrize("kind", [faulty.work, faulty.work_leased], ids=["transaction", "lease"])
def test_a_job_that_exhausts_memory_is_dead_in_the_end_and_doubles_nobody(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database, kind
) -> None:
    """A MemoryError may strike any thread of the process: others may be charged an attempt, and are done once."""
    names = enqueue(sessions, kind, "exhaust-memory", 100)
    with supervised_relays(outboxq_database.url, kind.queue):
        wait_until(lambda: dead(engine) == 1 and waiting(engine) == 0, "every job's end")
    assert dead_letter(engine)[-1] == "poison"
    effects = sorted(ledger(engine).elements())
    times = Counter(effect.partition(":")[0] for effect in effects)
    doubled = [effect for effect in effects if times[effect.partition(":")[0]] > 1]
    assert (doubled, set(names) - set(times)) == ([], set())
    assert len(times) == len(names)


@pytest.mark.large
def test_suspects_run_one_at_a_time_so_that_the_guilty_one_takes_nobody_along(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """All are suspects and there are slots for all: only the one that kills its relay has a crash counted."""
    names = [f"slow {number}" for number in range(4)]
    with sessions.begin() as session:
        session.add_job(faulty.work, name="poison", fault="die-slowly")
        session.add_jobs(faulty.work.job(name=name, fault="dawdle") for name in names)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET state = 'suspect'"))
    settings = RelayConfig(groups=(SlotGroup(("tx",), 5),), lease_seconds=1, max_crashes=2, poll_seconds=0.05)
    relays = 0
    while waiting(engine) and relays < 10:
        with RelayProcess("tests.support.faulty:jobs", outboxq_database.url, settings) as relay:
            relays += 1
            wait_until(lambda relay=relay: relay.returncode is not None or not waiting(engine), "its end")
        expire_leases(engine)
    assert dead_letter(engine) == (0, 2, "crashed 2 of 2 times while it ran alone", "poison")
    assert ledger(engine) == {faulty.trace(name): 1 for name in names}
    assert relays == 3
    assert_nothing_left(engine, dead_letters=1, dead_relays=2)
