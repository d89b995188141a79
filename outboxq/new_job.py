"""A job that is not enqueued yet."""

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from uuid import UUID

import msgspec

from outboxq.codec.entities import EntityArgument
from outboxq.codec.values import MAX_ARGS_BYTES, encode_value, join_object
from outboxq.errors import ArgumentError, EnqueueError, JobTooLarge


class JobEnvelope(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The fields that the jobs of a kind with its options share: one object for all of them.

    `keeps_result`: True if results of the kind are kept; None if its handler is elsewhere.
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
    """The key of a job that is added only if no other job has it, and for how long it is kept in any case.

    `key` begins with the kind.
    """

    key: str
    kept: timedelta | None


class JobKeys(msgspec.Struct, frozen=True, gc=False):
    """The keys of a job: to coalesce it (with its kind), its group, its unique key; and its batch's id in hex.

    None for those that it does not have. `opens_batch`: it is added when the batch that has its id has ended.
    """

    coalesce: str | None = None
    group: str | None = None
    unique: UniqueKey | None = None
    batch: str | None = None
    opens_batch: bool = False


# A struct, as a bulk makes one for each job: in a third of a dataclass's time, and unless it has entities nothing
# that the garbage collector has to walk.
class NewJob(msgspec.Struct, frozen=True, eq=False):
    """A job that is not enqueued yet. Make one with `kind.job(...)`.

    Its arguments are those of the call: changing a list afterwards does not change the job.
    """

    envelope: JobEnvelope
    # A JSON object of all arguments but the entities that had no primary key at the call.
    args: str
    entities: Mapping[str, EntityArgument] | None
    # With such an entity, a function of its primary key.
    keys: JobKeys | Callable[[], JobKeys] | None = None
    # The jobs of its chain that run after it, one after the other; none of these has followers of its own.
    followers: tuple["NewJob", ...] = ()
    # Makes `keys` again if the primary key of an entity has changed: all of them but the batch.
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
        """The entities whose primary keys are known only after a flush."""
        return [argument.entity for argument in (self.entities or {}).values() if argument.is_pending()]

    def was_pending(self) -> bool:
        """Return True if an entity had no primary key at the call, so that the job was not checked as a whole."""
        return any(argument.key is None for argument in (self.entities or {}).values())

    def has_entities(self) -> bool:
        """Return True if the job, or one of those that follow it, has an entity among its arguments."""
        return bool(self.entities) or any(each.entities for each in self.followers)

    def complete(self) -> "NewJob":
        """The job and its followers with the primary keys that their entities have now; every one must have its own.

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
        """The same job, and after it another one: it is added in the transaction in which this one is done.

        `a.then(b).then(c)` and `a.then(b.then(c))` are the same chain. Only a job that is done is followed: not one
        that is discarded, cancelled or among the dead letters.

        Raises:
            ArgumentError: no job, one of a batch, or one with an entity that has no primary key yet; or it would
                follow a coalesced job, or one that follows another and has a unique key.
            JobTooLarge: the jobs that follow have more than 256 KiB, headers included.
        """
        if not isinstance(follower, NewJob):
            raise ArgumentError(f"then takes a job made by kind.job(...), got {type(follower).__name__}")
        refuse_coalesced((self, *self.followers)[-1], "followed by another job")
        followers = (*self.followers, _follower(follower), *follower.followers)
        _refuse_unique_between(followers)
        _check_chain(self.kind, followers)
        return NewJob(self.envelope, self.args, self.entities, self.keys, followers, self.keys_at_flush)

    def in_batch(self, batch: str) -> "NewJob":
        """The same job as a member of a batch, by its id in hex, and with it those that follow it.

        Raises:
            ArgumentError: one of them is coalesced.
        """
        for each in (self, *self.followers):
            refuse_coalesced(each, "in a batch")
        keys = self.keys
        if callable(keys):
            return msgspec.structs.replace(self, keys=lambda: msgspec.structs.replace(keys(), batch=batch))
        return msgspec.structs.replace(self, keys=msgspec.structs.replace(keys or JobKeys(), batch=batch))


def _refuse_unique_between(followers: "tuple[NewJob, ...]") -> None:
    """Refuse a chain that would silently end at a follower that is not added because another job has its key."""
    for each in followers[:-1]:
        if has_unique_key(each):
            raise ArgumentError(
                f"{each.kind!r} has a unique key, and cannot be between two jobs of a chain: if another job has the "
                "key, it is not added, and nothing could follow it. Let it be the first or the last one"
            )


def refuse_coalesced(new: NewJob, what: str) -> None:
    """Refuse a job that the run of another one may replace, and with it the things that belong to this one.

    Raises:
        ArgumentError: it is coalesced; `what` says what it cannot be.
    """
    # Keys that depend on the primary keys of pending entities are checked when these are known.
    if not callable(new.keys) and new.keys is not None and new.keys.coalesce is not None:
        raise ArgumentError(
            f"{new.kind!r} is coalesced, and cannot be {what}: the run of another job may stand for it. Leave one out"
        )


# The number of a chain's kinds that an error names.
_NAMED = 5
# The bytes that a job takes in addition to its arguments and headers.
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
    """The outcome of adding a unique job, given when its key is taken: by the flush, or in a handler by the COMMIT."""

    __slots__ = ("added", "existing_id")

    def __init__(self) -> None:
        self.added: bool | None = None
        self.existing_id: UUID | None = None

    def give(self, *, added: bool, existing_id: UUID | None = None) -> None:
        """Record whether the job was added, and the id of the job that has its key instead."""
        self.added, self.existing_id = added, None if added else existing_id


class UniqueJob(NewJob, frozen=True, eq=False, kw_only=True):
    """A job that waits in a session, and may have a unique key: that may depend on keys of pending entities."""

    answer: UniqueAnswer

    @property
    def key(self) -> UniqueKey:
        """Its unique key, which it must have."""
        assert isinstance(self.keys, JobKeys)
        assert self.keys.unique is not None
        return self.keys.unique

    def complete(self) -> NewJob:
        """The job with all of its arguments; no `UniqueJob` any more if it has no unique key."""
        completed = super().complete()
        keys = completed.keys
        if callable(keys) or keys is None or keys.unique is None:
            self.answer.give(added=True)
            return completed
        return _unique(completed, self.answer)


def has_unique_key(new: NewJob) -> bool:
    """Return True if a job has a unique key, or may have one once the keys of pending entities are known."""
    return callable(new.keys) or (new.keys is not None and new.keys.unique is not None)


def with_answer(new: NewJob) -> UniqueJob:
    """A job that has a unique key, with a place for its outcome: its own, as one `NewJob` may be added twice."""
    if isinstance(new, UniqueJob):
        return new
    return _unique(new, UniqueAnswer())


def _unique(new: NewJob, answer: UniqueAnswer) -> UniqueJob:
    return UniqueJob(new.envelope, new.args, new.entities, new.keys, new.followers, new.keys_at_flush, answer=answer)


def check_size(kind: str, args: str) -> str:
    """Refuse arguments over the cap."""
    size_bytes = len(args) if args.isascii() else len(args.encode())
    if size_bytes > MAX_ARGS_BYTES:
        raise JobTooLarge(kind, size_bytes, MAX_ARGS_BYTES)
    return args
