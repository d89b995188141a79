"""`outboxq schedules`: list, show, change and remove schedules, and run one now."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from outboxq.cli.errors import WrongUsage
from outboxq.cli.help import Commands
from outboxq.cli.options import ActingOptions, KindFilter, QueueFilter, takes
from outboxq.cli.output import notice, print_json, print_wrapped
from outboxq.cli.reading import lists, shows
from outboxq.cli.tables import Column
from outboxq.codec.display import moment

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from outboxq.new_job import NewJob

app = Commands(help="List, show, change, pause and run schedules: jobs that relays add at times.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Its name, as `list` prints it.", show_default=False)]


@app.command("list")
@lists(
    "schedules",
    (
        Column("name", "name"),
        Column("kind", "name", rank=3),
        Column("queue", "name", rank=4),
        Column("cron"),
        Column("time_zone", rank=2),
        Column("next_at"),
        Column("last_at", rank=1),
        Column("paused_at", rank=1),
        Column("missed", rank=5),
        Column("jitter_seconds", rank=6),
        Column("declared", rank=7),
        Column("owner", "name", rank=8),
        Column("disabled", rank=9),
        Column("created_at", rank=10),
    ),
    "--queue or --kind",
)
def list_schedules(
    connection: "Connection", queue: QueueFilter = None, kind: KindFilter = None, *, limit: int
) -> Sequence[object]:
    """List schedules by name, and when they are due.

    One that is declared is written in the code of an application, whose registry is its owner. A paused one skips its
    times, and so does one that is disabled, as its owner's code does not declare it any more.

    \b
    Examples:
      outboxq schedules list
      outboxq schedules list --kind nightly --json
    """
    from outboxq.admin import schedules

    return schedules.list_schedules(connection, queue=queue, kind=kind, limit=limit)


@app.command("show")
@shows
def show_schedule(connection: "Connection", name: Name) -> object:
    """Show one schedule with the job that it adds, and its next five times, as the clocks of its time zone show them.

    \b
    Example:
      outboxq schedules show nightly
    """
    from outboxq.admin import schedules

    return schedules.show_schedule(connection, name)


@dataclass(frozen=True, kw_only=True, slots=True)
class PutOptions(ActingOptions):
    """The options of `outboxq schedules put`."""

    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the schedule.", show_default=False)]
    kind: Annotated[str, typer.Option("--kind", metavar="NAME", help="The kind of its job.", show_default=False)]
    cron: Annotated[
        str | None,
        typer.Option("--cron", metavar="TEXT", help="When: '30 2 * * *', or @daily and the like.", show_default=False),
    ] = None
    every: Annotated[
        str | None,
        typer.Option(
            "--every", metavar="TIME", help="In place of --cron, an interval: 30s, 15m, 1h30m, 1d.", show_default=False
        ),
    ] = None
    queue: Annotated[str, typer.Option("--queue", metavar="NAME", help="The queue of its job.")] = "default"
    args: Annotated[
        str | None,
        typer.Option("--args", metavar="JSON", help="The arguments of its job, a JSON object.", show_default=False),
    ] = None
    fire_time: Annotated[
        str | None,
        typer.Option(
            "--fire-time",
            metavar="ARGUMENT",
            help="The argument that is given the time when the job is due.",
            show_default=False,
        ),
    ] = None
    time_zone: Annotated[str, typer.Option("--time-zone", metavar="NAME", help="The time zone of the cron text.")] = (
        "UTC"
    )
    missed: Annotated[
        Literal["skip", "one", "all"],
        typer.Option(
            "--missed",
            metavar="WORD",
            help="For times at which no relay ran: skip them, add one job for all, or add all jobs.",
        ),
    ] = "one"
    jitter_seconds: Annotated[
        float,
        typer.Option(
            "--jitter-seconds",
            metavar="SECONDS",
            min=0,
            max=86_400,
            help="Run later by a random time, so much at most.",
        ),
    ] = 0.0
    priority: Annotated[int, typer.Option("--priority", metavar="NUMBER", help="The priority of its job.")] = 0


@app.command("put")
@takes(PutOptions)
def put(options: PutOptions) -> None:
    """Make a schedule, or change the one of this name.

    One that is paused stays paused. It keeps the time that it is due next, unless the cron text, the interval or the
    time zone is another one, or the time is later than it can be. The arguments are not compared with the handler's. A
    schedule that an application's code declares is changed there.

    \b
    Examples:
      outboxq schedules put cleanup --kind clean_up --queue upkeep --cron @hourly
      outboxq schedules put poll --kind poll_bank --queue bank --every 30s
      outboxq schedules put monday --kind report --queue reports \\
        --cron '0 6 * * 1' --time-zone Europe/Berlin --fire-time fire_time
    """
    from datetime import timedelta

    from outboxq.admin import schedules
    from outboxq.cron import Cron, of_schedule

    if (options.cron is None) == (options.every is None):
        raise WrongUsage("a schedule takes --cron or --every, one of the two")
    with of_schedule(options.name):
        cron = Cron(options.cron or f"@every {options.every}", options.time_zone)
    new = schedules.NewSchedule(
        name=options.name,
        job=_job(options),
        cron=cron,
        missed=options.missed,
        jitter=timedelta(seconds=options.jitter_seconds),
    )
    with options.transaction() as connection:
        made = options.actions().put_schedule(connection, new)
    if options.as_json:
        print_json({"schedule": made})
        return
    print_wrapped(f"schedule {made.name!r} is due next at {moment(made.next_at)}")
    if made.paused_at is not None:
        notice(f"it is paused: `outboxq schedules resume {made.name}`")


def _job(options: PutOptions) -> "NewJob":
    from outboxq.admin.schedules import FIRE_TIME
    from outboxq.outbox.kinds import external

    try:
        values = msgspec.json.decode(options.args or "{}", type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise WrongUsage(f"--args takes a JSON object, such as '{{\"tenant\": 7}}': {error}") from error
    if options.fire_time is not None:
        if options.fire_time in values:
            raise WrongUsage(f"argument {options.fire_time!r} is in --args and in --fire-time: leave it out of one")
        values[options.fire_time] = FIRE_TIME
    return external(options.kind, queue=options.queue).options(priority=options.priority).job(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class NamesOptions(ActingOptions):
    """The options of the commands that change schedules."""

    names: Annotated[list[str], typer.Argument(metavar="NAME", help="The names of schedules.", show_default=False)]


@app.command("pause")
@takes(NamesOptions)
def pause(options: NamesOptions) -> None:
    """Keep schedules from adding jobs, until they are resumed. Jobs that were added stay.

    \b
    Example:
      outboxq schedules pause nightly
    """
    _change(options, options.actions().pause_schedules, "paused", "was paused already")


@app.command("resume")
@takes(NamesOptions)
def resume(options: NamesOptions) -> None:
    """Resume schedules from their next time on: times that passed in the meantime are skipped.

    \b
    Example:
      outboxq schedules resume nightly
    """
    _change(options, options.actions().resume_schedules, "resumed", "was not paused")


@app.command("remove")
@takes(NamesOptions)
def remove(options: NamesOptions) -> None:
    """Remove schedules. Jobs that they added stay.

    One that is still declared in the code of an application comes back when its relay starts: pause it instead.

    \b
    Example:
      outboxq schedules remove report-7
    """
    _change(options, options.actions().remove_schedules, "removed", "was not there")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptOptions(NamesOptions):
    """The options of `outboxq schedules adopt`."""

    owner: Annotated[
        str | None,
        typer.Option(
            "--owner",
            metavar="NAME",
            help="The name of the registry that declares them, such as myapp.jobs:jobs. Without it: operators.",
            show_default=False,
        ),
    ] = None


@app.command("adopt")
@takes(AdoptOptions)
def adopt(options: AdoptOptions) -> None:
    """Give schedules that an application's code declares to another registry, or to operators.

    A relay does not start if its registry declares what belongs to another one: adopt it, if it has moved there or the
    registry has a new name. Without --owner, it is changed by `put` from then on, and stays when the code is gone; one
    that is disabled stays paused until it is resumed.

    
    Examples:
      outboxq schedules adopt nightly --owner myapp.jobs:jobs
      outboxq schedules adopt nightly
    """
    actions = options.actions()
    whose = "operators" if options.owner is None else repr(options.owner)

    def change(connection: "Connection", names: Sequence[str]) -> tuple[str, ...]:
        return actions.adopt_schedules(connection, names, options.owner)

    _change(options, change, "adopted", f"belonged to {whose} already", said=f"belongs to {whose} now")


@dataclass(frozen=True, kw_only=True, slots=True)
class NameOptions(ActingOptions):
    """The options of `outboxq schedules run-now`."""

    name: Name


@app.command("run-now")
@takes(NameOptions)
def run_now(options: NameOptions) -> None:
    """Add a schedule's job once more, now, also if it is paused. When it is due next stays as it is.

    \b
    Example:
      outboxq schedules run-now nightly
    """
    with options.transaction() as connection:
        added = options.actions().run_schedule(connection, options.name)
    if options.as_json:
        own = {"id": added.id} if added.added else {"id": None, "existing_id": added.existing_id}
        print_json({**own, "kind": added.kind, "queue": added.queue})
    elif added.added:
        typer.echo(f"job {added.id} of kind {added.kind!r} is added")
    else:
        typer.echo(f"no job of kind {added.kind!r} is added: job {added.existing_id} has its unique key")


def _change(
    options: NamesOptions,
    change: "Callable[[Connection, Sequence[str]], tuple[str, ...]]",
    done: str,
    before: str,
    *,
    said: str | None = None,
) -> None:
    """Change schedules, and print for each schedule if the command has changed it.

    If one of them does not exist, the exit code is 1.

    Args:
        change: Makes the change; returns the names of the schedules that it changed.
        done: The word for a changed schedule, such as paused; also the key in the JSON.
        before: The words for a schedule that needed no change, such as was paused already.
        said: The words that people read for a changed schedule; by default made from `done`.
    """
    from outboxq.admin import schedules

    with options.transaction() as connection:
        known = {row.name for row in schedules.list_schedules(connection)}
        changed = change(connection, options.names)
    wanted = list(dict.fromkeys(options.names))
    unknown = [name for name in wanted if name not in known]
    unchanged = [name for name in wanted if name in known and name not in changed]
    if options.as_json:
        print_json({done: changed, "unchanged": unchanged, "not_found": unknown})
    else:
        for name in wanted:
            if name not in unknown:
                typer.echo(f"{name!r} {said or f'is {done}'}" if name in changed else f"{name!r} {before}")
    for name in unknown:
        notice(f"there is no schedule {name!r}: see `outboxq schedules list`")
    if unknown:
        raise typer.Exit(1)
