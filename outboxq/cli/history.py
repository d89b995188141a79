"""`outboxq history`."""

import re
from dataclasses import dataclass, fields
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outboxq.cli.errors import WrongUsage
from outboxq.cli.options import DatabaseOptions, KindFilter, QueueFilter, Wide, takes
from outboxq.cli.output import notice, print_json
from outboxq.cli.tables import Column, print_table
from outboxq.codec.display import Latency

if TYPE_CHECKING:
    from outboxq.admin.history import HistoryRow

_SPAN = re.compile(r"(\d{1,5})([mhd])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}
_LONGEST = timedelta(days=35)


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryOptions(DatabaseOptions):
    """The options of `outboxq history`."""

    queue: QueueFilter = None
    kind: KindFilter = None
    since: Annotated[
        str, typer.Option("--since", metavar="SPAN", help="From so long ago on: 30m, 24h or 7d; 35d at the most.")
    ] = "1h"
    by: Annotated[
        Literal["minute", "hour", "kind"],
        typer.Option("--by", metavar="SORT", help="One row for each: minute, hour or kind."),
    ] = "minute"
    wide: Wide = False


@takes(HistoryOptions)
def history(options: HistoryOptions) -> None:
    """Show what became of jobs: how many were done, failed and died, and how long they waited and ran.

    Of the times 50, 95 and 99 in a hundred jobs are below p50, p95 and p99, as far as the buckets tell in which relays
    count them. Relays add their numbers every 15 seconds. Minutes are kept for two days, then hours for 35 days.

    \b
    Examples:
      outboxq history
      outboxq history --by kind --since 24h
      outboxq history --queue mail --by hour --since 7d --json
    """
    from outboxq.admin.history import read_history
    from outboxq.statements.paging import database_clock

    since = read_span(options.since)
    with options.transaction() as connection:
        rows = read_history(connection, queue=options.queue, kind=options.kind, since=since, by=options.by)
        now = database_clock(connection)
    if options.as_json:
        print_json({"since": now - since, "by": options.by, "history": rows})
        return
    if not rows:
        notice(f"nothing became of any job within {options.since}, or no relay has written it down yet")
    print_table(_columns(options.by), map(_with_latencies, rows), now=now, wide=options.wide)


def _columns(by: str) -> list[Column]:
    first = [Column("queue", "name"), Column("kind", "name")] if by == "kind" else [Column("at", if_empty=True)]
    outcomes = [Column(name) for name in ("died", "snoozed", "discarded", "crashed", "lost")]
    times = [
        Column(f"{name}_p{percent}_seconds", rank=rank)
        for name in ("wait", "run")
        for percent, rank in ((50, 2), (95, 3), (99, 4))
    ]
    return [*first, Column("done", if_empty=True), Column("retried"), *outcomes, *times]


def _with_latencies(row: "HistoryRow") -> SimpleNamespace:
    """A row whose times are shown in milliseconds, if they are short."""
    values = {each.name: getattr(row, each.name) for each in fields(row)}
    shown = {name: Latency(value) if isinstance(value, float) else value for name, value in values.items()}
    return SimpleNamespace(**shown)


def read_span(given: str) -> timedelta:
    """A span of time such as 30m, 24h or 7d, as `--since` takes it.

    Raises:
        WrongUsage: something else, or over 35 days.
    """
    found = _SPAN.fullmatch(given)
    span = timedelta(**{_UNITS[found[2]]: int(found[1])}) if found else timedelta(0)
    if not timedelta(0) < span <= _LONGEST:
        raise WrongUsage(f"--since takes minutes, hours or days up to 35d, such as 30m, 24h or 7d, got {given!r}")
    return span
