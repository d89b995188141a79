"""`JobRow`: an object in a SQLAlchemy session that represents the jobs which the session's next flush will insert."""

import os
import threading
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, event, func, inspect, select
from sqlalchemy.orm import Mapper, registry

from outboxq.tables.columns import metadata
from outboxq.tables.jobs import job


class JobRow:
    """Jobs that are not inserted yet: one object in the caller's session, for all jobs that the next flush inserts.

    It is mapped to no table, so that SQLAlchemy writes nothing for it: `write` inserts the jobs when the flush reaches
    it. Until then it is a pending object of the session, so that SQLAlchemy itself handles savepoints, rollbacks and
    autoflush. It is never returned to callers.

    Args:
        number: Distinguishes this object from others in its session's identity map.
        write: Called with the connection and this object when a flush reaches it.
    """

    # For users' hooks that read the table of every object of a session.
    __tablename__ = job.name

    def __init__(self, number: int, write: "Callable[[Connection, JobRow], None]") -> None:
        self.number = number
        self.write = write
        # By their ids in hex; None after they are written.
        self.jobs: dict[str, Any] | None = {}


# Selected from the table, so that `binds` by table apply here too; without its primary key, so that nothing is written.
_numbered = select(func.pg_catalog.max(job.c.seq, type_=job.c.seq.type).label("number")).subquery("jobs")
_mapping = threading.Lock()


def _forget_lock() -> None:
    # A thread that a forked child lacks may have held it.
    global _mapping
    _mapping = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def job_mapper() -> Mapper[JobRow]:
    """Return SQLAlchemy's mapper of `JobRow`, and make it if it does not exist.

    A user's `clear_mappers()` removes all mappers, also this one.
    """
    found: Mapper[JobRow] | None = inspect(JobRow, raiseerr=False)
    if found is None:
        with _mapping:
            found = inspect(JobRow, raiseerr=False) or _map()
    assert found is not None
    return found


def _map() -> Mapper[JobRow]:
    mapper = registry(metadata=metadata).map_imperatively(
        JobRow, _numbered, primary_key=[_numbered.c.number], eager_defaults=False
    )
    JobRow.__table__ = job  # type: ignore[attr-defined]  # where declared classes have their table
    event.listen(mapper, "before_insert", lambda _mapper, connection, row: row.write(connection, row))
    return mapper


job_mapper()
