"""A run of relays on a queue with a limit or a rate, while their processes are killed and their sessions ended."""

import argparse
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import psycopg
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, RelayConfig
from outboxq.admin import queues
from outboxq.config import SlotGroup
from outboxq.migrations.runner import migrate
from outboxq.postgres import start_embedded
from outboxq.queue_limits import make_limits
from outboxq.testing.relay_process import RelayProcess
from tests.limits import app
from tests.support.urls import libpq_url

Mode: TypeAlias = Literal["transaction", "lease"]
KINDS = {"transaction": app.in_transaction, "lease": app.under_lease}
TARGET = "tests.limits.app:jobs"
# For how long no job may be done, while jobs wait for the leases of dead relays, on a busy machine.
_STALLED_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What a run is given.

    Args:
        seconds: How long producers add jobs, and faults come.
        job_seconds: How long a job takes, on average.
        jobs_each_second: How many jobs are added.
    """

    mode: Mode
    seconds: float
    seed: int
    running: int | None = None
    rate: str | None = None
    burst: int | None = None
    relays: int = 3
    slots: int = 4
    job_seconds: float = 0.02
    jobs_each_second: float = 100.0
    fault_every_seconds: float = 0.7

    @property
    def queue(self) -> str:
        return KINDS[self.mode].queue


@dataclass
class Outcome:
    """What a run has seen."""

    added: int = 0
    done: int = 0
    doubled: int = 0
    kills: int = 0
    terminations: int = 0
    most_running: int = 0
    starts: list[float] = field(default_factory=list)


def play(scene: Scene, url: str) -> Outcome:
    """Run it to the end: until every job is done."""
    chance, outcome = random.Random(scene.seed), Outcome()
    engine = create_engine(url)
    with ExitStack() as stack:
        stack.callback(engine.dispose)
        with engine.begin() as connection:
            migrate(connection)
            connection.execute(text(app.CREATE))
            limits = make_limits(running=scene.running, rate=scene.rate, burst=scene.burst)
            queues.set_limits(connection, [scene.queue], limits)
        sampling = stack.enter_context(_sampled(url, outcome))
        relays = [_relay(scene, url, stack) for _ in range(scene.relays)]
        sessions = sessionmaker(engine, class_=OutboxSession)
        began = time.monotonic()
        next_fault = began + scene.fault_every_seconds
        while (now := time.monotonic()) < began + scene.seconds:
            wanted = int((now - began) * scene.jobs_each_second) + 10
            with sessions.begin() as session:
                for number in range(outcome.added, wanted):
                    seconds = chance.uniform(0, 2 * scene.job_seconds)
                    session.add_job(KINDS[scene.mode], number=number, seconds=seconds)
            outcome.added = max(outcome.added, wanted)
            if now > next_fault:
                next_fault = now + chance.uniform(0.5, 1.5) * scene.fault_every_seconds
                _fault(chance, scene, url, relays, outcome, stack)
            time.sleep(0.05)
        _wait_for_the_end(sessions, outcome)
        sampling.set()
        with sessions() as session:
            rows = session.execute(text("SELECT number, running FROM run")).all()
            starts = session.execute(text("SELECT extract(epoch FROM at)::float8 FROM start ORDER BY at")).scalars()
            outcome.starts = list(starts)
        outcome.done = len({row.number for row in rows})
        outcome.doubled = len(rows) - outcome.done
        outcome.most_running = max([outcome.most_running, *(row.running for row in rows)])
    return outcome


def _relay(scene: Scene, url: str, stack: ExitStack) -> RelayProcess:
    config = RelayConfig(
        groups=(SlotGroup((scene.queue,), scene.slots),),
        # A relay that stands still for longer loses its jobs to others, and goes on with the one that it runs.
        lease_seconds=5,
        heartbeat_seconds=0.5,
        max_crashes=1_000,
        poll_seconds=0.5,
        drain_seconds=5,
    )
    return stack.enter_context(RelayProcess(TARGET, url, config))


def _fault(
    chance: random.Random, scene: Scene, url: str, relays: list[RelayProcess], outcome: Outcome, stack: ExitStack
) -> None:
    """Kill a relay that is at work, and start another, or end the sessions of one."""
    named = "SELECT DISTINCT application_name FROM pg_stat_activity WHERE application_name = ANY (%s)"
    with psycopg.connect(libpq_url(url), autocommit=True) as connection:
        found = {row[0] for row in connection.execute(named, [[relay.name for relay in relays]])}
    at_work = [place for place, relay in enumerate(relays) if relay.name in found]
    # The others are about to start.
    if not at_work:
        return
    place = chance.choice(at_work)
    if chance.random() < 0.4:
        relays[place].kill()
        outcome.kills += 1
        relays[place] = _relay(scene, url, stack)
        return
    with psycopg.connect(libpq_url(url), autocommit=True) as connection:
        ended = connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s", [relays[place].name]
        ).rowcount
    outcome.terminations += ended


@contextmanager
def _sampled(url: str, outcome: Outcome) -> Iterator[threading.Event]:
    """Look all the time at how many jobs run; ends when the event is set."""
    over = threading.Event()

    def look() -> None:
        with psycopg.connect(libpq_url(url), autocommit=True) as connection:
            while not over.wait(0.003):
                row = connection.execute(app.COUNT).fetchone()
                assert row is not None
                outcome.most_running = max(outcome.most_running, row[0])

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield over
    finally:
        over.set()
        thread.join()


def _wait_for_the_end(sessions: "sessionmaker[OutboxSession]", outcome: Outcome) -> None:
    """Wait for all jobs to be done, however long a busy machine takes; not if they stall."""
    done, progress_at = 0, time.monotonic()
    while time.monotonic() < progress_at + _STALLED_SECONDS:
        with sessions() as session:
            found = session.scalars(text("SELECT count(DISTINCT number) FROM run")).one()
        if found == outcome.added:
            return
        if found > done:
            done, progress_at = found, time.monotonic()
        time.sleep(0.1)


def lead(starts: list[float], jobs: int, seconds: float, burst: int) -> float:
    """By how many jobs the starts are ahead of the rate's bound, in the worst stretch of time; negative if never."""
    worst, least = float("-inf"), float("inf")
    for place, at in enumerate(starts):
        level = place - at * jobs / seconds
        least = min(least, level)
        worst = max(worst, level - least + 1 - burst)
    return worst


def command(name: str, run: Callable[[Mode, float, int, str], str]) -> None:
    """The command line of such a run: it prints what was seen, and fails if the run does."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.limits.{name}_under_kills")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--mode", choices=tuple(KINDS), default="transaction")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with (
        start_embedded() as server,
        server.create_database() as database,
    ):
        sys.stdout.write(run(given.mode, given.seconds, given.seed, database.url) + "\n")
