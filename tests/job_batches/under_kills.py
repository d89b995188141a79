"""Batches under kills: every callback once, and none while a member is left.

    python -m tests.job_batches.under_kills --seconds 30 --mode transaction --seed 1

Relay processes are killed and backends terminated while producers open batches, whose members fail, die, are discarded
and add others. In the end each batch must have one row of its callback, which found no member left, and counted the
dead ones.
"""

import argparse
import random
import re
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, RelayConfig
from outboxq.config import SlotGroup
from outboxq.postgres import Database, start_embedded
from outboxq.testing import RelayProcess
from tests.job_batches.app import jobs, leased_member, member, report
from tests.support import app
from tests.support.waiting import wait_until

RELAYS = 3
_TARGET = "tests.job_batches.app:jobs"
_REPORT = re.compile(r"report (\d+) left (\d+) failed (\d+)")


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    batches: int
    kills: int
    terminations: int
    missing: list[int]
    doubled: list[int]
    early: list[int]
    miscounted: list[int]
    open: int

    @property
    def is_good(self) -> bool:
        """Whether every callback ran once, with no member left, and told the right number of dead ones."""
        return not (self.missing or self.doubled or self.early or self.miscounted or self.open)


def run_under_kills(database: Database, *, seconds: float, mode: str, seed: int) -> Outcome:
    """Open batches for `seconds` while relays die, then let the rest be worked off."""
    chance = random.Random(seed)
    engine = create_engine(database.url)
    config = RelayConfig(
        groups=(SlotGroup(("members",), 3), SlotGroup(("leased-members",), 3), SlotGroup(("reports",), 1)),
        batch_size=4,
        poll_seconds=0.1,
        lease_seconds=1,
        max_crashes=1_000,
        prune_seconds=1,
    )
    stop = threading.Event()
    opened: list[int] = []
    producer = threading.Thread(target=_produce, args=(engine, mode, seed, opened, stop))
    kills = terminations = 0
    with ExitStack() as stack:
        relays = [stack.enter_context(RelayProcess(_TARGET, database.url, config)) for _ in range(RELAYS)]
        producer.start()
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline:
                time.sleep(chance.uniform(0.3, 1.0))
                place = chance.randrange(RELAYS)
                if chance.random() < 0.3:
                    relays[place].kill()
                    relays[place] = stack.enter_context(RelayProcess(_TARGET, database.url, config))
                    kills += 1
                else:
                    terminations += _terminate(engine, chance)
        finally:
            stop.set()
            producer.join()
        wait_until(lambda: _left(engine) == 0, "the end of all jobs and batches", 120)
    outcome = _judge(engine, opened, kills, terminations)
    engine.dispose()
    return outcome


def _produce(engine: Engine, mode: str, seed: int, opened: list[int], stop: threading.Event) -> None:
    chance = random.Random(seed + 1)
    sessions = sessionmaker(engine, class_=OutboxSession)
    kind = leased_member if mode == "lease" else member
    while not stop.is_set():
        number = len(opened) + 1
        with sessions.begin() as session, jobs.batch(session, on_done=report.job(batch=number)) as batch:
            numbers = chance.sample(range(60), chance.randint(0, 5))
            batch.add_jobs(kind.job(batch=number, number=each) for each in numbers)
        opened.append(number)
        time.sleep(chance.uniform(0, 0.02))


def _terminate(engine: Engine, chance: random.Random) -> int:
    with engine.begin() as connection:
        pids = connection.execute(
            text(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
                "AND application_name LIKE 'outboxq%' ORDER BY pid"
            )
        ).scalars()
        found = list(pids)
        if not found:
            return 0
        connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": chance.choice(found)})
        return 1


def _left(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(
            connection.execute(
                text("SELECT (SELECT count(*) FROM outboxq.job) + (SELECT count(*) FROM outboxq.batch)")
            ).scalar_one()
        )


def _judge(engine: Engine, opened: list[int], kills: int, terminations: int) -> Outcome:
    with engine.connect() as connection:
        names = list(connection.execute(text("SELECT name FROM effect_ledger WHERE name LIKE 'report %'")).scalars())
        rows = connection.execute(
            text("SELECT (args ->> 'batch')::int, count(*) FROM outboxq.dead_job GROUP BY 1")
        ).all()
    dead = {int(number): int(count) for number, count in rows}
    reports = [tuple(map(int, match.groups())) for match in map(_REPORT.fullmatch, names) if match is not None]
    times = Counter(number for number, _, _ in reports)
    return Outcome(
        batches=len(opened),
        kills=kills,
        terminations=terminations,
        missing=[number for number in opened if not times[number]],
        doubled=[number for number in opened if times[number] > 1],
        early=[number for number, left, _ in reports if left],
        miscounted=[number for number, _, failed in reports if failed != dead.get(number, 0)],
        open=_left(engine),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--mode", choices=("transaction", "lease"), default="transaction")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    server = start_embedded()
    with closing(server), server.create_database() as database:
        app.prepare(database.url)
        outcome = run_under_kills(database, seconds=given.seconds, mode=given.mode, seed=given.seed)
    print(outcome)  # what the command is for
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
