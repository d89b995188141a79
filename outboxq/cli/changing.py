"""`outboxq jobs change`: change when waiting jobs run, their priority or their arguments."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from outboxq.cli.arguments import App, Args, GivenArguments, Unchecked
from outboxq.cli.bulk import ChangeOptions, change_all, exit_code_of
from outboxq.cli.errors import WrongUsage
from outboxq.cli.options import KindFilter, QueueFilter, StateFilter, read_moment, takes
from outboxq.cli.output import notice, print_json
from outboxq.codec.text import several

if TYPE_CHECKING:
    from datetime import datetime

    from outboxq.admin.actions import Total


@dataclass(frozen=True, kw_only=True, slots=True)
class NewValues(ChangeOptions):
    """The options of `outboxq jobs change` that give jobs new values."""

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
    args: Args = None
    app: App = None
    unchecked: Unchecked = False

    @property
    def arguments(self) -> GivenArguments:
        """The new arguments, with the options that say what checks them."""
        return GivenArguments(self.args, self.app, self.unchecked)

    def check_values(self) -> None:
        """Refuse options that do not go together.

        Raises:
            WrongUsage: the options do not fit; the message says what to do.
        """
        if not self.run_now and self.run_at is None and self.priority is None and self.args is None:
            raise WrongUsage("change what? Give --run-now, --run-at, --priority or --args")
        if self.run_now and self.run_at is not None:
            raise WrongUsage("give --run-now or --run-at, not both")
        self.arguments.check_options()


@dataclass(frozen=True, kw_only=True, slots=True)
class JobsChangeOptions(NewValues):
    """The options of `outboxq jobs change`: the new values, and filters that choose the jobs."""

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
    from outboxq.admin.actions import ChangeJobs, preview
    from outboxq.admin.jobs import JobChange, JobFilter

    options.check_selection()
    options.check_values()
    to = JobChange(priority=options.priority, run_at=options.run_at, run_now=options.run_now, args=options.args)
    with options.open() as begin:
        with begin() as connection:
            wanted = ChangeJobs(JobFilter(options.queue, options.kind, options.state, options.distinct_ids), to)
            found = preview(connection, wanted, most=None, samples=0)
        options.arguments.check_kinds(found.kinds)
        options.ask("change", "changed", "jobs", found.kinds, there=found.kinds)
        total = change_all(options, begin, found, "changed")
    _report(total, as_json=options.as_json)


def _report(total: "Total", *, as_json: bool) -> None:
    if as_json:
        others = {"running": total.held, "refused": total.refused, "not_found": total.not_found}
        print_json({"changed": total.changed, **others})
    else:
        typer.echo(f"changed {several(total.changed, 'job', 'jobs')}")
    for job_id in total.not_found:
        notice(f"no job {job_id}")
    for job_id in total.held:
        notice(f"not changed, because it is running: {job_id} (see `outboxq jobs list --running`)")
    for job_id in total.refused:
        notice(f"not changed, because it is one of a group, whose jobs run in their order: {job_id}")
    raise typer.Exit(exit_code_of(total))
