"""Takes away the marks that a change of jobs leaves in their rows if it is rolled back: else they would be suspects."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias
from uuid import UUID

from sqlalchemy import Connection

from outboxq.admin import jobs
from outboxq.database.errors import INSUFFICIENT_PRIVILEGE, sqlstate_of
from outboxq.statements import audit as statements

# Begins a transaction at READ COMMITTED that is committed at the end of the block.
Begin: TypeAlias = Callable[[], AbstractContextManager[Connection]]

# Tries, because the server notices only a moment later that a session was cut off or interrupted.
_TRIES, _PAUSE_SECONDS = 40, 0.05


@contextmanager
def unmarked(
    begin: Begin, ids: Sequence[UUID], warn: Callable[[str], None], *, run: UUID | None = None
) -> Iterator[None]:
    """Clear the marks of jobs whose change was rolled back: by an error, Ctrl-C, a time-out, or a refused COMMIT.

    Args:
        ids: The jobs; read at the end, so that jobs that were not touched need not be in it.
        run: The row in the audit of the change of many rows that this is a page of. Another process that goes on with
            it waits: a job that is locked while its mark is cleared would be passed over.
    """
    try:
        yield
    except BaseException:
        if ids and not _clear(begin, ids, run):
            warn(f"up to {len(ids):,} of the jobs may run one at a time for once, or run already")
        raise


def _clear(begin: Begin, ids: Sequence[UUID], run: UUID | None) -> bool:
    try:
        for _ in range(_TRIES):
            with begin() as connection:
                if (run is None or _lock(connection, run)) and jobs.clear_marks(connection, ids):
                    return True
            time.sleep(_PAUSE_SECONDS)
    except Exception as error:  # noqa: BLE001  # the server is gone, perhaps: what counts is the error before this one
        # A role that may not write jobs has marked none.
        return sqlstate_of(error) == INSUFFICIENT_PRIVILEGE
    return False


def _lock(connection: Connection, run: UUID) -> bool:
    """Keep pages of a change of many rows from beginning; False while one is under way."""
    if connection.execute(statements.lock_entry(run, skip_locked=True)).first() is not None:
        return True
    # Without a row nothing goes on with it: its first page was rolled back.
    return connection.execute(statements.select_entry(run)).first() is None
