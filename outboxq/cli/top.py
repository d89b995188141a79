"""`outboxq top`: watch queues, kinds, relays, long jobs and errors."""

import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from outboxq.cli.errors import WrongUsage
from outboxq.cli.options import Wide, takes
from outboxq.cli.output import notice, print_json, print_wrapped
from outboxq.cli.replica import ReadingOptions
from outboxq.cli.tables import print_table
from outboxq.codec.display import standby
from outboxq.codec.text import several

if TYPE_CHECKING:
    from outboxq.admin.snapshot import Snapshot
    from outboxq.cli.database import Begin

# Moves to the upper left corner, and clears the screen and its scrollback.
_CLEAR = "\x1b[H\x1b[2J\x1b[3J"


@dataclass(frozen=True, kw_only=True, slots=True)
class TopOptions(ReadingOptions):
    """The options of `outboxq top`."""

    every_seconds: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=0.5, max=3600.0, help="How often to look.")
    ] = 2.0
    plain: Annotated[
        bool, typer.Option("--plain", help="Only tables, printed again and again; needs no extra of outboxq.")
    ] = False
    once: Annotated[
        bool, typer.Option("--once", help="Print the tables once, as with --json and without a terminal.")
    ] = False
    wide: Wide = False


@takes(TopOptions)
def top(options: TopOptions) -> None:
    """Watch queues, kinds, relays, jobs that run for long, and what jobs died of.

    Keys: the arrows and Tab move, s and r sort, / filters, Enter shows all of a row, e explains a queue or a job, p
    pauses or resumes a queue after a question, Space freezes, q quits. Needs outboxq[top]; --plain and --once do not. A
    look takes the database some milliseconds, however many jobs wait.

    \b
    Examples:
      outboxq top
      outboxq top --plain --every 10
      outboxq top --once --json | jq '.queues[] | select(.relays == 0) | .queue'
    """
    if options.once or options.as_json or not sys.stdout.isatty():
        _print_once(options)
    elif options.plain:
        _print_always(options)
    elif find_spec("textual") is None:
        raise WrongUsage("outboxq top needs textual: pip install 'outboxq[top]', or look with --plain")
    else:
        from outboxq.cli.top_screen import show_top

        show_top(options)


def _print_once(options: TopOptions) -> None:
    with options.reading() as begin:
        snapshot = look(begin)
    if options.as_json:
        print_json(snapshot)
    else:
        print_snapshot(snapshot, wide=options.wide)


def _print_always(options: TopOptions) -> None:
    with options.reading() as begin:
        while True:
            snapshot = look(begin)
            sys.stdout.write(_CLEAR)
            print_snapshot(snapshot, wide=options.wide)
            time.sleep(options.every_seconds)


def look(begin: "Begin") -> "Snapshot":
    """Read a snapshot of the database (queues, relays, dead letters and more) in a transaction of its own."""
    from outboxq.admin.snapshot import take_snapshot

    with begin() as connection:
        return take_snapshot(connection)


def print_snapshot(snapshot: "Snapshot", *, wide: bool) -> None:
    """Print a snapshot: the line that `summary` returns, then a table for each part that has rows."""
    from outboxq.cli.top_views import VIEWS

    print_wrapped(summary(snapshot))
    for view in VIEWS:
        rows = view.rows(snapshot)
        if rows:
            print_table(view.columns, rows, now=snapshot.at, wide=wide, title=f"{view.title}:")
    for said in not_known(snapshot):
        notice(said)


def not_known(snapshot: "Snapshot") -> list[str]:
    """Return a line for each reason why parts of a snapshot could not be read: the parts' names, and the reason."""
    parts: dict[str, list[str]] = {}
    for each in snapshot.not_known:
        parts.setdefault(each.reason, []).append(each.part)
    return [f"{', '.join(names)}: {reason}" for reason, names in parts.items()]


def summary(snapshot: "Snapshot") -> str:
    """Return a line about a snapshot: the numbers of relays, slots (each runs one job), dead letters and more."""
    alive = [relay for relay in snapshot.relays if relay.state != "dead"]
    busy, slots = sum(relay.busy for relay in alive), sum(relay.slots for relay in alive)
    said = [several(len(alive), "relay lives", "relays live")]
    if slots:
        said.append(f"{busy} of {several(slots, 'slot', 'slots')} busy")
    waiting = sum(relay.waiting for relay in alive)
    if waiting:
        said.append(f"{several(waiting, 'job waits', 'jobs wait')} for a connection")
    lost = len(snapshot.relays) - len(alive)
    if lost:
        said.append(several(lost, "relay is dead", "relays are dead"))
    dead = sum(queue.dead for queue in snapshot.queues)
    if dead:
        said.append(several(dead, "dead letter", "dead letters"))
    if snapshot.unknown_effects:
        said.append(several(snapshot.unknown_effects, "effect of unknown outcome", "effects of unknown outcome"))
    if snapshot.standby_delay_seconds is not None:
        said.append(standby(snapshot.standby_delay_seconds))
    return ", ".join(said)
