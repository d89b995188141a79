"""Events: what happened, as frozen values for hooks; logs, metrics and tests read these, never the core's internals.

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
    """The base of events about one claimed job.

    `seconds`, in events that have it, is the time for which the handler ran in this attempt. A job of a batch handler
    has its share of the call's time; a job whose handler was not called has nearly 0.
    """

    job: Job

    @property
    def waited_seconds(self) -> float:
        """The time between the moment at which the job was due and its claim, by the database's clock."""
        return self.job.waited_seconds


@dataclass(frozen=True, slots=True)
class JobDone(EventOfJob):
    """The handler's rows and the removal of the job were committed.

    `result`: the value that the handler returned, as JSON; None if its kind keeps no results.
    """

    seconds: float
    result: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class JobRetried(EventOfJob):
    """An attempt failed, or its handler returned `Retry`; the job runs again in `delay_seconds`.

    `error_type`, `message`, `exception` and `record` describe the error as in `JobDied`.
    """

    error_type: str
    message: str
    where: tuple[str, ...]
    delay_seconds: float
    exception: BaseException | None = field(default=None, repr=False, compare=False)
    record: ErrorRecord | None = field(default=None, repr=False, compare=False)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobDied(EventOfJob):
    """The job moved to the dead letters; `reason` says why.

    `error_type` and `message` describe the error of the last attempt, the message as the handler's setting `messages`
    keeps it. Both are empty if the handler requested the dead letter, or if no handler ran. `exception` is the
    handler's exception, with all of its payload: for a service that collects errors. After the hooks were called, its
    traceback is dropped, so that the values in its frames do not outlive the job. `record` is the form in which the
    exception is stored, `where` the innermost frames of the handler's own code.
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
    """The handler requested a later run, and no attempt was counted."""

    delay_seconds: float
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobDiscarded(EventOfJob):
    """The handler dropped the job."""

    reason: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobCancelled(EventOfJob):
    """An operator cancelled the job: its handler was not called, or the handler's rows were rolled back.

    A job that is cancelled into the dead letters has the event `JobDied` instead, with the reason "cancelled".
    """

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobExpired(EventOfJob):
    """The job's `expires` passed before its handler was called: it was dropped."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobsCoalesced:
    """`count` jobs that waited with the key of `job` were removed: one run, with the newest arguments, serves all.

    Sent in addition to the event of the run itself: after its commit, or under a lease before it begins.
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
    """A claim took `count` jobs of a queue, in a round trip of `seconds` that may have included a COMMIT."""

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
    """A call of `once` has ended.

    `outcome` is "called" if the other side was called, and "replayed" if the result of an earlier call was returned.
    After errors it is "refused" (`EffectFailed`), "in_progress", "conflict", "unknown", or "failed" (any other error).
    """

    scope: str
    outcome: EffectOutcome


@dataclass(frozen=True, slots=True)
class MessageSeen:
    """An inbox received a message; `outcome` says if it was new.

    The event of a message that was accepted in a session is sent after COMMIT, that of any other message at once.
    """

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
    """`count` jobs of kinds that this relay does not know, or that are paused, were put back, to be claimed later."""

    queue: str
    kinds: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class JobsSuspected:
    """The claim of `count` jobs was lost without an outcome, as when a relay dies.

    Each of these jobs now runs in a transaction of its own, so that a job that kills its relay is found.
    """

    queue: str
    count: int


@dataclass(frozen=True, slots=True)
class JobCrashed:
    """A relay died, stalled or lost its connection while it ran this job.

    The job runs again, in a transaction of its own; or, if `dead_letter` is True, it has become a dead letter.
    """

    id: UUID
    queue: str
    kind: str
    crashes: int
    dead_letter: bool


@dataclass(frozen=True, slots=True)
class JobSetAside:
    """A job whose row no claim can take became a dead letter without having run; `reason` says why."""

    id: UUID
    queue: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class JobLeaseLost(EventOfJob):
    """A handler ended after its job's lease was lost: its rows were rolled back; only another run of the job counts."""


@dataclass(frozen=True, slots=True)
class JobInterrupted(EventOfJob):
    """A stopping relay gave up waiting for this job: it was rolled back and waits again, without a counted attempt."""


@dataclass(frozen=True, slots=True)
class LeaseExtensionFailed:
    """The relay could not extend its lease; others may take its jobs when `lease_seconds` have passed."""

    error: str


@dataclass(frozen=True, slots=True)
class RelayStarted:
    """The relay is about to claim.

    Args:
        slots: How many jobs it runs at once.
        connections: The most connections that it holds while all of its slots work, without those of `ctx.once`.
        call_slots: The number of its slots in lease mode, which hold no connection while their handlers wait.
        call_connections: The number of its connections that the calls in `call_slots` share.
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
    """All jobs of one claim were rolled back because of `error`; they wait again, unchanged."""

    queue: str
    jobs: int
    error: str


@dataclass(frozen=True, slots=True)
class BatchFinished:
    """All jobs of a batch (`jobs.batch`) have ended, and its callback was added, under the batch's id, to `queue`.

    `kind` is that of the callback. `failed` is the number of jobs that ended as dead letters.
    """

    id: UUID
    queue: str
    kind: str
    failed: int


@dataclass(frozen=True, slots=True)
class Pruned:
    """Expired rows were deleted; each field is a number of rows.

    `batches`: batches of jobs that had ended before, and whose callbacks were added only now.
    """

    messages: int
    effects: int
    keys: int = 0
    batches: int = 0
    finished: int = 0


@dataclass(frozen=True, slots=True)
class DeadLettersPruned:
    """Dead letters of a queue were deleted because the time to keep them has passed."""

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
    """A schedule was due, and its job was added, unless `added` is False.

    `fire_time`: when it was due, as the schedule's clocks show it. `late_seconds`: how much later the job was added.
    `added`: False if the job was not added because another job has its unique key.
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

    `database`: the name of its database, if the supervisor keeps relays of several databases.
    """

    pid: int
    exit_code: int
    restart_seconds: float
    database: str = ""


@dataclass(frozen=True, slots=True)
class ChildStuck:
    """A relay process of the supervisor has ended because it could not end a handler; another starts at once."""

    pid: int
    database: str = ""


@dataclass(frozen=True, slots=True)
class ChildUnresponsive:
    """A relay process of the supervisor showed no sign of life for `silent_seconds`: it is killed, then `ChildDied`."""

    pid: int
    silent_seconds: float
    database: str = ""


@dataclass(frozen=True, slots=True)
class ChildStopTimedOut:
    """A relay process of the supervisor did not end in `stopping_seconds`: it is killed, and `ChildDied` follows."""

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
# Received only by hooks that name them.
CountedEvent: TypeAlias = JobsClaimed | ClaimsEmpty | ClaimsFailed | EffectCalled | MessageSeen | JobsEnqueued
# For hooks of engines with the option `outboxq_hooks`, and not for hooks of a relay.
ProducerEvent: TypeAlias = MessageSeen | JobsEnqueued
# Events of the process that supervises `outboxq relay --processes N`: it logs them, and calls no hook.
SupervisorEvent: TypeAlias = ChildDied | ChildStuck | ChildUnresponsive | ChildStopTimedOut
Event: TypeAlias = (
    JobEvent | CountedEvent | JobsEvent | LostJobEvent | RelayEvent | BatchFinished | UpkeepEvent | SupervisorEvent
)
Hook: TypeAlias = Callable[[Event], None]
