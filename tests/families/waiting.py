"""Producers of a key wait for no handler of it: how long 100 adds take while a handler with the same key is at work.

python -m tests.families.waiting --seconds 5
"""

import argparse
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Context, Job, Jobs, OutboxSession, Relay, RelayConfig, batch_of
from outboxq.migrations.runner import migrate_committing
from outboxq.postgres import start_embedded

SORTS = ("coalesce", "unique", "group", "batch")
MODES = ("transaction", "lease")
ADDS = 100


class Sleeper:
    """A handler of one claim mode that is at work until it is let go, and a way to add jobs with its job's key.

    Args:
        sort: What the key is for, one of `SORTS`.
        seconds: How long the handler works if it is not let go.
    """

    def __init__(self, sort: str, mode: str, seconds: float) -> None:
        self.jobs = Jobs()
        self.begun, self.go, self.ended = threading.Event(), threading.Event(), threading.Event()
        self._sort = sort
        self._running: list[Job] = []

        @self.jobs.handler(queue="slow", claim=mode, timeout_seconds=seconds + 60)
        def work(ctx: Context) -> None:
            ctx.session.execute(text("SELECT 1"))
            self._running.append(ctx.job)
            self.begun.set()
            self.go.wait(seconds)
            self.ended.set()

        self._kind = work if sort == "batch" else work.options(**{sort: "key"})  # type: ignore[arg-type]  # a key

    def add_first(self, session: OutboxSession) -> None:
        """Add the job that runs."""
        if self._sort != "batch":
            session.add_job(self._kind)
            return
        with self.jobs.batch(session, on_done=self._kind.job()) as batch:
            batch.add_job(self._kind)

    def add(self, session: OutboxSession) -> None:
        """Add another one of the same key, or to the same batch."""
        if self._sort != "batch":
            session.add_job(self._kind)
            return
        batch = batch_of(session, self._running[0])
        assert batch is not None
        batch.add_job(self._kind)


@contextmanager
def running(jobs: Jobs, url: str) -> Iterator[None]:
    """A relay of one slot in a thread, which leaves at its end what has not begun."""
    relay = Relay(url, jobs, RelayConfig(slots_per_queue=1))
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        yield
    finally:
        relay.stop()
        thread.join(60)
        assert not thread.is_alive(), "the relay did not stop"


def slowest_add(sort: str, mode: str, url: str, *, seconds: float, patience_seconds: float) -> float:
    """The wall time of the slowest of `ADDS` transactions that add a job, in seconds, while a handler is at work.

    Raises:
        OperationalError: one has waited for a lock, or for a statement's end, for `patience_seconds`.
        AssertionError: the handler has ended before the last of them.
    """
    sleeper = Sleeper(sort, mode, seconds)
    engine = create_engine(url)
    sessions = sessionmaker(engine, class_=OutboxSession)
    with sessions.begin() as session:
        sleeper.add_first(session)
    patience = int(patience_seconds * 1_000)
    slowest = 0.0
    with running(sleeper.jobs, url):
        try:
            assert sleeper.begun.wait(60)
            for _ in range(ADDS):
                started_at = time.monotonic()
                with sessions.begin() as session:
                    for timeout in ("lock_timeout", "statement_timeout"):
                        session.execute(text(f"SET LOCAL {timeout} = {patience}"))
                    sleeper.add(session)
                slowest = max(slowest, time.monotonic() - started_at)
            assert not sleeper.ended.is_set(), "the handler ended before all jobs were added: nothing was shown"
        finally:
            sleeper.go.set()
    engine.dispose()
    return slowest


def main() -> None:
    """Measure each sort of key in each claim mode, in a database of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.families.waiting", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long the handler works (default: 5)")
    seconds = parser.parse_args().seconds
    with start_embedded() as server:
        for sort in SORTS:
            for mode in MODES:
                with server.create_database() as database:
                    engine = create_engine(database.url)
                    with engine.connect() as connection:
                        migrate_committing(connection)
                    engine.dispose()
                    slowest = slowest_add(sort, mode, database.url, seconds=seconds, patience_seconds=seconds / 2)
                sys.stdout.write(
                    f"{sort}, {mode}: the slowest of {ADDS} adds took {slowest * 1_000:.1f} ms beside a handler of "
                    f"{seconds:g} s\n"
                )


if __name__ == "__main__":
    main()
