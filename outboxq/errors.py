"""Every error that outboxq raises, in one tree below `OutboxqError`.

Each message says what was expected, what came, and what to do; values for programs are attributes.
"""

import shlex
from collections.abc import Sequence
from uuid import UUID


class OutboxqError(Exception):
    """The base of every error that outboxq raises."""


class PermanentError(OutboxqError):
    """Trying again cannot help: if a handler raises it, its job becomes a dead letter at once."""


class ConfigError(OutboxqError):
    """A setting, a URL or a module path cannot be used as given."""


class LibpqMissing(ConfigError, ImportError):
    """psycopg is installed, and finds no libpq, PostgreSQL's client library."""

    def __init__(self) -> None:
        super().__init__(
            "psycopg finds no libpq, PostgreSQL's client library: pip install 'outboxq[binary]', which brings one, "
            "or install your system's (Debian: apt-get install libpq5)"
        )


class RegistryError(ConfigError):
    """The handlers of a `Jobs` registry do not fit together."""


class UnknownKind(OutboxqError):
    """No handler is registered for a kind."""

    def __init__(self, kind: str, known: tuple[str, ...]) -> None:
        super().__init__(f"no handler for kind {kind!r} (known: {', '.join(known) or 'none'})")
        self.kind, self.known = kind, known


class EnqueueError(OutboxqError):
    """A job was refused before anything was written."""


class ArgumentError(EnqueueError, TypeError):
    """The arguments of a job do not fit its handler, or JSON cannot hold them."""


class JobTooLarge(EnqueueError):
    """The arguments of a job, or those of all jobs that follow it in its chain, exceed the cap."""

    def __init__(self, kind: str, size_bytes: int, max_bytes: int, what: str = "", else_do: str = "") -> None:
        super().__init__(
            f"{what or f'the arguments of {kind!r}'} take {size_bytes:,} bytes as JSON, over the cap of {max_bytes:,}: "
            f"store the data in a table of yours and pass its key{else_do}"
        )
        self.kind, self.size_bytes, self.max_bytes = kind, size_bytes, max_bytes


class AddedNotKnown(OutboxqError):
    """`handle.added` was read before the job's unique key was checked."""

    def __init__(self, kind: str) -> None:
        super().__init__(
            f"whether this job {kind!r} is added is not known yet: in a producer's session call session.flush() first, "
            "or ask after its COMMIT; in a handler, unique jobs are added when its transaction is committed, so that "
            "no other session waits for the handler"
        )
        self.kind = kind


class SchemaError(OutboxqError):
    """The outboxq tables are missing, or older than this version of outboxq needs."""


class MigrationRefused(OutboxqError):
    """The database refused a migration, and nothing was changed: a downgrade that would drop jobs, for example."""


class HandlerError(OutboxqError):
    """A handler did something that its transaction forbids; the attempt is recorded as failed."""


class NothingDone(HandlerError, PermanentError):
    """A handler's work was not done: it returned a coroutine that was never awaited, or the class of an outcome.

    Every attempt would return the same, so the job becomes a dead letter.
    """


class ResultNotKept(HandlerError, PermanentError):
    """The value that a handler with `keep_result=True` returned cannot be kept, and further attempts would not help.

    Its rows are undone, and the job becomes a dead letter.
    """

    def __init__(self, kind: str, problem: str) -> None:
        super().__init__(f"the result of {kind!r} {problem}: return what its producer needs, or where it is")


class HandlerRolledBack(HandlerError):
    """The handler rolled its session back, so its rows are gone although it returned."""


class SessionRefused(HandlerError):
    """A batch handler in lease mode used `ctx.session`: it runs outside any transaction, and has no session."""

    def __init__(self) -> None:
        super().__init__(
            'a batch handler with claim="lease" has no session: open one of your own, write the rows in a job that '
            'another handler runs, or leave out claim="lease"'
        )


class TransactionVerbRefused(HandlerError):
    """The handler tried to begin, commit or roll back the relay's transaction with a statement of its own."""


class TransactionEndedByHandler(HandlerError):
    """The handler ended the relay's transaction by a statement that SQLAlchemy did not see.

    If that was a COMMIT, the job is a dead letter.
    """

    def __init__(self) -> None:
        super().__init__(
            "the handler ended the relay's transaction on the driver's own connection: "
            "return to commit, raise to roll back"
        )


class HandlerTimedOut(HandlerError):
    """The handler did not end within its deadline; if its connection had to be ended, its rows are gone."""

    def __init__(self, timeout_seconds: float) -> None:
        super().__init__(
            f"the handler did not end within its timeout_seconds={timeout_seconds:g}: make it faster, split it, or "
            "give @jobs.handler(timeout_seconds=...) more"
        )
        self.timeout_seconds = timeout_seconds


class DeferError(HandlerError, TypeError):
    """`ctx.defer` received something that cannot be sent later, together with other jobs' statements."""


class LeaseLost(OutboxqError):
    """A job's lease expired, or another run of the job took it over, while its handler ran.

    Nothing of the handler's run was committed.
    """

    def __init__(self, job_id: UUID) -> None:
        super().__init__(f"the lease of job {job_id} was lost while its handler ran")
        self.job_id = job_id


class RelayStuck(OutboxqError):
    """A handler went on after its deadline, or after its cancellation: the process of its relay must be replaced."""


class LoginRefused(OutboxqError):
    """The database has refused the relay's login for too long: restart the relay with a login that works.

    Attributes:
        reason: The server's reason: "authentication failed", for example.
    """

    def __init__(self, reason: str, seconds: float) -> None:
        super().__init__(
            f"the database has refused the relay's login for {seconds:.0f} s ({reason}): the relay ends, to be started "
            "again with the new password, role or database"
        )
        self.reason = reason


class EntityGone(HandlerError):
    """An entity argument's row no longer exists; annotate it `Entity | None` to receive None instead."""

    def __init__(self, parameter: str, entity: str) -> None:
        super().__init__(
            f"the {entity} row of argument {parameter!r} is gone (annotate `{entity} | None` to allow that)"
        )
        self.parameter, self.entity = parameter, entity


class PayloadError(OutboxqError):
    """The stored arguments of a job do not fit the signature of its handler."""


class JobNotFound(OutboxqError):
    """No job or dead letter has this id."""

    def __init__(self, job_id: UUID, where: str, became: str = "") -> None:
        super().__init__(f"no {where} with id {job_id}{became and f': {became}'}")
        self.job_id = job_id


class ArgsNotKept(OutboxqError):
    """A finished job cannot be run again: its kind keeps no arguments."""

    def __init__(self, job_id: UUID, kind: str) -> None:
        super().__init__(
            f"job {job_id} cannot be run again, as its arguments were not kept: give the handler of {kind!r} "
            "keep_args=True for jobs to come"
        )
        self.job_id = job_id


class ResultUnavailable(OutboxqError):
    """The result of a job is not available. `job_id` names the job."""

    def __init__(self, job_id: UUID, message: str) -> None:
        super().__init__(f"job {job_id}: {message}")
        self.job_id = job_id


class WaitRefused(ResultUnavailable):
    """Waiting for this result is refused: its job is not committed yet, was not added, or keeps no result."""


class JobNotDone(ResultUnavailable):
    """The job whose result was waited for ended without being done: `outcome` says how, `reason` why if it is dead."""

    def __init__(self, job_id: UUID, outcome: str, reason: str | None = None) -> None:
        super().__init__(job_id, f"a dead letter: {reason}" if outcome == "dead" else f"it has no result: {outcome}")
        self.outcome, self.reason = outcome, reason


class ResultNotFound(ResultUnavailable):
    """No result of this job is in the database: it was never committed, or has ended and its result is not kept."""


class ResultTimeout(ResultUnavailable, TimeoutError):
    """The job did not end within the time to wait for its result. It goes on."""


class BatchNotFound(OutboxqError):
    """No open batch has this id: it has ended, and its callback is a job with the same id, or it never existed."""

    def __init__(self, batch_id: UUID) -> None:
        super().__init__(
            f"no batch with id {batch_id} is open: if it has ended, its callback has the same id, see "
            f"`outboxq jobs show {batch_id}`"
        )
        self.batch_id = batch_id


class ScheduleNotFound(OutboxqError):
    """No schedule has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no schedule {name!r}: see `outboxq schedules list`")
        self.name = name


class ScheduleDeclared(OutboxqError):
    """A schedule that an application's code declares can only be changed there.

    `owner`: the name of the registry that declares it, if it is known.
    """

    def __init__(self, name: str, owner: str | None = None) -> None:
        code = "an application's code" if owner is None else f"an application's code ({owner})"
        super().__init__(
            f"the schedule {name!r} is declared by {code}, which would change it back: change it there, "
            "pause it, or use another name"
        )
        self.name, self.owner = name, owner


class ScheduleOwned(ConfigError):
    """The registry `claimant` declares schedules, `names`, that belong to another registry, `owner`."""

    def __init__(self, names: Sequence[str], owner: str, claimant: str) -> None:
        adopted = shlex.join([*names, "--owner", claimant])
        super().__init__(
            f"schedules of the registry {owner!r} are declared by the registry {claimant!r}, too: "
            f"{', '.join(map(repr, names))}. Rename them in one of the two (name=...); or if {claimant!r} takes over, "
            f"or is the new name of {owner!r}, run `outboxq schedules adopt {adopted}`"
        )
        self.names, self.owner, self.claimant = tuple(names), owner, claimant


class InvalidKey(OutboxqError, ValueError):
    """A consumer, a message id, a scope or a key that cannot be stored as given."""


class MessageConflict(PermanentError):
    """A message has the id of an accepted message, but other content."""

    def __init__(self, consumer: str, message_id: str) -> None:
        super().__init__(
            f"message {message_id!r} of consumer {consumer!r} was accepted with other content: its sender gave one id "
            "to two messages, so look at both before you choose"
        )
        self.consumer, self.message_id = consumer, message_id


class EffectError(OutboxqError):
    """A call of `once` gave no result. `scope` and `key` name its effect."""

    def __init__(self, scope: str, key: str, message: str) -> None:
        super().__init__(f"effect {scope!r}, key {key!r}: {message}")
        self.scope, self.key = scope, key


class EffectInProgress(EffectError):
    """Another caller holds this effect's lock. In a handler the job is retried later, without counting an attempt."""

    def __init__(self, scope: str, key: str, retry_after_seconds: float) -> None:
        super().__init__(scope, key, f"a call is under way: ask again in {retry_after_seconds:.1f} s")
        self.retry_after_seconds = retry_after_seconds


class EffectNotRecorded(EffectError):
    """The call ended, but its outcome could not be recorded: the next caller does not know if it was applied."""

    def __init__(self, scope: str, key: str) -> None:
        super().__init__(scope, key, "the call ended, but its outcome could not be recorded in the database")


class CallNotApplied(OutboxqError):
    """Raise it in the function `call` of `once` if the other side surely did nothing: it will be called again."""


class CallRefused(OutboxqError):
    """Raise it in the function `call` of `once` if the other side refused for good: `reason` is stored and replayed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class EffectFailed(EffectError, PermanentError):
    """The other side refused for good. The refusal is recorded, and replayed instead of a call."""

    def __init__(self, scope: str, key: str, reason: str) -> None:
        super().__init__(scope, key, f"refused for good: {reason}")
        self.reason = reason


class EffectUnknown(EffectError):
    """It cannot be determined if the call was applied: an operator decides."""

    def __init__(self, scope: str, key: str, reason: str) -> None:
        super().__init__(
            scope,
            key,
            f"it is not known if it was applied: {reason}. Ask the other side, then run `outboxq effects resolve` "
            "with --applied or --not-applied",
        )
        self.reason = reason


class EffectConflict(EffectError, PermanentError):
    """The key was used before, with another request."""

    def __init__(self, scope: str, key: str) -> None:
        super().__init__(scope, key, "the key was used before with another request: a key is for one request")


class EffectLockLost(EffectError):
    """The call took longer than its lock and another caller took over, or its row is gone: nothing was recorded."""

    def __init__(self, scope: str, key: str) -> None:
        super().__init__(
            scope,
            key,
            "taken over by another caller while this one stood still, or its row was lost (a failover, a restored "
            "backup): what the call came to is not recorded",
        )


class ResultNotStorable(EffectError, PermanentError):
    """The effect is done and will not be called again, but its result is lost: JSON cannot store it, or changes it."""

    def __init__(self, scope: str, key: str, reason: str) -> None:
        super().__init__(
            scope,
            key,
            f"done, but its result was not kept: {reason}. Let the call return what JSON can hold, such as an id; this "
            "one can be given its result by `outboxq effects resolve` with --applied and --result",
        )
        self.reason = reason


class EffectRefused(HandlerError):
    """`once` was called at a point at which the call cannot be made safely, as in a batch of several jobs."""


class EffectNotFound(OutboxqError):
    """No effect has this scope and key."""

    def __init__(self, scope: str, key: str) -> None:
        super().__init__(f"no effect of scope {scope!r} with key {key!r}: it was never called, or is forgotten")
        self.scope, self.key = scope, key


class AuditNotFound(OutboxqError):
    """The audit has no row of this id."""

    def __init__(self, entry: UUID) -> None:
        super().__init__(f"the audit has no action with id {entry}: see `outboxq audit list`")
        self.entry = entry


class RunElsewhere(OutboxqError):
    """This process stops a change of many rows: another process has taken it over, or is changing some of the rows.

    `resumed`: True if `outboxq bulk resume` took the change over.
    """

    def __init__(self, entry: UUID, *, resumed: bool) -> None:
        super().__init__(
            f"{entry} was resumed elsewhere, and goes on there: see `outboxq audit show {entry}`"
            if resumed
            else f"a page of {entry} is under way in another session: see `outboxq audit show {entry}`, and try again"
        )
        self.entry, self.resumed = entry, resumed


class RunNotResumable(OutboxqError):
    """A change of many rows, such as one by `outboxq bulk`, cannot be resumed.

    The change has ended, or would exceed the number of rows that was agreed to; or the id is that of another sort of
    action.
    """

    def __init__(self, entry: UUID, reason: str) -> None:
        super().__init__(f"{entry} cannot go on: {reason}")
        self.entry = entry


class InstallationInUse(OutboxqError):
    """An installation cannot be given another id while relays are alive or calls of `once` are under way."""

    def __init__(self, relays: int, calls: int) -> None:
        super().__init__(
            f"the installation is in use: {relays} relays are alive and {calls} calls are under way. Stop its relays, "
            "and what else calls effects, and try again; those of a database that this one was copied from end "
            "with their leases"
        )
        self.relays, self.calls = relays, calls


class MessageNotFound(OutboxqError):
    """The inbox has no such message."""

    def __init__(self, consumer: str, message_id: str) -> None:
        super().__init__(f"consumer {consumer!r} has no message {message_id!r}: forgotten, expired or never accepted")
        self.consumer, self.message_id = consumer, message_id
