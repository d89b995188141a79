"""Kinds (types of jobs), for operators to pause and resume in one queue, while the queue's other kinds go on.

Jobs of a paused kind can be added, and those that run already go on. Relays learn of a change at once if they listen
for notifications, otherwise at the next UPDATE by which they renew their lease. A relay that claims a job of a paused
kind puts it off: it makes the job due five seconds later, each time longer up to five minutes, without counting an
attempt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from uuid import UUID

from sqlalchemy import Connection

from outboxq.admin.walks import count_rows, first_rows
from outboxq.database.driver import run_script
from outboxq.names import check_name
from outboxq.statements import kinds as statements
from outboxq.statements import wake
from outboxq.statements.paging import MAX_PAGE_ROWS, Page, read_page
from outboxq.statements.stretches import stretches, stretches_of_blocks
from outboxq.tables import job, mapped_schema


@dataclass(frozen=True, slots=True)
class PausedKind:
    """A kind that is paused in a queue, the time of the pause, and the number of its jobs that wait or run."""

    queue: str
    kind: str
    paused_at: datetime
    jobs: int


def list_paused(connection: Connection) -> list[PausedKind]:
    """Return the paused kinds of all queues, ordered by queue and name.

    If there are any, the whole table of jobs is read to count their jobs.
    """
    paused = connection.execute(statements.paused_names()).all()
    if not paused:
        return []
    counted = count_rows(connection, stretches_of_blocks(connection, job), statements.count_paused, None)
    jobs = {(each.queue, each.kind): each.count for each in counted}
    return [PausedKind(queue, kind, at, jobs.get((queue, kind), 0)) for queue, kind, at in paused]


def pause(connection: Connection, queue: str, kinds: Sequence[str]) -> tuple[str, ...]:
    """Keep relays from running these kinds of a queue, when the transaction commits.

    Returns:
        The kinds that this call has paused, without those that were paused already.

    Raises:
        ArgumentError: a name that no queue or kind can have.
    """
    changed = connection.execute(statements.pause(check_name("queue", queue), _checked(kinds))).scalars()
    return _told(connection, tuple(sorted(changed)))


def resume(connection: Connection, queue: str, kinds: Sequence[str]) -> tuple[str, ...]:
    """Allow relays to run these kinds again, when the transaction commits.

    Call `bring_back` after the commit, so that jobs that relays have put off do not wait up to five minutes longer.

    Returns:
        The kinds that this call has resumed, without those that were not paused.

    Raises:
        ArgumentError: a name that no queue or kind can have.
    """
    changed = connection.execute(statements.resume(check_name("queue", queue), _checked(kinds))).scalars()
    return _told(connection, tuple(sorted(changed)))


def bring_back(connection: Connection, queue: str, kinds: Sequence[str], ids: Sequence[UUID]) -> Page:
    """Make jobs run now that relays had put off while their kinds were paused; call it after `resume` was committed.

    Without this call the jobs run at the time to which they were put off, within five minutes. A relay that does not
    know of the resumption yet puts the jobs off once more, for five seconds.

    Args:
        ids: The jobs, as `put_off_ids` returns them.

    Returns:
        The ids of the changed jobs (`changed`), and of jobs that another transaction has locked (`held`).
    """
    page = read_page(connection.execute(statements.bring_back_page(queue, kinds, ids)))
    if page.changed:
        # An UPDATE wakes no relay.
        run_script(connection, wake.notify(mapped_schema(connection), queue))
    return page


def put_off_ids(
    connection: Connection, queue: str, kinds: Sequence[str], *, after: UUID | None = None, limit: int = MAX_PAGE_ROWS
) -> tuple[UUID, ...]:
    """Return ids of jobs of these kinds that relays have put off to later without running them, for `bring_back`.

    The ids are in order, up to `limit` of them. Continue with `after=` the last returned id.
    """
    start = [] if after is None else [job.c.id > after]
    behind = stretches(connection, job.c.id, *start, first=limit)
    return tuple(row.id for row in first_rows(connection, behind, partial(statements.put_off_ids, queue, kinds), limit))


def _told(connection: Connection, changed: tuple[str, ...]) -> tuple[str, ...]:
    if changed:
        run_script(connection, wake.notify(mapped_schema(connection), wake.SETTINGS))
    return changed


def _checked(kinds: Sequence[str]) -> list[str]:
    # Sorted: two operators who change several kinds lock them in the same order.
    return sorted({check_name("kind", kind) for kind in kinds})
