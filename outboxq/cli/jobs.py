"""`outboxq jobs`: list, show, watch, cancel and change jobs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from outboxq.cli.bulk import ChangeOptions, change_all, exit_code_of
from outboxq.cli.cancelling import await_ends, report_cancelled
from outboxq.cli.changing import change_jobs
from outboxq.cli.errors import WrongUsage
from outboxq.cli.help import Commands
from outboxq.cli.options import GroupFilter, KindFilter, OneId, QueueFilter, StateFilter, takes
from outboxq.cli.output import notice, print_json
from outboxq.cli.reading import lists, shows, what_became_of
from outboxq.cli.tables import Column
from outboxq.cli.watching import watch_jobs
from outboxq.codec.text import several

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from outboxq.admin.actions import Total
    from outboxq.outbox.cancel import CancelOutcome

app = Commands(help="List, show, change and cancel jobs that wait or run.")


@app.command("list")
@lists(
    "jobs",
    (
        Column("id", "id"),
        Column("queue", "name"),
        Column("kind", "name"),
        Column("state"),
        Column("attempt", rank=4),
        Column("run_at", rank=1),
        Column("running_seconds", rank=2),
        Column("pid", "id", rank=3),
        Column("progress", rank=11),
        Column("note", rank=12),
        Column("max_attempts", rank=8),
        Column("crashes", rank=6),
        Column("parked", rank=7),
        Column("priority", rank=5),
        Column("created_at", rank=9),
        Column("expires_at", rank=10),
    ),
    "--queue, --kind or --state",
)
def list_jobs(
    connection: "Connection",
    running: Annotated[
        bool, typer.Option("--running", help="Only jobs that a relay is running now: running, or leased.")
    ] = False,
    queue: QueueFilter = None,
    kind: KindFilter = None,
    state: StateFilter = None,
    group: GroupFilter = None,
    *,
    limit: int,
) -> "Sequence[object]":
    """List jobs that wait or run, the oldest first.

    Their order is that in which they came into the table. `run` is how long ago a job's time came, or when it will.

    The states are those of `outboxq stats`: ready; grouped (waits for its turn in its group); scheduled; due
    (scheduled, and its time has come); running (in a transaction; pid is that of its PostgreSQL backend); leased (run
    by a relay under a lease: in lease mode, or alone because an earlier relay died while it ran); orphaned (leased to a
    relay that has died or cannot be reached: another one takes it back); suspect (its relay died while it ran: it will
    run alone).

    \b
    Examples:
      outboxq jobs list --queue accounts --limit 10
      outboxq jobs list --running
    """
    from outboxq.admin import jobs

    wanted = jobs.JobFilter(queue=queue, kind=kind, state=state, group=group)
    return jobs.list_jobs(connection, wanted, running=running, limit=limit)


@app.command("show")
@shows
def show_job(connection: "Connection", job_id: OneId) -> object:
    """Show one job with its arguments and the errors of its earlier attempts.

    \b
    Example:
      outboxq jobs show 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
    """
    from outboxq.admin import dead_letters, finished, jobs
    from outboxq.cli.errors import CommandFailed
    from outboxq.errors import JobNotFound

    try:
        return jobs.show_job(connection, job_id)
    except JobNotFound as missing:
        if dead_letters.is_dead(connection, job_id):
            raise CommandFailed(f"{missing}: it is a dead letter, see `outboxq dead show {job_id}`") from missing
        outcome = finished.outcome_of(connection, job_id)
        if outcome is not None:
            raise CommandFailed(f"{missing}: it is {outcome}, see `outboxq done show {job_id}`") from missing
        became = what_became_of(connection, job_id, "it is done, was cancelled, or never existed")
        raise CommandFailed(f"{missing}: {became}") from missing


app.command("watch")(watch_jobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningOptions(ChangeOptions):
    """The options of `outboxq jobs cancel` that concern running jobs."""

    running: Annotated[
        bool, typer.Option("--running", help="Also jobs that run: their relays end them, and undo what they wrote.")
    ] = False
    dead_letter: Annotated[
        bool, typer.Option("--dead-letter", help="Make dead letters of the jobs, instead of no trace. With --running.")
    ] = False
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="End the database session of a job that runs on. Asks first, as jobs that share its transaction are "
            "rolled back with it, and run again. With --running.",
        ),
    ] = False
    wait_seconds: Annotated[
        float,
        typer.Option("--wait", metavar="SECONDS", min=0.0, max=3600.0, help="How long to wait for relays' answers."),
    ] = 15.0

    @property
    def outcome(self) -> "CancelOutcome":
        """The outcome of cancelled jobs: with --dead-letter `dead`, a dead letter; otherwise `discard`, no trace."""
        return "dead" if self.dead_letter else "discard"


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelOptions(RunningOptions):
    """The options of `outboxq jobs cancel`."""

    queue: QueueFilter = None
    kind: KindFilter = None
    state: StateFilter = None


@app.command("cancel")
@takes(CancelOptions)
def cancel_jobs(options: CancelOptions) -> None:
    """Delete jobs that wait, and with --running end jobs that run. They leave no trace, and never run again.

    Without --running, a job that runs in a transaction is neither changed nor waited for: it is reported, and the exit
    code is 1. One that runs under a lease is deleted; its handler goes on to its end, and what it wrote is rolled back.
    Jobs that are added in the meantime stay. Asks before it deletes more than 100 that a filter finds.

    With --running, the relays that run the jobs tell their handlers to end, cancel their statements, and two seconds
    later end their database sessions; what the handlers wrote is rolled back. A job that comes to its end at the same
    moment has ended well, and is reported so. The exit code is 1 if a job runs on.

    \b
    Examples:
      outboxq jobs cancel 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10
      outboxq jobs cancel --queue mail --kind send_welcome
      outboxq jobs cancel 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10 --running
    """
    from outboxq.admin.actions import CancelJobs, CancelRunning, preview
    from outboxq.admin.jobs import JobFilter

    options.check_selection()
    if (options.dead_letter or options.force) and not options.running:
        raise WrongUsage("--dead-letter and --force are about jobs that run: add --running")
    with options.open() as begin:
        with begin() as connection:
            wanted = JobFilter(options.queue, options.kind, options.state, options.distinct_ids)
            action = CancelRunning(wanted, options.outcome) if options.running else CancelJobs(wanted)
            found = preview(connection, action, most=None, samples=0)
        options.ask("cancel", "cancelled", "jobs", found.kinds, there=found.kinds)
        if options.running:
            total = change_all(options, begin, found, "cancelled or asked to end")
            report_cancelled(await_ends(begin, options, total), as_json=options.as_json)
        total = change_all(options, begin, found, "cancelled")
    _report(total, as_json=options.as_json)


def _report(total: "Total", *, as_json: bool) -> None:
    if as_json:
        print_json({"cancelled": total.changed, "running": total.held, "not_found": total.not_found})
    else:
        typer.echo(f"cancelled {several(total.changed, 'job', 'jobs')}")
    for job_id in total.not_found:
        notice(f"no job {job_id}")
    for job_id in total.held:
        notice(f"not cancelled, because it is running: {job_id} (see `outboxq jobs list --running`)")
    raise typer.Exit(exit_code_of(total))


app.command("change")(change_jobs)
