"""Handlers whose results are waited for, and waiters that only a notification wakes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
from sqlalchemy import Engine, text

from outboxq import Context, DeadLetter, Discard, Jobs
from outboxq.fault_points import fault_action
from outboxq.outbox.result_listener import ResultLimits
from outboxq.outbox.results import listeners
from outboxq.postgres import Database
from outboxq.statements.results import result_channel
from tests.support.app import QUICK, Effect
from tests.support.waiting import PATIENCE, wait_until

KEEP = timedelta(days=7)


@dataclass
class Report:
    """What `work` returns."""

    name: str
    pages: int


def keeping_jobs(claim: str = "transaction") -> tuple[Jobs, Any]:
    """A registry, and its handler: it writes a row, and ends in the way that its argument names."""
    jobs = Jobs()

    @jobs.handler(claim=claim, keep=KEEP, keep_result=True, retry=QUICK)
    def work(ctx: Context, name: str) -> Any:
        if name != "idle":
            ctx.session.add(Effect(name=name))
        if name == "fails":
            raise ValueError("no luck")
        outcomes = {"dies": DeadLetter("beyond help"), "discards": Discard("not needed"), "nothing": None}
        return outcomes.get(name, Report(name, 3))

    return jobs, work


@contextmanager
def limited(**limits: Any) -> Iterator[None]:
    """Listeners that are made in the block have these limits."""
    before, listeners.limits = listeners.limits, ResultLimits(**limits)
    try:
        yield
    finally:
        listeners.limits = before


@contextmanager
def only_woken() -> Iterator[None]:
    """Listeners that are made in the block look once, and again only when they are notified or connect anew."""
    with limited(look_seconds=3600.0, poll_most_seconds=3600.0, linger_seconds=0.1):
        yield


@contextmanager
def once_at(point: str, action: Callable[[], object]) -> Iterator[None]:
    """Within the block, run `action` at the first look that comes to this point, in the thread that looks."""
    left = [action]

    def act(name: str) -> None:
        if name == point and left:
            left.pop()()

    with fault_action(act):
        yield


@contextmanager
def waiting(wait: Callable[[], object]) -> Iterator[Callable[[], object]]:
    """Wait in a thread, once its first look is over; what is given returns the result, or raises the error."""
    looked, ended = threading.Event(), []

    def run() -> None:
        try:
            ended.append((wait(), None))
        except BaseException as error:  # noqa: BLE001  # raised again by the test
            ended.append((None, error))

    def result() -> object:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the wait did not end"
        value, error = ended[0]
        if error is not None:
            raise error
        return value

    thread = threading.Thread(target=run)
    with once_at("after-look", looked.set):
        thread.start()
        try:
            assert looked.wait(PATIENCE)
            yield result
        finally:
            thread.join(PATIENCE)


@contextmanager
def told(database: Database) -> Iterator[Callable[[], list[str]]]:
    """Collects what was notified to those who wait for results."""
    channel = f'"{result_channel("outboxq")}"'
    with psycopg.connect(database.url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"LISTEN {channel}")
        heard: list[str] = []

        def collect() -> list[str]:
            # Behind our own there is none of before.
            connection.execute(f"NOTIFY {channel}, 'ours'")
            for notify in connection.notifies(timeout=PATIENCE):
                if notify.payload == "ours":
                    return heard
                heard.append(notify.payload)
            raise AssertionError("our own notification did not come back")

        yield collect


def listening(engine: Engine) -> list[int]:
    """The backends that listen for results."""
    wanted = text(
        "SELECT DISTINCT pid FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted "
        "AND classid = hashtext('outboxq_outboxq result')::oid "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    with engine.connect() as connection:
        return list(connection.execute(wanted).scalars())


def end_listener(engine: Engine) -> None:
    """Terminate the backend that listens for results."""
    (pid,) = wait_until(lambda: listening(engine), "a listener")
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_terminate_backend(:pid, 60000)"), {"pid": pid})
