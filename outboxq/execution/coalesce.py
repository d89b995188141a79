"""Coalesce: before the handlers of a claim run, the waiting jobs of their keys are taken along.

In transaction mode they are deleted before the claim's savepoints, so that they go and come back with the claim. Under
a lease that is a transaction of its own, in which the leased row takes over the newest arguments: if the relay dies
before it, they wait on, and if it dies after it, the row runs again with the newest arguments.

Two runs of a key may overlap, as two slots may claim two of its jobs in the same moment. Only a group excludes that.

Before that, windows: a claimed job with `every` runs if its key's window is its own; else it waits for the next one. A
window belongs to one job, which may run in it again if it fails, is put off or comes back from a relay that died. In
transaction mode the window goes and comes back with the claim; under a lease it is committed with the id of the job,
before the others of the key are taken along.

A job that waits for the next window is put back as it was, its attempt uncounted. A later run of its key takes it
along, as any other. If a newer job of its key runs or waits, it takes over that one's arguments.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime
from itertools import chain
from operator import attrgetter
from typing import Any, cast
from uuid import UUID

import msgspec
import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from outboxq.database.driver import Script, is_lost, run_script
from outboxq.database.errors import describe_error
from outboxq.events import JobsCoalesced
from outboxq.execution.batch_state import BatchState
from outboxq.execution.runtime import SettledByClaim
from outboxq.job import EVERY_HEADER, Job, added_order, number_in
from outboxq.outcomes import MAX_DELAY
from outboxq.statements.coalesce import CONTENT, TAKEN_AT_ONCE, take_along, take_along_leased
from outboxq.statements.lease_mode import finish_leased
from outboxq.statements.settle import put_back_until
from outboxq.statements.transaction import READABLE_DATES, TIMED_AGAIN, UNTIMED, local_timeouts
from outboxq.statements.windows import MAX_KEY_BYTES, WantedWindow, take_windows

logger = logging.getLogger("outboxq.relay")

_place = attrgetter("added_order")
_MOST_MICROSECONDS = MAX_DELAY.days * 86_400_000_000
# For a pruner that deletes old keys, or a reaper: both are done in a moment.
_PATIENCE = "SET LOCAL lock_timeout = '5s'"
_NOT_TAKEN_ALONG = "jobs with the key of a claimed job could not be taken along"
_NO_WINDOWS = "jobs with every= run although their window may be over"


class _Runs:
    """The job that runs for each key among claimed jobs, with the newest content; and the jobs that it runs for.

    Attributes:
        dropped: Claimed jobs for which a newer one of the same claim runs.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        keyed = [(job.unique_key, job) for job in sorted(jobs, key=_place) if job.unique_key is not None]
        self.by_key = dict(keyed)
        self.dropped = [job for key, job in keyed if job is not self.by_key[key]]
        self._others: dict[str, list[UUID]] = {key: [] for key in self.by_key}
        for key, job in keyed:
            if job is not self.by_key[key]:
                self._others[key].append(job.id)

    def keep(self, job_ids: set[UUID]) -> None:
        """Run these jobs, which were to be dropped, by themselves."""
        for ids in self._others.values():
            ids[:] = [job_id for job_id in ids if job_id not in job_ids]

    def add(self, rows: Iterable[Sequence[object]]) -> int:
        """Add the jobs that a statement has taken along; return their number."""
        count = 0
        for row in rows:
            key, ids, seq, *content = cast("tuple[str, list[UUID], int, *tuple[Any, ...]]", row)
            self._others[key] += ids
            count += len(ids)
            run, newest = self.by_key[key], dict(zip(CONTENT, content, strict=True))
            if added_order(newest["headers"], seq) > run.added_order:
                # Its `id` and `seq` stay: they find it again if the answer to COMMIT is lost.
                self.by_key[key] = msgspec.structs.replace(run, **newest)
        return count

    def running(self) -> tuple[Job, ...]:
        """Return the jobs that run, in the order in which they were claimed."""
        newest = {job.id: job for job in self.by_key.values()}
        others = set(chain.from_iterable(self._others.values()))
        return tuple(newest.get(job.id, job) for job in self.jobs if job.id not in others)

    def stands_for(self) -> dict[UUID, tuple[UUID, ...]]:
        """Return the jobs for which others run, by the id of the job that runs."""
        return {self.by_key[key].id: tuple(ids) for key, ids in self._others.items() if ids}

    def events(self) -> tuple[JobsCoalesced, ...]:
        """Return the events, for after COMMIT."""
        return tuple(JobsCoalesced(self.by_key[key], len(ids)) for key, ids in self._others.items() if ids)


def coalesce(connection: Connection, batch: BatchState, schema: str) -> None:
    """Take along the jobs that wait for the keys of a batch.

    In transaction mode COMMIT puts back jobs whose windows others have.
    """
    transaction = batch.transaction
    if transaction is None:
        _coalesce_leased(connection, batch, schema)
        return
    # The savepoints are set again, after jobs were put back or deleted.
    settled = (*(local_timeouts(batch.running.timeout_seconds) or (TIMED_AGAIN,)), transaction.renew())
    throttled = _throttled(batch.jobs)
    if throttled:
        with _or_back(connection, transaction.reset(), _NO_WINDOWS):
            put_off = _put_off(connection, throttled, (UNTIMED,), schema)
            run_script(connection, *settled)
            batch.decided.update({job.id: SettledByClaim() for job in put_off})
    runs = _Runs([job for job in batch.jobs if job.id not in batch.decided])
    if not runs.by_key:
        return
    script = (UNTIMED, *take_along(schema, list(runs.by_key)), *settled)
    # If it fails, jobs that are left run by themselves.
    with _or_back(connection, transaction.reset(), _NOT_TAKEN_ALONG):
        while runs.add(run_script(connection, *script)) == TAKEN_AT_ONCE:
            pass
    newest = {job.id: job for job in runs.running()}
    batch.jobs = tuple(newest.get(job.id, job) for job in batch.jobs)
    batch.decided.update({job.id: SettledByClaim() for job in runs.dropped})
    batch.stands_for = runs.stands_for()
    batch.of_claim += runs.events()


def _coalesce_leased(connection: Connection, batch: BatchState, schema: str) -> None:
    """Take along the jobs that wait for the keys of leased jobs, and commit; the batch keeps the jobs that run.

    Before that, jobs whose windows others have are put back, and that is committed.
    """
    throttled = _throttled(batch.jobs)
    if throttled:
        with _or_back(connection, "ROLLBACK", _NO_WINDOWS):
            with _transaction(connection):
                put_off = _put_off(connection, throttled, (UNTIMED, _PATIENCE, READABLE_DATES), schema)
                run_script(connection, "COMMIT")
            gone = {job.id for job in put_off}
            batch.jobs = tuple(job for job in batch.jobs if job.id not in gone)
    runs = _Runs(batch.jobs)
    if not runs.by_key:
        return
    with _or_back(connection, "ROLLBACK", _NOT_TAKEN_ALONG):
        while _take_along_leased(connection, runs, schema) == TAKEN_AT_ONCE:
            pass
    # If that succeeded, none is left.
    runs.keep({job.id for job in runs.dropped})
    batch.jobs = runs.running()
    batch.stands_for = runs.stands_for()
    batch.of_claim += runs.events()


def _take_along_leased(connection: Connection, runs: _Runs, schema: str) -> int:
    script = Script().add("settings", UNTIMED, READABLE_DATES)
    if runs.dropped:
        # They were committed before their claim, and the run begins after it. Locked ones are left, and run alone.
        script.add("dropped", finish_leased(schema, runs.dropped, free=True))
    script.add("taken along", *take_along_leased(schema, runs.by_key.values())).add("settings", "COMMIT")
    with _transaction(connection):
        answer = script.send(connection)
        if answer.error is not None:
            raise answer.error
    runs.dropped = []
    # Jobs that are locked, or another relay's by now.
    runs.keep({job_id for job_id, _ in answer.rows.get("dropped", ())})
    return runs.add(answer.rows["taken along"])


def _put_off(
    connection: Connection, throttled: dict[str, tuple[int, list[Job]]], settings: tuple[str, ...], schema: str
) -> list[Job]:
    """Take the windows of these keys; put back the jobs of keys without one, and return them."""
    wanted = [WantedWindow(key, jobs[-1].id, every) for key, (every, jobs) in throttled.items()]
    claimed = [job.id for _, jobs in throttled.values() for job in jobs]
    put_off: list[Job] = []
    for row in run_script(connection, *settings, take_windows(schema, wanted, claimed)):
        key, until, place, *content = cast("tuple[str, datetime, list[int] | None, *tuple[Any, ...]]", row)
        newest = dict(zip(("created_at", "args", "headers", "max_attempts"), content, strict=True))
        for job in throttled[key][1]:
            is_older = place is not None and job.added_order < tuple(place)
            # If the lease was lost, this writes nothing: another relay has the job.
            connection.execute(put_back_until(msgspec.structs.replace(job, **newest) if is_older else job, until))
            put_off.append(job)
    return put_off


def _throttled(jobs: Iterable[Job]) -> dict[str, tuple[int, list[Job]]]:
    """Find the jobs of each key that runs once in a window, the newest last, with its microseconds.

    A claimed job of the key without `every` runs at once, also for the others.
    """
    found: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=_place):
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


def _transaction(connection: Connection) -> AbstractContextManager[object]:
    """Begin a transaction by SQLAlchemy, unless one is open: users' listeners set up each transaction."""
    return nullcontext() if connection.in_transaction() else connection.begin()


@contextmanager
def _or_back(connection: Connection, back: str, failed: str) -> Iterator[None]:
    """Go back by the statements `back`, and log `failed`, if the server refuses something: the jobs run all the same.

    Usually that is a row which cannot be read or deleted.
    """
    try:
        yield
    except (psycopg.Error, DBAPIError) as error:
        if is_lost(connection):
            raise
        logger.warning("%s: %s", failed, describe_error(error))
        run_script(connection, back)
