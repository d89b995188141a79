"""Events: what happened, as frozen values for hooks; logs, metrics and tests read these, never the core's insides.

Job events are sent after the commit that made them true. A job's payload is not in the `repr` of its event.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, TypeAlias
from uuid import UUID

from outboxq.error_record import ErrorRecord
from outboxq.job import Job

EffectOutcome: TypeAlias = Literal["called", "replayed", "in_progress", "refused", "conflict", "unknown", "failed"]


@dataclass(frozen=True, slots=True)
class EventOfJob:
    """An event of a claimed job. `seconds`, if it has that, is how long the handler ran in the attempt that counts.

    Each job of a batch handler has its share of the call; one whose handler was not called has nearly none.
    """

    job: Job

    @property
    def waited_seconds(self) -> float:
        """The time that it had waited when it was claimed, from when it was due, by the database's clock."""
        return self.job.waited_seconds


@dataclass(frozen=True, slots=True)
class JobDone(EventOfJob):
    """The handler's rows and the job's disappearance were committed. `result`: what is kept of its value, as JSON."""

    seconds: float
    result: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class JobRetried(EventOfJob):
    """An attempt failed, or requested another; it runs again in `delay_seconds`. The errors are as in `JobDied`."""

    error_type: str
    message: str
    where: tuple[str, ...]
    delay_seconds: float
    exception: BaseException | None = field(default=None, repr=False, compare=False)
    record: ErrorRecord | None = field(default=None, repr=False, compare=False)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobDied(EventOfJob):
    """The job moved to the dead letters.

    `error_type` and `message` are those of its last attempt, `message` as its handler's `messages` wants it kept; both
    are empty if the handler asked for this, or if no handler ran. `exception` is what the handler raised, with all of
    its payload: for a service that collects errors. After the hooks were called its traceback is dropped, so that the
    values in its frames do not outlive the job. `record` is the stored form of it.
    """

    reason: str
    where: tuple[str, ...] = ()
    error_type: str = ""
    message: str = ""
    exception: BaseException | None = field(default=None, repr=False, compare=False)
    record: ErrorRecord | None = field(default=None, repr=False, compare=False)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobSnoozed(EventOfJob):
    """The handler requested to run later, without an attempt counted."""

    delay_seconds: float
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobDiscarded(EventOfJob):
    """The handler dropped the job."""

    reason: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobCancelled(EventOfJob):
    """An operator cancelled the job: its handler's rows were rolled back, or it was not called.

    A job that is cancelled into the dead letters has the event `JobDied` instead, with the reason "cancelled".
    """

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobExpired(EventOfJob):
    """The job's `expires` passed before its handler was called: it was dropped."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobsCoalesced:
    """`count` other jobs that waited with the key of `job` were removed: its run, with the newest arguments, is theirs.

    Sent in addition to the event of the run itself: once it is committed, and under a lease before it begins.
    """

    job: Job
    count: int


@dataclass(frozen=True, slots=True)
class FollowerSuppressed(EventOfJob):
    """The job is done, but the one that follows it in its chain was not added: another job has its unique key."""

    follower_kind: str
    existing_id: UUID | None


@dataclass(frozen=True, slots=True)
class JobsClaimed:
    """A claim took `count` jobs of a queue, in a round trip of `seconds`, in which a COMMIT may have gone along."""

    queue: str
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ClaimsEmpty:
    """`count` claims of a queue took no job since the last such event."""

    queue: str
    count: int


@dataclass(frozen=True, slots=True)
class ClaimsFailed:
    """`count` claims of a queue were answered with an error, or not at all, since the last such event."""

    queue: str
    count: int


@dataclass(frozen=True, slots=True)
class EffectCalled:
    """A `once` has ended: by a call ("called"), an earlier one ("replayed") or an error (`EffectFailed`: "refused")."""

    scope: str
    outcome: EffectOutcome


@dataclass(frozen=True, slots=True)
class MessageSeen:
    """An inbox received a message; an accepted one is reported after COMMIT."""

    consumer: str
    outcome: Literal["accepted", "duplicate", "conflict"]


@dataclass(frozen=True, slots=True)
class JobsEnqueued:
    """`count` jobs of a kind were added, and committed. Jobs whose unique key was taken do not count."""

    queue: str
    kind: str
    count: int


@dataclass(frozen=True, slots=True)
class JobsParked:
    """Jobs of kinds that this relay does not know, or that are paused, were put off."""

    queue: str
    kinds: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class JobsSuspected:
    """Jobs whose last claim died: they run alone, one at a time, so that one that kills its relay is found."""

    queue: str
    count: int


@dataclass(frozen=True, slots=True)
class JobCrashed:
    """A relay died, stalled or lost its connection while it ran this job, which runs again, alone, or is dead now."""

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
class JobLeaseLost(EventOfJob):
    """A handler ended after its job's lease was lost: its rows were rolled back, and another run counts."""


@dataclass(frozen=True, slots=True)
class JobInterrupted(EventOfJob):
    """A stopping relay did not wait any longer for this job: it was rolled back, and waits again, uncharged."""


@dataclass(frozen=True, slots=True)
class LeaseExtensionFailed:
    """The relay could not extend its lease; others may take its jobs when `lease_seconds` have passed."""

    error: str


@dataclass(frozen=True, slots=True)
class RelayStarted:
    """The relay is about to claim.

    Args:
        slots: How many jobs it runs at once.
        connections: How many it holds at most while all of its slots work, `ctx.once` apart.
        call_slots: Those of the slots that are in lease mode, and hold no connection while their handlers wait.
        call_connections: Those of the connections that the calls in these slots share.
    """

    queues: tuple[str, ...]
    slots: int
    connections: int
    call_slots: int = 0
    call_connections: int = 0


@dataclass(frozen=True, slots=True)
class RelayStopping:
    """The relay stops claiming and waits for its handlers."""

    running: int
    drain_seconds: float


@dataclass(frozen=True, slots=True)
class RelayStopped:
    """The relay has ended. `abandoned` jobs were rolled back because they did not finish in time.

    `hook_failures`: how often a hook raised. `hook_events_dropped`: events that the registry's hooks did not receive,
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
    """Expired rows were deleted; each number is one of rows. `batches`: callbacks that no relay had added."""

    messages: int
    effects: int
    keys: int = 0
    batches: int = 0
    finished: int = 0


@dataclass(frozen=True, slots=True)
class DeadLettersPruned:
    """Dead letters of a queue that keeps them for a time were deleted, because it has passed."""

    queue: str
    jobs: int


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
    """A relay process of the supervisor could not free a handler and must be replaced; another starts at once."""

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
JobsEvent: TypeAlias = FollowerSuppressed | JobsCoalesced | JobsParked | JobsSuspected
LostJobEvent: TypeAlias = JobCrashed | JobSetAside | JobLeaseLost | JobInterrupted
RelayEvent: TypeAlias = (
    LeaseExtensionFailed | RelayStarted | RelayStopping | RelayStopped | DatabaseLost | DatabaseBack | BatchRolledBack
)
UpkeepEvent: TypeAlias = Pruned | DeadLettersPruned | IndexRebuilt | ScheduleFired
# For hooks that name them, and for no other.
CountedEvent: TypeAlias = JobsClaimed | ClaimsEmpty | ClaimsFailed | EffectCalled | MessageSeen | JobsEnqueued
# For the hooks of engines with the option `outboxq_hooks`, and for those of no relay.
ProducerEvent: TypeAlias = MessageSeen | JobsEnqueued
# Of the process that keeps the relays of `outboxq relay --processes N` running: it logs them, and calls no hook.
SupervisorEvent: TypeAlias = ChildDied | ChildStuck | ChildUnresponsive | ChildStopTimedOut
Event: TypeAlias = (
    JobEvent | CountedEvent | JobsEvent | LostJobEvent | RelayEvent | BatchFinished | UpkeepEvent | SupervisorEvent
)
Hook: TypeAlias = Callable[[Event], None]
