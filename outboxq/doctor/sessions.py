"""Checks for sessions, prepared transactions, replication slots and standbys that lock jobs or hold vacuum up."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from sqlalchemy import Row
from sqlalchemy.exc import DBAPIError

from outboxq.codec.text import several
from outboxq.database.engines import RELAY_NAME
from outboxq.doctor.findings import CheckContext, Finding, Value, detail_of
from outboxq.doctor.formatting import age, size
from outboxq.statements.doctor import sessions as statements
from outboxq.statements.stretches import stretches

# A lock on a whole table stops all work, so it is reported sooner than locks on jobs.
_TABLE_LOCK_SECONDS = 10.0

# A session's jobs are counted among the first million.
_MOST_STRETCHES = 50

_OF_CITUS = (
    "Citus prepared it, and knows how it is to end. On the coordinator, in this database: SELECT "
    "recover_prepared_transactions();"
)
_PINNED = "vacuum cannot remove jobs that were finished since, and claims have to walk over them"


def find_lock_holders(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for sessions that have locked jobs for `Limits.older_than_seconds`, or a table for ten seconds."""
    holders = context.rows(statements.lock_holders(context.schema))
    limit = context.limits.older_than_seconds
    for row in holders:
        if _blocks(row) and (row.seconds or 0) >= min(limit, _TABLE_LOCK_SECONDS):
            yield Finding(
                "table-locked",
                "problem",
                f"{_session(row)} has locked {', '.join(row.tables)} for {age(row.seconds)}: claims and producers wait",
                {**_session_detail(row), "tables": list(row.tables), "modes": list(row.modes)},
                f"Let it finish, or end it: SELECT pg_terminate_backend({row.pid});",
            )
    old = [row for row in holders if not _blocks(row) and (row.seconds or 0) >= limit]
    held = _count_leased_jobs(context, [row.xid for row in old if row.xid is not None])
    for row in old:
        yield _jobs_held(row, held.get(row.xid, 0))


def _blocks(row: Row[Any]) -> bool:
    return not set(statements.BLOCKING_MODES).isdisjoint(row.modes)


def _count_leased_jobs(context: CheckContext, transactions: list[str]) -> Mapping[str, int]:
    if not transactions:
        return {}
    held = Counter[str]()
    jobs = statements.jobs_of(context.schema)
    try:
        with context.connection.begin_nested():
            for stretch in islice(stretches(context.connection, jobs.c.id), _MOST_STRETCHES):
                for row in context.rows(statements.leased_jobs(jobs, transactions, stretch)):
                    held[row.xid] += row.jobs
    except DBAPIError:
        # This role may not read the jobs, so the holders are named without the number.
        return {}
    return held


def _jobs_held(row: Row[Any], jobs: int) -> Finding:
    what = f"has held {several(jobs, 'job', 'jobs')}" if jobs else "has had a transaction open on the jobs"
    if row.application_name == RELAY_NAME:
        # The session is idle in its transaction while its handler does something else.
        what = f"of a relay has run {several(jobs, 'job', 'jobs') if jobs else 'a handler'}"
    if row.application_name == RELAY_NAME or row.state == "active":
        advice = (
            "A handler or statement that runs this long keeps its jobs and its connection: give long handlers "
            'timeout_seconds or claim="lease". '
        )
    else:
        advice = (
            "It waits for its client: find out why the client does not commit. Jobs that it added are not visible. "
        )
    return Finding(
        "jobs-held-by-session",
        "warning",
        f"{_session(row)} {what} for {age(row.seconds)}",
        {**_session_detail(row), "jobs": jobs or None},
        f"{advice}To end it: SELECT pg_terminate_backend({row.pid}); its jobs are put back.",
    )


def find_pinned_snapshot(context: CheckContext) -> Iterator[Finding]:
    """Yield a finding for the session with the oldest snapshot, because of which vacuum cannot remove dead rows."""
    rows = context.rows(statements.snapshot_holders())
    old = [row for row in rows if (row.seconds or 0) >= context.limits.older_than_seconds]
    if old:
        first, others = old[0], len(old) - 1
        also = f" (and {several(others, 'more session', 'more sessions')})" if others else ""
        yield Finding(
            "snapshot-pinned-by-session",
            "warning",
            f"{_session(first)} has pinned the oldest snapshot for {age(first.seconds)}{also}: {_PINNED}",
            {**_session_detail(first), "transactions": first.transactions, "others": others},
            (
                'It is a handler of a relay: give long handlers timeout_seconds or claim="lease". '
                if first.application_name == RELAY_NAME
                else "Commit or end what it does; run long reports on a standby, or in shorter transactions. "
            )
            + f"To end it: SELECT pg_terminate_backend({first.pid});",
        )


def find_hidden_sessions(context: CheckContext) -> Iterator[Finding]:
    """Yield a finding if this role may not read the age of some transactions, which other checks may then miss."""
    hidden: int = context.scalar(statements.hidden_transactions())
    if hidden:
        yield Finding(
            "check-not-made",
            "warning",
            "could not look at how long "
            f"{several(hidden, 'transaction of another role has', 'transactions of other roles have')} been open",
            {"check": "the age of transactions", "hidden": hidden, "grant": "pg_monitor"},
            "Run the doctor as a role that has pg_monitor, or grant it.",
        )


def find_prepared_transactions(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for prepared transactions (of two-phase commits) that were neither committed nor rolled back."""
    for row in context.rows(statements.prepared_transactions(context.schema)):
        if row.seconds >= context.limits.older_than_seconds:
            is_held, opened = row.holds_jobs, f"prepared transaction {row.gid!r} of {row.owner} has"
            gid = row.gid.replace("'", "''")
            yield Finding(
                "jobs-held-by-prepared-transaction" if is_held else "prepared-transaction-orphaned",
                "problem" if is_held else "warning",
                f"{opened} held jobs for {age(row.seconds)}, and restarts do not end it"
                if is_held
                else f"{opened} been open for {age(row.seconds)}: {_PINNED}",
                {name: value for name, value in detail_of(row).items() if name != "holds_jobs"},
                _OF_CITUS
                if row.gid.startswith("citus_")
                else "Ask its coordinator whether it was to be committed. If it does not know it any more, in this "
                f"database as {row.owner} or a superuser: ROLLBACK PREPARED '{gid}'; (or COMMIT PREPARED).",
            )


def find_slots(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for replication slots that no client reads, or that keep vacuum from removing dead rows."""
    limits = context.limits
    for row in context.rows(statements.replication_slots()):
        pinned = max(row.xmin_age or 0, row.catalog_xmin_age or 0)
        # Before PostgreSQL 17 the time is not known, so every inactive slot is reported.
        left = row.inactive_seconds is None or row.inactive_seconds >= limits.older_than_seconds
        if not row.active and left and (row.retained_bytes is not None or pinned):
            yield _slot_inactive(row)
        elif pinned and pinned >= limits.older_than_transactions:
            yield Finding(
                "snapshot-pinned-by-slot",
                "warning",
                f"replication slot {row.name!r} has held a snapshot back for "
                f"{several(pinned, 'transaction', 'transactions')}: {_PINNED}",
                detail_of(row),
                "Its reader is behind, or a query on the standby is long: let it catch up, or set "
                "hot_standby_feedback = off there.",
            )


def _slot_inactive(row: Row[Any]) -> Finding:
    since = f" for {age(row.inactive_seconds)}" if row.inactive_seconds is not None else ""
    pins = row.xmin_age is not None or row.catalog_xmin_age is not None
    return Finding(
        "slot-inactive",
        "warning",
        f"replication slot {row.name!r} has not been read{since}: it retains {size(row.retained_bytes or 0)} of WAL"
        + (" and pins a snapshot" if pins else ""),
        detail_of(row),
        f"Start its reader again, or drop it: SELECT pg_drop_replication_slot('{row.name}'); "
        "max_slot_wal_keep_size bounds what slots may retain.",
    )


def find_standby_feedback(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for standbys whose queries keep vacuum on this server from removing dead rows."""
    for row in context.rows(statements.standby_feedback()):
        if row.transactions >= context.limits.older_than_transactions:
            yield Finding(
                "snapshot-pinned-by-standby",
                "warning",
                f"standby {row.application_name!r} (walsender {row.pid}) has held a snapshot back for "
                f"{several(row.transactions, 'transaction', 'transactions')}: {_PINNED}",
                detail_of(row),
                "End the long query on the standby, or set hot_standby_feedback = off or "
                "max_standby_streaming_delay there.",
            )


def _session(row: Row[Any]) -> str:
    name = f", {row.application_name!r}" if row.application_name else ""
    return f"session {row.pid} ({row.state or 'state hidden'}{name})"


def _session_detail(row: Row[Any]) -> dict[str, Value]:
    return {
        "pid": row.pid,
        "state": row.state,
        "application_name": row.application_name,
        "role": row.usename,
        "seconds": row.seconds,
    }
