"""Groups under kills: in each group one job at a time, in order, none lost and none doubled.

    python -m tests.groups.under_kills --seconds 30 --mode transaction --seed 1

Relays in processes of their own are killed, and the server ends backends, while jobs fail now and then, and while
producers add to their groups.
"""

import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, create_engine, text

from outboxq import OutboxSession, RelayConfig
from tests.support import grouped_app
from tests.support.kill_run import DEAD, WAITING, Relays, command, count, ended, running
from tests.support.waiting import wait_until

RELAYS = 3
_GROUPS = 12
_AHEAD = 400
_KINDS: dict[str, Any] = {"transaction": grouped_app.apply, "lease": grouped_app.apply_leased}
_CONFIG = RelayConfig(
    slots_per_queue=3, batch_size=8, heartbeat_seconds=0.1, lease_seconds=1.0, max_crashes=1_000, reindex=False
)
_SUSPECTS = text("SELECT count(*) FROM outboxq.job WHERE state = 'group_suspect'")
_APPLIED = text("SELECT count(*) FROM applied")
_WRONG = text("SELECT count(*) FROM wrong")
_TERMINATE = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE application_name LIKE 'outboxq relay%' AND xact_start IS NOT NULL ORDER BY random() LIMIT 1"
)


@dataclass(slots=True)
class Report:
    """What was done, and what is not as it should be."""

    jobs: int = 0
    kills: int = 0
    terminated: int = 0
    suspects_seen: int = 0
    out_of_order: int = 0
    lost: int = 0
    doubled: int = 0
    dead: int = 0
    seconds: float = 0.0

    @property
    def problems(self) -> int:
        """How many jobs are not as they should be."""
        return self.out_of_order + self.lost + self.doubled + self.dead


def run(url: str, *, seconds: float, mode: str, seed: int, relays: int = RELAYS) -> Report:
    """Add jobs to groups under kills, and look how they ran. The database has our tables."""
    engine, chance, report, started = create_engine(url), random.Random(seed), Report(), time.monotonic()
    keys = [f"account-{number}" for number in range(_GROUPS)]
    with engine.begin() as connection:
        connection.execute(text(grouped_app.TABLES))
        connection.execute(text("INSERT INTO ledger VALUES (:key, 0)"), [{"key": key} for key in keys])
    added: Counter[str] = Counter()
    over = threading.Event()
    producer = threading.Thread(target=_produce, args=(engine, mode, keys, added, over))
    with running("tests.support.grouped_app:jobs", url, _CONFIG, relays) as processes:
        producer.start()
        try:
            wait_until(lambda: count(engine, _APPLIED) > 0, "the first job")
            _disturb(engine, processes, chance, report, time.monotonic() + seconds)
        finally:
            over.set()
            producer.join()
        wait_until(lambda: count(engine, WAITING) == 0, "the end of all jobs", 120)
    with engine.connect() as connection:
        ran = Counter((row.key, row.number) for row in connection.execute(text("SELECT key, number FROM applied")))
    report.jobs, report.seconds = sum(added.values()), time.monotonic() - started
    report.out_of_order, report.dead = count(engine, _WRONG), count(engine, DEAD)
    report.lost = sum((key, number) not in ran for key in keys for number in range(1, added[key] + 1))
    report.doubled = sum(number - 1 for number in ran.values())
    engine.dispose()
    return report


def _produce(engine: Engine, mode: str, keys: list[str], added: Counter[str], over: threading.Event) -> None:
    """Add to one group after another, more to the first ones, while not too many wait."""
    chance, apply = random.Random(1), _KINDS[mode]
    while not over.is_set():
        with OutboxSession(engine) as session, session.begin():
            for key in chance.choices(keys, weights=range(len(keys), 0, -1), k=10):
                added[key] += 1
                session.add_job(apply, key=key, number=added[key])
        while not over.is_set() and count(engine, WAITING) > _AHEAD:
            over.wait(0.05)


def _disturb(engine: Engine, relays: Relays, chance: random.Random, report: Report, end: float) -> None:
    next_kill = time.monotonic() + 0.3
    while time.monotonic() < end:
        if time.monotonic() > next_kill:
            next_kill += chance.uniform(0.5, 1.5)
            relays.kill_one(chance)
            report.kills += 1
        if chance.random() < 0.2:
            report.terminated += ended(engine, _TERMINATE)
        report.suspects_seen = max(report.suspects_seen, count(engine, _SUSPECTS))
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(command("groups", str(__doc__), _KINDS, run))
