"""Unique jobs under kills: no snapshot shows two jobs of a key, and every job that was added is done once.

    python -m tests.unique_jobs.under_kills --seconds 30 --mode transaction --seed 1

Producers add jobs of a few keys, relays in processes of their own are killed, and the server ends backends, of relays
and of producers.
"""

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import UUID

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import sessionmaker

from outboxq import JobHandle, OutboxSession, RelayConfig
from tests.support import unique_app
from tests.support.kill_run import CONNECTED, DEAD, WAITING, command, count, ended, running
from tests.support.waiting import wait_until

PRODUCERS, KEYS, RELAYS = 8, 12, 4
_KINDS = {"transaction": unique_app.work, "lease": unique_app.work_leased}
_CONFIG = RelayConfig(
    heartbeat_seconds=0.1, lease_seconds=1.0, max_crashes=1_000, batch_size=5, prune_seconds=1, reindex=False
)
_NAME = "unique producer"
# One statement, so one snapshot: a job that runs in transaction mode is seen by it, too.
_TWICE = text("SELECT headers->>'outboxq.unique', count(*) FROM outboxq.job GROUP BY 1 HAVING count(*) > 1")
_RAN = text("SELECT job_id FROM ran")
_TERMINATE = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE application_name LIKE 'outboxq relay %' OR application_name = :producer ORDER BY random() LIMIT 1"
)


@dataclass(slots=True)
class Report:
    """What was done, and what is not as it should be."""

    added: int = 0
    suppressed: int = 0
    unsure: int = 0
    by_handlers: int = 0
    kills: int = 0
    terminated: int = 0
    snapshots: int = 0
    slowest_seconds: float = 0.0
    twice: int = 0
    lost: int = 0
    doubled: int = 0
    unknown: int = 0
    misled: int = 0
    dead: int = 0
    stuck: int = 0

    @property
    def problems(self) -> int:
        return self.twice + self.lost + self.doubled + self.unknown + self.misled + self.dead + self.stuck


@dataclass(slots=True)
class Adds:
    """What producers did, each in its thread."""

    url: str
    mode: str
    seed: int
    stopping: threading.Event = field(default_factory=threading.Event)
    added: list[UUID] = field(default_factory=list)
    unsure: list[UUID] = field(default_factory=list)
    # The ids that suppressed adds were told.
    told: set[UUID] = field(default_factory=set)
    suppressed: int = 0
    slowest_seconds: float = 0.0

    def produce(self, number: int) -> None:
        """Add jobs until told to stop."""
        chance = random.Random(self.seed * 100 + number)
        engine = create_engine(self.url, connect_args={"application_name": _NAME})
        sessions = sessionmaker(engine, class_=OutboxSession)
        while not self.stopping.is_set():
            self._add(sessions, chance)
            time.sleep(chance.uniform(0.0, 0.01))
        engine.dispose()

    def _add(self, sessions: sessionmaker[OutboxSession], chance: random.Random) -> None:
        handles: list[JobHandle] = []
        began = time.monotonic()
        try:
            with sessions.begin() as session:
                # In the order of their names: two flushes of a session are two statements.
                for key in sorted(chance.sample(range(KEYS), chance.choice((1, 1, 2)))):
                    then = f"key {chance.randrange(KEYS)}" if chance.random() < 0.3 else None
                    fails, seconds = chance.choice((0, 0, 0, 1)), chance.choice((0.0, 0.0, 0.01, 0.05))
                    kind = _KINDS[self.mode].options(unique=f"key {key}")
                    handles.append(session.add_job(kind, fails, seconds, then))
                session.flush()
                if chance.random() < 0.1:
                    session.rollback()
                    return
        except DBAPIError:
            # COMMIT may have come through.
            self.unsure += [handle.id for handle in handles]
            return
        self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - began)
        self.added += [handle.id for handle in handles if handle.added]
        others = [handle for handle in handles if not handle.added]
        self.told |= {handle.existing_id for handle in others if handle.existing_id is not None}
        self.suppressed += len(others)


def run(url: str, *, seconds: float, mode: str, seed: int, relays: int = RELAYS, producers: int = PRODUCERS) -> Report:
    """Add unique jobs under kills, and look for two of a key. The database has our tables."""
    engine, chance, report, adds = create_engine(url), random.Random(seed), Report(), Adds(url, mode, seed)
    with engine.begin() as connection:
        connection.execute(text(unique_app.LEDGER))
    with running("tests.support.unique_app:jobs", url, _CONFIG, relays) as processes:
        wait_until(lambda: count(engine, CONNECTED) >= relays, "the relays")
        with producing(adds, producers) as threads:
            next_kill, end = time.monotonic() + 0.5, time.monotonic() + seconds
            while time.monotonic() < end:
                look(engine, report)
                # Not while more than one of them is only starting.
                if time.monotonic() > next_kill and count(engine, CONNECTED) >= relays - 1:
                    next_kill = time.monotonic() + chance.uniform(0.3, 1.0)
                    processes.kill_one(chance)
                    report.kills += 1
                report.terminated += ended(engine, _TERMINATE, producer=_NAME) if chance.random() < 0.05 else 0
        report.stuck = sum(thread.is_alive() for thread in threads)
        wait_until(lambda: look(engine, report) or count(engine, WAITING) == 0, "all jobs to be done", 120)
    compare(engine, adds, report)
    engine.dispose()
    return report


def compare(engine: Engine, adds: Adds, report: Report) -> None:
    """Compare what ran with what was added; a handler's own adds are known by their runs alone."""
    with engine.connect() as connection:
        ran = Counter(connection.execute(_RAN).scalars())
        by_handlers = set(connection.execute(text("SELECT successor FROM ran WHERE successor IS NOT NULL")).scalars())
    added, unsure = set(adds.added), set(adds.unsure)
    report.added, report.suppressed, report.unsure = len(added), adds.suppressed, len(unsure)
    report.by_handlers = len(by_handlers & ran.keys())
    report.slowest_seconds, report.dead = adds.slowest_seconds, count(engine, DEAD)
    report.lost = len(added - ran.keys())
    report.doubled = sum(number - 1 for number in ran.values())
    report.unknown = len(ran.keys() - added - unsure - by_handlers)
    report.misled = len(adds.told - ran.keys())


def look(engine: Engine, report: Report) -> bool:
    """Take one snapshot; False."""
    with engine.connect() as connection:
        report.twice += len(connection.execute(_TWICE).all())
    report.snapshots += 1
    return False


@contextmanager
def producing(adds: Adds, producers: int) -> Iterator[list[threading.Thread]]:
    """Producers in threads of their own."""
    threads = [threading.Thread(target=adds.produce, args=(number,)) for number in range(producers)]
    try:
        for thread in threads:
            thread.start()
        yield threads
    finally:
        adds.stopping.set()
        for thread in threads:
            thread.join(60)


if __name__ == "__main__":
    sys.exit(command("unique_jobs", str(__doc__), _KINDS, run))
