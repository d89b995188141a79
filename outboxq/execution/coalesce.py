"""Coalesce: before the handlers of a claim run, the waiting jobs of their keys are taken along.

In transaction mode they are deleted before the claim's savepoints, so that they go and come back with the claim. Under
a lease that is a transaction of its own, in which the leased row takes over the newest arguments: if the relay dies
before it, they wait on, and if it dies after it, the row runs again with the newest arguments.

Two runs of a key may overlap, as two slots may claim two of its jobs in the same moment. Only a group excludes that. Of
jobs with `every`, those whose window another job has are put back first (`windows`).
"""

import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, cast
from uuid import UUID

import msgspec
import psycopg
from sqlalchemy import Connection

from outboxq.database.driver import Script, is_lost, run_script
from outboxq.database.errors import describe_error
from outboxq.events import JobsCoalesced
from outboxq.execution.batch_state import BatchState
from outboxq.execution.lease_mode import LeasedBatch
from outboxq.execution.runtime import SettledByClaim
from outboxq.execution.windows import keep_windows, keep_windows_leased
from outboxq.job import Job, added_order
from outboxq.statements.coalesce import CONTENT, TAKEN_AT_ONCE, take_along, take_along_leased
from outboxq.statements.lease_mode import finish_leased
from outboxq.statements.transaction import READABLE_DATES, TIMED_AGAIN, UNTIMED, local_timeouts

logger = logging.getLogger("outboxq.relay")

_place = attrgetter("added_order")


@dataclass(slots=True)
class Runs:
    """The job that runs for each key among claimed jobs, with the newest content; and the jobs that it runs for.

    Attributes:
        dropped: Claimed jobs for which a newer one of the same claim runs.
    """

    jobs: tuple[Job, ...]
    dropped: tuple[Job, ...] = field(init=False)
    _runs: dict[str, Job] = field(init=False)
    _others: dict[str, list[UUID]] = field(init=False)
    _kept: set[UUID] = field(default_factory=set)

    def __post_init__(self) -> None:
        keyed = sorted((job for job in self.jobs if job.unique_key is not None), key=_place)
        self._runs = {job.unique_key: job for job in keyed if job.unique_key is not None}
        self._others = {key: [] for key in self._runs}
        running = {job.id for job in self._runs.values()}
        self.dropped = tuple(job for job in keyed if job.id not in running)
        for job in self.dropped:
            self._others[cast("str", job.unique_key)].append(job.id)

    @property
    def keys(self) -> list[str]:
        return list(self._runs)

    @property
    def running_with_keys(self) -> list[Job]:
        return list(self._runs.values())

    def keep(self, job_ids: set[UUID]) -> None:
        """Run these jobs, which were to be dropped, by themselves."""
        self._kept |= job_ids
        for ids in self._others.values():
            ids[:] = [job_id for job_id in ids if job_id not in job_ids]

    def add(self, rows: Iterable[Sequence[object]]) -> int:
        """Add the jobs that a statement has taken along; return their number."""
        count = 0
        for row in rows:
            key, ids, seq, *content = cast("tuple[str, list[UUID], int, *tuple[Any, ...]]", row)
            self._others[key] += ids
            count += len(ids)
            run, newest = self._runs[key], dict(zip(CONTENT, content, strict=True))
            if added_order(newest["headers"], seq) > run.added_order:
                # Its `id` and `seq` stay: they find it again if the answer to COMMIT is lost.
                self._runs[key] = msgspec.structs.replace(run, **newest)
        return count

    def running(self) -> tuple[Job, ...]:
        """Return the jobs that run, in the order in which they were claimed."""
        by_id = {job.id: job for job in self._runs.values()}
        alone = {job.id for job in self.jobs if job.unique_key is None} | self._kept
        return tuple(by_id.get(job.id, job) for job in self.jobs if job.id in by_id or job.id in alone)

    def stands_for(self) -> dict[UUID, tuple[UUID, ...]]:
        """Return the jobs for which others run, by the id of the job that runs."""
        return {self._runs[key].id: tuple(ids) for key, ids in self._others.items() if ids}

    def events(self) -> tuple[JobsCoalesced, ...]:
        """Return the events, for after COMMIT."""
        return tuple(JobsCoalesced(self._runs[key], len(ids)) for key, ids in self._others.items() if ids)


def coalesce(connection: Connection, batch: BatchState, schema: str) -> None:
    """Take along the jobs that wait for a batch's keys in transaction mode; send nothing if no job has a key."""
    transaction = batch.transaction
    if transaction is None or not has_keys(batch.jobs):
        return
    keep_windows(connection, batch, transaction, schema)
    runs = Runs(tuple(job for job in batch.jobs if job.id not in batch.decided))
    if not runs.keys:
        return
    settings = local_timeouts(batch.running.timeout_seconds) or (TIMED_AGAIN,)
    # The savepoints are set again, after the deletes.
    script = (UNTIMED, *take_along(schema, runs.keys), *settings, transaction.renew())
    try:
        while runs.add(run_script(connection, *script)) == TAKEN_AT_ONCE:
            pass
    except psycopg.Error as error:
        if is_lost(connection):
            raise
        # Usually a row that cannot be read or deleted: jobs that are left run by themselves.
        _warn(error)
        run_script(connection, transaction.reset())
    newest = {job.id: job for job in runs.running()}
    batch.jobs = tuple(newest.get(job.id, job) for job in batch.jobs)
    batch.decided.update({job.id: SettledByClaim() for job in runs.dropped})
    batch.stands_for = runs.stands_for()


def coalesce_leased(connection: Connection, leased: LeasedBatch, schema: str) -> tuple[JobsCoalesced, ...]:
    """Take along the jobs that wait for the keys of leased jobs, commit, and return the events."""
    if not has_keys(leased.jobs):
        return ()
    keep_windows_leased(connection, leased, schema)
    if not has_keys(leased.jobs):
        return ()
    runs = Runs(leased.jobs)
    try:
        while _take_along_leased(connection, runs, schema) == TAKEN_AT_ONCE:
            pass
    except psycopg.Error as error:
        if is_lost(connection):
            raise
        _warn(error)
        run_script(connection, "ROLLBACK")
        runs.keep({job.id for job in runs.dropped})
    leased.coalesce(runs.running())
    leased.stands_for = runs.stands_for()
    return runs.events()


def _take_along_leased(connection: Connection, runs: Runs, schema: str) -> int:
    dropped = runs.dropped
    script = Script().add("settings", UNTIMED, READABLE_DATES)
    if dropped:
        # They were committed before their claim, and the run begins after it. Locked ones are left, and run alone.
        script.add("dropped", finish_leased(schema, dropped, free=True))
    script.add("taken along", *take_along_leased(schema, runs.running_with_keys)).add("settings", "COMMIT")
    # Users' listeners set up each transaction.
    with nullcontext() if connection.in_transaction() else connection.begin():
        answer = script.send(connection)
        if answer.error is not None:
            raise answer.error
    runs.dropped = ()
    # Jobs that are locked, or another relay's by now.
    runs.keep({job_id for (job_id,) in answer.rows.get("dropped", ())})
    return runs.add(answer.rows["taken along"])


def has_keys(jobs: Iterable[Job]) -> bool:
    """Return True if one of these jobs has a key to coalesce by."""
    return bool([job for job in jobs if job.unique_key is not None])


def _warn(error: psycopg.Error) -> None:
    logger.warning("jobs with the key of a claimed job could not be taken along: %s", describe_error(error))
