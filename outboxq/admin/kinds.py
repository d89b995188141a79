"""Kinds, for operators to pause and resume: the other kinds of a queue go on.

Jobs of a paused kind can be added, and those that run already go on. Relays receive a change at once if they listen,
else at the next beat of their lease; a relay that claims a job of a paused kind puts it off, for five seconds at first
and five minutes in the end, without counting an attempt.
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
    """A kind that is paused in a queue, since when, and how many of its jobs wait or run."""

    queue: str
    kind: str
    paused_at: datetime
    jobs: int


def list_paused(connection: Connection) -> list[PausedKind]:
    """The kinds that are paused, by queue and name. If there are any, each block of the jobs is read once."""
    paused = connection.execute(statements.paused_names()).all()
    if not paused:
        return []
    counted = count_rows(connection, stretches_of_blocks(connection, job), statements.count_paused, None)
    jobs = {(each.queue, each.kind): each.count for each in counted}
    return [PausedKind(queue, kind, at, jobs.get((queue, kind), 0)) for queue, kind, at in paused]


def pause(connection: Connection, queue: str, kinds: Sequence[str]) -> tuple[str, ...]:
    """Keep relays from running these kinds of a queue, when the transaction commits.

    Returns:
        Those that were not paused before.

    Raises:
        ArgumentError: a name that no queue or kind can have.
    """
    changed = connection.execute(statements.pause(check_name("queue", queue), _checked(kinds))).scalars()
    return _told(connection, tuple(sorted(changed)))


def resume(connection: Connection, queue: str, kinds: Sequence[str]) -> tuple[str, ...]:
    """Allow relays to run these kinds again, when the transaction commits; call `bring_back` after that.

    Returns:
        Those that were paused.

    Raises:
        ArgumentError: a name that no queue or kind can have.
    """
    changed = connection.execute(statements.resume(check_name("queue", queue), _checked(kinds))).scalars()
    return _told(connection, tuple(sorted(changed)))


def bring_back(connection: Connection, queue: str, kinds: Sequence[str], ids: Sequence[UUID]) -> Page:
    """Make those of these jobs that were put off, as `put_off_ids` finds them, run now.

    Without it they run when their time has come, within five minutes. A relay that has not received the resumption yet
    puts them off again, for five seconds.
    """
    page = read_page(connection.execute(statements.bring_back_page(queue, kinds, ids)))
    if page.changed:
        # An UPDATE wakes no relay.
        run_script(connection, wake.notify(mapped_schema(connection), queue))
    return page


def put_off_ids(
    connection: Connection, queue: str, kinds: Sequence[str], *, after: UUID | None = None, limit: int = MAX_PAGE_ROWS
) -> tuple[UUID, ...]:
    """The ids of the next jobs of these kinds that were put off; continue with `after` the last one."""
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
