"""A poll of the tables: the values that the exporter reads from them at one moment, part by part.

Each part is a READ ONLY transaction of its own, bounded by two seconds, that waits for no lock: a part that is refused,
or takes too long, is missing from the poll, without effect on the others.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy import Connection

from outboxq.admin.stats import QueueStats, Stats, collect_stats
from outboxq.database.driver import is_lost, run_script
from outboxq.database.errors import explain_missing_tables
from outboxq.database.settings import SET_OURS
from outboxq.errors import SchemaError
from outboxq.observability.metrics.reading import Reading
from outboxq.queue_limits import limits_in_force, read_limits
from outboxq.statements import gauges as statements
from outboxq.statements.doctor import limits as limit_statements
from outboxq.statements.doctor import sessions, work
from outboxq.statements.doctor import tables as table_statements
from outboxq.statements.jobs import STATES
from outboxq.statements.relays import declared_limits, may_read_relays
from outboxq.statements.server import schema_version, standby_delay_seconds
from outboxq.statements.stats import count_first_unknown_effects

logger = logging.getLogger("outboxq.metrics")

# LOCAL, because a transaction pooler would keep another setting for its next client.
_SETTINGS = f"SET TRANSACTION READ ONLY; {SET_OURS}SET LOCAL statement_timeout = '2s'; SET LOCAL lock_timeout = '200ms'"
_RELAYS_MOST = 1_000
_SCHEDULES_MOST = 200
_COUNTED_MOST = 10_001
# A relay reports several times a minute that it lives.
_DEAD_SECONDS = 60.0
_RELAY_STATES: tuple[str, ...] = ("serving", "draining", "stopping", "dead")
_HOLDERS: tuple[str, ...] = ("session", "prepared", "slot", "standby")


@dataclass(slots=True)
class TablesLook:
    """The state of one poll on one connection; later parts of the poll read the results of earlier ones here.

    `reading`: the metrics so far. `serving`: how many slots serve each queue. `standby_delay_seconds`: the delay of the
    server, None if it is no standby.
    """

    connection: Connection
    schema: str
    reading: Reading
    stats: Stats = field(default_factory=lambda: Stats((), (), 0))
    serving: Counter[str] = field(default_factory=Counter)
    standby_delay_seconds: float | None = None

    @property
    def waiting(self) -> dict[str, int]:
        """The number of jobs in each queue that could be claimed."""
        return {each.queue: each.ready + each.due for each in self.stats.queues}


def look_at_tables(connection: Connection, schema: str, reading: Reading) -> SchemaError | None:
    """Poll the tables: read each part that this server allows, and add its values to `reading`.

    Returns:
        The reason why some parts failed, if tables are missing or too old.

    Raises:
        DBAPIError, psycopg.Error: the connection was lost.
    """
    look = TablesLook(connection, schema, reading)
    missing = [
        timed(name, partial(read, look), connection, reading)
        for name, read in PARTS.items()
        if look.standby_delay_seconds is None or name not in _OF_A_PRIMARY
    ]
    return next(filter(None, missing), None)


def timed(name: str, read: Callable[[], None], connection: Connection, reading: Reading) -> SchemaError | None:
    """Call `read`, a part of a poll, in a separate transaction; add its duration and success to `reading`.

    Returns:
        The reason why it failed, if tables are missing or too old.

    Raises:
        DBAPIError, psycopg.Error: the connection was lost.
    """
    began_at, is_answered = time.perf_counter(), True
    missing: SchemaError | None = None
    try:
        with connection.begin():
            run_script(connection, _SETTINGS)
            read()
    except Exception as error:
        # A row that cannot be read does not affect other parts.
        if is_lost(connection):
            raise
        is_answered = False
        logger.debug("a part of a look failed: %s", name, extra={"error_type": type(error).__name__})
        missing = error if isinstance(error, SchemaError) else explain_missing_tables(error)
    reading.highest("outboxq_exporter_query_seconds", (name,), time.perf_counter() - began_at)
    reading.highest("outboxq_exporter_query_ok", (name,), int(is_answered))
    return missing


def _read_standby(look: TablesLook) -> None:
    look.standby_delay_seconds = standby_delay_seconds(look.connection)
    if look.standby_delay_seconds is not None:
        look.reading.highest("outboxq_standby_delay_seconds", (), look.standby_delay_seconds)


def _read_relays(look: TablesLook) -> None:
    states = Counter(dict.fromkeys(_RELAY_STATES, 0))
    for row in look.connection.execute(statements.relays(_RELAYS_MOST)):
        is_dead = row.silent_seconds > _DEAD_SECONDS
        states["dead" if is_dead else row.state] += 1
        if not is_dead and row.state != "stopping":
            look.serving.update(dict.fromkeys(row.queues, row.slots))
    for state, relays in states.items():
        look.reading.add("outboxq_relays", (state,), relays)


def _read_queues(look: TablesLook) -> None:
    look.stats = collect_stats(look.connection)
    found = {each.queue: each for each in look.stats.queues}
    reading = look.reading
    for name in sorted({*found, *look.serving}):
        queue = found.get(name, QueueStats(queue=name))
        for state in STATES:
            reading.add("outboxq_queue_jobs", (name, state), getattr(queue, state))
        reading.highest("outboxq_queue_jobs_exact", (name,), int(queue.exact))
        reading.highest("outboxq_queue_oldest_seconds", (name,), max(0.0, queue.oldest_waiting_seconds or 0.0))
        reading.highest("outboxq_queue_paused", (name,), int(queue.paused_at is not None))
        reading.add("outboxq_queue_serving_slots", (name,), look.serving[name])
        reading.add("outboxq_dead_letters", (name,), queue.dead)
    for parked in look.stats.parked_kinds:
        reading.add("outboxq_parked_jobs", (parked.queue, parked.kind), parked.jobs)


def _read_effects(look: TablesLook) -> None:
    unknown = look.connection.execute(count_first_unknown_effects(_COUNTED_MOST - 1)).scalar_one()
    look.reading.add("outboxq_effects", ("unknown",), unknown)


def _read_snapshots(look: TablesLook) -> None:
    ages = dict.fromkeys(_HOLDERS[:2], 0.0)
    transactions = dict.fromkeys(_HOLDERS, 0)
    connection = look.connection
    held = {
        "session": connection.execute(sessions.snapshot_holders()),
        "prepared": connection.execute(sessions.prepared_transactions(look.schema)),
    }
    for holder, rows in held.items():
        for row in rows:
            # For a session of another role, both may be hidden.
            ages[holder] = max(ages[holder], row.seconds or 0.0)
            transactions[holder] = max(transactions[holder], row.transactions or 0)
    for row in connection.execute(sessions.replication_slots()):
        transactions["slot"] = max(transactions["slot"], row.xmin_age or 0, row.catalog_xmin_age or 0)
    for row in connection.execute(sessions.standby_feedback()):
        transactions["standby"] = max(transactions["standby"], row.transactions or 0)
    for holder, age in ages.items():
        look.reading.add("outboxq_oldest_snapshot_seconds", (holder,), age)
    for holder, number in transactions.items():
        look.reading.add("outboxq_oldest_snapshot_transactions", (holder,), number)


def _read_dead_rows(look: TablesLook) -> None:
    for row in look.connection.execute(table_statements.vacuum_state(look.schema)):
        look.reading.add("outboxq_table_dead_rows", (row.table,), row.dead)


def _read_sizes(look: TablesLook) -> None:
    for row in look.connection.execute(statements.relation_sizes(look.schema)):
        # The index was dropped between reading the catalog and the file.
        if row.bytes is not None:
            look.reading.add("outboxq_relation_bytes", (row.relation,), row.bytes)


def _read_schedules(look: TablesLook) -> None:
    for row in look.connection.execute(statements.schedule_times(_SCHEDULES_MOST)):
        late = 0.0 if row.is_paused else max(0.0, row.late_seconds)
        look.reading.highest("outboxq_schedule_late_seconds", (row.name,), late)
        if row.last_at is not None:
            look.reading.highest("outboxq_schedule_last_fire_timestamp_seconds", (row.name,), row.last_at)


def _read_limits(look: TablesLook) -> None:
    by_operators = read_limits(look.connection.execute(limit_statements.queue_limits(look.schema)))
    # Even if the exporter may not see relays, operators' limits are known.
    may_see = look.connection.execute(may_read_relays(look.schema)).scalar_one()
    declared = look.connection.execute(declared_limits(look.schema)).all() if may_see else ()
    limits = limits_in_force(by_operators, read_limits(declared))
    _read_running(look, {name: each.running for name, each in limits.items() if each.running is not None})
    ahead = dict(tuple(row) for row in look.connection.execute(limit_statements.rates_ahead(look.schema)))
    for name, each in limits.items():
        if each.rate is None:
            continue
        is_used_up = ahead.get(name, 0.0) > (each.rate.burst - 1) * each.rate.seconds_each
        look.reading.add("outboxq_queue_rate_per_second", (name,), each.rate.jobs / each.rate.seconds)
        look.reading.add("outboxq_queue_rate_waiting", (name,), look.waiting.get(name, 0) if is_used_up else 0)


def _read_running(look: TablesLook, most: Mapping[str, int]) -> None:
    if not most:
        return
    running = limit_statements.running(look.schema).bindparams(names=list(most), most=list(most.values()))
    for row in look.connection.execute(running):
        is_full = row.running >= row.most
        look.reading.add("outboxq_queue_limit", (row.queue,), row.most)
        look.reading.add("outboxq_queue_limit_used", (row.queue,), row.running)
        look.reading.add("outboxq_queue_limit_waiting", (row.queue,), look.waiting.get(row.queue, 0) if is_full else 0)


def _read_groups(look: TablesLook) -> None:
    for row in look.connection.execute(work.blocked_groups(look.schema)):
        look.reading.add("outboxq_groups_blocked", (row.queue,), 1)
        look.reading.add("outboxq_group_blocked_jobs", (row.queue,), row.jobs)
        look.reading.highest("outboxq_group_blocked_seconds", (row.queue,), row.due_in_seconds)


def _read_batches(look: TablesLook) -> None:
    look.reading.add(
        "outboxq_batches_open", (), look.connection.execute(statements.open_batches(_COUNTED_MOST)).scalar_one()
    )
    age = look.connection.execute(statements.oldest_batch()).scalar_one_or_none()
    look.reading.add("outboxq_batch_oldest_seconds", (), max(0.0, age or 0.0))


def _read_step(look: TablesLook) -> None:
    look.reading.add("outboxq_schema_step", (), schema_version(look.connection, look.schema) or 0)


# Their values are those of sessions, locks and statistics, which a standby has of its own.
_OF_A_PRIMARY = frozenset({"snapshots", "dead_rows", "limits"})
# The standby first; relays before queues, and queues before limits: later parts use the results of earlier ones.
PARTS: Mapping[str, Callable[[TablesLook], None]] = {
    "standby": _read_standby,
    "step": _read_step,
    "relays": _read_relays,
    "queues": _read_queues,
    "effects": _read_effects,
    "snapshots": _read_snapshots,
    "dead_rows": _read_dead_rows,
    "sizes": _read_sizes,
    "schedules": _read_schedules,
    "limits": _read_limits,
    "groups": _read_groups,
    "batches": _read_batches,
}
