"""`outboxq done`: list and show finished jobs that are kept, and run one again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal
from uuid import UUID

import typer

from outboxq.cli.help import Commands
from outboxq.cli.options import ActingOptions, KindFilter, OneId, QueueFilter, Since, since_in, since_option, takes
from outboxq.cli.output import print_json
from outboxq.cli.reading import lists, shows
from outboxq.cli.tables import Column

if TYPE_CHECKING:
    from sqlalchemy import Connection

app = Commands(help="List, show and run again finished jobs, of kinds that keep them.")


@app.command("list")
@lists(
    "done",
    (
        Column("id", "id"),
        Column("queue", "name"),
        Column("kind", "name"),
        Column("outcome"),
        Column("finished_at"),
        Column("seconds", rank=1),
        Column("attempt", rank=2),
        Column("created_at", rank=3),
        Column("claimed_at", rank=4),
    ),
    "--queue, --kind, --outcome or --since",
    things="finished jobs",
)
def list_done(
    connection: "Connection",
    queue: QueueFilter = None,
    kind: KindFilter = None,
    outcome: Annotated[
        Literal["done", "discarded", "cancelled", "expired"] | None,
        typer.Option("--outcome", metavar="OUTCOME", help="Only those that ended so.", show_default=False),
    ] = None,
    since: Annotated[Since | None, since_option("That ended since then")] = None,
    before: Annotated[
        UUID | None,
        typer.Option("--before", metavar="ID", help="The next page: those added before this one.", show_default=False),
    ] = None,
    *,
    limit: int,
) -> Sequence[object]:
    """List finished jobs that are kept, the last added first.

    Only kinds with keep=timedelta(...) keep their finished jobs. The outcomes are done, discarded (by the handler),
    cancelled (while it ran) and expired.

    \b
    Examples:
      outboxq done list --kind make_report --since 24h
      outboxq done list --outcome discarded --json
    """
    from outboxq.admin import finished

    ended_since = since_in(connection, since)
    wanted = finished.DoneFilter(queue=queue, kind=kind, outcome=outcome, since=ended_since)
    return finished.list_finished(connection, wanted, before=before, limit=limit)


@app.command("show")
@shows
def show_done(connection: "Connection", job_id: OneId) -> object:
    """Show one finished job, with its arguments and its result, if they are kept.

    \b
    Example:
      outboxq done show 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
    """
    from outboxq.admin import finished

    return finished.show_finished(connection, job_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgainOptions(ActingOptions):
    """The options of `outboxq done run-again`."""

    job_id: OneId


@app.command("run-again")
@takes(AgainOptions)
def run_again(options: AgainOptions) -> None:
    """Add a new job like a finished one: its kind, queue, arguments and headers, of a kind with keep_args=True.

    The new job has an id of its own, and no key, group or batch; no job follows it.

    \b
    Example:
      outboxq done run-again 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
    """
    with options.transaction() as connection:
        new_id = options.actions().run_again(connection, options.job_id)
    if options.as_json:
        print_json({"added": new_id, "like": options.job_id})
    else:
        typer.echo(f"added job {new_id}")
