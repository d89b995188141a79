"""Options that several commands share."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, TypeAlias
from uuid import UUID

import typer

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
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, with keys that stay.")]
QueueFilter: TypeAlias = Annotated[
    str | None, typer.Option("--queue", metavar="NAME", help="Only of this queue.", show_default=False)
]
KindFilter: TypeAlias = Annotated[
    str | None, typer.Option("--kind", metavar="NAME", help="Only of this kind.", show_default=False)
]
ConsumerFilter: TypeAlias = Annotated[
    str | None, typer.Option("--consumer", metavar="NAME", help="Only of this consumer.", show_default=False)
]
ScopeFilter: TypeAlias = Annotated[
    str | None, typer.Option("--scope", metavar="NAME", help="Only of this scope.", show_default=False)
]


def read_moment(text: str) -> datetime:
    """A date or a time as ISO 8601 has it, as `--json` prints it too; in UTC where it does not say otherwise."""
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
        help="Only accepted from then on: 2026-01-31, or 2026-01-31T08:00:00, in UTC or with an offset (+02:00).",
        show_default=False,
    ),
]
Everything: TypeAlias = Annotated[bool, typer.Option("--all", help="All there are. Asks first, as more than 100 do.")]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Change nothing: say how many it would be, by queue and kind.")
]
Limit: TypeAlias = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="At most this many.")]
Ids: TypeAlias = Annotated[list[UUID] | None, typer.Argument(metavar="ID", show_default=False)]
OneId: TypeAlias = Annotated[UUID, typer.Argument(metavar="ID", show_default=False)]

DEFAULT_SCHEMA = "outboxq"


class State(StrEnum):
    """What a job is at; the names of `outboxq.admin.jobs.STATES`."""

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
    """What an effect's row says; see the documentation of the tables."""

    started = "started"
    done = "done"
    failed = "failed"
    retryable = "retryable"
    unknown = "unknown"


EffectStatusFilter: TypeAlias = Annotated[
    EffectStatus | None, typer.Option("--status", help="Only in this status.", show_default=False)
]
