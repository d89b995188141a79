"""The settings of a relay's transactions, and statements by which another connection ends one of them."""

from functools import lru_cache

from psycopg import sql

from outboxq.statements.render import fill

# The server waits this much longer than the relay, which acts on its own deadlines while it can.
IDLE_GRACE_SECONDS = 10.0

# Less would hit the claim and the COMMIT, which share the transaction: the relay alone enforces shorter deadlines.
LEAST_SECONDS = 1.0

# The driver's own statement to begin a slot's transaction.
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"

# LOCAL: behind a transaction pooler a session soon belongs to another client.
# DateStyle: psycopg reads only ISO, which need not be the database's default.
READABLE_DATES = "SET LOCAL datestyle = 'ISO'"
# For our statements that find rows by a condition and go through the driver, which prepares them: a plan that was made
# while the table was empty, an idle relay's normal state, would scan all that arrives later.
LOCAL_SETTINGS = ("SET LOCAL plan_cache_mode = force_custom_plan", READABLE_DATES)

# The role's time-out must not cancel a long claim, which would be repeated for ever, as long each time.
UNTIMED = "SET LOCAL statement_timeout = 0"
TIMED_AGAIN = "SET LOCAL statement_timeout TO DEFAULT"


@lru_cache(256)
def local_timeouts(seconds: float | None) -> tuple[str, ...]:
    """The server's own deadlines for the rest of a transaction; with None those of the role and the database hold.

    The handler's savepoint contains a statement_timeout. The idle time-out frees a job whose relay hangs.
    """
    if seconds is None:
        return ()
    seconds = max(seconds, LEAST_SECONDS)
    statement, lock, idle = (int(value * 1000) for value in (seconds, seconds * 0.9, seconds + IDLE_GRACE_SECONDS))
    return (
        f"SET LOCAL statement_timeout = {statement}",
        f"SET LOCAL lock_timeout = {lock}",
        f"SET LOCAL idle_in_transaction_session_timeout = {idle}",
    )


# The deadlines of the role and the database again, for the rest of a transaction.
TIMEOUTS_OFF = (
    TIMED_AGAIN,
    "SET LOCAL lock_timeout TO DEFAULT",
    "SET LOCAL idle_in_transaction_session_timeout TO DEFAULT",
)


# Recorded when the transaction of a leased job begins, as a user's listener may have set it: see `restored`.
NOTE_ROLE = "pg_catalog.set_config('outboxq.role', pg_catalog.current_setting('role'), true)"
_ROLE_AS_NOTED = "SELECT pg_catalog.set_config('role', pg_catalog.current_setting('outboxq.role', true), true); "


def restored(inner_savepoint: str, seconds: float | None, *, is_noted: bool) -> str:
    """Restore the role, the right to write and the deadlines from before a handler, for our statements after it.

    A handler's settings outlive its savepoint if that is released. READ ONLY ends with the savepoint.

    Args:
        is_noted: True if the transaction began with `NOTE_ROLE`; else the role is that of the session.
    """
    role = _ROLE_AS_NOTED if is_noted else "SET LOCAL ROLE TO DEFAULT; "
    # Not `lock_timeout`, with which a handler bounds its COMMIT's wait for a lock.
    statement, _, idle = local_timeouts(seconds) or TIMEOUTS_OFF
    # The time-outs first: until then statements run under those of the handler.
    return (
        f"{statement}; {idle}; "
        f"RELEASE SAVEPOINT {inner_savepoint}; SAVEPOINT {inner_savepoint}; "
        f"SET LOCAL SESSION AUTHORIZATION DEFAULT; {role}"
    )


def clock_seconds() -> str:
    """One row: the database's time, in seconds since 1970."""
    return "SELECT extract(epoch FROM pg_catalog.clock_timestamp())"


def current_xid() -> str:
    """One row: the id of the open transaction, or NULL if it has written nothing."""
    return "SELECT pg_catalog.pg_current_xact_id_if_assigned()::text"


def xact_status(xid: str) -> str:
    """One row: the status of a transaction."""
    return f"SELECT pg_catalog.pg_xact_status('{int(xid)}'::xid8)"


def may_be_committed(xid: str) -> str:
    """One row: true if this server may have committed a transaction of another epoch.

    False for a transaction that this server undid, runs now, or never received; perhaps true if the number was used
    again.
    """
    return (
        f"SELECT CASE WHEN '{int(xid)}'::xid8 < pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot()) "
        f"THEN coalesce(pg_catalog.pg_xact_status('{int(xid)}'::xid8), 'committed') = 'committed' ELSE false END"
    )


def prepared_as(xid: str) -> str:
    """The name under which a transaction is prepared for a two-phase commit; no row if it is not."""
    # The view shows ids without their epoch; no two open transactions differ only by the epoch.
    return (
        f"SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE transaction::text = '{int(xid) & 0xFFFF_FFFF}' "
        "AND database = pg_catalog.current_database()"
    )


def rollback_prepared(gid: str) -> str:
    """Undo a prepared transaction: outside of a transaction block, by its owner, in the same database."""
    return fill("ROLLBACK PREPARED {gid}", gid=gid)


def end_backend(pid: int, xid: str, *, terminate: bool) -> str:
    """Cancel a backend's statement, or terminate the backend, if it still runs this transaction. One row if it did."""
    action = sql.SQL("pg_catalog.pg_terminate_backend" if terminate else "pg_catalog.pg_cancel_backend")
    return fill(
        "SELECT {action}(pid) FROM pg_catalog.pg_stat_activity WHERE pid = {pid} AND backend_xid::text = {xid}",
        action=action,
        pid=pid,
        xid=str(int(xid) & 0xFFFF_FFFF),
    )
