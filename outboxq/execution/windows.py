"""Windows: a claimed job with `every` runs if its key's window is its own; else it waits for the next one.

A window belongs to one job, which may run in it again if it fails, is put off or comes back from a relay that died. In
transaction mode the window goes and comes back with the claim; under a lease it is committed with the id of the job,
before the others of the key are taken along.

A job that waits for the next window is put back as it was, its attempt uncounted. A later run of its key takes it
along, as any other. If a newer job of its key runs or waits, it takes over that one's arguments.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from datetime import datetime
from operator import attrgetter
from typing import Any, cast

import msgspec
import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from outboxq.database.driver import is_lost, run_script
from outboxq.database.errors import describe_error
from outboxq.execution.batch_state import BatchState
from outboxq.execution.claim import ClaimTransaction
from outboxq.execution.lease_mode import LeasedBatch
from outboxq.execution.runtime import SettledByClaim
from outboxq.job import EVERY_HEADER, Job, number_in
from outboxq.outcomes import MAX_DELAY
from outboxq.statements.settle import put_back_until
from outboxq.statements.transaction import READABLE_DATES, TIMED_AGAIN, UNTIMED, local_timeouts
from outboxq.statements.windows import MAX_KEY_BYTES, WantedWindow, take_windows

logger = logging.getLogger("outboxq.relay")

_MOST_MICROSECONDS = MAX_DELAY.days * 86_400_000_000
# For a pruner that deletes old keys, or a reaper: both are done in a moment.
_PATIENCE = "SET LOCAL lock_timeout = '5s'"


def keep_windows(connection: Connection, batch: BatchState, transaction: ClaimTransaction, schema: str) -> None:
    """Take the windows of a batch in transaction mode; its COMMIT puts back jobs whose windows others have."""
    throttled = _throttled(batch.jobs)
    if not throttled:
        return
    settings = local_timeouts(batch.running.timeout_seconds) or (TIMED_AGAIN,)
    try:
        put_off = _put_off(connection, throttled, (UNTIMED,), schema)
        # The savepoints are set again, after jobs were put back.
        run_script(connection, *settings, transaction.renew())
    except (psycopg.Error, DBAPIError) as error:
        if is_lost(connection):
            raise
        _warn(error)
        run_script(connection, transaction.reset())
    else:
        batch.decided.update({job.id: SettledByClaim() for job in put_off})


def keep_windows_leased(connection: Connection, leased: LeasedBatch, schema: str) -> None:
    """Take the windows of leased jobs, put back those whose windows others have, and commit that."""
    throttled = _throttled(leased.jobs)
    if not throttled:
        return
    try:
        # Users' listeners set up each transaction.
        with nullcontext() if connection.in_transaction() else connection.begin():
            put_off = _put_off(connection, throttled, (UNTIMED, _PATIENCE, READABLE_DATES), schema)
            run_script(connection, "COMMIT")
    except (psycopg.Error, DBAPIError) as error:
        if is_lost(connection):
            raise
        _warn(error)
        run_script(connection, "ROLLBACK")
    else:
        gone = {job.id for job in put_off}
        leased.coalesce(tuple(job for job in leased.jobs if job.id not in gone))


def _put_off(
    connection: Connection, throttled: dict[str, tuple[int, list[Job]]], settings: tuple[str, ...], schema: str
) -> list[Job]:
    """Take the windows of these keys; put back the jobs of keys without one, and return them."""
    wanted = [WantedWindow(key, jobs[-1].id, every) for key, (every, jobs) in throttled.items()]
    claimed = [job.id for _, jobs in throttled.values() for job in jobs]
    left_out = run_script(connection, *settings, take_windows(schema, wanted, claimed))
    put_off = [
        (job, until) for row in left_out for job, until in _with_newest(throttled[cast("str", row[0])][1], row[1:])
    ]
    for job, until in put_off:
        # If the lease was lost, this writes nothing: another relay has the job.
        connection.execute(put_back_until(job, until))
    return [job for job, _ in put_off]


def _with_newest(jobs: Iterable[Job], row: tuple[Any, ...]) -> Iterator[tuple[Job, datetime]]:
    """Yield jobs of one key with the content of a newer one, if any, and the time until which they wait."""
    until, place, created_at, args, headers, max_attempts = row
    for job in jobs:
        is_older = place is not None and job.added_order < tuple(place)
        newest = {"created_at": created_at, "args": args, "headers": headers, "max_attempts": max_attempts}
        yield (msgspec.structs.replace(job, **newest) if is_older else job), until


def _throttled(jobs: Iterable[Job]) -> dict[str, tuple[int, list[Job]]]:
    """Find the jobs of each key that runs once in a window, the newest last, with its microseconds.

    A claimed job of the key without `every` runs at once, also for the others.
    """
    found: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=attrgetter("added_order")):
        if job.unique_key is not None and job.group_key is None and len(job.unique_key.encode()) <= MAX_KEY_BYTES:
            found.setdefault(job.unique_key, []).append(job)
    throttled = {}
    for key, of_key in found.items():
        lengths = [every for job in of_key if (every := _every(job)) is not None]
        if len(lengths) == len(of_key):
            throttled[key] = (lengths[-1], of_key)
    return throttled


def _every(job: Job) -> int | None:
    """The length of a job's windows in microseconds; None if it has none, or one that our producers cannot set."""
    given = number_in(job.headers, EVERY_HEADER)
    return given if given is not None and 0 < given <= _MOST_MICROSECONDS else None


def _warn(error: psycopg.Error | DBAPIError) -> None:
    logger.warning("jobs with every= run although their window may be over: %s", describe_error(error))
