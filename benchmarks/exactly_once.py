"""Workers that are killed while they work, and the effects of their jobs: each adds to an account of its own."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import psycopg

from benchmarks.bench import CENTS, MeasurementFailed

KILLS = 10
KILLED_JOBS = 6_000

_LOOK_SECONDS = 0.01
_TIMEOUT_SECONDS = 180.0
_COMMITTED = f"SELECT coalesce(sum(balance), 0)::bigint / {CENTS} FROM account"
_CHANGED = "SELECT count(*) FROM account WHERE balance > 0"


@dataclass(frozen=True, slots=True)
class Effects:
    """Effects of so many jobs, after so many kills of their workers."""

    jobs: int
    kills: int
    doubled: int
    missing: int

    def __str__(self) -> str:
        work = f"{self.kills} kills over {self.jobs:,} jobs"
        if not self.doubled and not self.missing:
            return f"exactly once: yes ({work})"
        return f"exactly once: no, {self.doubled:,} effects too many and {self.missing:,} missing ({work})"


def effects_after_kills(
    url: str, start: Callable[[], AbstractContextManager[object]], unfinished: str, jobs: int, kills: int
) -> Effects:
    """Work off all jobs by one worker after the other. Each is killed when it has done its share.

    Args:
        start: Starts a worker, which is killed (SIGKILL) at the end of the block.
        unfinished: A query that counts the jobs that are not done.

    Raises:
        MeasurementFailed: a worker took too long.
    """
    with psycopg.connect(url, autocommit=True) as connection:
        for kill in range(1, kills + 1):
            with start():
                _wait_until(connection, f"({_COMMITTED}) >= {jobs * kill // (kills + 1)}")
        with start():
            _wait_until(connection, f"({unfinished}) = 0")
        committed, changed = _value(connection, f"({_COMMITTED})"), _value(connection, f"({_CHANGED})")
    return Effects(jobs, kills, committed - changed, jobs - changed)


def _wait_until(connection: psycopg.Connection, condition: str) -> None:
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while not _value(connection, condition):
        if time.monotonic() > deadline:
            raise MeasurementFailed(f"waited {_TIMEOUT_SECONDS:.0f} s for {condition}")
        time.sleep(_LOOK_SECONDS)


def _value(connection: psycopg.Connection, expression: str) -> int:
    row = connection.execute(f"SELECT {expression}".encode()).fetchone()
    assert row is not None
    return int(row[0])
