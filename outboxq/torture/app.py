"""The application of the torture test: handlers that record their effect, some after an error, an exit or a deadlock.

A job misbehaves only once. Its misbehaviour is recorded on another connection, so that the record is not rolled back
with the job.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

from outboxq import AsyncBatchContext, AsyncContext, Backoff, BatchContext, BatchItem, Context, DeadLetter, Jobs
from outboxq.job import Job
from outboxq.torture.history import SCHEMA
from outboxq.torture.lanes import LIMITED, coalesce_key, watch
from outboxq.torture.starts import is_first_mark, record_start

MAX_ATTEMPTS = 25
# Quick, and with enough attempts for a job that meets several faults that count.
RETRY = Backoff(max_attempts=MAX_ATTEMPTS, first_seconds=0.05, cap_seconds=1.0)
EXIT_CODE = 86
# The queue of handlers that wait for something outside.
CALL_SECONDS = 0.5
# The length of a call of a batch handler under a lease.
WINDOW_SECONDS = 0.05


_EFFECT = text(
    f"INSERT INTO {SCHEMA}.effect (job_id, attempt, crashes, token, counted, lane, seq, key, number, batch_id) "
    # The row of a leased job still exists, and says under which token the job runs.
    "VALUES (:job_id, :attempt, :crashes, :token, :counted, :lane, :seq, :key, :number, :batch_id)"
)
_TOKEN = text("SELECT lease_token FROM outboxq.job WHERE id = :job_id AND state IN ('leased', 'group_leased')")
_FIRST_TIME = text(f"INSERT INTO {SCHEMA}.misbehaved (job_id) VALUES (:job_id) ON CONFLICT DO NOTHING RETURNING job_id")
_COUNT = text(f"UPDATE {SCHEMA}.counter SET value = value + 1 WHERE id = :id")
_PAUSE = text("SELECT pg_sleep(0.02)")


class Misbehaviour(Exception):
    """Raised by a handler whose job is planned to fail."""


jobs, leased, mixed = Jobs(), Jobs(), Jobs()
# Including the jobs of flow control.
flow = Jobs()
calls = Jobs()
windows = Jobs()


def _record(
    ctx: Context, behaviour: str = "plain", number: int | None = None, unique: str | None = None
) -> DeadLetter | None:
    """Handler: misbehave once if `behaviour` names a misbehaviour, then record the job's effect."""
    return _run(ctx.session, ctx.job, behaviour, number, unique)


async def _record_async(ctx: AsyncContext, behaviour: str = "plain", number: int | None = None) -> DeadLetter | None:
    """Handler: do the same as `_record`, as an async handler."""
    return await ctx.session.run_sync(_run, ctx.job, behaviour, number, None)


@calls.handler(kind="call", queue="torture-call", retry=RETRY, claim="lease")
async def call(ctx: AsyncContext, starts: str, behaviour: str = "plain") -> DeadLetter | None:
    """Handler: record its start, wait without using the session, as if calling a service, then record the effect."""
    record_start(ctx.job, starts)
    await asyncio.sleep(CALL_SECONDS)
    return await ctx.session.run_sync(_run, ctx.job, behaviour, None, None)


record = jobs.handler(kind="record", queue="torture", retry=RETRY)(_record)
record_async = jobs.handler(kind="record_async", queue="torture-async", retry=RETRY)(_record_async)
record_leased = leased.handler(kind="record_leased", queue="torture-lease", retry=RETRY, claim="lease")(_record)
record_leased_async = leased.handler(
    kind="record_leased_async", queue="torture-lease-async", retry=RETRY, claim="lease"
)(_record_async)
mixed.include(jobs)
mixed.include(leased)

group = flow.handler(kind="group", queue="torture-group", retry=RETRY)(_record)
group_async = flow.handler(kind="group_async", queue="torture-group-async", retry=RETRY)(_record_async)
group_leased = flow.handler(kind="group_leased", queue="torture-group-lease", retry=RETRY, claim="lease")(_record)
limit = flow.handler(kind="limit", queue=LIMITED, retry=RETRY)(_record)
coalesce = flow.handler(kind="coalesce", queue="torture-coalesce", retry=RETRY)(_record)
coalesce_leased = flow.handler(kind="coalesce_leased", queue="torture-coalesce-lease", retry=RETRY, claim="lease")(
    _record
)
unique = flow.handler(kind="unique", queue="torture-unique", retry=RETRY)(_record)
unique_leased = flow.handler(kind="unique_leased", queue="torture-unique-lease", retry=RETRY, claim="lease")(_record)
batched = flow.handler(kind="batched", queue="torture-batch", retry=RETRY)(_record)
batched_leased = flow.handler(kind="batched_leased", queue="torture-batch-lease", retry=RETRY, claim="lease")(_record)
flow.include(mixed)
USES = {
    **dict.fromkeys(("group", "group_async", "group_leased"), "group"),
    "limit": "limit",
    **dict.fromkeys(("coalesce", "coalesce_leased"), "coalesce"),
    **dict.fromkeys(("unique", "unique_leased"), "unique"),
    **dict.fromkeys(("batched", "batched_leased"), "batch"),
    **dict.fromkeys(("call", "window", "window_async"), "call"),
}


@dataclass(frozen=True, slots=True)
class Message:
    """The arguments of a job that its handler sends: `starts` is the directory of the files that receive it."""

    starts: str
    behaviour: str = "plain"


def _send(items: Sequence[BatchItem[Message]]) -> list[DeadLetter | None]:
    """Misbehave for each item that says so, then write each job to this process's file, as if to a broker."""
    outcomes: list[DeadLetter | None] = []
    for item in items:
        behaviour = item.args.behaviour
        if behaviour in ("raise", "flush-raise", "exit") and is_first_mark(item.job, item.args.starts):
            if behaviour == "exit":
                os._exit(EXIT_CODE)
            raise Misbehaviour(behaviour)
        outcomes.append(DeadLetter("it was told to give up") if behaviour == "give-up" else None)
        if behaviour != "give-up":
            record_start(item.job, item.args.starts)
    return outcomes


@windows.batch_handler(Message, kind="window", queue="torture-window", retry=RETRY, claim="lease", max_size=20)
def window(ctx: BatchContext, items: Sequence[BatchItem[Message]]) -> list[DeadLetter | None]:
    """Handler: send the messages of a window, which takes a while, as a confirm does."""
    assert len(ctx.jobs) == len(items)
    time.sleep(WINDOW_SECONDS)
    return _send(items)


@windows.batch_handler(Message, kind="window_async", queue="torture-window-async", retry=RETRY, claim="lease")
async def window_async(ctx: AsyncBatchContext, items: Sequence[BatchItem[Message]]) -> list[DeadLetter | None]:
    """Handler: do the same as `window`, as an async handler."""
    assert len(ctx.jobs) == len(items)
    await asyncio.sleep(WINDOW_SECONDS)
    return _send(items)


def _run(session: Session, job: Job, behaviour: str, number: int | None, unique_key: str | None) -> DeadLetter | None:
    """The body of every handler: misbehave if `behaviour` says so, then record the job's effect.

    Return a `DeadLetter` if `behaviour` is `give-up`.
    """
    connection = session.connection()
    watch(connection, job, unique_key)
    token = connection.execute(_TOKEN, {"job_id": job.id}).scalar()
    effect = {
        "job_id": job.id,
        "attempt": job.attempt,
        "crashes": job.crashes,
        "token": token,
        "lane": None if job.group_key is None else f"{job.queue} {job.group_key}",
        "seq": job.seq,
        "key": coalesce_key(job),
        "number": number,
        "batch_id": job.batch_id,
    }
    counts = behaviour.startswith("deadlock")
    if behaviour in ("raise", "flush-raise", "exit") and _is_first_time(connection, job.id):
        if behaviour == "flush-raise":
            connection.execute(_EFFECT, {**effect, "counted": False})
        if behaviour == "exit":
            os._exit(EXIT_CODE)
        raise Misbehaviour(behaviour)
    if counts:
        for number in (0, 1) if behaviour == "deadlock-up" else (1, 0):
            connection.execute(_COUNT, {"id": number})
            connection.execute(_PAUSE)
    connection.execute(_EFFECT, {**effect, "counted": counts})
    return DeadLetter("it was told to give up") if behaviour == "give-up" else None


def _is_first_time(connection: Connection, job_id: UUID) -> bool:
    with connection.engine.begin() as beside:
        return beside.execute(_FIRST_TIME, {"job_id": job_id}).first() is not None
