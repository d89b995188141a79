"""Queries of the history: the counts of jobs' outcomes that relays write into the table `stat`."""

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Executable, cast, literal_column, select

from outboxq.statements.builtin import pg
from outboxq.statements.history import BUCKETS, OUTCOMES
from outboxq.statements.paging import matching
from outboxq.tables import Instant, stat

_SPANS = {"minute": "interval '1 minute'", "hour": "interval '1 hour'"}
_ORIGIN: ColumnElement[datetime] = literal_column("timestamptz '2000-01-01 00:00:00+00'", Instant())


def select_history(*, queue: str | None, kind: str | None, since: timedelta, by: str) -> Executable:
    """Select the sums of outcomes, and of each bucket of the histograms of seconds, since the minute `since` ago.

    There is a row for each minute, hour or kind, as `by` names it. Index: the primary key, from that minute on; the
    older rows are those of hours (`grain` 3600). No locks.
    """
    now = pg.statement_timestamp()
    groups: tuple[ColumnElement[Any], ...] = (stat.c.queue, stat.c.kind)
    if by != "kind":
        groups = (pg.date_bin(literal_column(_SPANS[by]), stat.c.at, _ORIGIN, type_=stat.c.at.type).label("at"),)
    first = pg.date_bin(literal_column(_SPANS["minute"]), now - since, _ORIGIN)
    return (
        select(
            *groups,
            *(_sum(stat.c[name], name) for name in OUTCOMES),
            *(
                _sum(stat.c[name][place], f"{name}_{place}")
                for name in ("wait", "run")
                for place in range(1, BUCKETS + 1)
            ),
        )
        .where(stat.c.grain.in_((60, 3600)), stat.c.at >= first, *matching(stat, queue=queue, kind=kind))
        .group_by(*groups)
        .order_by(*groups)
    )


def _sum(column: ColumnElement[Any], name: str) -> ColumnElement[int]:
    return cast(pg.sum(column), BigInteger).label(name)
