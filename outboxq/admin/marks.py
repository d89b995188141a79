"""Takes away the marks that a change of jobs leaves in their rows if it is rolled back: else they would be suspects."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias
from uuid import UUID

from sqlalchemy import Connection

from outboxq.admin import jobs

# Begins a transaction at READ COMMITTED that is committed at the end of the block.
Begin: TypeAlias = Callable[[], AbstractContextManager[Connection]]

# Tries, because the server notices only a moment later that a session was cut off or interrupted.
_TRIES, _PAUSE_SECONDS = 40, 0.05


@contextmanager
def unmarked(begin: Begin, ids: Sequence[UUID], warn: Callable[[str], None]) -> Iterator[None]:
    """Clear the marks of jobs whose change was rolled back: by an error, Ctrl-C, a time-out, or a refused COMMIT."""
    try:
        yield
    except BaseException:
        if ids and not _clear(begin, ids):
            warn(f"up to {len(ids):,} of the jobs may run one at a time for once, or run already")
        raise


def _clear(begin: Begin, ids: Sequence[UUID]) -> bool:
    try:
        for _ in range(_TRIES):
            with begin() as connection:
                if jobs.clear_marks(connection, ids):
                    return True
            time.sleep(_PAUSE_SECONDS)
    except Exception:  # noqa: BLE001  # the server is gone, perhaps: what counts is the error before this one
        return False
    return False
