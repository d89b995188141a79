"""Assertions about the jobs that a test's transaction has enqueued."""

from collections.abc import Awaitable
from typing import overload

import msgspec
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from outboxq.codec.values import encode_value, join_object
from outboxq.new_job import JobHandle
from outboxq.outbox.kinds import JobKind, P
from outboxq.tables import job


@overload
def assert_enqueued(session: Session, kind: "JobKind[P] | str", /, **args: object) -> JobHandle: ...


@overload
def assert_enqueued(session: AsyncSession, kind: "JobKind[P] | str", /, **args: object) -> Awaitable[JobHandle]: ...


def assert_enqueued(
    session: Session | AsyncSession, kind: "JobKind[P] | str", /, **args: object
) -> JobHandle | Awaitable[JobHandle]:
    """Assert that a job of `kind` waits whose arguments include `args`; await it for an async session.

    Flushes the session first, and sees what its transaction sees. Entities are compared by primary key.

    Raises:
        AssertionError: there is none; the message lists the jobs that wait.
    """
    name = kind if isinstance(kind, str) else kind.kind
    if isinstance(session, AsyncSession):
        return session.run_sync(_assert_enqueued, name, args)
    return _assert_enqueued(session, name, args)


def _assert_enqueued(session: Session, kind: str, args: dict[str, object]) -> JobHandle:
    session.flush()
    expected = join_object({name: encode_value(name, value) for name, value in args.items()})
    columns = select(job.c.id, job.c.kind, job.c.queue, job.c.args).order_by(job.c.seq)
    found = session.execute(
        columns.where(job.c.kind == kind, job.c.args.cast(JSONB).contains(msgspec.json.decode(expected)))
    ).first()
    if found is not None:
        return JobHandle(found.id.hex, found.kind, found.queue)
    waiting = [f"  {row.kind} {row.args}" for row in session.execute(columns.limit(20))]
    raise AssertionError(
        f"no job {kind} with {expected} is enqueued; waiting are:\n" + ("\n".join(waiting) or "  none")
    )
