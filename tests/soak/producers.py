"""Threads that commit jobs with their business rows at a steady pace; one transaction in ten rolls back."""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count

from sqlalchemy import URL, create_engine, text

from outboxq import NewJob, OutboxSession
from tests.soak import app

THREADS = 2
_JOBS_PER_TRANSACTION = 5
_REQUEST = text("INSERT INTO request (job_id, kind, ending) VALUES (:job_id, :kind, :ending)")
_GENERAL = (app.record, app.record_async, app.record_leased, app.record_leased_async)
# How often each is drawn, relative to the others.
_BEHAVIOURS = {"plain": 80, "raise": 4, "flush-raise": 4, "retry": 3, "snooze": 3, app.GIVE_UP: 1}
# How often a producer adds, beside its other jobs, one that outlasts its deadline, and two that deadlock.
_DAWDLE_SECONDS = 10.0
_DEADLOCK_SECONDS = 2.0


class Producers:
    """The threads, and how many jobs they have committed."""

    def __init__(self, url: URL, jobs_a_second: float, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._engine = create_engine(url, pool_size=THREADS)
        self._pause = THREADS * _JOBS_PER_TRANSACTION / jobs_a_second
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(THREADS)
        self._ends: list[Future[None]] = [
            self._pool.submit(self._produce, random.Random(f"{seed}-{number}")) for number in range(THREADS)
        ]

    def stop(self) -> None:
        """End after the transactions at hand. Raises what a thread raised."""
        self._is_over.set()
        for end in self._ends:
            end.result()

    def close(self) -> None:
        self._is_over.set()
        self._pool.shutdown()
        self._engine.dispose()

    def _produce(self, chance: random.Random) -> None:
        due = dawdles = deadlocks = time.monotonic()
        while not self._is_over.wait(max(0.0, due - time.monotonic())):
            due += self._pause
            with OutboxSession(self._engine) as session:
                jobs = [self._job(session, chance) for _ in range(_JOBS_PER_TRANSACTION)]
                if time.monotonic() > dawdles:
                    dawdles += _DAWDLE_SECONDS
                    jobs.append(self._dawdler(chance))
                if time.monotonic() > deadlocks:
                    deadlocks += _DEADLOCK_SECONDS
                    jobs += self._deadlock(chance)
                self._enqueue(session, jobs, rolls_back=chance.random() < 0.1)

    def _enqueue(self, session: OutboxSession, jobs: list[tuple[NewJob, str]], *, rolls_back: bool) -> None:
        handles = session.add_jobs(job for job, _ in jobs)
        for handle, (_, ending) in zip(handles, jobs, strict=True):
            session.execute(_REQUEST, {"job_id": handle.id, "kind": handle.kind, "ending": ending})
        if rolls_back:
            session.rollback()
        else:
            session.commit()
        with self._lock:
            self.counts["rolled back" if rolls_back else "committed"] += len(jobs)

    def _job(self, session: OutboxSession, chance: random.Random) -> tuple[NewJob, str]:
        """A job, and what it is to come to."""
        match chance.randrange(8):
            case 0:
                account = session.get_one(app.Account, chance.randint(1, app.ACCOUNTS))
                return app.credit.job(account=account, cents=1, fails=chance.random() < 0.02), "done"
            case 1:
                return app.credit_many.job(account_id=chance.randint(1, app.ACCOUNTS)), "done"
            case 2:
                return app.pay.job(number=next(self._numbers)), "done"
            case 3:
                return app.pay_async.job(number=next(self._numbers)), "done"
            case number:
                (behaviour,) = chance.choices([*_BEHAVIOURS], weights=[*_BEHAVIOURS.values()])
                return _GENERAL[number - 4].job(behaviour=behaviour), "dead" if behaviour == app.GIVE_UP else "done"

    def _dawdler(self, chance: random.Random) -> tuple[NewJob, str]:
        how = chance.choice(["statement", "python", "async"])
        return (app.dawdle_async.job() if how == "async" else app.dawdle.job(how=how)), "done"

    def _deadlock(self, chance: random.Random) -> list[tuple[NewJob, str]]:
        """Of two queues, so that they run at the same time; added in one transaction, so that they begin together."""
        one, other = chance.sample(_GENERAL, 2)
        pair = chance.randrange(app.PAIRS)
        return [
            (one.job(behaviour="deadlock-up", pair=pair), "done"),
            (other.job(behaviour="deadlock-down", pair=pair), "done"),
        ]


@contextmanager
def producing(url: URL, *, jobs_a_second: float, seed: int) -> Iterator[Producers]:
    """Producers that end with the block."""
    producers = Producers(url, jobs_a_second, seed)
    try:
        yield producers
    finally:
        producers.close()
