"""What happened, as frozen values for hooks: logs, metrics and tests read these, never the core's insides.

Job events are sent after the commit that made them true. A job's payload is not in the `repr` of its event.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias
from uuid import UUID

from outboxq.job import Job


@dataclass(frozen=True, slots=True)
class JobDone:
    """The handler's rows and the job's disappearance were committed."""

    job: Job
    seconds: float


@dataclass(frozen=True, slots=True)
class JobRetried:
    """An attempt failed, or asked to be repeated; the job runs again in `delay_seconds`."""

    job: Job
    error_type: str
    message: str
    where: tuple[str, ...]
    delay_seconds: float


@dataclass(frozen=True, slots=True)
class JobDied:
    """The job moved to the dead letters."""

    job: Job
    reason: str
    where: tuple[str, ...] = ()


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
class JobsParked:
    """Jobs of kinds that this relay does not know were put off."""

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
    """A job was taken from a relay that died, stalled or lost its connection; it runs alone, or is dead (`died`)."""

    id: UUID
    queue: str
    kind: str
    crashes: int
    died: bool


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
    """The relay has ended. `abandoned` jobs were rolled back because they did not finish in time."""

    done: int
    failed: int
    abandoned: int


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
class Pruned:
    """Messages and effects whose retention was over were deleted; each number is one of rows."""

    messages: int
    effects: int


@dataclass(frozen=True, slots=True)
class IndexRebuilt:
    """A bloated index of the job table was rebuilt, while jobs went on."""

    index: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class ChildDied:
    """A relay process of the supervisor ended by itself; another starts in `restart_seconds`."""

    pid: int
    exit_code: int
    restart_seconds: float


@dataclass(frozen=True, slots=True)
class ChildStuck:
    """A relay process of the supervisor could not free a handler and asked to be replaced; another starts at once."""

    pid: int


@dataclass(frozen=True, slots=True)
class ChildUnresponsive:
    """A relay process of the supervisor showed no life for `silent_seconds`; it is killed, and `ChildDied` follows."""

    pid: int
    silent_seconds: float


@dataclass(frozen=True, slots=True)
class ChildStopTimedOut:
    """A relay process of the supervisor did not end in `stopping_seconds`; it is killed, and `ChildDied` follows."""

    pid: int
    stopping_seconds: float


JobEvent: TypeAlias = JobDone | JobRetried | JobDied | JobSnoozed | JobDiscarded
Event: TypeAlias = (
    JobEvent
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
    | Pruned
    | IndexRebuilt
    | ChildDied
    | ChildStuck
    | ChildUnresponsive
    | ChildStopTimedOut
)
Hook: TypeAlias = Callable[[Event], None]


class Emitter:
    """Hands events to hooks; a hook that fails is reported to `on_failure` and never breaks a job."""

    def __init__(self, hooks: Iterable[Hook], on_failure: Callable[[Hook, Event], None]) -> None:
        self._hooks = tuple(hooks)
        self._on_failure = on_failure

    def __call__(self, event: Event) -> None:
        """Hand `event` to every hook, in order."""
        for hook in self._hooks:
            try:
                hook(event)
            except BaseException as error:
                # User code: reported with its traceback, whatever it raises. Ctrl-C comes to the main thread alone.
                self._on_failure(hook, event)
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    raise
