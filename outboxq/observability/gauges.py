"""Gauges: the number of jobs of each queue by state, which one of the relays stores once a minute."""

from sqlalchemy import Connection

from outboxq.admin.stats import QueueStats, collect_stats
from outboxq.database.driver import run_script
from outboxq.database.settings import SET_OURS
from outboxq.statements import history as statements
from outboxq.statements.relays import served_queues

MOST_QUEUES = 1_000
# While a snapshot is pinned, the index of a busy queue begins with entries of dead rows.
_SETTINGS = f"{SET_OURS}SET LOCAL statement_timeout = '2s'"


def write_gauges(connection: Connection, schema: str) -> int:
    """Write this minute's gauges, the counts of each queue's jobs by state; return the number of queues.

    Returns 0 if another relay has written them or is writing them.
    """
    if not run_script(connection, statements.is_gauge_due(schema))[0][0]:
        return 0
    run_script(connection, _SETTINGS)
    served = {str(name) for (name,) in run_script(connection, served_queues(schema, MOST_QUEUES))}
    counted = {each.queue: each for each in collect_stats(connection).queues}
    names = sorted({*served, *counted})[:MOST_QUEUES]
    if names:
        rows = [_row(counted.get(name, QueueStats(queue=name))) for name in names]
        run_script(connection, statements.SETTINGS + statements.write_gauges(schema, rows))
    return len(names)


def _row(queue: QueueStats) -> tuple[object, ...]:
    held = queue.running + queue.leased + queue.orphaned
    return (
        queue.queue,
        queue.ready + queue.grouped,
        queue.scheduled,
        queue.due,
        held,
        queue.suspect,
        queue.dead,
        queue.exact,
        queue.oldest_waiting_seconds,
    )
