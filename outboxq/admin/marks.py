"""Removes the marks that a rolled back change of jobs leaves in the jobs' rows.

A marked job looks as if its relay had died while it ran the job, so it would run alone the next time, to find out if
the job kills relays.
"""

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

# The number of tries: the server notices only a moment later that a session was cut off or interrupted.
_TRIES, _PAUSE_SECONDS = 40, 0.05


@contextmanager
def unmarked(
    begin: Begin, ids: Sequence[UUID], warn: Callable[[str], None], *, run: UUID | None = None
) -> Iterator[None]:
    """Run a block that changes jobs; if the change is rolled back, clear the marks that it left in the jobs' rows.

    A marked job runs alone the next time. A change is rolled back by an error, Ctrl-C, a time-out or a refused COMMIT;
    the block's error is raised again. `warn` is called with a sentence if the marks could not be cleared.

    Args:
        begin: Begins a transaction at READ COMMITTED, committed at the end of its block.
        ids: The ids of the changed jobs: a list that the block may fill, because it is only read after an error.
        run: For a page of a change of many rows: the id of that change's row in the audit. The row is locked while
            marks are cleared, so that another process does not go on with the change and pass over the locked jobs.
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
    """Lock a bulk change's row in the audit, so that no process begins a page; False if the row is locked already.

    Returns True if there is no such row: the first page was rolled back, so no process goes on with the change.
    """
    if connection.execute(statements.lock_entry(run, skip_locked=True)).first() is not None:
        return True
    # Without a row no process goes on with the change: its first page was rolled back.
    return connection.execute(statements.select_entry(run)).first() is None
