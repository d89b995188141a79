"""Handles of jobs, which `add_job` returns, and the wait for a job's result."""

import weakref
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, TypeVar, overload
from uuid import UUID

import msgspec
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import SessionTransaction

from outboxq.errors import AddedNotKnown, ArgumentError, WaitRefused
from outboxq.new_job import NewJob, UniqueAnswer, UniqueJob
from outboxq.outbox import results

T = TypeVar("T")

_A_MINUTE = timedelta(minutes=1)


# gc=False: it refers to no object that could refer to it, and the handles of a bulk live together.
class JobHandle(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The handle that `add_job` returns: enough to find the job again, known before anything is written.

    `hex` is the `id` as 32 hexadecimal digits.
    """

    # Strings and no UUID: a bulk returns a handle for each job, in a tenth of the time of a frozen dataclass with a
    # UUID.
    hex: str
    kind: str
    queue: str
    # True if the kind keeps results; None if its handler is in another application.
    _keeps_result: bool | None = None
    # The session's transaction that adds the job, in this process.
    _transaction: "weakref.ref[SessionTransaction] | None" = None

    @property
    def id(self) -> UUID:
        return UUID(self.hex)

    @property
    def added(self) -> bool:
        """True if the job was added: always, unless another job has its unique key.

        For a unique job this is known once its session has flushed, in a handler once the handler's transaction is
        committed. A later rollback undoes the job, which this does not show.

        Raises:
            AddedNotKnown: it is not known yet.
        """
        return True

    @property
    def existing_id(self) -> UUID | None:
        """The id of the job that has the unique key, if this job was not added; None if it was.

        That job may be done already, if its key is kept longer (`Unique(for_=...)`).

        Raises:
            AddedNotKnown: as `added` does.
        """
        return None

    @overload
    def result(
        self, engine: str | URL | Engine, *, timeout: timedelta | float = ..., returns: None = None, schema: str = ...
    ) -> Any: ...

    @overload
    def result(
        self, engine: str | URL | Engine, *, timeout: timedelta | float = ..., returns: type[T], schema: str = ...
    ) -> T: ...

    @overload
    def result(
        self, engine: AsyncEngine, *, timeout: timedelta | float = ..., returns: None = None, schema: str = ...
    ) -> Coroutine[Any, Any, Any]: ...

    @overload
    def result(
        self, engine: AsyncEngine, *, timeout: timedelta | float = ..., returns: type[T], schema: str = ...
    ) -> Coroutine[Any, Any, T]: ...

    def result(
        self,
        engine: str | URL | Engine | AsyncEngine,
        *,
        timeout: timedelta | float = _A_MINUTE,
        returns: type[Any] | None = None,
        schema: str | None = None,
    ) -> Any:
        """Wait until the job is done, and return its handler's value; await this if the engine is async.

        For kinds with `keep_result=True`, after the COMMIT of the transaction that added the job. The wait holds none
        of the engine's connections: all waits of a process share one separate connection, which listens. The time-out
        ends only the wait: the job goes on.

        Args:
            engine: The job's database: an engine, of any driver, or a URL. With an async engine the method returns a
                coroutine.
            timeout: How long to wait, as a timedelta or in seconds.
            returns: The type of the result, such as a dataclass; by default JSON's own types.
            schema: The schema of the tables; by default that of the engine's `schema_translate_map`, or `outboxq`.

        Raises:
            WaitRefused: the transaction that adds the job is open, or the kind keeps no results.
            JobNotDone: the job is dead, was discarded or cancelled, or has expired.
            ResultNotFound: the job was never committed, or its result no longer exists.
            ResultTimeout: the job has not ended yet. Also a `TimeoutError`.
            PayloadError: the result is not of the type `returns`.
            ConfigError: the engine, the time, the type or the schema cannot be used, or the database refuses the role.
            SchemaError: the outboxq tables are missing, or too old.
        """
        self.refuse_to_wait()
        return results.wait(engine, self.id, timeout=timeout, returns=returns, schema=schema)

    def refuse_to_wait(self) -> None:
        """Refuse a wait that cannot succeed, as far as can be known without I/O.

        Raises:
            WaitRefused: the transaction that adds the job is open, or the kind keeps no results.
        """
        if self._keeps_result is False:
            raise WaitRefused(
                self.id,
                f"its kind {self.kind!r} keeps no results: give its handler keep=timedelta(days=7), keep_result=True",
            )
        if _is_open(self._transaction):
            raise WaitRefused(
                self.id,
                "the transaction that adds it is still open, and it cannot run before COMMIT: wait after the end of "
                "the `with Session.begin()` block, or after session.commit()",
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, JobHandle):
            return NotImplemented
        return (self.hex, self.kind, self.queue) == (other.hex, other.kind, other.queue)

    def __hash__(self) -> int:
        return hash(self.hex)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process does not know the transaction.
        return type(self), (self.hex, self.kind, self.queue, self._keeps_result)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self.id!r}, kind={self.kind!r}, queue={self.queue!r})"


class UniqueJobHandle(JobHandle, frozen=True, eq=False, gc=False, kw_only=True):
    """The handle of a unique job, which may turn out not to be added."""

    answer: UniqueAnswer

    @property
    def added(self) -> bool:
        if self.answer.added is None:
            raise AddedNotKnown(self.kind)
        return self.answer.added

    @property
    def existing_id(self) -> UUID | None:
        return None if self.added else self.answer.existing_id

    def refuse_to_wait(self) -> None:
        super().refuse_to_wait()
        if self.answer.added is False:
            raise WaitRefused(
                self.id,
                f"it was not added, because job {self.answer.existing_id} has its unique key: wait for that one with "
                "outboxq.wait_for_result(engine, handle.existing_id)",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.hex, self.kind, self.queue, self._keeps_result, self.answer)


def _unpickled(hexadecimal: str, kind: str, queue: str, keeps_result: bool | None, answer: UniqueAnswer) -> JobHandle:
    return UniqueJobHandle(hexadecimal, kind, queue, keeps_result, answer=answer)


def make_handle(job_id: str, new: NewJob, transaction: "weakref.ref[SessionTransaction] | None" = None) -> JobHandle:
    """Make the handle of a new job.

    `transaction`: the session's transaction that adds the job, if known: while it is open, the handle refuses to wait.
    """
    envelope = new.envelope
    if isinstance(new, UniqueJob):
        return UniqueJobHandle(
            job_id, envelope.kind, envelope.queue, envelope.keeps_result, transaction, answer=new.answer
        )
    return JobHandle(job_id, envelope.kind, envelope.queue, envelope.keeps_result, transaction)


def _is_open(transaction: "weakref.ref[SessionTransaction] | None") -> bool:
    """Return True if this transaction of a session is known and has not ended."""
    found = None if transaction is None else transaction()
    return found is not None and found.session.get_transaction() is found


@overload
def wait_for_result(
    engine: str | URL | Engine,
    job: JobHandle | UUID | str,
    *,
    timeout: timedelta | float = ...,
    returns: None = None,
    schema: str = ...,
) -> Any: ...


@overload
def wait_for_result(
    engine: str | URL | Engine,
    job: JobHandle | UUID | str,
    *,
    timeout: timedelta | float = ...,
    returns: type[T],
    schema: str = ...,
) -> T: ...


@overload
def wait_for_result(
    engine: AsyncEngine,
    job: JobHandle | UUID | str,
    *,
    timeout: timedelta | float = ...,
    returns: None = None,
    schema: str = ...,
) -> Coroutine[Any, Any, Any]: ...


@overload
def wait_for_result(
    engine: AsyncEngine,
    job: JobHandle | UUID | str,
    *,
    timeout: timedelta | float = ...,
    returns: type[T],
    schema: str = ...,
) -> Coroutine[Any, Any, T]: ...


def wait_for_result(
    engine: str | URL | Engine | AsyncEngine,
    job: JobHandle | UUID | str,
    *,
    timeout: timedelta | float = _A_MINUTE,
    returns: type[Any] | None = None,
    schema: str | None = None,
) -> Any:
    """Wait until a job is done, and return its handler's value, if only the job's id is known, as in another process.

    All arguments but `job` are those of `JobHandle.result`.

    An id does not show that its transaction is still open, or that its kind keeps no result: both lead to
    `ResultNotFound`, the second when the job is done.

    Raises:
        ArgumentError: the text is no id; other errors are those of `JobHandle.result`.
    """
    job_id = job_id_of(job)
    if isinstance(job, JobHandle):
        job.refuse_to_wait()
    return results.wait(engine, job_id, timeout=timeout, returns=returns, schema=schema)


def job_id_of(job: JobHandle | UUID | str) -> UUID:
    """Return the id of a job, which is given by its handle, or by its id, also as text.

    Raises:
        ArgumentError: it is neither, or the text is no id.
    """
    if isinstance(job, JobHandle):
        return job.id
    if isinstance(job, UUID):
        return job
    form = "a job is given by what add_job returned, or by its id, such as '01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10'"
    if not isinstance(job, str):
        raise ArgumentError(f"{form}; got {type(job).__name__}")
    try:
        return UUID(job)
    except ValueError:
        raise ArgumentError(f"{form}; got {job[:80]!r}") from None
