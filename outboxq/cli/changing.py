"""`outboxq jobs change`: what waits runs now, at another time, with another priority or other arguments."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from outboxq.cli.bulk import ChangeOptions, Total, sweep, unmarked
from outboxq.cli.errors import WrongUsage
from outboxq.cli.inbox import read_moment
from outboxq.cli.options import KindFilter, QueueFilter, StateFilter, takes
from outboxq.cli.output import notice, print_json
from outboxq.codec.text import several

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from outboxq.admin.jobs import JobChange, JobFilter
    from outboxq.cli.database import Begin
    from outboxq.statements.paging import KindCount, Page


@dataclass(frozen=True, kw_only=True, slots=True)
class NewValues(ChangeOptions):
    """What is to be changed."""

    run_now: Annotated[bool, typer.Option("--run-now", help="Run them as soon as a relay is free.")] = False
    run_at: Annotated[
        "datetime | None",
        typer.Option(
            "--run-at",
            metavar="TIME",
            parser=read_moment,
            help="Run them at this time, such as 2026-01-31T08:00:00+01:00; in UTC without an offset.",
            show_default=False,
        ),
    ] = None
    priority: Annotated[
        int | None,
        typer.Option(
            "--priority", metavar="NUMBER", min=-32_767, max=32_767, help="Higher runs first.", show_default=False
        ),
    ] = None
    args: Annotated[
        str | None,
        typer.Option(
            "--args",
            metavar="JSON",
            help="Their arguments, all of them. With --app, or --unchecked.",
            show_default=False,
        ),
    ] = None
    app: Annotated[
        str | None,
        typer.Option(
            "--app",
            metavar="REGISTRY",
            help="The registry whose handlers the arguments have to fit, such as myapp.jobs:jobs.",
            show_default=False,
        ),
    ] = None
    unchecked: Annotated[bool, typer.Option("--unchecked", help="Take the arguments as they are.")] = False

    def check_values(self) -> None:
        """Refuse options that do not go together.

        Raises:
            WrongUsage: with what to do.
        """
        if not self.run_now and self.run_at is None and self.priority is None and self.args is None:
            raise WrongUsage("change what? Give --run-now, --run-at, --priority or --args")
        if self.run_now and self.run_at is not None:
            raise WrongUsage("give --run-now or --run-at, not both")
        if self.args is not None and (self.app is None) is not self.unchecked:
            raise WrongUsage(
                "--args takes either --app, whose handlers say whether the arguments fit, or --unchecked: what does "
                "not fit fails when it runs"
            )
        if self.args is None and (self.app is not None or self.unchecked):
            raise WrongUsage("--app and --unchecked are about --args")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobsChangeOptions(NewValues):
    """Which jobs are meant."""

    queue: QueueFilter = None
    kind: KindFilter = None
    state: StateFilter = None


@takes(JobsChangeOptions)
def change_jobs(options: JobsChangeOptions) -> None:
    """Change jobs that wait: when they run, their priority, or their arguments.

    Jobs keep their place among those of their priority, and the keys that they were added with. A job that runs is
    neither changed nor waited for: it is reported, and the exit code is 1. So is a job of a group that is given a
    priority or a time: a group's jobs run in their order; --run-now lets a head that waits to be retried run at once.
    Asks before it changes more than 100 that a filter finds.

    \b
    Examples:
      outboxq jobs change --queue mail --kind send_welcome --run-now
      outboxq jobs change 01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10 --priority 10
      outboxq jobs change --kind greet --args '{"id": 7}' --app myapp.jobs:jobs
    """
    from outboxq.admin import jobs
    from outboxq.statements.paging import database_clock

    options.check_selection()
    options.check_values()
    change = jobs.JobChange(
        priority=options.priority, run_at=options.run_at, run_now=options.run_now, args=options.args
    )
    with options.open() as begin:
        with begin() as connection:
            # Without jobs that are added from now on.
            until = database_clock(connection)
            wanted = jobs.JobFilter(**options.filters, ids=options.distinct_ids, created_before=until)
            counted = jobs.count_matching(connection, wanted)
            there = jobs.find_ids(connection, wanted, limit=len(options.ids)) if options.ids else ()
        _check_args(options, counted)
        options.ask("change", "changed", "jobs", counted, there=counted)
        total = _change_matching(begin, wanted, change)
    total.not_found += [job_id for job_id in options.distinct_ids or () if job_id not in there]
    _report(total, as_json=options.as_json)


def _check_args(options: NewValues, counted: "Iterable[KindCount]") -> None:
    """Refuse arguments that do not fit the handlers of the kinds that are meant.

    Raises:
        WrongUsage: they do not fit, or are no JSON object.
    """
    if options.args is None:
        return
    import msgspec

    from outboxq.errors import PayloadError, UnknownKind
    from outboxq.handlers.loading import load_jobs

    try:
        msgspec.json.decode(options.args.encode(), type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise WrongUsage("--args takes a JSON object, such as '{\"user_id\": 7}'") from error
    if options.app is None:
        return
    registry = load_jobs(options.app).resolve()
    try:
        for kind in sorted({each.kind for each in counted}):
            registry.find(kind).signature().decode(options.args)
    except (PayloadError, UnknownKind) as error:
        raise WrongUsage(f"the arguments do not fit: {error}") from error


def _change_matching(begin: "Begin", wanted: "JobFilter", change: "JobChange") -> Total:
    from outboxq.admin import jobs

    def run_page(after: "UUID | None") -> "Page":
        # Found before they are locked: whatever happens from then on, it is known which marks are to be cleared.
        with begin() as connection:
            ids = jobs.find_ids(connection, wanted, after=after)
        with unmarked(begin, ids), begin() as connection:
            page = jobs.change_page(connection, replace(wanted, ids=ids), change)
        return replace(page, last=ids[-1] if ids else None)

    return sweep(run_page, "changed")


def _report(total: Total, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "changed": total.changed,
                "running": total.held,
                "refused": total.refused,
                "not_found": total.not_found,
            }
        )
    else:
        typer.echo(f"changed {several(total.changed, 'job', 'jobs')}")
    for job_id in total.not_found:
        notice(f"no job {job_id}")
    for job_id in total.held:
        notice(f"not changed, because it is running: {job_id} (see `outboxq jobs list --running`)")
    for job_id in total.refused:
        notice(f"not changed, because it is one of a group, whose jobs run in their order: {job_id}")
    raise typer.Exit(total.exit_code)
