"""Batches: jobs that are added together, and a callback, a job that is added when all of them have ended."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self, overload
from uuid import UUID

import msgspec
from sqlalchemy.orm import Session, SessionTransaction

from outboxq.database.sessions import AnySession, plain_session
from outboxq.errors import ArgumentError, EnqueueError
from outboxq.job import BATCH_FAILED_HEADER, BATCH_HEADER, Job
from outboxq.new_job import JobKeys, NewJob
from outboxq.outbox.handle import JobHandle
from outboxq.outbox.kinds import JobKind, P
from outboxq.outbox.pending import current_transaction, is_within, replace_pending
from outboxq.outbox.session import add_new
from outboxq.outbox.stored_job import add_headers


class JobBatch:
    """An open batch, to which members can be added. Made by `jobs.batch(...)`, `ctx.batch` and `batch_of`.

    `id` is also the id of the callback, the job that is added when all members have ended.
    """

    def __init__(self, session: Session, batch_hex: str) -> None:
        self._session = session
        self._hex = batch_hex

    @property
    def id(self) -> UUID:
        return UUID(self._hex)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    @overload
    def of(self, jobs: NewJob, /) -> NewJob: ...

    @overload
    def of(self, jobs: Iterable[NewJob], /) -> Iterator[NewJob]: ...

    def of(self, jobs: NewJob | Iterable[NewJob], /) -> NewJob | Iterator[NewJob]:
        """Return the same job, or jobs, as members of the batch: for `session.add_jobs`, or as `on_done` of a batch.

        With the first job of a chain, its followers become members too.

        Raises:
            ArgumentError: an argument is no job, or is in a batch already.
            EnqueueError: the batch takes no more members.
        """
        return self._of(jobs) if isinstance(jobs, NewJob) else map(self._of, jobs)

    def add_job(self, kind: JobKind[P], /, *args: P.args, **kwargs: P.kwargs) -> JobHandle:
        """Add a job to the session, as a member of the batch, and return its handle.

        Raises:
            ArgumentError, JobTooLarge, EnqueueError: for the same reasons as by `session.add_job`, or the batch takes
                no more members.
        """
        if not isinstance(kind, JobKind):
            raise ArgumentError(f"add_job takes a handler, or a kind made by external(...), got {type(kind).__name__}")
        return self.add_jobs([kind.job(*args, **kwargs)])[0]

    def add_jobs(self, jobs: Iterable[NewJob]) -> list[JobHandle]:
        """Add many jobs, made by `kind.job(...)`, to the session as members of the batch; return their handles.

        Raises:
            ArgumentError, JobTooLarge, EnqueueError: for the same reasons as by `session.add_jobs`, or the batch takes
                no more members.
        """
        return add_new(self._session, [self._of(new) for new in jobs])

    def _of(self, new: NewJob) -> NewJob:
        self._check()
        if not isinstance(new, NewJob):
            raise ArgumentError(f"a batch takes jobs made by kind.job(...), got {type(new).__name__}")
        if not callable(new.keys) and new.keys is not None and new.keys.batch is not None:
            raise ArgumentError(f"{new.kind!r} is in a batch already, and a job has one: add it to one of the two")
        return new.in_batch(self._hex)

    def _check(self) -> None:
        """Refuse a new member if the batch may end before it is written; this class refuses none, subclasses may."""


class OpeningBatch(JobBatch, AbstractContextManager["JobBatch"]):
    """A batch that `jobs.batch` has opened in the session's transaction; it takes members only in its `with` block."""

    def __init__(self, session: Session, on_done: NewJob) -> None:
        keys = on_done.keys
        opening = (lambda: _opening(on_done, keys())) if callable(keys) else _opening(on_done, keys or JobKeys())
        (handle,) = add_new(session, [msgspec.structs.replace(on_done, keys=opening)])
        super().__init__(session, handle.hex)
        self._callback = on_done
        self._transaction: SessionTransaction | None = current_transaction(session)
        self._is_open = False
        self._is_empty = True

    def __enter__(self) -> Self:
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        if kind is None and self._is_empty:
            # Ended from the start: the callback is added at once. If the batch is written already, because the block
            # flushed, the relays' sweep finds it.
            replace_pending(self._session, self._hex, self._as_over())

    def _as_over(self) -> NewJob:
        added = {BATCH_HEADER: str(self.id), BATCH_FAILED_HEADER: "0"}
        return msgspec.structs.replace(self._callback, envelope=add_headers(self._callback.envelope, added))

    def _of(self, new: NewJob) -> NewJob:
        member = super()._of(new)
        self._is_empty = False
        return member

    def _check(self) -> None:
        if not self._is_open:
            raise EnqueueError(
                "a batch takes members inside of its block: with jobs.batch(session, on_done=...) as batch: ..."
            )
        if self._transaction is None or not is_within(self._session, self._transaction):
            raise EnqueueError(
                "the transaction or savepoint in which the batch was opened has ended: a batch takes all members in "
                "it; later ones are added by the handlers of its members, by ctx.batch"
            )


def batch(session: AnySession, /, *, on_done: NewJob) -> OpeningBatch:
    """Open a batch: `on_done` is added when all of its members have ended.

    A member has ended when it is done, discarded, cancelled or a dead letter: the callback's `ctx.finished_batch` has
    the number of dead letters. The batch, its members and the callback are written in the session's transaction, by its
    flushes; this is no coroutine, not even for async sessions. If no member is added, the callback is added at once.

    Args:
        session: Any SQLAlchemy session, sync or async.
        on_done: A job made by `kind.job(...)`, in any queue. It may be a member of another batch (`other.of(...)`),
            which then ends only after this job has.

    Returns:
        A context manager: in its `with` block, members are added by `add_job`, `add_jobs`, or
        `session.add_jobs(batch.of(...))`.

    Raises:
        ArgumentError: `on_done` is no job, or has `unique=` or `every=`.
        EnqueueError: the session cannot hold jobs.
    """
    if not isinstance(on_done, NewJob):
        raise ArgumentError(f"on_done takes a job made by kind.job(...), got {type(on_done).__name__}")
    return OpeningBatch(plain_session(session, "batch"), on_done)


def batch_of(session: AnySession, job: Job, /) -> JobBatch | None:
    """Return the batch of which a running job is a member, to add more members; None if it is in none.

    For batch handlers: `batch_of(ctx.session, item.job)`. Other handlers have `ctx.batch`. Use the handler's session:
    members that are written after the job has ended may come after the callback.
    """
    return None if job.batch_id is None else JobBatch(plain_session(session, "batch_of"), job.batch_id.hex)


class FinishedBatch(msgspec.Struct, frozen=True):
    """The data that a callback receives about its batch: its id, and how many of its jobs ended as dead letters."""

    id: UUID
    failed: int


def finished_batch(job: Job, /) -> FinishedBatch | None:
    """Return the batch whose callback a job is; None if it is no callback. Handlers have `ctx.finished_batch`."""
    if BATCH_HEADER not in job.headers:
        return None
    headers = msgspec.json.decode(job.headers.encode(), type=dict[str, str])
    found, failed = headers.get(BATCH_HEADER), headers.get(BATCH_FAILED_HEADER, "0")
    return None if found is None else FinishedBatch(UUID(found), int(failed))


def _opening(on_done: NewJob, keys: JobKeys) -> JobKeys:
    if keys.unique is not None:
        raise ArgumentError("on_done takes no job with unique=: a batch adds its callback once in any case")
    if on_done.envelope.every is not None:
        raise ArgumentError("on_done takes no job with every=: it is added when the batch has ended")
    return msgspec.structs.replace(keys, opens_batch=True)
