"""Schedules under kills: every time that a schedule is due is fired once, and its job has its effect once.

    python -m tests.schedules.under_kills --seconds 30 --mode transaction --seed 1

Relays in processes of their own are killed, and the server ends backends, those that fire before others. Whenever a
schedule was fired, its next time is written anew: a second later than its last one, and always in the past.
"""

import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Engine, create_engine, text

from outboxq import RelayConfig, schedules
from tests.support import scheduled_app
from tests.support.kill_run import CONNECTED, DEAD, WAITING, command, count, ended, running
from tests.support.waiting import wait_until

RELAYS = 6
_SCHEDULES = 30
_CONFIG = RelayConfig(heartbeat_seconds=0.1, lease_seconds=1.0, max_crashes=1_000, batch_size=5, reindex=False)
_START = datetime(2026, 1, 1, tzinfo=UTC)
_KINDS = {"transaction": scheduled_app.note, "lease": scheduled_app.note_leased}
# Those that were fired are due again in years.
_MOVE = text(
    "UPDATE outboxq.schedule SET next_at = coalesce(last_at, :start) + interval '1 second' "
    "WHERE next_at > clock_timestamp() RETURNING name, next_at"
)
_DUE = text("SELECT count(*) FROM outboxq.schedule WHERE next_at <= clock_timestamp()")
_RAN = text("SELECT name, at FROM fired")
_TERMINATE = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'outboxq relay %' "
    "ORDER BY (state <> 'idle' AND query LIKE '%schedule%') DESC, random() LIMIT 1"
)


@dataclass(slots=True)
class Report:
    """What was done, and what is not as it should be."""

    due: int = 0
    kills: int = 0
    terminated: int = 0
    lost: int = 0
    doubled: int = 0
    not_due: int = 0
    dead: int = 0
    seconds: float = 0.0

    @property
    def problems(self) -> int:
        return self.lost + self.doubled + self.not_due + self.dead


def run(url: str, *, seconds: float, mode: str, seed: int, relays: int = RELAYS) -> Report:
    """Fire schedules under kills, and compare what ran with what was due. The database has our tables."""
    engine, chance, report, started = create_engine(url), random.Random(seed), Report(), time.monotonic()
    prepare(engine, mode)
    due: Counter[tuple[str, datetime]] = Counter()
    with running("tests.support.scheduled_app:jobs", url, _CONFIG, relays) as processes:
        wait_until(lambda: count(engine, CONNECTED) >= relays, "the relays")
        next_kill = time.monotonic() + 0.5
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            due.update(move(engine))
            if time.monotonic() > next_kill:
                next_kill = time.monotonic() + chance.uniform(0.5, 1.5)
                processes.kill_one(chance)
                report.kills += 1
            report.terminated += ended(engine, _TERMINATE) if chance.random() < 0.3 else 0
            time.sleep(0.02)
        wait_until(lambda: count(engine, _DUE) == 0 and count(engine, WAITING) == 0, "all schedules and jobs", 120)
    with engine.connect() as connection:
        ran = Counter((row.name, row.at.astimezone(UTC)) for row in connection.execute(_RAN))
    report.due, report.dead, report.seconds = len(due), count(engine, DEAD), time.monotonic() - started
    report.lost, report.not_due = len(due.keys() - ran.keys()), len(ran.keys() - due.keys())
    report.doubled = sum(number - 1 for number in ran.values())
    engine.dispose()
    return report


def prepare(engine: Engine, mode: str) -> None:
    """Make the ledger and the schedules, each due for the first time in years."""
    with engine.begin() as connection:
        connection.execute(text(scheduled_app.LEDGER))
        for number in range(_SCHEDULES):
            name = f"{mode}-{number}"
            job = _KINDS[mode].job(name=name, fire_time=schedules.FIRE_TIME)
            schedules.put(connection, name, job, cron="0 0 29 2 *", missed="one")


def move(engine: Engine) -> list[tuple[str, datetime]]:
    """Have all schedules that were fired be due again; the times."""
    with engine.begin() as connection:
        return [(row.name, row.next_at.astimezone(UTC)) for row in connection.execute(_MOVE, {"start": _START})]


if __name__ == "__main__":
    sys.exit(command("schedules", str(__doc__), _KINDS, run))
