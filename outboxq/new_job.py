"""A job that is not enqueued yet, and what enqueueing it returns."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from uuid import UUID

import msgspec

from outboxq.codec.entities import is_pending
from outboxq.codec.values import MAX_ARGS_BYTES, encode_value, join_object
from outboxq.errors import JobTooLarge


class JobEnvelope(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What the jobs of a kind with its options have in common: one object for all of them."""

    kind: str
    queue: str
    headers: str
    priority: int
    max_attempts: int | None
    run_at: datetime | None
    delay: timedelta | None


# A struct, as a bulk makes one for each job: in a third of a dataclass's time, and unless an entity is pending nothing
# that the garbage collector has to walk.
class NewJob(msgspec.Struct, frozen=True, eq=False):
    """A job that is not enqueued yet. Make one with `kind.job(...)`.

    Its arguments are those of the call: changing a list afterwards does not change the job.
    """

    envelope: JobEnvelope
    # A JSON object of all arguments but the pending ones.
    args: str
    # Entities that had no primary key at the call.
    pending: Mapping[str, object] | None

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
        return [entity for entity in (self.pending or {}).values() if is_pending(entity)]

    def complete(self) -> "NewJob":
        """The job with all of its arguments; every entity must have its primary key."""
        if not self.pending:
            return self
        keys = join_object({name: encode_value(name, entity) for name, entity in self.pending.items()})
        args = keys if self.args == "{}" else f"{self.args[:-1]},{keys[1:]}"
        return NewJob(self.envelope, check_size(self.kind, args), None)


def check_size(kind: str, args: str) -> str:
    """Refuse arguments over the cap."""
    size_bytes = len(args) if args.isascii() else len(args.encode())
    if size_bytes > MAX_ARGS_BYTES:
        raise JobTooLarge(kind, size_bytes, MAX_ARGS_BYTES)
    return args


class JobHandle(msgspec.Struct, frozen=True):
    """What `add_job` returns: enough to find the job again, known before anything is written.

    `hex` is the `id` as 32 hexadecimal digits.
    """

    # Strings, and no UUID: a bulk returns one for each job, in a tenth of the time of a frozen dataclass with a UUID.
    hex: str
    kind: str
    queue: str

    @property
    def id(self) -> UUID:
        return UUID(self.hex)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self.id!r}, kind={self.kind!r}, queue={self.queue!r})"
