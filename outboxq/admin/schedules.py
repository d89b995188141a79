"""Schedules, jobs that relays add when their time comes: make, change, list and run them.

Every function works in the caller's transaction, on a connection or a session; `outboxq.schedules` has the same
functions for async connections and sessions. To fire a schedule is to add its job at a due time. A change waits for a
relay that is just firing the schedule, for some milliseconds.
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Literal, TypeAlias, get_args

import msgspec
from sqlalchemy import Connection, Row
from sqlalchemy.orm import Session

from outboxq.clock import uuid7s
from outboxq.cron import Cron, every_of, of_schedule
from outboxq.database.sessions import transaction_connection
from outboxq.errors import ArgumentError, ScheduleDeclared, ScheduleNotFound
from outboxq.names import MAX_SCOPE_BYTES, check_key
from outboxq.new_job import (
    JobKeys,
    NewJob,
    check_size,
    has_unique_key,
    with_answer,
)
from outboxq.outbox.handle import JobHandle, make_handle
from outboxq.outbox.insert import insert_all
from outboxq.outbox.stored_job import dump, load
from outboxq.statements import schedules as statements
from outboxq.statements.paging import database_clock

Missed: TypeAlias = Literal["skip", "one", "all"]
# Executes statements: a session or a connection.
Executor: TypeAlias = Session | Connection

NAME_HEADER, FIRE_TIME_HEADER = "outboxq.schedule", "outboxq.fire_time"
# As an argument of a schedule's job, it is replaced by the time that the job is due.
FIRE_TIME = datetime.min.replace(tzinfo=UTC)
_STANDS_FOR_FIRE_TIME = msgspec.json.encode(FIRE_TIME)
MAX_JITTER = timedelta(days=1)
_SHOWN_FIRES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSchedule:
    """A schedule that code or an operator wants to store; making the object checks its values.

    Attributes:
        missed: The jobs to add for due times that passed while no relay ran: "skip" for none, "one" for the latest due
            time, "all" for each.
        jitter: The longest random delay of a job.

    Raises:
        ArgumentError: an impossible value, or job options that make no sense for a job that recurs.
        InvalidKey: no schedule can have this name.
    """

    name: str
    job: NewJob
    cron: Cron
    missed: Missed = "one"
    jitter: timedelta = timedelta(0)
    # The name of the registry that declares it.
    owner: str | None = None

    def __post_init__(self) -> None:
        check_key("schedule name", self.name, MAX_SCOPE_BYTES)
        if self.owner is not None:
            check_key("name of the registry", self.owner, MAX_SCOPE_BYTES)
        if not isinstance(self.job, NewJob):
            raise ArgumentError(f"a schedule takes a job made by kind.job(...), got {type(self.job).__name__}")
        if self.missed not in get_args(Missed):
            raise ArgumentError(f"missed takes {' or '.join(map(repr, get_args(Missed)))}, got {self.missed!r}")
        if not isinstance(self.jitter, timedelta) or not timedelta(0) <= self.jitter <= MAX_JITTER:
            raise ArgumentError(f"jitter takes a timedelta from 0 to 24 hours, got {self.jitter!r}")
        if self.job.envelope.run_at is not None:
            raise ArgumentError("a schedule says itself when its job is due: leave run_at= out, or take delay=")
        if self.jitter:
            self._check_jitter()
        self._check_expiry()

    def _check_jitter(self) -> None:
        if isinstance(self.job.keys, JobKeys) and self.job.keys.group is not None:
            raise ArgumentError("a job of a group runs when its turn comes: leave out the group or the jitter")
        if self.job.envelope.every is not None:
            raise ArgumentError(
                "a job with every= runs when its window has ended: leave out the every= of its handler or the jitter"
            )
        if self.cron.every is not None and self.jitter >= self.cron.every:
            raise ArgumentError(
                f"a jitter of {self.jitter} is no shorter than the interval of {self.cron.every}: a job could run "
                "after the next one"
            )

    def _check_expiry(self) -> None:
        expires, delay = self.job.envelope.expires, self.job.envelope.delay or timedelta(0)
        if expires is not None and expires <= delay + self.jitter:
            raise ArgumentError(
                f"a job that expires after {expires} may never run if it runs up to {delay + self.jitter} later (its "
                "delay and its jitter): give it more time to expire"
            )

    def as_row(self, now: datetime, *, declared: bool) -> dict[str, object]:
        """Return the schedule as a row of the table `schedule`, due for the first time after `now`.

        `declared`: True if an application's code declares it, False for an operator's.
        """
        stored = dump(self.job)
        fields = msgspec.json.decode(_json(stored.pop("args")), type=dict[str, msgspec.Raw])
        fire_time = [name for name, value in fields.items() if bytes(value) == _STANDS_FOR_FIRE_TIME]
        args = {name: value for name, value in fields.items() if name not in fire_time}
        if fire_time:
            stored["fire_time"] = fire_time
        return {
            "name": self.name,
            "kind": stored.pop("kind"),
            "queue": stored.pop("queue"),
            "args": _json(args),
            "options": _json(stored),
            "cron": self.cron.text,
            "time_zone": self.cron.time_zone,
            "missed": self.missed,
            "jitter_seconds": self.jitter.total_seconds(),
            "declared": declared,
            "next_at": self.cron.after(now),
        }


@dataclass(frozen=True, slots=True)
class Schedule:
    """A stored schedule, without its job's arguments and options.

    Attributes:
        cron: Its cron text, or its interval, such as "@every 30s".
        missed: The jobs to add for due times that passed while no relay ran: "skip" for none, "one" for the latest due
            time, "all" for each.
        declared: True if an application's code declares it.
        next_at: The next time at which relays add its job.
        last_at: The latest due time for which relays added its job; None if there is none.
        paused_at: The time since which it adds no jobs, because an operator paused it or it is disabled; None
            otherwise.
        owner: The name of the registry that declares it; None if operators made it, or code of an older version.
        every_seconds: The length of its interval, if it has one.
        disabled: The reason why relays disabled it: its owner's code no longer declares it. None if it is not disabled.
    """

    name: str
    kind: str
    queue: str
    cron: str
    time_zone: str
    missed: Missed
    jitter_seconds: float
    declared: bool
    next_at: datetime
    last_at: datetime | None
    paused_at: datetime | None
    created_at: datetime
    owner: str | None = None
    every_seconds: float | None = None
    disabled: str | None = None


@dataclass(frozen=True, slots=True)
class ScheduleDetail:
    """A schedule with its job, as `show_schedule` returns it; the job's `args` and `options` are JSON text.

    `next_fires`: its next five due times, as ISO texts in its own time zone; none if this process cannot read the
    schedule. `unreadable`: the reason why it cannot.
    """

    schedule: Schedule
    next_fires: tuple[str, ...]
    args: str = field(repr=False)
    options: str = field(repr=False)
    unreadable: str | None = None


@dataclass(frozen=True, slots=True)
class StoredSchedule:
    """A schedule read from the database, with its due times and the job that it adds; relays use it to make its jobs.

    Attributes:
        fire_time: The names of the job's arguments that are set to the due time.

    Raises:
        ArgumentError, PayloadError: this process cannot read the schedule: for example, it does not know the time zone.
    """

    schedule: Schedule
    cron: Cron
    job: NewJob
    fire_time: tuple[str, ...]

    @classmethod
    def of(cls, row: Row[Any]) -> "StoredSchedule":
        """Make a `StoredSchedule` from a row of the statements `lock_due` or `select_schedule`."""
        found = _schedule(row)
        options = msgspec.json.decode(row.options, type=dict[str, msgspec.Raw])
        names = msgspec.json.decode(options.pop("fire_time", b"[]"), type=tuple[str, ...])
        job = load({"kind": found.kind, "queue": found.queue, "args": msgspec.Raw(row.args.encode()), **options})
        return cls(found, Cron(found.cron, found.time_zone), job, names)

    def jobs_at(self, due_times: Iterable[datetime]) -> dict[str, NewJob]:
        """Make the job that the schedule adds, once for each of these due times; return `{new job id: job}`."""
        made = [self._job_at(due) for due in due_times]
        jobs = [with_answer(new) if has_unique_key(new) else new for new in made]
        return dict(zip(uuid7s(len(jobs)), jobs, strict=True))

    def _job_at(self, due: datetime) -> NewJob:
        at = self.cron.local(due)
        envelope = self.job.envelope
        headers = msgspec.json.decode(envelope.headers, type=dict[str, str])
        headers |= {NAME_HEADER: self.schedule.name, FIRE_TIME_HEADER: at.isoformat()}
        changes: dict[str, object] = {"headers": _json(headers)}
        if self.schedule.jitter_seconds:
            later = timedelta(seconds=random.random() * self.schedule.jitter_seconds)
            changes |= {"run_at": due + (envelope.delay or timedelta(0)) + later, "delay": None}
        args = self.job.args
        if self.fire_time:
            fields = msgspec.json.decode(args, type=dict[str, msgspec.Raw])
            args = _json({**fields, **dict.fromkeys(self.fire_time, at)})
        changed = msgspec.structs.replace(envelope, **changes)
        return msgspec.structs.replace(self.job, envelope=changed, args=check_size(self.job.kind, args))


def put(connection: Executor, new: NewSchedule) -> Schedule:
    """Make a schedule, or change the schedule of this name; a paused one stays paused.

    Raises:
        ScheduleDeclared: an application's code declares the schedule, so only that code can change it.
    """
    return put_and_count(connection, new)[0]


def put_and_count(connection: Executor, new: NewSchedule) -> tuple[Schedule, int]:
    """Make or change a schedule as `put` does; also return the number of changed rows: 0 if it already was like this.

    Raises:
        ScheduleDeclared: an application's code declares the schedule, so only that code can change it.
    """
    row = new.as_row(clock_of(connection), declared=False)
    changed = len(connection.execute(statements.put([row], keep_declared=True)).all())
    found = _find(connection, new.name)
    if found.declared:
        raise ScheduleDeclared(new.name, found.owner)
    return _schedule(found), changed


def remove(connection: Executor, names: Sequence[str]) -> tuple[str, ...]:
    """Delete schedules, but not the jobs that they added; return the names of the deleted schedules.

    A schedule that an application's code declares is stored again when a relay of that application starts.
    """
    return tuple(sorted(connection.execute(statements.remove(sorted_names(names))).scalars()))


def pause(connection: Executor, names: Sequence[str]) -> tuple[str, ...]:
    """Pause schedules: relays add none of their jobs until they are resumed.

    Returns:
        The names of the schedules that this call has paused. Names that do not exist, or that an operator had paused
        already, are left out.
    """
    return tuple(sorted(connection.execute(statements.pause(sorted_names(names))).scalars()))


def resume(connection: Executor, names: Sequence[str]) -> tuple[str, ...]:
    """Resume schedules: relays add their jobs again. Due times that passed during the pause are skipped.

    Returns:
        The names of the schedules that this call has resumed. Names that do not exist or were not paused are left out.
    """
    resumed: list[str] = []
    for name in sorted_names(names):
        row = connection.execute(statements.select_schedule(name, lock=True)).one_or_none()
        if row is not None and row.paused_at is not None:
            next_at = _cron_of(row).after(_counted_from(clock_of(connection), row.last_at))
            connection.execute(statements.resume(name, next_at))
            resumed.append(name)
    return tuple(resumed)


def run_now(connection: Executor, name: str) -> JobHandle:
    """Add a job of this schedule now, even if the schedule is paused; its next due time stays as it is.

    Raises:
        ScheduleNotFound: no schedule has this name.
    """
    stored = StoredSchedule.of(_find(connection, name))
    jobs = stored.jobs_at([clock_of(connection)])
    insert_all(_transaction(connection), jobs, wakes="by queue")
    ((job_id, new),) = jobs.items()
    return make_handle(job_id, new)


def list_schedules(
    connection: Executor, *, queue: str | None = None, kind: str | None = None, limit: int | None = None
) -> list[Schedule]:
    """Return the schedules, ordered by name; with `queue` or `kind`, only those whose job has this queue or kind."""
    rows = connection.execute(statements.select_schedules(queue=queue, kind=kind, limit=limit))
    return [_schedule(row) for row in rows]


def show_schedule(connection: Executor, name: str) -> ScheduleDetail:
    """Return one schedule with its job and its next due times.

    Raises:
        ScheduleNotFound: no schedule has this name.
    """
    row = _find(connection, name)
    found = _schedule(row)
    try:
        cron = _cron_of(row)
    except ArgumentError as error:
        return ScheduleDetail(found, (), row.args, row.options, str(error))
    due = islice(cron.times_from(found.next_at), _SHOWN_FIRES)
    return ScheduleDetail(found, tuple(cron.local(each).isoformat() for each in due), row.args, row.options)


def is_ahead(cron: Cron, next_at: datetime, last_at: datetime | None, now: datetime) -> bool:
    """Return True if a schedule's `next_at` is too late, as it was computed while the database's clock was ahead.

    Too late is later than the due time that follows from `now`, the database's clock; the schedule would add no jobs
    until then.
    """
    return next_at > cron.after(_counted_from(now, last_at))


def _counted_from(now: datetime, last_at: datetime | None) -> datetime:
    """Return the moment from which a schedule's next due time is computed: `now`, or `last_at` if that is later.

    `last_at` is later if the database's clock was set back; counting from it keeps a due time from being used twice. A
    `last_at` that is later by more than `CLOCK_STEP` is ignored.
    """
    return last_at if last_at is not None and now < last_at <= now + statements.CLOCK_STEP else now


def _cron_of(row: Row[Any]) -> Cron:
    """Make a `Cron`, which computes due times, from the row of a schedule.

    Raises:
        ArgumentError: this process cannot read the row's values: for example, it does not know the time zone.
    """
    with of_schedule(row.name):
        return Cron(row.cron, row.time_zone)


def seconds_to_next(connection: Executor, without: Iterable[str] = ()) -> float:
    """Return the seconds until a relay has to fire the next schedule: the first due time of all that are not paused.

    Negative if that time has passed; infinite if there is no such schedule.

    `without`: the names of schedules that are left out.
    """
    found: float | None = connection.execute(statements.seconds_to_next(tuple(without))).scalar_one_or_none()
    return math.inf if found is None else found


def _find(connection: Executor, name: str) -> Row[Any]:
    row = connection.execute(statements.select_schedule(name)).one_or_none()
    if row is None:
        raise ScheduleNotFound(name)
    return row


def _schedule(row: Row[Any]) -> Schedule:
    every = every_of(row.cron)
    reason = f"the code of {row.owner!r} does not declare it any more" if row.is_disabled else None
    given = {name: getattr(row, name) for name in statements.SUMMARY_COLUMNS}
    return Schedule(**given, every_seconds=None if every is None else every.total_seconds(), disabled=reason)


def _transaction(connection: Executor) -> Connection:
    return connection if isinstance(connection, Connection) else transaction_connection(connection)


def clock_of(connection: Executor) -> datetime:
    """Return the database's present time."""
    return database_clock(_transaction(connection))


def sorted_names(names: Sequence[str]) -> list[str]:
    """Check names of schedules; return each name once, sorted, so that all transactions lock the rows in one order."""
    if isinstance(names, str):
        raise ArgumentError(f"schedules are named by a list of names, got one text: [{names!r}]")
    return sorted({check_key("schedule name", name, MAX_SCOPE_BYTES) for name in names})


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
