"""Decorators for commands that only read: they make a command from a function that takes a connection.

The command prints what the function returns.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from outboxq.cli.options import DatabaseOptions, Wide, as_command, parameters_of
from outboxq.cli.output import notice, print_detail, print_json
from outboxq.cli.tables import Column, print_table

if TYPE_CHECKING:
    from uuid import UUID

    from sqlalchemy import Connection

Shared = TypeVar("Shared", bound=DatabaseOptions)


@dataclass(frozen=True, kw_only=True, slots=True)
class ListOptions(DatabaseOptions):
    """The options that every list command has, in addition to its own filters."""

    limit: Annotated[int, typer.Option("--limit", metavar="NUMBER", min=1, max=10_000, help="At most this many.")] = 50
    wide: Wide = False


def lists(
    name: str, columns: Sequence[Column], filters: str, *, things: str | None = None
) -> Callable[[Callable[..., Sequence[object]]], Callable[..., None]]:
    """Return a decorator that turns a function into a command that prints the things it returns, as a table or as JSON.

    Args:
        name: The name of the list in the JSON.
        columns: The columns of the table.
        filters: The names of the command's filters, for the notice that there are more rows.
        things: A noun for the rows; without it, the list's name.
    """

    def decorate(find: Callable[..., Sequence[object]]) -> Callable[..., None]:
        def run(given: dict[str, Any]) -> None:
            from outboxq.statements.paging import database_clock

            options = _take(ListOptions, given)
            with options.transaction() as connection:
                # One row more than the limit, to know whether there are more.
                found = find(connection, limit=options.limit + 1, **given)
                now = database_clock(connection)
            shown, more = found[: options.limit], len(found) > options.limit
            if options.as_json:
                print_json({name: shown, "more": more})
                return
            if not found:
                notice(f"no {things or name} found")
            print_table(columns, shown, now=now, wide=options.wide)
            if more:
                notice(f"there are more than these {options.limit:,}: see --limit, or narrow it down with {filters}")

        return as_command(find, _options_of(find, ListOptions), run)

    return decorate


def shows(find: Callable[..., object]) -> Callable[..., None]:
    """Turn a function that returns one thing, such as a job, into a command that prints all of the thing's fields."""

    def run(given: dict[str, Any]) -> None:
        options = _take(DatabaseOptions, given)
        with options.transaction() as connection:
            found = find(connection, **given)
        print_detail(found, as_json=options.as_json)

    return as_command(find, _options_of(find, DatabaseOptions), run)


def _options_of(find: Callable[..., object], shared: type[DatabaseOptions]) -> list[inspect.Parameter]:
    """Return the parameters of a command: those of `find` except `connection` and `limit`, then the shared options."""
    own = [each for each in inspect.signature(find).parameters.values() if each.name not in ("connection", "limit")]
    return [*own, *parameters_of(shared)]


def _take(shared: type[Shared], given: dict[str, Any]) -> Shared:
    """Remove the options that several commands share from `given`, and return them as an object of their dataclass."""
    return shared(**{each.name: given.pop(each.name) for each in parameters_of(shared)})


def what_became_of(connection: "Connection", job_id: "UUID", unless_known: str) -> str:
    """Return a sentence, from the audit, about the last action of an operator on a job that is gone.

    Return `unless_known` if the audit has no such action.
    """
    from outboxq.admin.audit import last_action_on

    done = last_action_on(connection, str(job_id))
    if done is None:
        return unless_known
    return (
        f"{done.actor!r} did {done.action} to it at {done.at:%Y-%m-%d %H:%M:%S} UTC, see `outboxq audit show {done.id}`"
    )
