"""Insert: jobs become rows in the caller's transaction, and sleeping relays are notified."""

from collections.abc import Mapping
from itertools import islice
from typing import Literal, TypeAlias
from uuid import UUID

import msgspec
from sqlalchemy import Connection, Insert, event
from sqlalchemy.engine import ExceptionContext, ExecutionContext

from outboxq.database.errors import explain_missing_tables
from outboxq.new_job import JobKeys, NewJob, UniqueJob, has_unique_key, with_answer
from outboxq.outbox.stored_job import dump, fold_chain
from outboxq.outbox.unique import insert_unique
from outboxq.statements.callback_batches import open_batch
from outboxq.statements.enqueue import JOBS_PER_INSERT, insert_jobs
from outboxq.statements.wake import ALL_QUEUES, NOTIFY, NOTIFY_AS_BEFORE, SILENCE, channel_name
from outboxq.tables import job, mapped_schema

# The trigger that wakes relays takes a lock for each queue, and a server has room for 64 locks per transaction by
# default. If jobs are in more queues, one notification wakes all relays.
QUEUES_ANNOUNCED = 64
# The relays that new jobs wake.
Wakes: TypeAlias = Literal["by queue", "all", "none"]


def insert_all(connection: Connection, jobs: Mapping[str, NewJob], *, wakes: Wakes) -> None:
    """Insert jobs, given by their ids, in the given order; those with unique keys come last.

    Args:
        wakes: "by queue" wakes the sleeping relays of the jobs' queues; "all" wakes every relay, and takes no locks;
            with "none" relays find the jobs when they poll.
    """
    # If an INSERT fails, the rollback also undoes the setting.
    was = None if wakes == "by queue" else connection.execute(SILENCE).scalar_one()
    unique: dict[str, UniqueJob] = {}
    # A list: for plain jobs, which are all checked, it takes half the time of a generator.
    if [new for new in jobs.values() if new.keys is not None or new.followers]:
        jobs = _without_callbacks(connection, jobs)
        unique = {job_id: with_answer(new) for job_id, new in jobs.items() if has_unique_key(new)}
        jobs = {job_id: new for job_id, new in jobs.items() if job_id not in unique}
    rest = iter(jobs.items())
    while some := dict(islice(rest, JOBS_PER_INSERT)):
        connection.execute(*insert_jobs(some))
    if unique:
        # Last: from here on, other producers of these keys wait for this transaction.
        insert_unique(connection, unique)
    if was is not None:
        connection.execute(NOTIFY_AS_BEFORE, {"was": was})
    if wakes == "all" and was != "off":
        connection.execute(NOTIFY, {"channel": channel_name(mapped_schema(connection)), "payload": ALL_QUEUES})


def _without_callbacks(connection: Connection, jobs: Mapping[str, NewJob]) -> Mapping[str, NewJob]:
    """Insert a batch for each of these jobs that is the callback of a new batch, and return the other jobs.

    The row of the batch stores the callback, which is added when the batch has ended. A returned job stores the jobs
    that follow it (its chain) in one of its headers.
    """
    others: dict[str, NewJob] = {}
    for job_id, new in jobs.items():
        keys = new.keys
        if isinstance(keys, JobKeys) and keys.opens_batch:
            parent_id = None if keys.batch is None else UUID(keys.batch)
            callback = msgspec.json.encode(dump(new)).decode()
            # Inserted before its members, in their transaction, so that they are never seen without it.
            connection.execute(*open_batch(UUID(job_id), callback, parent_id))
        else:
            others[job_id] = fold_chain(new)
    return others


def queues_of(jobs: Mapping[str, NewJob]) -> set[str]:
    """Return the names of the queues of new jobs."""
    return {new.envelope.queue for new in jobs.values()}


def explain_errors_of(connection: Connection) -> None:
    """Make INSERTs of jobs raise `SchemaError` from now on if tables are missing, on all connections of this engine."""
    # The listener is on the dialect, because engine.execution_options() makes short-lived engines that share it.
    if not event.contains(connection.dialect, "handle_error", _explain_missing_tables):
        event.listen(connection.dialect, "handle_error", _explain_missing_tables)


def _explain_missing_tables(context: ExceptionContext) -> None:
    missing = explain_missing_tables(context.original_exception)
    if missing is not None and _inserts_jobs(context.execution_context):
        raise missing from context.original_exception


def _inserts_jobs(context: ExecutionContext | None) -> bool:
    statement = context.compiled.statement if context is not None and context.compiled is not None else None
    return isinstance(statement, Insert) and statement.table is job
