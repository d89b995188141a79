"""`outboxq dead`: list, show, retry and discard dead letters."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from outboxq.cli.arguments import App, Args, GivenArguments, Unchecked
from outboxq.cli.bulk import ChangeOptions, change_all, exit_code_of
from outboxq.cli.help import Commands
from outboxq.cli.options import KindFilter, OneId, QueueFilter, takes
from outboxq.cli.output import notice, print_json
from outboxq.cli.reading import lists, shows, what_became_of
from outboxq.cli.tables import Column
from outboxq.codec.text import several

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from outboxq.admin.actions import DiscardDead, RetryDead, Total

app = Commands(help="List, show, retry and discard dead letters: jobs that were given up.")

ReasonFilter = Annotated[
    str | None,
    typer.Option("--reason", metavar="TEXT", help="Only those whose reason contains this text.", show_default=False),
]


@app.command("list")
@lists(
    "dead",
    (
        Column("id", "id"),
        Column("queue", "name"),
        Column("kind", "name"),
        Column("attempt", rank=2),
        Column("died_at", rank=1),
        Column("crashes", rank=3),
        Column("max_attempts", rank=4),
        Column("created_at", rank=5),
        Column("reason", "text"),
    ),
    "--queue, --kind or --reason",
    things="dead letters",
)
def list_dead(
    connection: "Connection",
    queue: QueueFilter = None,
    kind: KindFilter = None,
    reason: ReasonFilter = None,
    *,
    limit: int,
) -> "Sequence[object]":
    """List dead letters, the latest first.

    \b
    Examples:
      outboxq dead list --queue accounts
      outboxq dead list --reason timeout --json
    """
    from outboxq.admin import dead_letters

    wanted = dead_letters.DeadFilter(queue=queue, kind=kind, reason=reason)
    return dead_letters.list_dead(connection, wanted, limit=limit)


@app.command("show")
@shows
def show_dead(connection: "Connection", job_id: OneId) -> object:
    """Show one dead letter with its arguments and every error.

    \b
    Example:
      outboxq dead show 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
    """
    from outboxq.admin import dead_letters
    from outboxq.errors import JobNotFound

    try:
        return dead_letters.show_dead(connection, job_id)
    except JobNotFound as missing:
        became = what_became_of(connection, job_id, "it was retried or discarded, or there was none")
        raise JobNotFound(job_id, "dead letter", became) from missing


@dataclass(frozen=True, kw_only=True, slots=True)
class NewArguments(ChangeOptions):
    """The options of `outboxq dead retry` that give dead letters new arguments."""

    args: Args = None
    app: App = None
    unchecked: Unchecked = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryOptions(NewArguments):
    """The options of `outboxq dead retry`: new arguments, and filters that choose the dead letters."""

    queue: QueueFilter = None
    kind: KindFilter = None
    reason: ReasonFilter = None


@app.command("retry")
@takes(RetryOptions)
def retry_dead(options: RetryOptions) -> None:
    """Make dead letters ready jobs again, with all their attempts before them.

    They keep their id and errors, and their arguments, unless --args gives others. If a job already has the id or the
    unique key, the dead letter stays, and is reported. Asks before it changes more than 100 that a filter finds.

    \b
    Examples:
      outboxq dead retry 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
      outboxq dead retry --queue accounts --reason OperationalError --dry-run
      outboxq dead retry --queue accounts --reason OperationalError --yes \\
        --because 'the bank is back'
      outboxq dead retry --kind greet --args '{"id": 7}' --app myapp.jobs:jobs
    """
    from outboxq.admin.actions import RetryDead
    from outboxq.admin.dead_letters import DeadFilter

    given = GivenArguments(options.args, options.app, options.unchecked)
    given.check_options()
    wanted = RetryDead(DeadFilter(options.queue, options.kind, options.reason, options.distinct_ids), options.args)
    _change(options, wanted, "retry", "retried", given)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscardOptions(ChangeOptions):
    """The options of `outboxq dead discard`: filters that choose the dead letters."""

    queue: QueueFilter = None
    kind: KindFilter = None
    reason: ReasonFilter = None


@app.command("discard")
@takes(DiscardOptions)
def discard_dead(options: DiscardOptions) -> None:
    """Delete dead letters for good. Asks before it deletes more than 100 that a filter finds.

    \b
    Examples:
      outboxq dead discard 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
      outboxq dead discard --kind send_welcome --dry-run
    """
    from outboxq.admin.actions import DiscardDead
    from outboxq.admin.dead_letters import DeadFilter

    wanted = DiscardDead(DeadFilter(options.queue, options.kind, options.reason, options.distinct_ids))
    _change(options, wanted, "discard", "discarded")


def _change(
    options: ChangeOptions,
    wanted: "RetryDead | DiscardDead",
    verb: str,
    done: str,
    given: GivenArguments | None = None,
) -> None:
    from outboxq.admin.actions import preview
    from outboxq.admin.dead_letters import DeadFilter, count_matching

    options.check_selection()
    with options.open() as begin:
        with begin() as connection:
            found = preview(connection, wanted, most=None, samples=0)
            is_asked_for = options.dry_run and options.ids
            there = count_matching(connection, DeadFilter(ids=options.distinct_ids)) if is_asked_for else found.kinds
        if given is not None:
            given.check_kinds(found.kinds)
        options.ask(verb, done, "dead letters", found.kinds, there)
        total = change_all(options, begin, found, done)
    _report(total, done, as_json=options.as_json)


def _report(total: "Total", verb: str, *, as_json: bool) -> None:
    if as_json:
        refused = {"refused": total.refused, "key_taken": total.key_taken} if verb == "retried" else {}
        print_json({verb: total.changed, "held": total.held, "not_found": total.not_found, **refused})
    else:
        typer.echo(f"{verb} {several(total.changed, 'dead letter', 'dead letters')}")
    for job_id in total.not_found:
        notice(f"no dead letter {job_id}")
    for job_id in total.held:
        notice(f"not {verb}, because another transaction holds it: {job_id}")
    for job_id in total.refused:
        notice(
            f"not {verb}, because a job with its id waits or runs already, or no job may be as it is "
            f"(too long, perhaps): {job_id}"
        )
    for job_id in total.key_taken:
        notice(f"not {verb}, because another job with its unique key waits or runs: {job_id}")
    raise typer.Exit(exit_code_of(total))
