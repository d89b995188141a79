"""`outboxq dead`."""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from outboxq.cli.bulk import Total, check_selection, confirm, in_groups, report_dry_run, sweep
from outboxq.cli.options import (
    DEFAULT_SCHEMA,
    AsJson,
    DatabaseUrl,
    DryRun,
    Everything,
    Ids,
    KindFilter,
    Limit,
    OneId,
    QueueFilter,
    Schema,
    Yes,
    takes,
)
from outboxq.cli.output import notice, print_detail, print_json, print_list
from outboxq.codec.text import several

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from outboxq.admin.dead_letters import DeadFilter
    from outboxq.cli.database import Begin
    from outboxq.statements.paging import KindCount, Page

app = typer.Typer(
    help="List, show, retry and discard dead letters: jobs that were given up.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

ReasonFilter = Annotated[
    str | None,
    typer.Option("--reason", metavar="TEXT", help="Only those whose reason contains this text.", show_default=False),
]


@app.command("list")
def list_dead(
    queue: QueueFilter = None,
    kind: KindFilter = None,
    reason: ReasonFilter = None,
    limit: Limit = 50,
    as_json: AsJson = False,
    schema: Schema = DEFAULT_SCHEMA,
    database_url: DatabaseUrl = None,
) -> None:
    """List dead letters, the latest first.

    \b
    Examples:
      outboxq dead list --queue accounts
      outboxq dead list --reason timeout --json
    """
    from outboxq.admin import dead_letters
    from outboxq.cli.database import open_database

    wanted = dead_letters.DeadFilter(queue=queue, kind=kind, reason=reason)
    with open_database(database_url, schema) as begin, begin() as connection:
        found = dead_letters.list_dead(connection, wanted, limit=limit + 1)
    columns = ("id", "queue", "kind", "attempt", "died_at", "reason")
    print_list("dead", found, limit, columns, "--queue, --kind or --reason", as_json=as_json)


@app.command("show")
def show_dead(
    job_id: OneId, as_json: AsJson = False, schema: Schema = DEFAULT_SCHEMA, database_url: DatabaseUrl = None
) -> None:
    """Show one dead letter with its arguments and every error.

    \b
    Example:
      outboxq dead show 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
    """
    from outboxq.admin import dead_letters
    from outboxq.cli.database import open_database

    with open_database(database_url, schema) as begin, begin() as connection:
        detail = dead_letters.show_dead(connection, job_id)
    fields = asdict(detail.dead) | {
        "priority": detail.priority, "unique_key": detail.unique_key, "group_key": detail.group_key,
    }  # fmt: skip
    print_detail(fields, {"args": detail.args, "headers": detail.headers, "errors": detail.errors}, as_json=as_json)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeOptions:
    """A field per option of the commands that change dead letters."""

    ids: Ids = None
    queue: QueueFilter = None
    kind: KindFilter = None
    reason: ReasonFilter = None
    everything: Everything = False
    yes: Yes = False
    dry_run: DryRun = False
    as_json: AsJson = False
    schema: Schema = DEFAULT_SCHEMA
    database_url: DatabaseUrl = field(default=None, repr=False)


@app.command("retry")
@takes(ChangeOptions)
def retry_dead(options: ChangeOptions) -> None:
    """Make dead letters ready jobs again, with all their attempts before them.

    They keep their id, arguments and errors. One whose id a job has already stays a dead letter, and is reported. Asks
    before it changes more than 100 that a filter finds.

    \b
    Examples:
      outboxq dead retry 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
      outboxq dead retry --queue accounts --reason OperationalError --dry-run
      outboxq dead retry --queue accounts --reason OperationalError --yes
    """
    from outboxq.admin import dead_letters

    _change(options, dead_letters.retry_page, "retry", "retried")


@app.command("discard")
@takes(ChangeOptions)
def discard_dead(options: ChangeOptions) -> None:
    """Delete dead letters for good. Asks before it deletes more than 100 that a filter finds.

    \b
    Examples:
      outboxq dead discard 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
      outboxq dead discard --kind send_welcome --dry-run
    """
    from outboxq.admin import dead_letters

    _change(options, dead_letters.discard_page, "discard", "discarded")


def _change(options: ChangeOptions, run_page: "Callable[..., Page]", verb: str, done: str) -> None:
    from outboxq.cli.database import open_database

    filters = {"--queue": options.queue, "--kind": options.kind, "--reason": options.reason}
    asks = not (options.yes or options.dry_run)
    check_selection(options.ids, filters, everything=options.everything, asks=asks)
    with open_database(options.database_url, options.schema) as begin:
        wanted, counted = _select(begin, options, to_retry=verb == "retry")
        if options.dry_run:
            missing = _count_missing(begin, options.ids or ())
            report_dry_run(done, "dead letters", counted, missing, as_json=options.as_json)
        if not (options.ids or options.yes):
            confirm(verb, "dead letters", counted, everything=options.everything)
        if options.ids:
            total = _change_ids(begin, options.ids, run_page)
        else:
            total = _change_matching(begin, wanted, run_page, done)
    _report(total, done, as_json=options.as_json)


def _select(begin: "Begin", options: ChangeOptions, *, to_retry: bool) -> "tuple[DeadFilter, tuple[KindCount, ...]]":
    """What the command is to change, without jobs that die from now on, and how many that are."""
    from outboxq.admin import dead_letters
    from outboxq.statements.paging import database_clock

    ids = tuple(options.ids) if options.ids else None
    with begin() as connection:
        wanted = dead_letters.DeadFilter(
            queue=options.queue,
            kind=options.kind,
            reason=options.reason,
            ids=ids,
            died_before=database_clock(connection),
        )
        return wanted, dead_letters.count_matching(connection, wanted, to_retry=to_retry)


def _count_missing(begin: "Begin", ids: "Sequence[UUID]") -> int:
    """How many of the ids are no dead letters."""
    from outboxq.admin import dead_letters

    distinct = tuple(set(ids))
    with begin() as connection:
        found = dead_letters.count_matching(connection, dead_letters.DeadFilter(ids=distinct))
    return len(distinct) - sum(kind.count for kind in found)


def _change_matching(begin: "Begin", wanted: "DeadFilter", run_page: "Callable[..., Page]", done: str) -> Total:
    def run(after: "UUID | None") -> "Page":
        with begin() as connection:
            return run_page(connection, wanted, after=after)

    return sweep(run, done)


def _change_ids(begin: "Begin", ids: "Sequence[UUID]", run_page: "Callable[..., Page]") -> Total:
    from outboxq.admin.dead_letters import DeadFilter

    total = Total()
    for some in in_groups(ids):
        with begin() as connection:
            page = run_page(connection, DeadFilter(ids=tuple(some)))
        total.add(page)
        found = {*page.changed, *page.held, *page.refused}
        total.not_found += [job_id for job_id in some if job_id not in found]
    return total


def _report(total: Total, verb: str, *, as_json: bool) -> None:
    if as_json:
        refused = {"refused": total.refused} if verb == "retried" else {}
        print_json({verb: total.changed, "held": total.held, "not_found": total.not_found, **refused})
    else:
        typer.echo(f"{verb} {several(total.changed, 'dead letter', 'dead letters')}")
    for job_id in total.not_found:
        notice(f"no dead letter {job_id}")
    for job_id in total.held:
        notice(f"not {verb}, because another transaction holds it: {job_id}")
    for job_id in total.refused:
        notice(
            f"not {verb}, because a job with its id waits or runs already, or it is longer than a job may be: {job_id}"
        )
    raise typer.Exit(total.exit_code)
