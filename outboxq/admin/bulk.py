"""Change many rows by a filter: preview them, then go on page by page, each a transaction with its part of the audit.

A page changes its rows, and counts them in the audit's row, in one transaction: if the process ends, or the answer to a
COMMIT is lost, the audit says what was done, and where to go on. It also keeps two processes from working on one
change: each one that goes on with it raises a number in the row, and one that finds another number than its own, in the
transaction of its next page, ends.
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
    """The rows that an action would change.

    Attributes:
        action: The action as it is to be run: without what comes from now on.
        kinds: How many rows it would change, by queue and kind.
        is_capped: True if there are more, which were not counted.
        samples: Some of the rows.
    """

    action: BulkAction
    kinds: tuple[KindCount, ...]
    is_capped: bool
    samples: Sequence[DeadJob | WaitingJob]

    @property
    def count(self) -> int:
        """The number of rows that were counted."""
        return sum(each.count for each in self.kinds)


@dataclass(slots=True)
class Total:
    """The outcomes of the rows of all pages.

    Attributes:
        refused: Rows that cannot be changed so.
        key_taken: Dead letters whose unique key a living job has.
        not_found: Ids that are not there.
        requested: Changed rows whose jobs run, and whose end was requested from their relays.
        is_stopped: An operator has stopped it before its end.
        entry: The row of the audit; None if none is written.
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
        """Add the outcomes of a page."""
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
    """Preview what an action would change. Reads only, and locks nothing.

    Args:
        most: Count up to so many rows; None for all.
        samples: How many rows to show.
        seconds: How long to count.

    Raises:
        TimeoutError: it was not counted in so many seconds.
    """
    with our_settings(connection):
        if action.ids is None:
            action = action.until(database_clock(connection))
        kinds = action.count(connection, None if most is None else most + 1, time.monotonic() + seconds)
        count = sum(each.count for each in kinds)
        is_capped = most is not None and count > most
        # No more than there are, for which all rows would be read once more.
        shown = action.sample(connection, min(samples, count)) if samples and count else ()
    return Preview(action, kinds, is_capped, shown)


class BulkRun:
    """An action on its way through its pages.

    Args:
        begin: Begins a transaction; called for each page, and for each search for the next one.
        action: As a preview has it, so that nothing newer is touched.
        expected: How many rows the preview has counted.
        follows: The row of the audit of an action that was begun before, to be resumed.
        entry: The id of its row in the audit, if that was chosen before: an action begins once by it.
        most: How many rows it may change, those from before it was taken over included; None for all.
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
        """Change page after page until nothing matches, or an operator stops it; each page commits by itself.

        An error leaves what was committed, and is recorded in the audit. One that takes the answer to the first COMMIT
        away has the id of the audit's row in a note of its own.

        Raises:
            RunElsewhere: another process has taken it over.
            AuditNotFound: the row of the audit was deleted.
            RunNotResumable: with its next page it may change more rows than it may.
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
        """The next rows. Found before they are locked, so that it is known which marks are to be cleared."""
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
        """Change a page; False if an operator has stopped it."""
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
        """Write the row of the audit, in the transaction of the first page."""
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
    """Call `check` with the arguments that an action gives, for each kind that is meant.

    Raises:
        PayloadError: they do not fit a handler.
        UnknownKind: a kind has none.
    """
    if action.args is not None:
        for kind in sorted({each.kind for each in action.count(connection, None, math.inf)}):
            check(kind, action.args)


@missing_tables_explained()
def stop(connection: Connection, journal: Journal, entry: UUID) -> Stopped:
    """Stop a change of many rows before its next page, when the caller's transaction commits.

    Waits for the page that is under way.

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
    """Take over a change of many rows that was stopped or cut off, to go on after its last page.

    A process that still works on it ends at its next page.

    Args:
        args: The arguments that it gives, if it gives some: the audit does not keep them.
        check: Called with each kind and these arguments. `most` is that of `BulkRun`.

    Raises:
        AuditNotFound: no action has this id.
        RunNotResumable: it has ended, or was not a change of many rows.
        RunElsewhere: a page of it is under way.
        ArgumentError: it gives arguments, and `args` does not, or the other way round.
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
