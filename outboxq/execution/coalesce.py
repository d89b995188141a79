"""Coalesce: before a claimed job's handler runs, the waiting jobs with its key are merged into it.

In transaction mode the waiting jobs are deleted before the claim's savepoints, so a rollback of the claim restores
them. Under a lease this is a separate transaction, in which the leased row takes over the newest arguments. If the
relay dies before this transaction, the waiting jobs remain; if it dies later, the row runs again with the newest
arguments.

Two runs of a key may overlap, because two slots may claim two of its jobs at the same moment. Only a group prevents
that.

A job with `every` runs at most once in each period of that length (a window) for its key. This is decided before jobs
are merged. The first job that claims the present window owns the window and runs, and may run in it again if it fails,
is put off or comes back from a dead relay. In transaction mode a rollback of the claim also frees the window; under a
lease the window is committed with the id of the job.

A claimed job that does not own its key's window waits for the next one: it is put back unchanged, without a counted
attempt. If a newer job of its key runs or waits, it takes over the newer job's arguments.
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
# The lock may be held by a pruner that deletes old keys, or by a reaper: both need only a moment.
_PATIENCE = "SET LOCAL lock_timeout = '5s'"
_NOT_TAKEN_ALONG = "jobs with the key of a claimed job could not be taken along"
_NO_WINDOWS = "jobs with every= run although their window may be over"


class _Runs:
    """For each key among claimed jobs, the job that runs, with the newest content, and the jobs merged into it.

    Attributes:
        by_key: The job that runs, by its key.
        dropped: Claimed jobs that are merged into a newer job of the same claim.
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
        """Run these claimed jobs by themselves: they were to be merged into newer ones, but were not deleted."""
        for ids in self._others.values():
            ids[:] = [job_id for job_id in ids if job_id not in job_ids]

    def add(self, rows: Iterable[Sequence[object]]) -> int:
        """Record the jobs that a statement has merged, from the rows that it returned; return the number of these jobs.

        If a merged job is newer than the one that runs for its key, the job that runs takes over the newer content.
        """
        count = 0
        for row in rows:
            key, ids, seq, *content = cast("tuple[str, list[UUID], int, *tuple[Any, ...]]", row)
            self._others[key] += ids
            count += len(ids)
            run, newest = self.by_key[key], dict(zip(CONTENT, content, strict=True))
            if added_order(newest["headers"], seq) > run.added_order:
                # The job's `id` and `seq` stay: by these it is found if the answer to COMMIT is lost.
                self.by_key[key] = msgspec.structs.replace(run, **newest)
        return count

    def running(self) -> tuple[Job, ...]:
        """Return the jobs that run, with the newest content of their keys, in the order in which they were claimed."""
        newest = {job.id: job for job in self.by_key.values()}
        others = set(chain.from_iterable(self._others.values()))
        return tuple(newest.get(job.id, job) for job in self.jobs if job.id not in others)

    def stands_for(self) -> dict[UUID, tuple[UUID, ...]]:
        """Return, by the id of a job that runs, the ids of the jobs merged into it."""
        return {self.by_key[key].id: tuple(ids) for key, ids in self._others.items() if ids}

    def events(self) -> tuple[JobsCoalesced, ...]:
        """Return one event for each job into which others were merged, to publish after COMMIT."""
        return tuple(JobsCoalesced(self.by_key[key], len(ids)) for key, ids in self._others.items() if ids)


def coalesce(connection: Connection, batch: BatchState, schema: str) -> None:
    """Merge waiting jobs into the batch's jobs of the same coalescing keys, which take over the newest content.

    A job with `every` does not run if another job has already run in the present period of its key; in transaction mode
    COMMIT then puts it back.
    """
    transaction = batch.transaction
    if transaction is None:
        _coalesce_leased(connection, batch, schema)
        return
    # The savepoints are set again after jobs were put back or deleted.
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
    # If this fails, the remaining jobs run by themselves.
    with _or_back(connection, transaction.reset(), _NOT_TAKEN_ALONG):
        while runs.add(run_script(connection, *script)) == TAKEN_AT_ONCE:
            pass
    newest = {job.id: job for job in runs.running()}
    batch.jobs = tuple(newest.get(job.id, job) for job in batch.jobs)
    batch.decided.update({job.id: SettledByClaim() for job in runs.dropped})
    batch.stands_for = runs.stands_for()
    batch.of_claim += runs.events()


def _coalesce_leased(connection: Connection, batch: BatchState, schema: str) -> None:
    """Merge waiting jobs into leased jobs that have the same keys, and commit; the batch keeps only the jobs that run.

    First, in a separate transaction, jobs with `every` are put back if another job of their key owns the present
    window.
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
    # If that succeeded, no job is left.
    runs.keep({job.id for job in runs.dropped})
    batch.jobs = runs.running()
    batch.stands_for = runs.stands_for()
    batch.of_claim += runs.events()


def _take_along_leased(connection: Connection, runs: _Runs, schema: str) -> int:
    script = Script().add("settings", UNTIMED, READABLE_DATES)
    if runs.dropped:
        # These jobs were committed before the claim, and the run begins after it. Locked ones are left, and run alone.
        script.add("dropped", finish_leased(schema, runs.dropped, free=True))
    script.add("taken along", *take_along_leased(schema, runs.by_key.values())).add("settings", "COMMIT")
    with _transaction(connection):
        answer = script.send(connection)
        if answer.error is not None:
            raise answer.error
    runs.dropped = []
    # Jobs that are locked, or belong to another relay by now.
    runs.keep({job_id for job_id, _ in answer.rows.get("dropped", ())})
    return runs.add(answer.rows["taken along"])


def _put_off(
    connection: Connection, throttled: dict[str, tuple[int, list[Job]]], settings: tuple[str, ...], schema: str
) -> list[Job]:
    """Try to take the present window of each key; put back the jobs of keys whose window another job owns.

    Return the jobs that were put back: they wait until the next window.

    Args:
        throttled: By key, the length of its window in microseconds, and the claimed jobs.
        settings: Statements that are sent first.
    """
    wanted = [WantedWindow(key, jobs[-1].id, every) for key, (every, jobs) in throttled.items()]
    claimed = [job.id for _, jobs in throttled.values() for job in jobs]
    put_off: list[Job] = []
    for row in run_script(connection, *settings, take_windows(schema, wanted, claimed)):
        key, until, place, *content = cast("tuple[str, datetime, list[int] | None, *tuple[Any, ...]]", row)
        newest = dict(zip(("created_at", "args", "headers", "max_attempts"), content, strict=True))
        for job in throttled[key][1]:
            is_older = place is not None and job.added_order < tuple(place)
            # If the lease was lost, this changes nothing: another relay has the job.
            connection.execute(put_back_until(msgspec.structs.replace(job, **newest) if is_older else job, until))
            put_off.append(job)
    return put_off


def _throttled(jobs: Iterable[Job]) -> dict[str, tuple[int, list[Job]]]:
    """Return the keys that run at most once in a window (`every`), each with its window's length and its jobs.

    The length is in microseconds; the newest job comes last. A key is left out if one of its claimed jobs has no
    `every`: this job runs at once, and the others are merged into it.
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
    """Return the length of a job's window (`every`) in microseconds; None if it has none, or one out of range."""
    given = number_in(job.headers, EVERY_HEADER)
    return given if given is not None and 0 < given <= _MOST_MICROSECONDS else None


def _transaction(connection: Connection) -> AbstractContextManager[object]:
    """Begin SQLAlchemy's transaction, unless one is open, so that users' listeners can set it up."""
    return nullcontext() if connection.in_transaction() else connection.begin()


@contextmanager
def _or_back(connection: Connection, back: str, failed: str) -> Iterator[None]:
    """If the server refuses a statement in the block, execute `back` to undo the block and log `failed`.

    The jobs still run. The usual cause is a row that cannot be read or deleted.
    """
    try:
        yield
    except (psycopg.Error, DBAPIError) as error:
        if is_lost(connection):
            raise
        logger.warning("%s: %s", failed, describe_error(error))
        run_script(connection, back)
