"""Lists of jobs, dead letters and other records, page by page, newest first, for a person to browse.

A page is searched among the next 50,000 rows only, so that a filter that matches little does not read a whole table.
Every function is one query or two in the caller's transaction, and locks nothing.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Literal, TypeAlias, TypeVar
from uuid import UUID

from sqlalchemy import Connection, Executable, Table

from outboxq.admin.audit import AuditEntry, AuditFilter
from outboxq.admin.dead_letters import DeadFilter, DeadJob
from outboxq.admin.effects import EffectFilter, EffectRecord
from outboxq.admin.finished import DoneFilter, FinishedJob
from outboxq.admin.jobs import JobFilter, WaitingJob
from outboxq.admin.messages import Message, MessageFilter
from outboxq.database.errors import missing_tables_explained
from outboxq.errors import ArgumentError
from outboxq.statements import browse as statements
from outboxq.statements import jobs
from outboxq.statements.paging import database_clock
from outboxq.statements.server import is_read_only, standby_delay_seconds
from outboxq.tables import audit, dead_job, done_job, job

Thing = TypeVar("Thing")

Listed: TypeAlias = Literal["job", "dead_job"]

DEPTH = 50_000
# Arguments that are no longer than this are read for lists.
SHORT_BYTES = 64 * 1024
# The number of further searches if rows were found that may not be seen.
_MOST_LOOKS = 10
_ROWS: Mapping[Listed, Table] = {"job": job, "dead_job": dead_job}
BULK_ACTIONS = ("dead.retry", "dead.discard", "job.cancel", "job.cancel_running", "job.change")


@dataclass(frozen=True, slots=True)
class Found(Generic[Thing]):
    """A page of a list, as the functions of this module return it, and the id after which the next page begins.

    Attributes:
        before: The id to pass as `before` for the next page; None if this page is the last.
        is_cut: True if the page is not full, because the search ended after the most rows that it may read: the next
            page may have more.
    """

    rows: Sequence[Thing]
    before: UUID | None = None
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Gauge:
    """The number of jobs in each state at one minute, of one queue or of all queues together.

    `at`: the minute, in seconds since 1970. `oldest_seconds`: the wait of the oldest waiting job.
    """

    at: float
    ready: int
    scheduled: int
    due: int
    leased: int
    suspect: int
    dead: int
    oldest_seconds: float | None


@dataclass(frozen=True, slots=True)
class Moment:
    """The database's time, and the state of its server, for the dashboard's pages to show.

    `is_read_only`: the server accepts no changes. `standby_delay_seconds`: the age of a standby's data; None for a
    primary.
    """

    now: datetime
    is_read_only: bool
    standby_delay_seconds: float | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """A search in the arguments of jobs: the path to a value, by names of JSON objects, and the values that match."""

    path: tuple[str, ...]
    values: tuple[object, ...]

    @property
    def documents(self) -> list[str]:
        """The search as JSON objects, one for each value: a job matches if its arguments contain (`@>`) one of them."""
        return [_nested(self.path, value) for value in self.values]


def read_moment(connection: Connection) -> Moment:
    """Read the database's time, and the state of its server."""
    return Moment(database_clock(connection), is_read_only(connection), standby_delay_seconds(connection))


def read_wanted(text: str) -> Wanted:
    """Parse a search in the arguments of jobs, such as `order_id:7` or `customer.id:"7"`.

    A value without quotes is searched as text, and also as the number, true or false that it spells.

    Raises:
        ArgumentError: the text has no colon, no name before the colon, or a path of more than 10 names.
    """
    name, colon, value = text.partition(":")
    path = tuple(name.strip().removeprefix("args.").split("."))
    if not colon or not all(path) or len(path) > 10:
        raise ArgumentError("a search is NAME:VALUE, such as order_id:7 or customer.id:7")
    given = value.strip()
    values: list[object] = []
    try:
        parsed = json.loads(given)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, str | int | float | bool) and len(given) < 100:
        values.append(parsed)
    if not given.startswith('"') or not values:
        values.append(given)
    return Wanted(path, tuple(values))


def find_jobs(
    connection: Connection,
    wanted: JobFilter,
    *,
    contains: Wanted | None = None,
    args_bytes: int = 0,
    before: UUID | None = None,
    limit: int = 50,
    depth: int = DEPTH,
) -> Found[tuple[WaitingJob, str | None]]:
    """Find a page of the newest jobs that match, each with its arguments as JSON text, or None if that is too long.

    Args:
        contains: Only jobs whose arguments match this search.
        args_bytes: The arguments of a job are returned if they have no more bytes than this.
        before: Only jobs with lower ids than this: `Found.before` of the previous page.
        depth: The most rows to read.
    """
    documents = [] if contains is None else contains.documents
    statement = jobs.newest_jobs(
        wanted, contains=documents, args_bytes=args_bytes, before=before, limit=limit + 1, depth=depth
    )
    return _page(connection, statement, _job_and_args, job, before, limit, depth)


def find_seen(
    connection: Connection,
    find: Callable[[UUID | None], Found[Thing]],
    sees: Callable[[Thing], bool],
    of: Listed,
    *,
    before: UUID | None,
    limit: int,
    depth: int = DEPTH,
) -> Found[Thing]:
    """Return a page of the rows that the viewer may see, without revealing that hidden rows exist.

    The place where the next page begins must not depend on hidden rows. So it is after the last row of a full page, and
    otherwise after exactly `depth` rows, visible or hidden.

    Args:
        find: Returns a page of rows, visible or not, with ids below the given one.
        sees: Returns True if the viewer may see a row.
        of: The table of the rows.
    """
    end: UUID | None = connection.execute(statements.end_of_walk(_ROWS[of], before=before, depth=depth)).scalar()
    seen: list[tuple[UUID, Thing]] = []
    at = before
    for _ in range(_MOST_LOOKS):
        found = find(at)
        ids = ((_id_of(each), each) for each in found.rows)
        seen += [(row_id, each) for row_id, each in ids if (end is None or row_id >= end) and sees(each)]
        at = found.before
        if len(seen) > limit or at is None or (end is not None and at <= end):
            break
    if len(seen) > limit:
        return Found([each for _, each in seen[:limit]], seen[limit - 1][0])
    return Found([each for _, each in seen], end, is_cut=end is not None)


def read_documents(
    connection: Connection, of: Listed, ids: Sequence[UUID], *, most_bytes: int = SHORT_BYTES
) -> dict[UUID, tuple[str, str]]:
    """Return `{id: (arguments, headers)}` of jobs or dead letters, as JSON texts.

    Rows that do not exist any more are left out, and rows with arguments or headers of more than `most_bytes`.
    """
    rows = connection.execute(statements.documents_of(_ROWS[of], ids, most_bytes=most_bytes))
    return {row_id: (args, headers) for row_id, args, headers in rows}


def next_jobs(connection: Connection, queue: str, *, limit: int = 20) -> list[WaitingJob]:
    """Return the first `limit` ready jobs of a queue, in the order in which relays claim them."""
    return [WaitingJob(*row) for row in connection.execute(jobs.next_jobs(queue, limit=limit))]


def next_scheduled(connection: Connection, queue: str, *, limit: int = 20) -> list[WaitingJob]:
    """Return the first `limit` scheduled jobs of a queue, in the order of the times at which they are due."""
    return [WaitingJob(*row) for row in connection.execute(jobs.next_scheduled(queue, limit=limit))]


def find_dead(
    connection: Connection, wanted: DeadFilter, *, before: UUID | None = None, limit: int = 50, depth: int = DEPTH
) -> Found[DeadJob]:
    """Return a page of the dead letters that match, in the order in which their jobs were added, the newest first."""
    statement = statements.newest_dead(wanted, before=before, limit=limit + 1, depth=depth)
    return _page(connection, statement, lambda row: DeadJob(*row), dead_job, before, limit, depth)


@missing_tables_explained()
def find_done(
    connection: Connection, wanted: DoneFilter, *, before: UUID | None = None, limit: int = 50, depth: int = DEPTH
) -> Found[FinishedJob]:
    """Return a page of the finished jobs that match, in the order in which the jobs were added, the newest first."""
    statement = statements.newest_done(wanted, before=before, limit=limit + 1, depth=depth)
    return _page(connection, statement, lambda row: FinishedJob(*row), done_job, before, limit, depth)


@missing_tables_explained()
def find_entries(
    connection: Connection,
    wanted: AuditFilter,
    *,
    only_bulk: bool = False,
    before: UUID | None = None,
    limit: int = 50,
    depth: int = DEPTH,
) -> Found[AuditEntry]:
    """Return a page of the audit's rows that match, the latest first; with `only_bulk`, only changes of many rows."""
    actions = BULK_ACTIONS if only_bulk else ()
    statement = statements.newest_entries(wanted, actions, before=before, limit=limit + 1, depth=depth)
    return _page(connection, statement, lambda row: AuditEntry(*row), audit, before, limit, depth)


def find_effects(
    connection: Connection,
    wanted: EffectFilter,
    *,
    after: tuple[str, str] | None = None,
    limit: int = 50,
    depth: int = DEPTH,
) -> list[EffectRecord]:
    """Return a page of the effects that match, ordered by scope and key.

    `after`: the scope and key of the last effect of the previous page.
    """
    rows = connection.execute(statements.effects_after(wanted, after=after, limit=limit, depth=depth))
    return [EffectRecord(*row) for row in rows]


def latest_messages(
    connection: Connection, wanted: MessageFilter, *, limit: int = 50, depth: int = DEPTH
) -> list[Message]:
    """Return up to `limit` of the accepted messages that match, the latest first, among the latest `depth` messages."""
    rows = connection.execute(statements.latest_messages(wanted, limit=limit, depth=depth))
    return [
        Message(consumer, message_id, None if digest is None else digest.hex(), seen_at, expires_at)
        for consumer, message_id, digest, seen_at, expires_at in rows
    ]


@missing_tables_explained()
def read_gauges(connection: Connection, queue: str | None = None, *, seconds: float = 3_600.0) -> list[Gauge]:
    """Return the numbers of jobs by state at each minute of the last `seconds`, the oldest first.

    `queue`: the queue whose jobs are counted; None for all queues together.
    """
    return [Gauge(*row) for row in connection.execute(statements.gauges_since(queue, seconds_ago=seconds))]


def _page(
    connection: Connection,
    statement: Executable,
    read: Callable[[Any], Thing],
    rows: Table,
    before: UUID | None,
    limit: int,
    depth: int,
) -> Found[Thing]:
    found = connection.execute(statement).all()
    things = [read(row) for row in found[:limit]]
    if len(found) > limit:
        return Found(things, found[limit - 1].id)
    end: UUID | None = connection.execute(statements.end_of_walk(rows, before=before, depth=depth)).scalar()
    return Found(things, end, is_cut=end is not None)


def _id_of(found: Any) -> UUID:
    row_id: UUID = (found[0] if isinstance(found, tuple) else found).id
    return row_id


def _job_and_args(row: Any) -> tuple[WaitingJob, str | None]:
    *summary, args = row
    return WaitingJob(*summary), args


def _nested(path: tuple[str, ...], value: object) -> str:
    for name in reversed(path):
        value = {name: value}
    return json.dumps(value)
