"""`outboxq dead`."""

from dataclasses import asdict, replace
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
)
from outboxq.cli.output import count, notice, print_detail, print_json, print_rows

if TYPE_CHECKING:
    from collections.abc import Callable
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
    typer.Option("--reason", metavar="TEXT", help="Only where the reason holds this text.", show_default=False),
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
        # One more than shown, to know whether there are more.
        found = dead_letters.list_dead(connection, wanted, limit=limit + 1)
    shown, more = found[:limit], len(found) > limit
    if as_json:
        print_json({"dead": shown, "more": more})
        return
    print_rows(("id", "queue", "kind", "attempt", "died_at", "reason"), shown)
    if more:
        notice(f"there are more than these {limit:,}: see --limit, or narrow it down with --queue, --kind or --reason")


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


@app.command("retry")
def retry_dead(
    ids: Ids = None,
    queue: QueueFilter = None,
    kind: KindFilter = None,
    reason: ReasonFilter = None,
    everything: Everything = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    schema: Schema = DEFAULT_SCHEMA,
    database_url: DatabaseUrl = None,
) -> None:
    """Put dead letters back to work, with all their attempts before them.

    They keep their id, arguments and errors, and are ready at once. One whose id a job has already stays, and is named.
    Asks before more than 100 that a filter finds.

    \b
    Examples:
      outboxq dead retry 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
      outboxq dead retry --queue accounts --reason OperationalError --dry-run
      outboxq dead retry --queue accounts --reason OperationalError --yes
    """
    from outboxq.admin import dead_letters
    from outboxq.cli.database import open_database

    wanted = dead_letters.DeadFilter(queue=queue, kind=kind, reason=reason)
    check_selection(ids, _options(wanted), everything=everything, asks=not (yes or dry_run))
    with open_database(database_url, schema) as begin:
        bounded, counted = _select(begin, ids, wanted, to_retry=True)
        if dry_run:
            report_dry_run("retried", "dead letters", counted, _missing(begin, ids), as_json=as_json)
        if not (ids or yes):
            confirm("retry", "dead letters", counted, everything=everything)
        total = _change(begin, ids, bounded, dead_letters.retry_page, "retried")
    _report(total, "retried", as_json=as_json)


@app.command("discard")
def discard_dead(
    ids: Ids = None,
    queue: QueueFilter = None,
    kind: KindFilter = None,
    reason: ReasonFilter = None,
    everything: Everything = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    schema: Schema = DEFAULT_SCHEMA,
    database_url: DatabaseUrl = None,
) -> None:
    """Delete dead letters for good. Asks before more than 100 that a filter finds.

    \b
    Examples:
      outboxq dead discard 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
      outboxq dead discard --kind send_welcome --dry-run
    """
    from outboxq.admin import dead_letters
    from outboxq.cli.database import open_database

    wanted = dead_letters.DeadFilter(queue=queue, kind=kind, reason=reason)
    check_selection(ids, _options(wanted), everything=everything, asks=not (yes or dry_run))
    with open_database(database_url, schema) as begin:
        bounded, counted = _select(begin, ids, wanted)
        if dry_run:
            report_dry_run("discarded", "dead letters", counted, _missing(begin, ids), as_json=as_json)
        if not (ids or yes):
            confirm("discard", "dead letters", counted, everything=everything)
        total = _change(begin, ids, bounded, dead_letters.discard_page, "discarded")
    _report(total, "discarded", as_json=as_json)


def _options(wanted: "DeadFilter") -> dict[str, str | None]:
    return {"--queue": wanted.queue, "--kind": wanted.kind, "--reason": wanted.reason}


def _select(
    begin: "Begin", ids: Ids, wanted: "DeadFilter", *, to_retry: bool = False
) -> "tuple[DeadFilter, tuple[KindCount, ...]]":
    """What the command is about, without what dies from now on, and how many that are."""
    from outboxq.admin import dead_letters
    from outboxq.statements.paging import database_clock

    with begin() as connection:
        bounded = replace(wanted, ids=tuple(ids) if ids else None, died_before=database_clock(connection))
        return bounded, dead_letters.count_matching(connection, bounded, to_retry=to_retry)


def _missing(begin: "Begin", ids: Ids) -> int:
    """How many of the ids are no dead letters."""
    from outboxq.admin import dead_letters

    distinct = tuple(set(ids or ()))
    with begin() as connection:
        found = dead_letters.count_matching(connection, dead_letters.DeadFilter(ids=distinct))
    return len(distinct) - sum(kind.count for kind in found)


def _change(begin: "Begin", ids: Ids, bounded: "DeadFilter", run_page: "Callable[..., Page]", verb: str) -> Total:
    if ids:
        return _change_ids(begin, ids, run_page)

    def run(after: "UUID | None") -> "Page":
        with begin() as connection:
            return run_page(connection, bounded, after=after)

    return sweep(run, verb)


def _change_ids(begin: "Begin", ids: Ids, run_page: "Callable[..., Page]") -> Total:
    from outboxq.admin.dead_letters import DeadFilter

    total = Total()
    for some in in_groups(ids or ()):
        with begin() as connection:
            page = run_page(connection, DeadFilter(ids=tuple(some)))
        total.changed += len(page.changed)
        total.held += page.held
        total.refused += page.refused
        found = {*page.changed, *page.held, *page.refused}
        total.not_found += [job_id for job_id in some if job_id not in found]
    return total


def _report(total: Total, verb: str, *, as_json: bool) -> None:
    if as_json:
        refused = {"refused": total.refused} if verb == "retried" else {}
        print_json({verb: total.changed, "held": total.held, "not_found": total.not_found, **refused})
    else:
        typer.echo(f"{verb} {count(total.changed, 'dead letter', 'dead letters')}")
    for job_id in total.not_found:
        notice(f"no dead letter {job_id}")
    for job_id in total.held:
        notice(f"not {verb}, because another transaction holds it: {job_id}")
    for job_id in total.refused:
        notice(
            f"not {verb}, because a job with its id waits or runs already, or it is longer than a job may be: {job_id}"
        )
    raise typer.Exit(total.exit_code)
