"""Steps of commands that change many rows: check the selection, ask the user, and change page after page.

Each page of rows is changed in a transaction of its own.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from outboxq.cli.errors import WrongUsage
from outboxq.cli.options import ActingOptions, Yes
from outboxq.cli.output import notice, print_json
from outboxq.cli.tables import Column, print_table
from outboxq.codec.text import several

if TYPE_CHECKING:
    from outboxq.admin.actions import Preview, Total
    from outboxq.cli.database import Begin
    from outboxq.statements.paging import KindCount

IDS_PER_TRANSACTION = 200
# The number of rows that a filter may change without a question.
_UNASKED = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeOptions(ActingOptions):
    """The options of every command that changes many rows; a subclass adds its filters as fields."""

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
        """The values of the filters by name, None for a filter that is not given.

        The filters are the fields that the subclass adds.
        """
        return {name: getattr(self, name) for name in inspect.get_annotations(type(self))}

    @property
    def distinct_ids(self) -> tuple[UUID, ...] | None:
        """The given ids, each once; None if no ids are given."""
        return tuple(dict.fromkeys(self.ids)) if self.ids else None

    def check_selection(self) -> None:
        """Refuse a choice of rows that is empty or ambiguous: it takes ids, or filters, or `--all`.

        Refuse `--all` too if the user would have to confirm it and there is no terminal.

        Raises:
            WrongUsage: the selection is refused; the message says what to do.
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
        """Ask the user to confirm a change of all rows, or of over 100 that a filter finds; return if it was confirmed.

        With `--dry-run`, print instead how many rows would be changed, and end the command.

        Args:
            verb: The change as a verb, such as retry.
            done: The change as a participle, such as retried.
            things: A noun for the rows.
            counted: The number of rows that would be changed, by queue and kind.
            there: If ids are given: the number of rows that have one of them, by queue and kind.

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


def change_all(options: ChangeOptions, begin: "Begin", found: "Preview", verb: str) -> "Total":
    """Make a change of many rows, page after page, and show the progress; return the numbers of rows by outcome.

    After an error or Ctrl-C the committed pages stay, and a notice says so.

    Args:
        found: The rows to change, and the change.
        verb: The change as a participle, such as retried, for the progress.
    """
    with showing(verb) as show:
        total = options.actions().run(begin, found, on_page=show)
    given = options.distinct_ids or ()
    total.not_found.sort(key={each: place for place, each in enumerate(given)}.__getitem__)
    return total


def exit_code_of(total: "Total") -> int:
    """Return the exit code of a change of many rows: 1 if some of the chosen rows were not changed, otherwise 0."""
    not_done = total.held or total.refused or total.key_taken or total.not_found or total.is_stopped
    return 1 if not_done else 0


def in_groups(ids: Sequence[UUID]) -> Iterator[list[UUID]]:
    """Yield the ids without duplicates, in groups of up to 200, the most for one transaction."""
    distinct = list(dict.fromkeys(ids))
    for start in range(0, len(distinct), IDS_PER_TRANSACTION):
        yield distinct[start : start + IDS_PER_TRANSACTION]


@contextmanager
def showing(verb: str) -> "Iterator[Callable[[Total], None]]":
    """Yield a function that shows the progress of a change of many rows; call it after each page of rows.

    If the change ends early, because of an error, Ctrl-C or an operator, a notice says how far it came.

    Args:
        verb: The change as a participle, such as retried.
    """
    last: list[Total] = []
    try:
        with _progress(verb) as show:

            def see(total: "Total") -> None:
                last[:] = [total]
                show(total)

            yield see
    except BaseException as error:
        for note in _notes_of(error):
            notice(note)
        if last and last[0].changed:
            notice(f"stopped after {last[0].changed:,} {verb}: those stand{_how_to_go_on(last[0])}")
        raise
    if last and last[0].is_stopped:
        notice(f"an operator stopped it after {last[0].changed:,} {verb}{_how_to_go_on(last[0])}")


def _notes_of(error: BaseException) -> list[str]:
    """Return the notes that a change of many rows has added to its error, to tell the user how to go on."""
    from outboxq.admin.bulk import NOTE

    notes: Sequence[str] = getattr(error, "__notes__", ())
    return [note.removeprefix(NOTE) for note in notes if note.startswith(NOTE)]


def _how_to_go_on(total: "Total") -> str:
    return "" if total.entry is None else f"; `outboxq bulk resume {total.entry}` does the rest"


@contextmanager
def _progress(verb: str) -> "Iterator[Callable[[Total], None]]":
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status(f"0 {verb}") as status:
        yield lambda total: status.update(f"{total.changed:,} {verb}, {len(total.held):,} held by others")
