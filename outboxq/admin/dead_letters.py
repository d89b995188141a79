"""Dead letters, jobs that failed for good and are kept in a table, for operators to list, retry or discard.

Every function reads or changes in the caller's transaction. None waits for a row lock, but `retry_page` may wait for a
transaction that is adding a job of the same unique key.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from uuid import UUID

from sqlalchemy import Connection

from outboxq.admin.walks import Stretch, count_rows, first_rows, latest_rows, stretches_of
from outboxq.codec.values import check_args_size
from outboxq.errors import JobNotFound
from outboxq.statements import dead_letters as statements
from outboxq.statements.cancel import drop_requests
from outboxq.statements.dead_letters import DeadFilter as DeadFilter
from outboxq.statements.paging import MAX_PAGE_ROWS, KindCount, Page, matching, read_page
from outboxq.statements.stretches import stretches_of_blocks
from outboxq.tables import dead_job


@dataclass(frozen=True, slots=True)
class DeadJob:
    """A dead letter (a job that failed for good), as lists show it: without its arguments and errors."""

    id: UUID
    queue: str
    kind: str
    reason: str
    attempt: int
    max_attempts: int | None
    crashes: int
    created_at: datetime
    died_at: datetime


@dataclass(frozen=True, slots=True)
class DeadDetail:
    """A dead letter with all of its columns; `args`, `headers` and `errors` are JSON text."""

    dead: DeadJob
    priority: int
    unique_key: str | None
    group_key: str | None
    args: str = field(repr=False)
    headers: str = field(repr=False)
    errors: str = field(repr=False)


def list_dead(connection: Connection, wanted: DeadFilter | None = None, *, limit: int = 50) -> list[DeadJob]:
    """Return up to `limit` dead letters that match, the latest first by the time of their death."""
    wanted = wanted or DeadFilter()
    found = latest_rows(
        connection,
        dead_job.c.died_at,
        *matching(dead_job, queue=wanted.queue),
        select=partial(statements.select_dead, wanted),
        limit=limit,
        ids=wanted.ids,
        indexed=statements.DIED if wanted.queue is None else None,
    )
    return [DeadJob(*row) for row in found]


def show_dead(connection: Connection, job_id: UUID) -> DeadDetail:
    """Return one dead letter, with its arguments and errors.

    Raises:
        JobNotFound: the dead letter was retried or discarded, or never existed.
    """
    row = connection.execute(statements.select_dead_letter(job_id)).one_or_none()
    if row is None:
        raise JobNotFound(job_id, "dead letter")
    summary = len(statements.SUMMARY_COLUMNS)
    return DeadDetail(DeadJob(*row[:summary]), *row[summary:])


def is_dead(connection: Connection, job_id: UUID) -> bool:
    """Return True if this job is a dead letter."""
    return connection.execute(statements.select_dead_letter(job_id)).first() is not None


def count_matching(
    connection: Connection,
    wanted: DeadFilter,
    *,
    to_retry: bool = False,
    most: int | None = None,
    give_up_at: float = math.inf,
) -> tuple[KindCount, ...]:
    """Count the dead letters that match, by queue and kind; with `most`, at most that many in total.

    Args:
        to_retry: True to leave out dead letters that `retry_page` would not retry.
        most: The number at which counting ends; None to count all.
        give_up_at: The time of `time.monotonic()` at which to raise `TimeoutError`.

    Raises:
        TimeoutError: the count was not finished at that time.
    """
    count = partial(statements.count_matching, wanted, to_retry=to_retry)
    return count_rows(connection, _all_dead(connection, wanted, give_up_at), count, most)


def sample(connection: Connection, wanted: DeadFilter, limit: int) -> list[DeadJob]:
    """Return up to `limit` dead letters that match, as examples.

    They are not the latest ones, because finding those could read the whole table.
    """
    some = first_rows(connection, _all_dead(connection, wanted), partial(statements.select_some, wanted), limit)
    return list_dead(connection, replace(wanted, ids=tuple(row.id for row in some)), limit=limit)


def _all_dead(connection: Connection, wanted: DeadFilter, give_up_at: float = math.inf) -> Iterable[Stretch]:
    """Divide the table `dead_job` into parts of some blocks each; return the SQL conditions of each part.

    If the filter has ids, there is one part without a condition, because a query by ids is fast.
    """
    return [[]] if wanted.ids is not None else stretches_of_blocks(connection, dead_job, give_up_at=give_up_at)


def find_ids(
    connection: Connection, wanted: DeadFilter, *, after: UUID | None = None, limit: int = MAX_PAGE_ROWS
) -> tuple[UUID, ...]:
    """Return the next ids of dead letters that match, up to `limit`, in order; continue with `after=` the last one.

    All pages together read the table once.
    """
    start = [] if after is None else [dead_job.c.id > after]
    behind = stretches_of(connection, wanted.ids, dead_job.c.id, *start, first=limit)
    return tuple(row.id for row in first_rows(connection, behind, partial(statements.select_ids, wanted), limit))


def retry_page(
    connection: Connection,
    wanted: DeadFilter,
    *,
    after: UUID | None = None,
    limit: int = MAX_PAGE_ROWS,
    args: str | None = None,
) -> Page:
    """Turn up to `limit` dead letters that match into ready jobs; continue with `after=page.last` until it is None.

    A dead letter stays if a job that waits or runs has its id (`page.refused`) or its unique key (`page.key_taken`).
    Ids of the filter that are in no list of the page do not exist. The call waits for a transaction that is just adding
    a job of the same unique key. Retried jobs keep their id, arguments and error history, and their attempts and
    crashes are counted from 0 again.

    Args:
        args: New arguments for all of the jobs, as the text of a JSON object; None to leave theirs unchanged.

    Raises:
        ArgumentError: arguments that are too long.
    """
    if args is not None:
        check_args_size(args)
    page = read_page(connection.execute(statements.retry_page(wanted, after=after, limit=limit, args=args)))
    if page.changed:
        # A cancellation that was requested while the job died must not end the job that comes back.
        connection.execute(drop_requests(page.changed))
    return page


def discard_page(
    connection: Connection, wanted: DeadFilter, *, after: UUID | None = None, limit: int = MAX_PAGE_ROWS
) -> Page:
    """Delete up to `limit` dead letters that match; continue with `after=page.last` until it is None."""
    return read_page(connection.execute(statements.discard_page(wanted, after=after, limit=limit)))
