"""Options that several commands share, and functions that turn a dataclass of options into a command."""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar
from uuid import UUID

import typer

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outboxq.admin.actions import Actions
    from outboxq.cli.database import Begin

Options = TypeVar("Options")


def takes(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Return a decorator that makes a command from a function with one parameter, an object of a dataclass.

    The command has an option for each field of the dataclass `options`, and passes the function an object with their
    values.
    """

    def decorate(function: Callable[[Options], None]) -> Callable[..., None]:
        return as_command(function, parameters_of(options), lambda given: function(options(**given)))

    return decorate


def as_command(
    documented: Callable[..., object], parameters: Sequence[inspect.Parameter], run: Callable[[dict[str, Any]], None]
) -> Callable[..., None]:
    """Return a function for typer to register as a command; it calls `run` with the values of its options by name.

    Typer takes the options from a function's signature, and the help from its docstring. So the returned function has
    `parameters` as its signature, and the docstring of `documented`.
    """

    def command(**given: object) -> None:
        run(given)

    command.__doc__ = documented.__doc__
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command


def parameters_of(options: type) -> list[inspect.Parameter]:
    """Return a keyword parameter for each field of a dataclass: first for its own fields, then the inherited ones."""
    parameters = inspect.signature(options).parameters
    names = dict.fromkeys(name for each in options.__mro__ for name in inspect.get_annotations(each))
    return [parameters[name] for name in names]


DatabaseUrl: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        metavar="URL",
        help="The database, as postgresql://user@host/name. Other users of the machine can see it here: prefer the "
        "variable OUTBOXQ_DATABASE_URL, which is used without this option.",
        show_default=False,
    ),
]
DatabaseUrls: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--database-url",
        metavar="URL",
        help="The database, as postgresql://user@host/name. May be repeated, for several. Other users of the machine "
        "can see it here: prefer the variable OUTBOXQ_DATABASE_URL, which is used without this option, with spaces "
        "between several URLs.",
        show_default=False,
    ),
]
Schema: TypeAlias = Annotated[
    str,
    typer.Option(
        "--schema",
        metavar="NAME",
        envvar="OUTBOXQ_SCHEMA",
        help="The PostgreSQL schema that holds outboxq's tables.",
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON; later versions keep its keys.")]


def only(what: str) -> Any:
    """Return a typer option that narrows a list down to one name, such as `--queue NAME`.

    Args:
        what: The option's name, without its dashes.
    """
    return typer.Option(f"--{what}", metavar="NAME", help=f"Only of this {what}.", show_default=False)


QueueFilter: TypeAlias = Annotated[str | None, only("queue")]
KindFilter: TypeAlias = Annotated[str | None, only("kind")]
GroupFilter: TypeAlias = Annotated[
    str | None, typer.Option("--group", metavar="KEY", help="Only jobs of this group.", show_default=False)
]
StateFilter: TypeAlias = Annotated[
    Literal["ready", "grouped", "running", "scheduled", "due", "leased", "orphaned", "suspect"] | None,
    typer.Option(
        "--state",
        metavar="STATE",
        help="Only in this state: ready, grouped, running, scheduled, due, leased, orphaned or suspect.",
        show_default=False,
    ),
]


def read_moment(text: str) -> datetime:
    """Return the time that is written in ISO 8601, maybe as a date alone. A text without an offset is in UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no time: give 2026-01-31, or 2026-01-31T08:00:00Z") from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


_SPAN = re.compile(r"([1-9][0-9]{0,4})([mhd])", re.ASCII)
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


@dataclass(frozen=True, slots=True)
class Since:
    """The start of a time span: a duration before the present time, or a fixed time."""

    began: timedelta | datetime

    @classmethod
    def parse(cls, text: str) -> "Since":
        """Return the start that is written as `24h`, `2026-01-31` or `2026-01-31T08:00:00`, for example.

        Raises:
            BadParameter: the text has none of these forms.
        """
        if found := _SPAN.fullmatch(text):
            return cls(timedelta(**{_UNITS[found[2]]: int(found[1])}))
        try:
            return cls(read_moment(text))
        except typer.BadParameter:
            raise typer.BadParameter(
                f"{text!r} is no time: give minutes, hours or days until now, such as 30m, 24h or 7d, or 2026-01-31, "
                "or 2026-01-31T08:00:00Z",
                param_hint="'--since'",
            ) from None

    def before(self, now: datetime) -> datetime:
        """Return the start of the time span as a time; if it is a duration, subtract that from `now`."""
        return now - self.began if isinstance(self.began, timedelta) else self.began


def since_option(what: str, *, parsed: bool = True) -> Any:
    """Return the option `--since` for a command that lists things.

    Args:
        what: The beginning of the option's help, such as `Only messages accepted since`.
    """
    return typer.Option(
        "--since",
        metavar="TIME",
        parser=Since.parse if parsed else None,
        help=f"{what}: 30m, 24h or 7d ago, or 2026-01-31, or 2026-01-31T08:00:00, in UTC or with an offset (+02:00).",
        show_default=not parsed,
    )


def since_in(connection: "Connection", since: Since | None) -> datetime | None:
    """Return the start of the time span as a time by the database's clock; None if `since` is None."""
    from outboxq.statements.paging import database_clock

    return None if since is None else since.before(database_clock(connection))


Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
OneId: TypeAlias = Annotated[
    UUID, typer.Argument(metavar="ID", help="Its id, as `list` prints it.", show_default=False)
]
Wide: TypeAlias = Annotated[
    bool, typer.Option("--wide", help="Show all columns and whole values, however narrow the terminal is.")
]

DEFAULT_SCHEMA = "outboxq"


@dataclass(frozen=True, kw_only=True, slots=True)
class DatabaseOptions:
    """The options of a command that connects to a database, and methods that open the connection."""

    as_json: AsJson = False
    schema: Schema = DEFAULT_SCHEMA
    database_url: DatabaseUrl = field(default=None, repr=False)

    def open(self) -> "AbstractContextManager[Begin]":
        """Return a context manager that connects to the database, and yields a function that begins a transaction."""
        from outboxq.cli.database import open_database

        return open_database(self.database_url, self.schema)

    @contextmanager
    def transaction(self) -> "Iterator[Connection]":
        """Connect, and yield the connection in a transaction, which is committed at the end of the block."""
        with self.open() as begin, begin() as connection:
            yield connection


@dataclass(frozen=True, kw_only=True, slots=True)
class ActingOptions(DatabaseOptions):
    """The options of a command that changes something."""

    because: Annotated[
        str | None,
        typer.Option("--because", metavar="TEXT", help="Why it is done: kept in the audit.", show_default=False),
    ] = None

    def actions(self) -> "Actions":
        """Return the object whose methods make changes for operators, and record them in the audit with the user."""
        from outboxq import config
        from outboxq.admin.actions import Actions, Actor
        from outboxq.cli.output import notice

        return Actions(Actor(config.actor_name(), via="cli"), self.because, warn=notice)
