"""Relays: those that live, their queues, and their long-running jobs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeAlias
from uuid import UUID

import msgspec
from sqlalchemy import Connection

from outboxq.database.errors import missing_tables_explained
from outboxq.outbox.progress import Progress, progress_of
from outboxq.statements import relays as statements
from outboxq.tables import mapped_schema


@dataclass(frozen=True, slots=True)
class ConnectionWait:
    """The wait of a job in lease mode for a connection.

    Args:
        calls: How many jobs of its relay wait for one, this one among them.
        connections: How many connections the jobs in the slots of its queue share.
    """

    calls: int
    connections: int


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that has run for longer than a second.

    Args:
        pid: The backend of its transaction, if it has one by now.
        progress: How far its handler is, from 0 to 1, by the last note of its `ctx.progress`; `note` is the text of it.
        waits: Its wait for a connection, if it is in lease mode and all connections of its queue were used.
    """

    id: UUID
    queue: str
    kind: str
    attempt: int
    seconds: float
    pid: int | None
    progress: float | None = None
    note: str | None = None
    waits: ConnectionWait | None = None


@dataclass(frozen=True, slots=True)
class RelaySummary:
    """A relay.

    Args:
        state: serving, draining, stopping; or dead, if it has written nothing for a minute.
        busy: How many of its slots had claimed jobs when it was last seen.
        schema_step: The step of the tables when it started.
        running: The jobs that had run for longer than a second then, 50 at most.
    """

    id: UUID
    state: str
    host: str
    pid: int
    queues: tuple[str, ...]
    slots: int
    busy: int
    listens: bool
    version: str
    schema_step: int
    started_at: datetime
    seen_at: datetime
    kinds: tuple[str, ...]
    running: tuple[RunningJob, ...]

    @property
    def free(self) -> int:
        """The number of its slots that were free."""
        return max(0, self.slots - self.busy)

    @property
    def waiting(self) -> int:
        """The number of its leased jobs that waited for a connection, if one had run for longer than a second."""
        return waiting_calls(self.running)

    @property
    def longest(self) -> str | None:
        """The kind of the job that runs longest, and since when."""
        job = max(self.running, key=lambda each: each.seconds, default=None)
        return None if job is None else f"{job.kind} for {job.seconds:.0f} s"


_Running: TypeAlias = tuple[RunningJob, ...]


def decode_running(running: str) -> _Running:
    """The jobs that `relay_status.running` names; none if it cannot be read, such as one of a newer relay."""
    try:
        return msgspec.json.decode(running, type=_Running)
    except (msgspec.MsgspecError, RecursionError):
        return ()


def waiting_calls(running: Sequence[RunningJob]) -> int:
    """The number of calls of a relay that wait for a connection, by its running jobs."""
    return max((job.waits.calls for job in running if job.waits is not None), default=0)


def _with_progress(job: RunningJob, noted: Progress | None) -> RunningJob:
    return job if noted is None else replace(job, progress=noted.fraction, note=noted.note)


def kinds_nobody_knows(connection: Connection, queue: str, kinds: Sequence[str]) -> tuple[str, ...]:
    """The kinds that no living relay of the queue knows; none if no relay serves it, or relays cannot be seen."""
    schema = mapped_schema(connection)
    if not kinds or not connection.execute(statements.may_read_relays(schema)).scalar_one():
        return ()
    found = connection.execute(statements.kinds_at_relays(schema, [(queue, kind) for kind in kinds]))
    return tuple(row.kind for row in found if row.serving and not row.knowing)


def list_relays(connection: Connection, *, limit: int = 50) -> list[RelaySummary]:
    """The relays that were seen within a day, in the order of their starts. One that ended in order is gone.

    If there are more than `limit`, those that were seen last: the living are among them, also if many have died.

    Raises:
        SchemaError: the table of relays is missing.
    """
    with missing_tables_explained():
        rows = connection.execute(statements.select_relays(limit)).all()
    running = {row.id: decode_running(row.running) for row in rows}
    noted = progress_of(connection, [job.id for jobs in running.values() for job in jobs])
    return [
        RelaySummary(
            row.id,
            "dead" if row.seen_seconds > statements.DEAD_SECONDS else row.state,
            row.host,
            row.pid,
            tuple(row.queues),
            row.slots,
            row.busy,
            row.listens,
            row.version,
            row.schema_step,
            row.started_at,
            row.seen_at,
            tuple(row.kinds),
            tuple(_with_progress(job, noted.get(job.id)) for job in running[row.id]),
        )
        for row in sorted(rows, key=lambda row: (row.started_at, row.id))
    ]
