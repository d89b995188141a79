"""What happened, as frozen values for hooks: logs, metrics and tests read these, never the core's insides.

Job events are sent after the commit that made them true. A job's payload is not in the `repr` of its event.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol, TypeAlias
from uuid import UUID

from outboxq.error_record import ErrorRecord
from outboxq.job import Job


@dataclass(frozen=True, slots=True)
class JobDone:
    """The handler's rows and the job's disappearance were committed."""

    job: Job
    seconds: float


@dataclass(frozen=True, slots=True)
class JobRetried:
    """An attempt failed, or asked to be repeated; the job runs again in `delay_seconds`.

    `exception` and `record` as in `JobDied`.
    """

    job: Job
    error_type: str
    message: str
    where: tuple[str, ...]
    delay_seconds: float
    exception: BaseException | None = field(default=None, repr=False, compare=False)
    record: ErrorRecord | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class JobDied:
    """The job moved to the dead letters.

    `error_type` and `message` are those of its last attempt, `message` as its handler's `messages` wants it kept; both
    are empty if the handler asked for this, or if no handler ran. `exception` is what the handler raised, with all of
    its payload: for a service that collects errors. When the hooks were called its traceback is dropped, so that what
    its frames hold does not outlive the job. `record` has what is stored of it.
    """

    job: Job
    reason: str
    where: tuple[str, ...] = ()
    error_type: str = ""
    message: str = ""
    exception: BaseException | None = field(default=None, repr=False, compare=False)
    record: ErrorRecord | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class JobSnoozed:
    """The handler asked to run later, without an attempt counted."""

    job: Job
    delay_seconds: float


@dataclass(frozen=True, slots=True)
class JobDiscarded:
    """The handler dropped the job."""

    job: Job
    reason: str


@dataclass(frozen=True, slots=True)
class JobCancelled:
    """An operator cancelled the job: what its handler had written was rolled back, or it was not called.

    A job that is cancelled into the dead letters has the event `JobDied` instead, with the reason "cancelled".
    """

    job: Job


@dataclass(frozen=True, slots=True)
class JobExpired:
    """The job's `expires` was over before its handler was called: it was dropped."""

    job: Job


@dataclass(frozen=True, slots=True)
class JobsCoalesced:
    """`count` other jobs that waited with the key of `job` were removed: its run, with the newest arguments, is theirs.

    Sent beside the event of the run itself: once it is committed, and under a lease before it begins.
    """

    job: Job
    count: int


@dataclass(frozen=True, slots=True)
class JobsParked:
    """Jobs of kinds that this relay does not know, or that are paused, were put off."""

    queue: str
    kinds: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class JobsSuspected:
    """Jobs whose last claim died: they run alone, one at a time, so that one that kills its relay is found out."""

    queue: str
    count: int


@dataclass(frozen=True, slots=True)
class JobCrashed:
    """A relay died, stalled or lost its connection while it ran this job.

    `crashes` counts how often. The job runs again, alone; or, after too many crashes, it is a dead letter.
    """

    id: UUID
    queue: str
    kind: str
    crashes: int
    dead_letter: bool


@dataclass(frozen=True, slots=True)
class JobSetAside:
    """A job whose row no claim can take became a dead letter, without having run; `reason` says why."""

    id: UUID
    queue: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class JobLeaseLost:
    """A handler ended after its job's lease was lost: its rows were rolled back, and another run counts."""

    job: Job


@dataclass(frozen=True, slots=True)
class JobInterrupted:
    """A stopping relay did not wait any longer for this job: it was rolled back, and waits again, uncharged."""

    job: Job


@dataclass(frozen=True, slots=True)
class LeaseExtensionFailed:
    """The relay could not extend its lease; others may take its jobs when `lease_seconds` have passed."""

    error: str


@dataclass(frozen=True, slots=True)
class RelayStarted:
    """The relay is about to claim. `connections`: how many it holds while all of its slots work, `ctx.once` apart."""

    queues: tuple[str, ...]
    slots: int
    connections: int


@dataclass(frozen=True, slots=True)
class RelayStopping:
    """The relay stops claiming and waits for its handlers."""

    running: int
    drain_seconds: float


@dataclass(frozen=True, slots=True)
class RelayStopped:
    """The relay has ended. `abandoned` jobs were rolled back because they did not finish in time.

    `hook_failures`: how often a hook raised. `hook_events_dropped`: events that the registry's hooks were not told,
    because they were too slow. Both are counted up to this event.
    """

    done: int
    failed_attempts: int
    dead: int
    abandoned: int
    hook_failures: int = 0
    hook_events_dropped: int = 0


@dataclass(frozen=True, slots=True)
class DatabaseLost:
    """The database cannot be reached; the relay tries again in `retry_seconds`."""

    error: str
    retry_seconds: float


@dataclass(frozen=True, slots=True)
class DatabaseBack:
    """The database answers again."""

    after_seconds: float


@dataclass(frozen=True, slots=True)
class BatchRolledBack:
    """A batch was rolled back as a whole for `error`; its jobs wait again as they were."""

    queue: str
    jobs: int
    error: str


@dataclass(frozen=True, slots=True)
class BatchFinished:
    """No job of a batch (`jobs.batch`) is left, and its callback was added, under the batch's id, to `queue`.

    `failed`: how many of its jobs are dead letters.
    """

    id: UUID
    queue: str
    kind: str
    failed: int


@dataclass(frozen=True, slots=True)
class Pruned:
    """What has expired was deleted: messages, effects, and unique keys; each number is one of rows.

    `batches`: those that were over, and whose callbacks were added, because no relay had come to it.
    """

    messages: int
    effects: int
    keys: int = 0
    batches: int = 0


@dataclass(frozen=True, slots=True)
class IndexRebuilt:
    """A bloated index of the job table was rebuilt, while jobs went on."""

    index: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class ScheduleFired:
    """A schedule's job was added, because its time has come.

    `fire_time`: when it was due, as the schedule's clocks show it. `late_seconds`: how much later it was added.
    `added`: False if another job has its unique key, and so this one was not.
    """

    name: str
    kind: str
    queue: str
    fire_time: datetime
    late_seconds: float
    added: bool = True


@dataclass(frozen=True, slots=True)
class ChildDied:
    """A relay process of the supervisor ended by itself; another starts in `restart_seconds`.

    `database`: its name, if the supervisor keeps relays of several.
    """

    pid: int
    exit_code: int
    restart_seconds: float
    database: str = ""


@dataclass(frozen=True, slots=True)
class ChildStuck:
    """A relay process of the supervisor could not free a handler and asked to be replaced; another starts at once."""

    pid: int
    database: str = ""


@dataclass(frozen=True, slots=True)
class ChildUnresponsive:
    """A relay process of the supervisor showed no life for `silent_seconds`; it is killed, and `ChildDied` follows."""

    pid: int
    silent_seconds: float
    database: str = ""


@dataclass(frozen=True, slots=True)
class ChildStopTimedOut:
    """A relay process of the supervisor did not end in `stopping_seconds`; it is killed, and `ChildDied` follows."""

    pid: int
    stopping_seconds: float
    database: str = ""


JobEvent: TypeAlias = JobDone | JobRetried | JobDied | JobSnoozed | JobDiscarded | JobCancelled | JobExpired
# Of the process that keeps the relays of `outboxq relay --processes N` running: it logs them, and runs no code of the
# application's.
SupervisorEvent: TypeAlias = ChildDied | ChildStuck | ChildUnresponsive | ChildStopTimedOut
Event: TypeAlias = (
    JobEvent
    | JobsCoalesced
    | JobsParked
    | JobsSuspected
    | JobCrashed
    | JobSetAside
    | JobLeaseLost
    | JobInterrupted
    | LeaseExtensionFailed
    | RelayStarted
    | RelayStopping
    | RelayStopped
    | DatabaseLost
    | DatabaseBack
    | BatchRolledBack
    | BatchFinished
    | Pruned
    | IndexRebuilt
    | ScheduleFired
    | SupervisorEvent
)
Hook: TypeAlias = Callable[[Event], None]
_LARGEST_FAILURE = 10_000
# A union that is written out is made anew at each call, which is made for each job.
_FAILURES = (JobRetried, JobDied)
_OF_EXCEPTIONS = vars(BaseException)


class EventQueue(Protocol):
    """Events that wait to be told in another thread."""

    def put(self, event: Event) -> bool:
        """Take an event, and call `forget` for it once it was told; False if the event is not taken."""
        ...


class Emitter:
    """Hands events to hooks; a hook that fails is reported to `on_failure` and never breaks a job.

    Args:
        later: Is given each event after the hooks.
    """

    def __init__(
        self, hooks: Iterable[Hook], on_failure: Callable[[Hook, Event], None], later: EventQueue | None = None
    ) -> None:
        self._hooks = tuple(hooks)
        self._on_failure = on_failure
        self._later = later

    def __call__(self, event: Event) -> None:
        """Hand `event` to every hook, in order; when all were told, drop the traceback of its exception."""
        for hook in self._hooks:
            try:
                hook(event)
            except BaseException as error:
                # User code: reported with its traceback, whatever it raises. Ctrl-C comes to the main thread alone.
                self._on_failure(hook, event)
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    raise
        if self._later is None or not self._later.put(event):
            forget(event)


def forget(event: Event) -> None:
    """Drop the traceback of an event's exception, once all hooks were told the event."""
    if isinstance(event, _FAILURES) and event.exception is not None:
        drop_tracebacks(event.exception)


def drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of an exception and of all that led to it.

    Their frames hold what the handler had in its variables, and, by way of the frames that called them, the exception
    itself: all of it would stay until the garbage collector comes to it.
    """
    pending, seen = [error], {id(error)}
    while pending and len(seen) < _LARGEST_FAILURE:
        each = pending.pop()
        # As Python itself does it: frozen classes refuse it, and users' can give these attributes other meanings.
        _OF_EXCEPTIONS["__traceback__"].__set__(each, None)
        before = [_OF_EXCEPTIONS[name].__get__(each) for name in ("__cause__", "__context__")]
        if issubclass(type(each), BaseExceptionGroup):
            before += vars(BaseExceptionGroup)["exceptions"].__get__(each)
        for one in before:
            if one is not None and id(one) not in seen:
                seen.add(id(one))
                pending.append(one)
