"""`outboxq audit` lists actions of operators, and `outboxq bulk` stops and resumes their changes of many rows."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from outboxq.cli.arguments import App, Args, GivenArguments, Unchecked
from outboxq.cli.bulk import exit_code_of, showing
from outboxq.cli.errors import WrongUsage
from outboxq.cli.help import Commands
from outboxq.cli.options import ActingOptions, OneId, Since, since_in, since_option, takes
from outboxq.cli.output import notice, print_json
from outboxq.cli.reading import lists, shows
from outboxq.cli.tables import Column
from outboxq.codec.text import several

if TYPE_CHECKING:
    from sqlalchemy import Connection

app = Commands(help="List and show what operators did, and why, and delete what is old.")
runs = Commands(help="Stop and resume changes of many rows.")


@app.command("list")
@lists(
    "audit",
    (
        Column("id", "id"),
        Column("at"),
        Column("actor", "name"),
        Column("action", "name"),
        Column("target", "name", rank=1),
        Column("changed", if_empty=True),
        Column("held", rank=2),
        Column("expected", rank=5),
        Column("finished_at", rank=4),
        Column("stopped_at", rank=3),
        Column("via", rank=6),
        Column("role", "name", rank=7),
        Column("db_user", "name", rank=8),
        Column("error", "text", rank=3),
        Column("reason", "text"),
    ),
    "--since, --action or --actor",
    things="actions",
)
def list_audit(
    connection: "Connection",
    since: Annotated[Since | None, since_option("Only since then")] = None,
    action: Annotated[
        str | None,
        typer.Option(
            "--action",
            metavar="NAME",
            help="Only this action, such as dead.retry, or this sort of them, such as dead.",
            show_default=False,
        ),
    ] = None,
    actor: Annotated[
        str | None, typer.Option("--actor", metavar="NAME", help="Only what this one did.", show_default=False)
    ] = None,
    *,
    limit: int,
) -> Sequence[object]:
    """List what operators did, the latest first.

    Each row was written in the transaction of the change, and neither exists without the other. A change of many rows
    that has no time in `finished` goes on, was stopped, or was cut off: `outboxq bulk resume` does the rest.

    \b
    Examples:
      outboxq audit list --since 24h
      outboxq audit list --action dead --since 2026-01-31 --json
    """
    from outboxq.admin import audit

    sorts = dict.fromkeys(name.partition(".")[0] for name in audit.ACTIONS)
    if action is not None and action not in (*audit.ACTIONS, *sorts):
        raise WrongUsage(
            f"--action takes one of {', '.join(audit.ACTIONS)}, or a sort of them: {', '.join(sorts)}; got {action!r}"
        )
    wanted = audit.AuditFilter(since=since_in(connection, since), action=action, actor=actor)
    return audit.list_audit(connection, wanted, limit=limit)


@app.command("show")
@shows
def show_audit(connection: "Connection", entry: OneId) -> object:
    """Show one action: which rows were meant, and what was to become of them. Arguments are not kept.

    \b
    Example:
      outboxq audit show 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
    """
    from outboxq.admin import audit

    return audit.show_audit(connection, entry)


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneOptions(ActingOptions):
    """The options of `outboxq audit prune`."""

    older_than: Annotated[
        str, typer.Option("--older-than", metavar="TIME", help="Older than so many days, such as 400d.")
    ]


@app.command("prune")
@takes(PruneOptions)
def prune_audit(options: PruneOptions) -> None:
    """Delete old rows, 1,000 a transaction, as the owner of the tables: no role of `outboxq roles` may.

    Rows of changes that have not ended stay, because `outboxq bulk resume` can go on with them. How many rows were
    deleted, and why, is a row of its own.

    \b
    Example:
      outboxq audit prune --older-than 400d
    """
    age = read_age(options.older_than)
    with options.open() as begin:
        deleted = options.actions().prune_audit(begin, age)
    if options.as_json:
        print_json({"deleted": deleted})
    else:
        typer.echo(f"deleted {several(deleted, 'row', 'rows')}")


def read_age(given: str) -> timedelta:
    """Return the duration that is written as a number of days, such as `400d`.

    Raises:
        WrongUsage: the text is no number of days, or the number is 0 or over 3,653.
    """
    found = re.fullmatch(r"(\d{1,4})d", given, re.ASCII)
    if found is None or not 1 <= int(found[1]) <= 3_653:
        raise WrongUsage(f"--older-than takes days from 1d to 3653d, such as 400d, got {given!r}")
    return timedelta(days=int(found[1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class StopOptions(ActingOptions):
    """The options of `outboxq bulk stop`."""

    entry: OneId


@runs.command("stop")
@takes(StopOptions)
def stop(options: StopOptions) -> None:
    """Stop a change of many rows before its next page of 200, wherever it runs. What is changed stays so.

    \b
    Example:
      outboxq bulk stop 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
    """
    with options.transaction() as connection:
        became = options.actions().stop(connection, options.entry)
    if options.as_json:
        print_json({"id": options.entry, "became": became})
    else:
        typer.echo(f"{options.entry} was over already" if became == "over" else f"{options.entry} is {became}")
    raise typer.Exit(1 if became == "over" else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeOptions(ActingOptions):
    """The options of `outboxq bulk resume`."""

    entry: OneId
    args: Args = None
    app: App = None
    unchecked: Unchecked = False


@runs.command("resume")
@takes(ResumeOptions)
def resume(options: ResumeOptions) -> None:
    """Go on with a change of many rows that was stopped or cut off.

    It changes what it was to change when it began, after the last row that it reached. Rows that it passed over,
    because others held them, are not tried again. If it gives jobs other arguments, give them again: the audit does not
    keep them. A process that still works on it ends at its next page.

    \b
    Example:
      outboxq bulk resume 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
    """
    given = GivenArguments(options.args, options.app, options.unchecked)
    given.check_options()
    with options.open() as begin, showing("changed") as show:
        total = options.actions().resume(begin, options.entry, args=options.args, check=given.checker(), on_page=show)
    if options.as_json:
        refused = [*total.refused, *total.key_taken]
        print_json({"changed": total.changed, "held": total.held, "refused": refused, "not_found": total.not_found})
    else:
        typer.echo(f"changed {several(total.changed, 'row', 'rows')}")
    if total.requested:
        notice(f"{several(len(total.requested), 'job runs', 'jobs run')} until the relays receive the request")
    for job_id in total.held:
        notice(f"not changed, because another transaction holds it: {job_id}")
    for job_id in (*total.refused, *total.key_taken):
        notice(f"not changed, because it cannot be: {job_id}")
    for job_id in total.not_found:
        notice(f"not there: {job_id}")
    raise typer.Exit(exit_code_of(total))
