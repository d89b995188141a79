"""Cancellations under kills: nothing of a cancelled job stands, and every other job is done once.

    python -m tests.cancelling.under_kills --seconds 30 --mode transaction --seed 1

Jobs that wait and jobs that run are cancelled, in order and by force, while relay processes are killed and backends of
relays are terminated. What a job's handler did is a row of `ran`, in the job's own transaction. A job that was told to
be cancelled, be it at once or in the end by `progress`, must have no row then, nor ever get one; a job that came to its
end first, or was never cancelled, has exactly one.
"""

import random
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from uuid import UUID

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, RelayConfig
from outboxq.admin import cancellation
from outboxq.config import SlotGroup
from tests.support import cancel_app
from tests.support.kill_run import CONNECTED, WAITING, command, count, ended, running
from tests.support.waiting import wait_until

RELAYS = 4
_TARGET = "tests.support.cancel_app:jobs"
_KINDS = {"transaction": cancel_app.work, "lease": cancel_app.work_leased}
_IDS = text("SELECT id FROM outboxq.job")
_DEAD = text("SELECT id FROM outboxq.dead_job")
_RAN = text("SELECT job_id FROM ran")
_TERMINATE = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'outboxq relay %' "
    "ORDER BY random() LIMIT 1"
)


@dataclass(slots=True)
class Report:
    """What was done, and what is not as it should be."""

    added: int = 0
    cancelled_waiting: int = 0
    requested: int = 0
    cancelled_running: int = 0
    came_first: int = 0
    forced: int = 0
    buried: int = 0
    kills: int = 0
    terminated: int = 0
    stands: int = 0
    lost: int = 0
    doubled: int = 0
    unknown: int = 0
    unburied: int = 0
    unanswered: int = 0

    @property
    def problems(self) -> int:
        return self.stands + self.lost + self.doubled + self.unknown + self.unburied + self.unanswered


@dataclass(slots=True)
class Work:
    """What was added, and what was told of the jobs that were cancelled."""

    engine: Engine
    mode: str
    chance: random.Random
    added: list[UUID] = field(default_factory=list)
    # Gone by an answer: these must never have done anything.
    gone: set[UUID] = field(default_factory=set)
    # Those among them that are to be dead letters.
    buried: set[UUID] = field(default_factory=set)
    # Asked for, and what they were asked to become.
    asked: dict[UUID, str] = field(default_factory=dict)
    forced: int = 0
    waiting: int = 0

    def add(self) -> None:
        """Add some jobs in one transaction."""
        with sessionmaker(self.engine, class_=OutboxSession).begin() as session:
            for _ in range(self.chance.randint(1, 4)):
                seconds = self.chance.choice((0.0, 0.1, 0.5, 1.0))
                how = self.chance.choice(("looks", "sends", "is deaf"))
                self.added.append(session.add_job(_KINDS[self.mode], seconds, how).id)

    def cancel(self) -> None:
        """Cancel some of the jobs that are there, the oldest ones mostly: these run."""
        with self.engine.connect() as connection:
            # Each once: of two cancellations of a job with other outcomes the first or the second may have ended it.
            there = sorted(set(connection.execute(_IDS).scalars()) - self.asked.keys())
        if not there:
            return
        some = self.chance.sample(there[: self.chance.choice((8, 8, 1_000))], 1)
        outcome = self.chance.choice(("discard", "discard", "dead"))
        with self.engine.begin() as connection:
            done = cancellation.cancel_running(connection, some, outcome)
        self.waiting += len(done.cancelled)
        self.gone.update(done.cancelled)
        if outcome == "dead":
            self.buried.update(done.cancelled)
        self.asked.update(dict.fromkeys(done.requested, outcome))
        if done.requested and self.chance.random() < 0.3:
            for job_id in done.requested:
                with self.engine.begin() as connection:
                    self.forced += cancellation.terminate(connection, job_id, outcome)


def settings(mode: str) -> RelayConfig:
    """Of relays that take jobs of this mode, and hear soon of what is asked and of what has died."""
    return RelayConfig(
        groups=(SlotGroup((_KINDS[mode].queue,), 2),),
        heartbeat_seconds=0.1,
        lease_seconds=1.0,
        max_crashes=1_000,
        batch_size=1 if mode == "lease" else 3,
        reindex=False,
    )


def run(url: str, *, seconds: float, mode: str, seed: int, relays: int = RELAYS) -> Report:
    """Add and cancel jobs under kills, and see what stands in the end. The database has our tables."""
    chance, report = random.Random(seed), Report()
    with ExitStack() as stack:
        engine = create_engine(url)
        stack.callback(engine.dispose)
        with engine.begin() as connection:
            connection.execute(text(cancel_app.LEDGER))
        work = Work(engine, mode, random.Random(seed + 1))
        processes = stack.enter_context(running(_TARGET, url, settings(mode), relays))
        wait_until(lambda: count(engine, CONNECTED) >= relays, "the relays", 150)
        next_kill, end = time.monotonic() + 0.5, time.monotonic() + seconds
        while time.monotonic() < end:
            if count(engine, WAITING) < 40:
                work.add()
            work.cancel()
            report.stands += stands(engine, work)
            # Not while more than one of them is only starting.
            if time.monotonic() > next_kill and count(engine, CONNECTED) >= relays - 1:
                next_kill = time.monotonic() + chance.uniform(0.5, 1.5)
                processes.kill_one(chance)
                report.kills += 1
            report.terminated += ended(engine, _TERMINATE) if chance.random() < 0.05 else 0
            time.sleep(0.02)
        wait_until(lambda: count(engine, WAITING) == 0, "the end of all jobs", 120)
        compare(engine, work, report)
    return report


def stands(engine: Engine, work: Work) -> int:
    """How many jobs have done something although their cancellation was answered by "cancelled"."""
    with engine.connect() as connection:
        return len(work.gone & set(connection.execute(_RAN).scalars()))


def compare(engine: Engine, work: Work, report: Report) -> None:
    """Compare what stands with what was told."""
    with engine.connect() as connection:
        ran = Counter(connection.execute(_RAN).scalars())
        dead = set(connection.execute(_DEAD).scalars())
        became = cancellation.progress(connection, sorted(work.asked))
    ends = {job_id for job_id, state in became.items() if state in ("cancelled", "dead")}
    report.unanswered = sum(state in ("running", "waiting") for state in became.values())
    to_bury = {job_id for job_id, outcome in work.asked.items() if outcome == "dead"}
    work.buried |= ends & to_bury
    work.gone |= ends
    others = set(work.added) - work.gone
    report.added, report.cancelled_waiting, report.forced = len(work.added), work.waiting, work.forced
    report.requested, report.cancelled_running = len(work.asked), len(ends)
    report.came_first, report.buried = len(work.asked) - len(ends), len(dead)
    report.stands += len(work.gone & ran.keys())
    report.lost = len(others - ran.keys())
    report.doubled = sum(number - 1 for number in ran.values())
    report.unknown = len(ran.keys() - set(work.added))
    report.unburied = len(work.buried ^ dead)


if __name__ == "__main__":
    sys.exit(command("cancelling", str(__doc__), _KINDS, run))
