"""Change many rows: check which are meant, ask first, and go on page by page with a transaction each."""

import inspect
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, TypeAlias
from uuid import UUID

import typer

from outboxq.cli.errors import WrongUsage
from outboxq.cli.options import DatabaseOptions, Yes
from outboxq.cli.output import notice, print_json
from outboxq.cli.tables import Column, print_table
from outboxq.codec.text import several

if TYPE_CHECKING:
    from outboxq.cli.database import Begin
    from outboxq.statements.paging import KindCount, Page

RunPage: TypeAlias = "Callable[[UUID | None], Page]"

IDS_PER_TRANSACTION = 200
# How many rows a filter may change without a question.
_UNASKED = 100
# Tries, because the server notices only a moment later that a session was cut off or interrupted.
_CLEARING_TRIES, _CLEARING_PAUSE_SECONDS = 40, 0.05


@dataclass(slots=True)
class Total:
    """What became of the rows of all pages."""

    changed: int = 0
    held: list[UUID] = field(default_factory=list)
    refused: list[UUID] = field(default_factory=list)
    key_taken: list[UUID] = field(default_factory=list)
    not_found: list[UUID] = field(default_factory=list)

    def add(self, page: "Page") -> None:
        """Count what became of a page."""
        self.changed += len(page.changed)
        self.held += page.held
        self.refused += page.refused
        self.key_taken += page.key_taken

    @property
    def exit_code(self) -> int:
        """1 if something was asked for that did not happen."""
        return 1 if self.held or self.refused or self.key_taken or self.not_found else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeOptions(DatabaseOptions):
    """The options of every command that changes many rows; a subclass brings its filters."""

    ids: Annotated[
        list[UUID] | None,
        typer.Argument(metavar="ID", help="Ids as `list` prints them; or give filters.", show_default=False),
    ] = None
    everything: Annotated[bool, typer.Option("--all", help="All of them, of every queue. Asks first.")] = False
    yes: Yes = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing: only say how many would be changed, by queue and kind.")
    ] = False

    @property
    def filters(self) -> dict[str, str | None]:
        """The values of the filters, by name."""
        return {name: getattr(self, name) for name in inspect.get_annotations(type(self))}

    @property
    def distinct_ids(self) -> tuple[UUID, ...] | None:
        """The ids, each once; None if there are none."""
        return tuple(dict.fromkeys(self.ids)) if self.ids else None

    def check_selection(self) -> None:
        """Refuse a selection that is empty or ambiguous, and one of everything if there is no terminal to ask at.

        Raises:
            WrongUsage: with what to do.
        """
        given = [value for value in self.filters.values() if value is not None]
        options = ", ".join(f"--{name}" for name in self.filters)
        if "" in given:
            raise WrongUsage(f"an empty filter matches nothing or everything: give {options} a value")
        if (self.ids and (given or self.everything)) or (given and self.everything):
            raise WrongUsage(f"give ids, or filters ({options}), or --all, and not two of them")
        if not self.ids and not given and not self.everything:
            raise WrongUsage(f"which ones? Give ids, or filters ({options}), or --all")
        if self.everything and not (self.yes or self.dry_run) and not sys.stdin.isatty():
            raise WrongUsage("--all asks first, and there is no terminal to ask at: add --yes, or look with --dry-run")

    def ask(
        self, verb: str, done: str, things: str, counted: "Sequence[KindCount]", there: "Sequence[KindCount]"
    ) -> None:
        """With --dry-run, say what would be done, and end; else ask before everything, or over 100 rows, are changed.

        Args:
            counted: The rows that would be changed.
            there: Those of the ids that are there, if ids are given.

        Raises:
            WrongUsage: there is no terminal to ask at.
            typer.Abort: the answer was no.
            typer.Exit: nothing is to be changed; with 1 if ids are missing.
        """
        number = sum(kind.count for kind in counted)
        if self.dry_run:
            missing = len(self.distinct_ids) - sum(kind.count for kind in there) if self.distinct_ids else 0
            if self.as_json:
                print_json({"dry_run": True, f"would_be_{done}": number, "kinds": counted, "not_found": missing})
            else:
                if counted:
                    print_table((Column("queue", "name"), Column("kind", "name"), Column("count")), counted)
                typer.echo(f"dry run: {several(number, things.removesuffix('s'), things)} would be {done}")
            if missing:
                notice(f"{missing:,} of the ids are not there")
            raise typer.Exit(1 if missing else 0)
        if self.ids or self.yes or (number <= _UNASKED and not (self.everything and number)):
            return
        if not sys.stdin.isatty():
            raise WrongUsage(
                f"{number:,} {things} match, more than {_UNASKED} are changed only after a question, and there is no "
                "terminal to ask at: add --yes, or look with --dry-run"
            )
        where = " of all queues" if self.everything else ""
        typer.confirm(f"{verb.capitalize()} {number:,} {things}{where}?", abort=True, err=True)


def sweep(run_page: RunPage, verb: str) -> Total:
    """Change page after page until nothing matches, and show the progress; each page commits by itself.

    An error or Ctrl-C leaves what was committed, and says so.
    """
    total = Total()
    after: UUID | None = None
    try:
        with _progress(verb) as show:
            while True:
                page = run_page(after)
                total.add(page)
                show(total)
                if page.last is None:
                    return total
                after = page.last
    except BaseException:
        if total.changed:
            notice(f"stopped after {total.changed:,} {verb}: those stand")
        raise


@contextmanager
def unmarked(begin: "Begin", ids: Sequence[UUID]) -> Iterator[None]:
    """Clear the marks of jobs whose change was rolled back: by an error, Ctrl-C, a time-out, or a refused COMMIT."""
    try:
        yield
    except BaseException:
        if not _clear_marks(begin, ids):
            notice(f"up to {len(ids):,} of the jobs may run one at a time for once, or run already")
        raise


def _clear_marks(begin: "Begin", ids: Sequence[UUID]) -> bool:
    from outboxq.admin import jobs

    try:
        for _ in range(_CLEARING_TRIES):
            with begin() as connection:
                if jobs.clear_marks(connection, ids):
                    return True
            time.sleep(_CLEARING_PAUSE_SECONDS)
    except Exception:  # noqa: BLE001  # the server is gone, perhaps: what counts is the error before this one
        return False
    return False


def in_groups(ids: Sequence[UUID]) -> Iterator[list[UUID]]:
    """The ids, each once, in pieces that one transaction takes."""
    distinct = list(dict.fromkeys(ids))
    for start in range(0, len(distinct), IDS_PER_TRANSACTION):
        yield distinct[start : start + IDS_PER_TRANSACTION]


@contextmanager
def _progress(verb: str) -> Iterator[Callable[[Total], None]]:
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status(f"0 {verb}") as status:
        yield lambda total: status.update(f"{total.changed:,} {verb}, {len(total.held):,} held by others")
