"""`outboxq history`: show the outcomes of jobs by minute, by hour or by kind."""

from dataclasses import dataclass, fields
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outboxq.cli.errors import WrongUsage
from outboxq.cli.options import KindFilter, QueueFilter, Since, Wide, since_option, takes
from outboxq.cli.output import notice, print_json
from outboxq.cli.replica import ReadingOptions
from outboxq.cli.tables import Column, print_table
from outboxq.codec.display import Latency, in_full, standby

if TYPE_CHECKING:
    from outboxq.admin.history import HistoryRow

_LONGEST = timedelta(days=35)


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryOptions(ReadingOptions):
    """The options of `outboxq history`."""

    queue: QueueFilter = None
    kind: KindFilter = None
    since: Annotated[str, since_option("From then on, 35 days ago at the most", parsed=False)] = "1h"
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
      outboxq history --by hour --since 2026-01-31
      outboxq history --queue mail --by hour --since 7d --json
    """
    from outboxq.admin.history import read_history
    from outboxq.statements.paging import database_clock
    from outboxq.statements.server import standby_delay_seconds

    begins = Since.parse(options.since)
    with options.reading() as begin, begin() as connection:
        now = database_clock(connection)
        since = now - begins.before(now)
        if not timedelta(0) < since <= _LONGEST:
            raise WrongUsage(f"--since takes a time within the last 35 days, got {options.since!r}")
        rows = read_history(connection, queue=options.queue, kind=options.kind, since=since, by=options.by)
        delay = standby_delay_seconds(connection)
    if options.as_json:
        print_json({"since": now - since, "by": options.by, "history": rows, "standby_delay_seconds": delay})
        return
    if delay is not None:
        notice(standby(delay))
    if not rows:
        notice(f"nothing became of any job since {in_full(now - since)}, or no relay has written it down yet")
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
    """Return a copy of a row of the history for printing; short times are then printed in milliseconds."""
    values = {each.name: getattr(row, each.name) for each in fields(row)}
    shown = {name: Latency(value) if isinstance(value, float) else value for name, value in values.items()}
    return SimpleNamespace(**shown)
