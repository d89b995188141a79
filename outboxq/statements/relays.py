"""Relays that live, by the rows that they keep of themselves."""

from typing import LiteralString

from sqlalchemy import Executable, select

from outboxq.statements.builtin import pg, seconds
from outboxq.statements.render import render
from outboxq.tables import relay_status

_SERVED: LiteralString = """\
SELECT DISTINCT pg_catalog.unnest(queues) AS queue FROM {relay_status}
WHERE seen_at > pg_catalog.statement_timestamp() - interval '1 minute' ORDER BY queue LIMIT {limit}"""


def served_queues(schema: str, limit: int) -> str:
    """The queues that relays serve, one row each. Reads the small table `relay_status`; no locks."""
    return render(schema, _SERVED, limit=limit)


def select_relays(limit: int) -> Executable:
    """The relays that were seen within a day, the newest last. Reads the small table `relay_status`; no locks."""
    return (
        select(
            relay_status,
            seconds(pg.statement_timestamp() - relay_status.c.seen_at).label("seen_seconds"),
        )
        .order_by(relay_status.c.started_at, relay_status.c.id)
        .limit(limit)
    )
