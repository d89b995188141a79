"""The history beside a ledger that handlers write, while relays are killed and lose their connections."""

import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, RelayConfig
from outboxq.postgres import Database
from outboxq.testing.proxy import CommitProxy
from outboxq.testing.relay_process import RelayProcess
from tests.support import counted_app
from tests.support.ledger import rows, waiting
from tests.support.waiting import wait_until

CONFIG = RelayConfig(
    slots_per_queue=1,
    stats_seconds=1.0,
    lease_seconds=2.0,
    heartbeat_seconds=0.2,
    max_crashes=1_000,
)
# One slot for each queue; a batch handler's slot has up to five jobs.
IN_FLIGHT = 7
KINDS = ("count", "count_async", "count_together")
CHAOS_SECONDS = 8.0
NAME = "outboxq relay counted"
TERMINATE = text("SELECT pg_terminate_backend(:pid)")
BEGINNING = datetime(2000, 1, 1, tzinfo=UTC)


class Fleet:
    """Four relays, as many of which live at any time, and what the database said of each of them."""

    def __init__(self, url: str, engine: Engine) -> None:
        self._url, self._engine = url, engine
        self.relays: list[RelayProcess] = []
        self.killed: list[int] = []
        # When each process was seen, each time once, the last time last.
        self.seen: defaultdict[int, list[datetime]] = defaultdict(list)

    def start(self) -> None:
        self.relays.append(RelayProcess("tests.support.counted_app:jobs", self._url, CONFIG, name=NAME))

    def kill(self, relay: RelayProcess) -> None:
        self.relays.remove(relay)
        relay.kill()
        relay.close()
        self.killed.append(relay.pid)
        self.look()

    def stop(self, relay: RelayProcess) -> None:
        self.relays.remove(relay)
        # Before it serves, a signal ends it at once.
        listed = f"SELECT FROM outboxq.relay_status WHERE pid = {relay.pid}"
        wait_until(lambda: rows(self._engine, listed), "the relay to be listed")
        assert relay.stop(60) == 0, relay.log
        relay.close()

    def look(self) -> None:
        """Note when each relay was seen."""
        for pid, seen_at in rows(self._engine, "SELECT pid, seen_at FROM outboxq.relay_status"):
            known = self.seen[int(str(pid))]
            if isinstance(seen_at, datetime) and seen_at not in known:
                known.append(seen_at)

    def may_have_lost(self, kind: str) -> int:
        """How many jobs of a kind the killed processes have done since their flush before the last one.

        What the last flush has added was counted before it was sent; a job that was done at that moment may have been
        counted behind it.
        """
        since = {pid: (self.seen[pid][-2:-1] or [BEGINNING])[0] for pid in self.killed}
        found = rows(self._engine, f"SELECT pid, at FROM counted WHERE kind = '{kind}'")
        late = sum(pid in since and at > since[pid] for pid, at in found)  # type: ignore[operator, index]
        return late + IN_FLIGHT * len(self.killed)


@contextmanager
def fleet(url: str, engine: Engine) -> Iterator[Fleet]:
    relays = Fleet(url, engine)
    with ExitStack() as stack:
        stack.callback(lambda: [relay.close() for relay in relays.relays])
        for _ in range(4):
            relays.start()
        yield relays


def enqueue(engine: Engine, first: int, number: int) -> None:
    names = [str(first + n) for n in range(number)]
    with sessionmaker(engine, class_=OutboxSession).begin() as session:
        session.add_jobs(counted_app.count.job(name=name) for name in names)
        session.add_jobs(counted_app.count_async.job(name=name) for name in names)
        session.add_jobs(counted_app.count_together.job(name=name) for name in names)


def counts(engine: Engine, statement: str) -> dict[str, int]:
    return dict.fromkeys(KINDS, 0) | {str(kind): int(str(number)) for kind, number in rows(engine, statement)}


def ledger(engine: Engine) -> dict[str, int]:
    return counts(engine, "SELECT kind, count(*) FROM counted GROUP BY kind")


def history(engine: Engine) -> dict[str, int]:
    return counts(engine, "SELECT kind, sum(done) FROM outboxq.stat GROUP BY kind")


def terminate_some(engine: Engine, draw: random.Random) -> None:
    """End some of the relays' sessions, whatever they are at: those of slots, of leases, and of flushes."""
    pids = [pid for (pid,) in rows(engine, f"SELECT pid FROM pg_stat_activity WHERE application_name = '{NAME}'")]
    with engine.begin() as connection:
        for pid in draw.sample(pids, min(len(pids), 3)):
            connection.execute(TERMINATE, {"pid": pid})


@pytest.mark.wide
@pytest.mark.parametrize("seed", [1])
def test_under_kills_the_history_is_never_over_and_under_by_what_was_not_flushed(
    outboxq_database: Database, engine: Engine, seed: int
) -> None:
    """For each kind: no job is counted twice, and lost is what killed processes had done since their last flushes."""
    draw, url, added = random.Random(seed), outboxq_database.url, 0
    counted_app.prepare(url)
    with fleet(url, engine) as relays:
        wait_until(lambda: len(rows(engine, "SELECT FROM outboxq.relay_status")) == 4, "four relays")
        ends_at = time.monotonic() + CHAOS_SECONDS
        while time.monotonic() < ends_at or len(relays.killed) < 3:
            enqueue(engine, added, 20)
            added += 20
            relays.look()
            if draw.random() < 0.5:
                terminate_some(engine, draw)
            if draw.random() < 0.1:
                relays.kill(draw.choice(relays.relays))
                relays.start()
            wait_until(lambda: waiting(engine) < 600, "relays to keep up")
        wait_until(lambda: waiting(engine) == 0, "all jobs", seconds=180)
        for relay in list(relays.relays):
            relays.stop(relay)
    done, counted = ledger(engine), history(engine)
    assert done == dict.fromkeys(KINDS, added)
    for kind in KINDS:
        assert 0 <= done[kind] - counted[kind] <= relays.may_have_lost(kind), (kind, done, counted, len(relays.killed))


@pytest.mark.wide
def test_without_kills_the_history_is_the_ledger(outboxq_database: Database, engine: Engine) -> None:
    """Relays that are told to stop, and others in their places, while sessions are ended, and answers to flushes lost.

    A flush that was committed unseen is sent again: without its number it would be added twice.
    """
    draw, added = random.Random(2), 0
    counted_app.prepare(outboxq_database.url)
    with CommitProxy(outboxq_database.url) as proxy, fleet(proxy.url, engine) as relays:
        lost = []
        wait_until(lambda: len(rows(engine, "SELECT FROM outboxq.relay_status")) == 4, "four relays")
        for turn in range(20):
            enqueue(engine, added, 20)
            added += 20
            terminate_some(engine, draw)
            if turn % 3 == 0:
                lost.append(proxy.cut_after_commit(containing='INTO "outboxq"."stat"'))
            if turn % 5 == 4:
                relays.stop(draw.choice(relays.relays))
                relays.start()
        wait_until(lambda: waiting(engine) == 0, "all jobs", seconds=180)
        for relay in list(relays.relays):
            relays.stop(relay)
        assert sum(trap.count for trap in lost) >= 5
    assert ledger(engine) == history(engine) == dict.fromkeys(KINDS, added)
