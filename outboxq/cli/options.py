"""Options that several commands share, and commands whose options are the fields of a dataclass."""

import inspect
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, TypeAlias, TypeVar
from uuid import UUID

import typer

Options = TypeVar("Options")


def takes(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Turn a function that takes this dataclass into a command with an option for each of its fields.

    Typer reads a command's signature: it is shown the one of the dataclass.
    """

    def as_command(function: Callable[[Options], None]) -> Callable[..., None]:
        def command(**given: object) -> None:
            function(options(**given))

        command.__doc__ = function.__doc__
        vars(command)["__signature__"] = inspect.signature(options)
        return command

    return as_command


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
Schema: TypeAlias = Annotated[
    str, typer.Option("--schema", metavar="NAME", help="The PostgreSQL schema that holds outboxq's tables.")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON; later versions keep its keys.")]


def _only(what: str) -> Any:
    return typer.Option(f"--{what}", metavar="NAME", help=f"Only of this {what}.", show_default=False)


QueueFilter: TypeAlias = Annotated[str | None, _only("queue")]
KindFilter: TypeAlias = Annotated[str | None, _only("kind")]
ConsumerFilter: TypeAlias = Annotated[str | None, _only("consumer")]
ScopeFilter: TypeAlias = Annotated[str | None, _only("scope")]


def read_moment(text: str) -> datetime:
    """A date or a time in ISO 8601, as `--json` prints it too; in UTC if it names no offset."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no time: give 2026-01-31, or 2026-01-31T08:00:00Z") from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


Since: TypeAlias = Annotated[
    datetime | None,
    typer.Option(
        "--since",
        metavar="TIME",
        parser=read_moment,
        help="Only messages accepted since: 2026-01-31, or 2026-01-31T08:00:00, in UTC or with an offset (+02:00).",
        show_default=False,
    ),
]
Everything: TypeAlias = Annotated[bool, typer.Option("--all", help="All of them, of every queue. Asks first.")]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Change nothing: only say how many would be changed, by queue and kind.")
]
Limit: TypeAlias = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="At most this many.")]
Ids: TypeAlias = Annotated[
    list[UUID] | None,
    typer.Argument(metavar="ID", help="Ids as `list` prints them; or give filters.", show_default=False),
]
OneId: TypeAlias = Annotated[UUID, typer.Argument(metavar="ID", show_default=False)]

DEFAULT_SCHEMA = "outboxq"


class State(StrEnum):
    """The states of a job: those of `outboxq.admin.jobs.STATES`."""

    ready = "ready"
    running = "running"
    scheduled = "scheduled"
    due = "due"
    leased = "leased"
    orphaned = "orphaned"
    suspect = "suspect"


StateFilter: TypeAlias = Annotated[
    State | None, typer.Option("--state", help="Only in this state.", show_default=False)
]


class EffectStatus(StrEnum):
    """The statuses of an effect's row."""

    started = "started"
    done = "done"
    failed = "failed"
    retryable = "retryable"
    unknown = "unknown"


EffectStatusFilter: TypeAlias = Annotated[
    EffectStatus | None, typer.Option("--status", help="Only in this status.", show_default=False)
]
