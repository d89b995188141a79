"""The settings of a relay's transactions, and statements with which another connection ends one of them."""

from functools import lru_cache

from psycopg import sql

from outboxq.statements.render import fill

# The server waits this much longer than the relay, which enforces its own deadlines as long as it can.
IDLE_GRACE_SECONDS = 10.0

# A shorter time-out would hit the claim and the COMMIT in the same transaction: only the relay enforces shorter
# deadlines.
LEAST_SECONDS = 1.0

# The driver's own statement to begin a slot's transaction.
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"

# LOCAL, because behind a transaction pooler a session soon belongs to another client. DateStyle: psycopg reads only
# ISO, which need not be the database's default.
READABLE_DATES = "SET LOCAL datestyle = 'ISO'"
# For outboxq's statements that find rows by a condition and go through the driver, which prepares them: a plan that was
# made while the table was empty, an idle relay's normal state, would scan all jobs that arrive later.
LOCAL_SETTINGS = ("SET LOCAL plan_cache_mode = force_custom_plan", READABLE_DATES)

# The role's time-out must not cancel a long claim: it would be repeated for ever, with the same duration.
UNTIMED = "SET LOCAL statement_timeout = 0"
TIMED_AGAIN = "SET LOCAL statement_timeout TO DEFAULT"


@lru_cache(256)
def local_timeouts(seconds: float | None) -> tuple[str, ...]:
    """Return the statements that set the server's time-outs (statement, lock, idle) until the transaction ends.

    There are none if `seconds` is None: then the settings of the role and the database apply. The handler's savepoint
    survives a statement_timeout. The idle time-out frees a job whose relay hangs.
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


# The deadlines of the role and the database again, for the remaining transaction.
TIMEOUTS_OFF = (
    TIMED_AGAIN,
    "SET LOCAL lock_timeout TO DEFAULT",
    "SET LOCAL idle_in_transaction_session_timeout TO DEFAULT",
)


# Recorded when the transaction of a leased job begins, because a user's listener may have set it: see `restored`.
NOTE_ROLE = "pg_catalog.set_config('outboxq.role', pg_catalog.current_setting('role'), true)"
_ROLE_AS_NOTED = "SELECT pg_catalog.set_config('role', pg_catalog.current_setting('outboxq.role', true), true); "


def restored(inner_savepoint: str, seconds: float | None, *, is_noted: bool) -> str:
    """Return a script that restores a transaction's role, READ WRITE and time-outs from before a handler ran.

    The relay's statements after the handler need these settings. The handler's settings would outlive its savepoint if
    that is released; READ ONLY ends with the savepoint.

    Args:
        inner_savepoint: The savepoint in which the handler ran.
        seconds: The time-outs of `local_timeouts`.
        is_noted: True if the transaction began with `NOTE_ROLE`; else the role is that of the session.
    """
    role = _ROLE_AS_NOTED if is_noted else "SET LOCAL ROLE TO DEFAULT; "
    # Without `lock_timeout`, with which a handler bounds its COMMIT's wait for a lock.
    statement, _, idle = local_timeouts(seconds) or TIMEOUTS_OFF
    # The time-outs first: until then statements run under the handler's.
    return (
        f"{statement}; {idle}; "
        f"RELEASE SAVEPOINT {inner_savepoint}; SAVEPOINT {inner_savepoint}; "
        f"SET LOCAL SESSION AUTHORIZATION DEFAULT; {role}"
    )


def clock_seconds() -> str:
    """Select one row: the database's time, in seconds since 1970."""
    return "SELECT extract(epoch FROM pg_catalog.clock_timestamp())"


def current_xid() -> str:
    """Select one row: the id of the open transaction, or NULL if it has written nothing."""
    return "SELECT pg_catalog.pg_current_xact_id_if_assigned()::text"


def xact_status(xid: str) -> str:
    """Select one row: a transaction's status in the words of `pg_xact_status`, such as `committed`."""
    return f"SELECT pg_catalog.pg_xact_status('{int(xid)}'::xid8)"


def may_be_committed(xid: str) -> str:
    """Select one row: true if this server may have committed a transaction that began in an earlier run of the server.

    It is false for a transaction that this server undid, runs now, or never received. If the transaction's number was
    reused, it may be true without reason. `server_epoch` identifies a run.
    """
    return (
        f"SELECT CASE WHEN '{int(xid)}'::xid8 < pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot()) "
        f"THEN coalesce(pg_catalog.pg_xact_status('{int(xid)}'::xid8), 'committed') = 'committed' ELSE false END"
    )


def prepared_as(xid: str) -> str:
    """Select the name under which a transaction is prepared for a two-phase commit; no row if it is not prepared."""
    # The view shows ids without their epoch; no two open transactions differ only by the epoch.
    return (
        f"SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE transaction::text = '{int(xid) & 0xFFFF_FFFF}' "
        "AND database = pg_catalog.current_database()"
    )


def rollback_prepared(gid: str) -> str:
    """Return SQL that rolls back a prepared transaction.

    Its owner must run it, in the same database, outside a transaction.
    """
    return fill("ROLLBACK PREPARED {gid}", gid=gid)


def end_backend(pid: int, xid: str, *, terminate: bool) -> str:
    """Return SQL that cancels a backend's statement, or terminates the backend, if it still runs this transaction.

    It returns one row if it did, otherwise none.
    """
    action = sql.SQL("pg_catalog.pg_terminate_backend" if terminate else "pg_catalog.pg_cancel_backend")
    return fill(
        "SELECT {action}(pid) FROM pg_catalog.pg_stat_activity WHERE pid = {pid} AND backend_xid::text = {xid}",
        action=action,
        pid=pid,
        xid=str(int(xid) & 0xFFFF_FFFF),
    )
