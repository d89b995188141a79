"""Relays, the processes that run jobs, for operators to list: their states, queues, and long-running jobs."""

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
    """A running job's wait, in lease mode, for one of the database connections of its queue, because all are in use.

    Args:
        calls: The number of jobs of the same relay that wait for a connection, this one included.
        connections: The number of connections that the running jobs of the queue share in this relay.
    """

    calls: int
    connections: int


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that a relay has run for longer than a second, as the relay wrote it into its row of `relay_status`.

    Args:
        pid: The process id of the backend of the job's transaction; None if it has begun none.
        progress: The progress that its handler has last reported with `ctx.progress`, from 0 to 1.
        note: The text of that report.
        waits: The job's wait for a connection, in lease mode; None if it does not wait.
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
    """A relay, as it last described itself in the table `relay_status`.

    Args:
        state: `serving`, `draining`, `stopping`, or `dead` if the relay has written nothing for a minute.
        busy: How many of its slots were running jobs when it last wrote.
        listens: True if the relay listens for notifications.
        schema_step: The migration step of the tables when the relay started.
        seen_at: The time at which the relay last wrote.
        running: The jobs that had run for longer than a second when the relay last wrote, 50 at most.
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
        """The number of the relay's slots that ran no job when it last wrote."""
        return max(0, self.slots - self.busy)

    @property
    def waiting(self) -> int:
        """The number of the relay's jobs in lease mode that waited for a connection when it last wrote.

        0 if none of them had run for longer than a second.
        """
        return waiting_calls(self.running)

    @property
    def longest(self) -> str | None:
        """The kind and the time of the relay's longest-running job, such as `send_mail for 12 s`; None without one."""
        job = max(self.running, key=lambda each: each.seconds, default=None)
        return None if job is None else f"{job.kind} for {job.seconds:.0f} s"


_Running: TypeAlias = tuple[RunningJob, ...]


def decode_running(running: str) -> _Running:
    """Decode the column `relay_status.running`, a relay's running jobs; empty if a newer relay wrote another form."""
    try:
        return msgspec.json.decode(running, type=_Running)
    except (msgspec.MsgspecError, RecursionError):
        return ()


def waiting_calls(running: Sequence[RunningJob]) -> int:
    """Return the number of a relay's jobs that wait for a connection; 0 if none waits.

    Each waiting job in `running` contains this number.
    """
    return max((job.waits.calls for job in running if job.waits is not None), default=0)


def _with_progress(job: RunningJob, noted: Progress | None) -> RunningJob:
    return job if noted is None else replace(job, progress=noted.fraction, note=noted.note)


def kinds_nobody_knows(connection: Connection, queue: str, kinds: Sequence[str]) -> tuple[str, ...]:
    """Return those of these kinds for which no living relay of the queue has a handler, to warn of misspelt names.

    Empty if no living relay serves the queue, or if this role may not read `relay_status`.
    """
    schema = mapped_schema(connection)
    if not kinds or not connection.execute(statements.may_read_relays(schema)).scalar_one():
        return ()
    found = connection.execute(statements.kinds_at_relays(schema, [(queue, kind) for kind in kinds]))
    return tuple(row.kind for row in found if row.serving and not row.knowing)


def list_relays(connection: Connection, *, limit: int = 50) -> list[RelaySummary]:
    """Return up to `limit` relays that were seen within a day, the first started first.

    Relays that were stopped in order are left out. If there are more than `limit`, those that were seen last are
    returned, so the living ones are among them.

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
