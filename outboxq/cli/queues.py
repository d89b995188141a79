"""`outboxq queues`: list, pause, resume and limit queues; and `outboxq stats`, which counts the jobs of queues."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outboxq.cli.help import Commands
from outboxq.cli.options import ActingOptions, DatabaseOptions, DatabaseUrls, Wide, takes
from outboxq.cli.output import notice, print_json
from outboxq.cli.replica import ReadUrls, open_reading, replicas_of
from outboxq.cli.tables import Column, print_table
from outboxq.codec.display import Estimate, age, duration, in_short, standby
from outboxq.codec.text import printable, several

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection

    from outboxq.admin.queues import Limit
    from outboxq.admin.stats import QueueStats, Stats
    from outboxq.queue_limits import QueueLimits

app = Commands(help="List, pause, resume and limit queues.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TableOptions(DatabaseOptions):
    """The options of a command that prints a table of all queues."""

    wide: Wide = False


@app.command("list")
@takes(TableOptions)
def list_queues(options: TableOptions) -> None:
    """List every queue that has a job, a dead letter, a setting or a limit.

    `jobs` counts those that wait or run; `outboxq stats` counts them by state. The limits are those that hold: as
    `outboxq queues set` has set them (`set_by` is operator), else as the application of a living relay declares them
    (application). `keep_dead` is what `queues set` has set. Reads the whole table of jobs.

    \b
    Example:
      outboxq queues list
    """
    from outboxq.admin import kinds, queues
    from outboxq.statements.paging import database_clock

    with options.transaction() as connection:
        found = queues.count_queues(connection)
        paused = kinds.list_paused(connection)
        now = database_clock(connection)
    if options.as_json:
        print_json({"queues": found, "paused_kinds": paused})
        return
    if not found:
        notice("no queues found")
    columns = (
        Column("queue", "name"),
        Column("jobs", if_empty=True),
        Column("dead", if_empty=True),
        Column("limit"),
        Column("rate"),
        Column("burst"),
        Column("per_group"),
        Column("set_by", rank=2),
        Column("keep_dead"),
        Column("paused_at"),
    )
    print_table(columns, found, now=now, wide=options.wide)
    if paused:
        of_kinds = (Column("queue", "name"), Column("kind", "name"), Column("paused_at"), Column("jobs"))
        print_table(of_kinds, paused, now=now, title="Paused kinds:")


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuesOptions(ActingOptions):
    """The options of the commands that change queues."""

    names: Annotated[list[str], typer.Argument(metavar="NAME", help="The names of queues.", show_default=False)]


@app.command("pause")
@takes(QueuesOptions)
def pause(options: QueuesOptions) -> None:
    """Keep relays from claiming jobs of these queues.

    Jobs that run already go on, and new jobs can still be added. A queue that has no job and no dead letter, and that
    no relay serves, is paused too, before its first job comes, and reported in case its name was mistyped.

    \b
    Example:
      outboxq queues pause accounts mail
    """
    _change(options, options.actions().pause_queues, "paused", "paused already")


@app.command("resume")
@takes(QueuesOptions)
def resume(options: QueuesOptions) -> None:
    """Resume these queues: relays claim their jobs again, at once.

    A queue that was not paused, has no job and no dead letter, and that no relay serves, is reported in case its name
    was mistyped.

    \b
    Example:
      outboxq queues resume accounts mail
    """
    _change(options, options.actions().resume_queues, "resumed", "not paused")


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitOptions(QueuesOptions):
    """The options of `outboxq queues set`."""

    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", help="How many jobs run at a time, 1 to 10000.", show_default=False),
    ] = None
    no_limit: Annotated[bool, typer.Option("--no-limit", help="Take the limit away.")] = False
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate",
            metavar="RATE",
            help="How many jobs begin in a time: 10/s, 100/min, 5/30s, 20/h, 500/day.",
            show_default=False,
        ),
    ] = None
    burst: Annotated[
        int | None,
        typer.Option(
            "--burst",
            metavar="N",
            help="With --rate: how many jobs may begin at once after a pause. By default those of a tenth of a second, "
            "at least 1.",
            show_default=False,
        ),
    ] = None
    no_rate: Annotated[bool, typer.Option("--no-rate", help="Take the rate and its burst away.")] = False
    per_group: Annotated[
        int | None,
        typer.Option(
            "--per-group",
            metavar="N",
            help="How many jobs of each group run at a time, 1 to 1000: more than 1 gives up their order.",
            show_default=False,
        ),
    ] = None
    no_per_group: Annotated[
        bool, typer.Option("--no-per-group", help="Jobs of each group run one at a time again, in their order.")
    ] = False
    keep_dead: Annotated[
        str | None,
        typer.Option(
            "--keep-dead",
            metavar="TIME",
            help="Delete dead letters after so long: 30d, 12h, 90m; or forever, whatever the application declares.",
            show_default=False,
        ),
    ] = None
    no_keep_dead: Annotated[
        bool, typer.Option("--no-keep-dead", help="Keep dead letters as the application declares; by default for ever.")
    ] = False

    @property
    def are_for_dead(self) -> bool:
        """Return True if the options change how long dead letters are kept."""
        return self.keep_dead is not None or self.no_keep_dead

    @property
    def are_for_jobs(self) -> bool:
        """Return True if the options set or remove a limit of running jobs, or if no option is given at all.

        Without any option the command then fails with the message about limits.
        """
        given = (self.limit, self.rate, self.burst, self.per_group)
        dropped = self.no_limit or self.no_rate or self.no_per_group
        return dropped or any(each is not None for each in given) or not self.are_for_dead


@app.command("set")
@takes(LimitOptions)
def set_limits(options: LimitOptions) -> None:
    """Limit how many jobs of these queues run at a time or begin in a time; say how long dead letters are kept.

    Over all relays of the database. What is not given stays as it is. Relays heed it within moments; if a limit is
    lowered, jobs that run already go on. Without a limit set here, those hold that the application declares. Dead
    letters whose time has ended are deleted by relays, within some minutes.

    \b
    Examples:
      outboxq queues set mail --limit 5 --rate 100/min --burst 20
      outboxq queues set mail --no-rate
      outboxq queues set mail --keep-dead 30d
    """
    from outboxq.admin import queues
    from outboxq.queue_limits import kept_in_words, make_limits, parse_keep

    _refuse_both(options)
    seconds = None if options.keep_dead is None else parse_keep(options.keep_dead)
    limits = make_limits(running=options.limit, per_group=options.per_group, rate=options.rate, burst=options.burst)
    given: dict[queues.Limit, bool] = {
        "running": options.no_limit,
        "rate": options.no_rate,
        "per_group": options.no_per_group,
    }
    drop: list[queues.Limit] = [name for name, wanted in given.items() if wanted]
    actions = options.actions()

    def change(connection: "Connection", names: Sequence[str]) -> tuple[str, ...]:
        changed: set[str] = set()
        if options.are_for_jobs:
            changed.update(actions.set_limits(connection, names, limits, drop))
        if options.are_for_dead:
            changed.update(actions.keep_dead(connection, names, seconds))
        return tuple(sorted(changed))

    kept = [kept_in_words(seconds)] if options.are_for_dead else []
    said = "; ".join([*_limits_in_words(limits, drop), *kept])
    _change(options, change, "limited", "set so already", said=said)


def _limits_in_words(limits: "QueueLimits", drop: "Sequence[Limit]") -> list[str]:
    """Return the changes of a queue's limits as words that follow the queue's name, one for each limit."""
    words: dict[Limit, str] = {
        "running": "limit of jobs at a time",
        "rate": "rate",
        "per_group": "limit of jobs of a group",
    }
    set_now = [f"is limited: {limits}"] if limits != type(limits)() else []
    return set_now + [f"has no {words[name]} set any more" for name in drop]


def _refuse_both(options: LimitOptions) -> None:
    """Refuse options that set a limit and remove the same limit."""
    pairs = (
        ("--limit", options.limit is not None, options.no_limit),
        ("--rate", options.rate is not None or options.burst is not None, options.no_rate),
        ("--per-group", options.per_group is not None, options.no_per_group),
        ("--keep-dead", options.keep_dead is not None, options.no_keep_dead),
    )
    for name, is_set, is_dropped in pairs:
        if is_set and is_dropped:
            raise typer.BadParameter(f"{name} and --no{name[1:]} exclude one another: give one of them")


def _change(
    options: QueuesOptions,
    change: "Callable[[Connection, Sequence[str]], tuple[str, ...]]",
    done: str,
    before: str,
    *,
    said: str | None = None,
) -> None:
    """Change queues, and print for each queue if the command has changed it.

    Args:
        change: Makes the change; returns the names of the queues that it changed.
        done: The word for a changed queue, such as paused; also the key in the JSON.
        before: The words for a queue that needed no change, such as paused already.
        said: The words that people read for a changed queue; by default made from `done`.
    """
    from outboxq.admin import queues

    with options.transaction() as connection:
        known = queues.known_names(connection)
        changed = change(connection, options.names)
    wanted = list(dict.fromkeys(options.names))
    unchanged = [name for name in wanted if name not in changed]
    # A queue that was resumed had been paused, so its name is right.
    unknown = [name for name in wanted if name not in known and not (done == "resumed" and name in changed)]
    if options.as_json:
        print_json({done: changed, "unchanged": unchanged, "unknown": unknown})
    else:
        for name in wanted:
            typer.echo(f"{name!r} {said or f'is {done}'}" if name in changed else f"{name!r} was {before}")
    for name in unknown:
        others = ", ".join(sorted(known)) or "none"
        nothing = f"note: queue {name!r} has no job and no dead letter, and no relay serves it"
        notice(f"{nothing} (known: {others}): was it meant?")


@dataclass(frozen=True, kw_only=True, slots=True)
class StatsOptions(TableOptions):
    """The options of `outboxq stats`."""

    exact: Annotated[
        bool, typer.Option("--exact", help="Count every job: reads the whole tables, however many there are.")
    ] = False
    database_url: DatabaseUrls = field(default=None, repr=False)  # type: ignore[assignment]  # one or several
    read_url: ReadUrls = field(default=None, repr=False)


@takes(StatsOptions)
def stats(options: StatsOptions) -> None:
    """Count the jobs that wait, run and died, per queue.

    The states are those of `outboxq jobs list`. Parked jobs, which are also counted as scheduled or due, were postponed
    because no relay that saw them knows their kind: start one that does. Effects whose outcome is unknown are counted
    too. A terminal shows the columns that count something. Up to 10,000 jobs of a queue are counted in each state; what
    is more is an estimate, `~ 1.2 M`, and in --json `exact` is false and `estimated` names the states. --exact counts
    all. Of several databases, those that give no numbers are named with the reason, and it does not end with 0.

    \b
    Examples:
      outboxq stats
      outboxq stats --exact
      outboxq stats --json | jq '.queues[] | select(.dead > 0)'
    """
    from outboxq import config
    from outboxq.cli.errors import explain

    urls = config.database_urls(options.database_url)
    replicas = replicas_of(urls, options.read_url, options.database_url)
    if len(urls) == 1:
        ((name, url),) = urls.items()
        _print_stats(options, *_collect(url, replicas.get(name), options))
        return
    found: dict[str, tuple[Stats, datetime]] = {}
    exit_code = 0
    for name, url in urls.items():
        try:
            found[name] = _collect(url, replicas.get(name), options)
        except Exception as error:
            failure = explain(error)
            if failure is None:
                raise
            notice(f"{name}: {failure.message}")
            exit_code = max(exit_code, failure.exit_code)
    _print_several(options, found)
    if exit_code:
        raise typer.Exit(exit_code)


def _collect(url: "URL", replica: "URL | None", options: StatsOptions) -> "tuple[Stats, datetime]":
    from outboxq.admin.stats import collect_stats
    from outboxq.statements.paging import database_clock

    with open_reading(url, replica, options.schema) as begin, begin() as connection:
        return collect_stats(connection, exact=options.exact), database_clock(connection)


def _print_several(options: StatsOptions, found: "Mapping[str, tuple[Stats, datetime]]") -> None:
    if options.as_json:
        print_json({"databases": [{"database": name, **_fields(each)} for name, (each, _) in found.items()]})
        return
    for name, (each, now) in found.items():
        typer.echo(f"{printable(name)}:")
        _print_stats(options, each, now, f"{name}: ")


def _fields(found: "Stats") -> dict[str, object]:
    return {each.name: getattr(found, each.name) for each in fields(found)}


def _print_stats(options: StatsOptions, found: "Stats", now: datetime, of_database: str = "") -> None:
    from outboxq.admin.jobs import STATES

    if options.as_json:
        print_json(found)
        return
    if found.standby_delay_seconds is not None:
        notice(of_database + standby(found.standby_delay_seconds))
    if not found.queues:
        notice(f"{of_database}no queues found")
    counts = (Column(state, if_empty=state == "ready") for state in (*STATES, "parked", "dead"))
    columns = [Column("queue", "name"), *counts, Column("oldest_waiting_seconds"), Column("paused_at")]
    if options.wide or not (sys.stdout.isatty() and all(row.exact for row in found.queues)):
        columns.append(Column("exact"))
    rows = [_Shown(row) for row in found.queues]
    print_table(columns, rows, now=now, wide=options.wide, in_words=lambda row: _in_words(row, STATES, now))
    if found.parked_kinds:
        kinds = (Column("queue", "name"), Column("kind", "name"), Column("jobs"), Column("next_look_at"))
        print_table(kinds, found.parked_kinds, now=now, title="Kinds that no relay knows:")
    if found.unknown_effects:
        effects = several(found.unknown_effects, "effect waits", "effects wait")
        notice(f"{of_database}{effects} for an operator: see `outboxq effects list --status unknown`")


class _Shown:
    """A queue's numbers for the table of `outboxq stats`, in which estimates are printed with a `~`."""

    def __init__(self, row: "QueueStats") -> None:
        self._row = row

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._row, name)
        return Estimate(value) if name in self._row.estimated else value


def _in_words(row: "_Shown", states: Sequence[str], now: datetime) -> str:
    """Return a queue's numbers as text, for a narrow terminal: `accounts: 5 ready, 2 dead; oldest_waiting 3 m`."""
    counts = {state: getattr(row, state) for state in (*states, "dead")}
    said = [", ".join(f"{in_short(number, now)} {state}" for state, number in counts.items() if number) or "0 ready"]
    if row.parked:
        said.append(f"parked {row.parked:,}")
    if row.oldest_waiting_seconds is not None:
        said.append(f"oldest_waiting {duration(row.oldest_waiting_seconds)}")
    if row.paused_at is not None:
        said.append(f"paused {age(row.paused_at, now)}")
    return f"{printable(row.queue)}: {'; '.join(said)}"
