"""New jobs, which are not enqueued yet."""

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from uuid import UUID

import msgspec

from outboxq.codec.entities import EntityArgument
from outboxq.codec.values import MAX_ARGS_BYTES, encode_value, join_object
from outboxq.errors import ArgumentError, EnqueueError, JobTooLarge


class JobEnvelope(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The fields that all jobs of a kind with the same options share: one object for all of them.

    `keeps_result`: True if results of the kind are kept; None if its handler is in another application.
    """

    kind: str
    queue: str
    headers: str
    priority: int
    max_attempts: int | None
    run_at: datetime | None
    delay: timedelta | None
    every: timedelta | None = None
    expires: timedelta | None = None
    keeps_result: bool | None = None


class UniqueKey(msgspec.Struct, frozen=True, gc=False):
    """The unique key of a job: the job is added only if no other job has the key.

    `key` begins with the kind. `kept` is the minimum time for which the key stays taken, even if the job is done
    sooner.
    """

    key: str
    kept: timedelta | None


class JobKeys(msgspec.Struct, frozen=True, gc=False):
    """The keys of a job, which relate it to other jobs; None for each that the job does not have.

    `coalesce`, `group` and `unique` are the options of those names; `coalesce` begins with the kind. `batch` is the id,
    in hex, of the batch that the job is in. `opens_batch`: the job is the callback of a batch, and is added when the
    batch with the job's own id has ended.
    """

    coalesce: str | None = None
    group: str | None = None
    unique: UniqueKey | None = None
    batch: str | None = None
    opens_batch: bool = False


# A struct, because a bulk makes one for each job: it takes a third of a dataclass's time, and unless it has entities,
# the garbage collector need not walk it.
class NewJob(msgspec.Struct, frozen=True, eq=False):
    """A job that is not enqueued yet. Make one with `kind.job(...)`.

    That call encodes the arguments: changing a list afterwards does not change the job.
    """

    envelope: JobEnvelope
    # A JSON object of all arguments except entities that had no primary key at the call.
    args: str
    entities: Mapping[str, EntityArgument] | None
    # With such an entity, a function of its primary key.
    keys: JobKeys | Callable[[], JobKeys] | None = None
    # The later jobs of its chain, in their order; none of these has followers of its own.
    followers: tuple["NewJob", ...] = ()
    # Makes `keys` again if an entity's primary key has changed, except for the batch.
    keys_at_flush: Callable[[], JobKeys] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kind!r} for queue {self.queue!r}>"

    @property
    def kind(self) -> str:
        return self.envelope.kind

    @property
    def queue(self) -> str:
        return self.envelope.queue

    def pending_entities(self) -> list[object]:
        """Return the arguments that are entities without a primary key, which only a flush will assign."""
        return [argument.entity for argument in (self.entities or {}).values() if argument.is_pending()]

    def was_pending(self) -> bool:
        """Return True if an entity had no primary key at `kind.job(...)`, so that the job was not fully checked."""
        return any(argument.key is None for argument in (self.entities or {}).values())

    def has_entities(self) -> bool:
        """Return True if the job, or one of those that follow it, has an entity among its arguments."""
        return bool(self.entities) or any(each.entities for each in self.followers)

    def complete(self) -> "NewJob":
        """Return the job and its followers with the present primary keys of their entities; each entity must have one.

        Raises:
            EnqueueError: an entity was deleted, and its parameter does not allow None.
        """
        if not self.has_entities():
            return self
        followers = tuple(each.complete() for each in self.followers)
        entities = {name: argument.current() for name, argument in (self.entities or {}).items()}
        for name, argument in entities.items():
            self._refuse_deleted(name, argument)
        changed = {name: argument for name, argument in entities.items() if argument is not (self.entities or {})[name]}
        if not changed:
            return msgspec.structs.replace(self, followers=followers)
        given = msgspec.json.decode(self.args, type=dict[str, msgspec.Raw])
        values = {name: bytes(data) for name, data in given.items()}
        args = join_object(values | {name: encode_value(name, argument.entity) for name, argument in changed.items()})
        check_size(self.kind, args)
        completed = NewJob(self.envelope, args, entities, self._current_keys(), followers, self.keys_at_flush)
        if followers or (isinstance(completed.keys, JobKeys) and completed.keys.batch is not None):
            refuse_coalesced(completed, "followed by another job, or in a batch")
        return completed

    def _refuse_deleted(self, name: str, argument: EntityArgument) -> None:
        if argument.is_deleted() and not argument.optional:
            entity = type(argument.entity).__name__
            raise EnqueueError(
                f"{self.kind!r} was given, as argument {name!r}, a {entity} that is deleted before the job is written: "
                f"its handler would find no row. Annotate {entity} | None there, or give the handler the primary key"
            )

    def _current_keys(self) -> JobKeys | None:
        keys = self.keys
        if callable(keys):
            return keys()
        if keys is None or self.keys_at_flush is None:
            return keys
        return msgspec.structs.replace(self.keys_at_flush(), batch=keys.batch, opens_batch=keys.opens_batch)

    def then(self, follower: "NewJob", /) -> "NewJob":
        """Return the same job with a follower, which is added in the transaction in which this job is done.

        `a.then(b).then(c)` and `a.then(b.then(c))` are the same chain. Only a done job is followed, not one that is
        discarded, cancelled or a dead letter.

        Raises:
            ArgumentError: `follower` is no job, is in a batch, or has an entity without a primary key; or it would
                follow a coalesced job, or a follower with a unique key.
            JobTooLarge: the followers have more than 256 KiB, headers included.
        """
        if not isinstance(follower, NewJob):
            raise ArgumentError(f"then takes a job made by kind.job(...), got {type(follower).__name__}")
        refuse_coalesced((self, *self.followers)[-1], "followed by another job")
        followers = (*self.followers, _follower(follower), *follower.followers)
        _refuse_unique_between(followers)
        _check_chain(self.kind, followers)
        return NewJob(self.envelope, self.args, self.entities, self.keys, followers, self.keys_at_flush)

    def in_batch(self, batch: str) -> "NewJob":
        """Return the same job, with its followers, as a member of the batch with this id in hex.

        Raises:
            ArgumentError: the job, or a follower, is coalesced.
        """
        for each in (self, *self.followers):
            refuse_coalesced(each, "in a batch")
        keys = self.keys
        if callable(keys):
            return msgspec.structs.replace(self, keys=lambda: msgspec.structs.replace(keys(), batch=batch))
        return msgspec.structs.replace(self, keys=msgspec.structs.replace(keys or JobKeys(), batch=batch))


def _refuse_unique_between(followers: "tuple[NewJob, ...]") -> None:
    """Refuse a chain in which a follower other than the last one has a unique key.

    If another job had the key, the follower would not be added, and the chain would silently end there.
    """
    for each in followers[:-1]:
        if has_unique_key(each):
            raise ArgumentError(
                f"{each.kind!r} has a unique key, and cannot be between two jobs of a chain: if another job has the "
                "key, it is not added, and nothing could follow it. Let it be the first or the last one"
            )


def refuse_coalesced(new: NewJob, what: str) -> None:
    """Refuse a coalesced job: another job's run may replace it, and its followers or batch would be lost.

    Raises:
        ArgumentError: the job is coalesced; `what` names the role, such as a batch's member, that it cannot have.
    """
    # Keys that depend on primary keys of pending entities are checked when these are known.
    if not callable(new.keys) and new.keys is not None and new.keys.coalesce is not None:
        raise ArgumentError(
            f"{new.kind!r} is coalesced, and cannot be {what}: the run of another job may stand for it. Leave one out"
        )


# The number of a chain's kinds that an error names.
_NAMED = 5
# The bytes that a job needs in addition to its arguments and headers.
_EACH_BYTES = 512


def _follower(new: NewJob) -> NewJob:
    entities = new.pending_entities()
    if entities:
        raise ArgumentError(
            f"{new.kind!r} was given a new {type(entities[0]).__name__}, which has no primary key yet: flush the "
            "session before it follows another job"
        )
    complete = new.complete()
    assert not callable(complete.keys), "a job is complete when it has its keys"
    if complete.keys is not None and complete.keys.batch is not None:
        raise ArgumentError(f"{new.kind!r} is in a batch by itself: add the first job of its chain to the batch")
    return NewJob(
        complete.envelope, complete.args, complete.entities, complete.keys, keys_at_flush=complete.keys_at_flush
    )


def _check_chain(kind: str, followers: tuple[NewJob, ...]) -> None:
    size_bytes = sum(_EACH_BYTES + len(each.args.encode()) + len(each.envelope.headers.encode()) for each in followers)
    if size_bytes > MAX_ARGS_BYTES:
        named = ", ".join(repr(each.kind) for each in followers[:_NAMED])
        others = f" and {len(followers) - _NAMED} more" if len(followers) > _NAMED else ""
        what = f"the jobs that follow {kind!r} in its chain ({named}{others}; headers included)"
        advice = ", or let the last job of a shorter chain add the next ones"
        raise JobTooLarge(kind, size_bytes, MAX_ARGS_BYTES, what, advice)


class UniqueAnswer:
    """The outcome of adding a unique job, read by its handle: known at the flush, or in a handler at COMMIT."""

    __slots__ = ("added", "existing_id")

    def __init__(self) -> None:
        self.added: bool | None = None
        self.existing_id: UUID | None = None

    def give(self, *, added: bool, existing_id: UUID | None = None) -> None:
        """Record that the job was added, or else the id of the job that has its key instead."""
        self.added, self.existing_id = added, None if added else existing_id


class UniqueJob(NewJob, frozen=True, eq=False, kw_only=True):
    """A job in a session with a unique key, or with one that is known only when its entities have primary keys."""

    answer: UniqueAnswer

    @property
    def key(self) -> UniqueKey:
        """The job's unique key; only for a complete job that has one."""
        assert isinstance(self.keys, JobKeys)
        assert self.keys.unique is not None
        return self.keys.unique

    def complete(self) -> NewJob:
        """Return the job with the primary keys of its entities; as a plain `NewJob` if it then has no unique key."""
        completed = super().complete()
        keys = completed.keys
        if callable(keys) or keys is None or keys.unique is None:
            self.answer.give(added=True)
            return completed
        return _unique(completed, self.answer)


def has_unique_key(new: NewJob) -> bool:
    """Return True if a job has a unique key, or if that is not known because its entities have no primary keys yet."""
    return callable(new.keys) or (new.keys is not None and new.keys.unique is not None)


def with_answer(new: NewJob) -> UniqueJob:
    """Return the job as a `UniqueJob` with its own `UniqueAnswer`, because one `NewJob` may be added twice."""
    if isinstance(new, UniqueJob):
        return new
    return _unique(new, UniqueAnswer())


def _unique(new: NewJob, answer: UniqueAnswer) -> UniqueJob:
    return UniqueJob(new.envelope, new.args, new.entities, new.keys, new.followers, new.keys_at_flush, answer=answer)


def check_size(kind: str, args: str) -> str:
    """Return the arguments of a job, as JSON text, unchanged, after a check of their size.

    Raises:
        JobTooLarge: they exceed 256 KiB.
    """
    size_bytes = len(args) if args.isascii() else len(args.encode())
    if size_bytes > MAX_ARGS_BYTES:
        raise JobTooLarge(kind, size_bytes, MAX_ARGS_BYTES)
    return args
