"""Change many rows by a filter: preview the change, then do it page by page, each page in its own transaction.

The transaction of a page (200 rows or fewer) also updates the change's row in the audit. If the process ends, or the
answer to a COMMIT is lost, that row shows the finished part, and the row after which to go on.

The audit's row also keeps two processes from working on one change: a process that takes the change over increases the
number `resumed`, and the former process ends at its next page, because it finds another number than it knows.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias
from uuid import UUID

from sqlalchemy import Connection

from outboxq.admin.audit import AuditDetail, Journal, detail_of, new_entry_id, show_audit
from outboxq.admin.bulk_actions import BulkAction, fields_of
from outboxq.admin.bulk_actions import read_action as read_action
from outboxq.admin.dead_letters import DeadJob
from outboxq.admin.jobs import WaitingJob
from outboxq.admin.marks import Begin, unmarked
from outboxq.database.errors import describe_error, is_database_unavailable, missing_tables_explained
from outboxq.database.settings import our_settings
from outboxq.errors import AuditNotFound, RunElsewhere, RunNotResumable
from outboxq.statements import audit as statements
from outboxq.statements.paging import MAX_PAGE_ROWS, KindCount, Page, database_clock

MAX_COUNT = 10_000
SAMPLES = 10

# How notes begin that are for operators: other libraries add notes too.
NOTE = "outboxq: "
_IN_DOUBT = (
    NOTE + "whether the first rows were changed is not known: if they were, `outboxq audit show {entry}` shows it, and "
    "`outboxq bulk resume {entry}` does the rest"
)

CheckArgs: TypeAlias = Callable[[str, str], object]
Stopped: TypeAlias = Literal["stopped", "stopped already", "over"]


@dataclass(frozen=True, slots=True)
class Preview:
    """The rows that an action would change, as `preview` counts and samples them for an operator.

    Attributes:
        action: The action to run: the previewed one, restricted to rows that existed at the preview.
        kinds: How many rows the action would change, by queue and kind.
        is_capped: True if more rows match than the argument `most` of `preview`, so that not all were counted.
        samples: Some of the rows.
    """

    action: BulkAction
    kinds: tuple[KindCount, ...]
    is_capped: bool
    samples: Sequence[DeadJob | WaitingJob]

    @property
    def count(self) -> int:
        """The number of rows that were counted; more match if `is_capped`."""
        return sum(each.count for each in self.kinds)


@dataclass(slots=True)
class Total:
    """The outcome of an action over its pages so far: the number of changed rows, and the ids of rows not changed.

    Attributes:
        held: Rows that were not changed, because another transaction had locked them.
        refused: Rows that cannot be changed in this way, such as a job of a group that was to get another priority.
        key_taken: Dead letters that were not retried, because a job that waits or runs has their unique key.
        not_found: Chosen ids that no row has.
        requested: Running jobs whose relays were requested to end them; `changed` counts these jobs too.
        is_stopped: True if an operator has stopped the action before its end.
        entry: The id of the action's row in the audit; None if none is written.
    """

    changed: int = 0
    held: list[UUID] = field(default_factory=list)
    refused: list[UUID] = field(default_factory=list)
    key_taken: list[UUID] = field(default_factory=list)
    not_found: list[UUID] = field(default_factory=list)
    requested: list[UUID] = field(default_factory=list)
    is_stopped: bool = False
    entry: UUID | None = None

    def add(self, page: Page) -> None:
        """Add the outcome of one page to the totals."""
        self.changed += len(page.changed)
        self.held += page.held
        self.refused += page.refused
        self.key_taken += page.key_taken
        self.requested += page.requested


def preview(
    connection: Connection,
    action: BulkAction,
    *,
    most: int | None = MAX_COUNT,
    samples: int = SAMPLES,
    seconds: float = math.inf,
) -> Preview:
    """Count the rows that an action would change, and sample some, to show both to an operator before the change.

    Only reads, and locks nothing.

    Args:
        most: The most rows to count; None for all.
        samples: How many rows to show.
        seconds: The time after which counting is given up.

    Raises:
        TimeoutError: the count took longer than `seconds`.
    """
    with our_settings(connection):
        if action.ids is None:
            action = action.until(database_clock(connection))
        kinds = action.count(connection, None if most is None else most + 1, time.monotonic() + seconds)
        count = sum(each.count for each in kinds)
        is_capped = most is not None and count > most
        # The limit is no higher than the number of rows: else all rows would be read once more.
        shown = action.sample(connection, min(samples, count)) if samples and count else ()
    return Preview(action, kinds, is_capped, shown)


class BulkRun:
    """Runs an action on many rows, new or resumed, page by page, and records its progress in the audit.

    Args:
        begin: Begins a transaction; called for each search for the next page's rows, and for each change of a page.
        action: The action, as in `Preview.action`: it excludes rows that were added after the preview.
        expected: How many rows the preview has counted.
        warn: Called with a sentence if a rolled back page may have left marks in jobs' rows.
        follows: The audit's row of the interrupted action that is to be resumed; None for a new action.
        entry: The id for the action's row in the audit; a second action with the same id is refused.
        most: The most rows that the action may change, including those changed before it was resumed; None for all.
    """

    def __init__(
        self,
        begin: Begin,
        action: BulkAction,
        journal: Journal,
        *,
        expected: int | None = None,
        warn: Callable[[str], None],
        follows: AuditDetail | None = None,
        entry: UUID | None = None,
        most: int | None = None,
    ) -> None:
        self._begin = begin
        self._action = action
        self._journal = journal
        self._expected = expected
        self._warn = warn
        self._position = None if follows is None else follows.position
        self._resumed = 0 if follows is None else follows.resumed
        self._changed_before = 0 if follows is None else follows.entry.changed
        self._most = most
        self.total = Total(entry=None if follows is None else follows.entry.id)
        # Chosen before the first page, so that it can be named if the answer to its COMMIT is lost.
        self._new_entry = entry or new_entry_id()
        self._is_in_doubt = False
        self._ids = None if action.ids is None else sorted(dict.fromkeys(action.ids))

    def run(self, on_page: Callable[[Total], None] = lambda _: None) -> Total:
        """Change page after page, each in its own transaction, until no row is left or an operator stops the action.

        After an error the committed pages stay, and the error is recorded in the audit's row. If the answer to the
        first COMMIT is lost, a note on the error has the id of the audit's row, which exists if that page was
        committed.

        Raises:
            RunElsewhere: another process has taken the action over.
            AuditNotFound: the row of the audit was deleted.
            RunNotResumable: the next page might change more rows than `most`.
        """
        try:
            while True:
                ids = self._find()
                is_last = len(ids) < MAX_PAGE_ROWS
                self._check_most(ids)
                if not self._change(ids, is_last=is_last):
                    self.total.is_stopped = True
                    on_page(self.total)
                    return self.total
                on_page(self.total)
                if is_last:
                    return self.total
        except (RunElsewhere, AuditNotFound):
            raise
        except BaseException as error:
            self._note(error)
            raise

    def _find(self) -> Sequence[UUID]:
        """Return the ids of the next page's rows, read in a transaction before the one that changes these rows.

        So the ids are known if the change is rolled back: the jobs may then have marks that must be cleared.
        """
        after = self._position
        if self._ids is not None:
            return [each for each in self._ids if after is None or each > after][:MAX_PAGE_ROWS]
        with self._begin() as connection:
            return self._action.find(connection, after)

    def _check_most(self, ids: Sequence[UUID]) -> None:
        # Rows can come into a filter after its preview, such as jobs that become ready.
        if self._most is not None and self._changed_before + self.total.changed + len(ids) > self._most:
            raise RunNotResumable(
                self.total.entry or self._new_entry,
                f"more rows match by now than the {self._most:,} that were agreed to; look at what is left once more",
            )

    def _change(self, ids: Sequence[UUID], *, is_last: bool) -> bool:
        """Change the rows of one page; return False, without a change, if an operator has stopped the action."""
        entry = self.total.entry
        touched: list[UUID] = []
        with unmarked(self._begin, touched, self._warn, run=entry), self._begin() as connection:
            if entry is None and self._journal.may_write(connection):
                entry = self._new_entry
                self._write(connection, entry)
            elif entry is not None and not self._may_go_on(connection, entry):
                return False
            if self._action.leaves_marks:
                touched += ids
            page = self._action.run(connection, ids) if ids else Page((), ())
            position = ids[-1] if ids else None
            if entry is not None:
                counts = {"changed": len(page.changed), "held": len(page.held)}
                connection.execute(statements.count_page(entry, **counts, position=position, finished=is_last))
            self._is_in_doubt = entry is not None and self.total.entry is None
        # Committed.
        self._is_in_doubt = False
        self.total.entry = entry
        self.total.add(page)
        if self._ids is not None:
            seen = {*page.changed, *page.held, *page.refused, *page.key_taken}
            self.total.not_found += [each for each in ids if each not in seen]
        self._position = position or self._position
        return True

    def _write(self, connection: Connection, entry: UUID) -> None:
        """Add the action's row to the audit, in the transaction that changes the first page."""
        ids = self._action.ids
        target = str(ids[0]) if ids is not None and len(ids) == 1 else None
        wanted = fields_of(self._action.wanted)
        counts = {"expected": self._expected}
        self._journal.write(
            connection, entry, self._action.name, target, wanted, self._action.change, counts, finished=False
        )

    def _may_go_on(self, connection: Connection, entry: UUID) -> bool:
        row = connection.execute(statements.lock_entry(entry, skip_locked=False)).one_or_none()
        if row is None:
            raise AuditNotFound(entry)
        if row.resumed != self._resumed:
            raise RunElsewhere(entry, resumed=True)
        return row.stopped_at is None

    def _note(self, error: BaseException) -> None:
        if self._is_in_doubt and is_database_unavailable(error):
            error.add_note(_IN_DOUBT.format(entry=self._new_entry))
        if self.total.entry is None:
            return
        # The server is gone, perhaps: what counts is the error itself.
        said = str(error) if isinstance(error, RunNotResumable) else describe_error(error)
        with contextlib.suppress(Exception), self._begin() as connection:
            connection.execute(statements.note_error(self.total.entry, self._resumed, said))


def check_args(connection: Connection, action: BulkAction, check: CheckArgs) -> None:
    """Check an action's new arguments: call `check` with each kind of the chosen jobs and the arguments.

    Does nothing if the action has no new arguments.

    Raises:
        PayloadError: the arguments do not fit a kind's handler.
        UnknownKind: a kind has no handler.
    """
    if action.args is not None:
        for kind in sorted({each.kind for each in action.count(connection, None, math.inf)}):
            check(kind, action.args)


@missing_tables_explained()
def stop(connection: Connection, journal: Journal, entry: UUID) -> Stopped:
    """Stop a change of many rows before its next page; the stop takes effect when the caller's transaction commits.

    If a page is being changed, the call waits for its end.

    Returns:
        `stopped` if this call stops the change, `stopped already` if an operator had stopped it before, `over` if the
        change had ended.

    Raises:
        AuditNotFound: no action has this id.
    """
    if connection.execute(statements.stop(entry)).first() is not None:
        journal.record(connection, "bulk.stop", str(entry), changed=1)
        return "stopped"
    return "over" if show_audit(connection, entry).entry.finished_at is not None else "stopped already"


@missing_tables_explained()
def resume(
    begin: Begin,
    journal: Journal,
    entry: UUID,
    *,
    args: str | None = None,
    check: CheckArgs | None = None,
    warn: Callable[[str], None],
    most: int | None = None,
) -> BulkRun:
    """Take over a change of many rows that was stopped or cut off; call `run` of the result to go on with it.

    The change goes on after its last committed page. A process that still works on it ends at its next page.

    Args:
        args: The new arguments, if the action changes arguments: the audit does not keep them.
        check: Checks `args`: called with each kind of the chosen jobs and `args`.
        most: The most rows to change, including those changed before; None for no bound.

    Raises:
        AuditNotFound: no action has this id.
        RunNotResumable: the change has ended, or was not a change of many rows.
        RunElsewhere: another process is changing a page at this moment.
        ArgumentError: the action changes arguments and `args` is missing, or it changes none and `args` is given.
    """
    with begin() as connection:
        row = connection.execute(statements.lock_entry(entry, skip_locked=True)).one_or_none()
        if row is None:
            show_audit(connection, entry)
            raise RunElsewhere(entry, resumed=False)
        found = detail_of(row)
        if found.entry.finished_at is not None:
            raise RunNotResumable(entry, "it is over")
        action = read_action(found.entry.action, found.filter, found.change, args)
        if action is None:
            raise RunNotResumable(entry, f"it is {found.entry.action}, which is none of many rows")
        if check is not None:
            check_args(connection, action, check)
        found = replace(found, resumed=connection.execute(statements.reopen(entry)).scalar_one())
        journal.record(connection, "bulk.resume", str(entry), changed=1)
    return BulkRun(begin, action, journal, warn=warn, follows=found, most=most)
