"""Runs the checks of the doctor, each in a transaction of its own, so that a failed one does not affect the others."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import DataError, DBAPIError

from outboxq.admin.roles import Part
from outboxq.codec.text import name_and_line
from outboxq.database.driver import is_lost, run_script, unprepared
from outboxq.database.errors import sqlstate_of
from outboxq.database.settings import SET_OURS
from outboxq.doctor import (
    callback_batches,
    cancellation,
    citus,
    dead_letters,
    effects,
    limits,
    pooler,
    queues,
    rights,
    schedules,
    server,
    sessions,
    vacuum,
    work,
)
from outboxq.doctor import schema as structure
from outboxq.doctor.findings import Check, CheckContext, Connect, Finding, Limits
from outboxq.errors import OutboxqError
from outboxq.handlers.resolved import Registry
from outboxq.statements.doctor import tables as statements
from outboxq.tables import SCHEMA

_MARKED, _JOB, _EFFECT = frozenset({"migration"}), frozenset({"job"}), frozenset({"effect"})
_SCHEDULE, _READS_SCHEDULES = frozenset({"schedule"}), "SELECT on the table schedule"

CHECKS: tuple[Check, ...] = (
    Check("the tables", structure.find_missing_tables, _MARKED, needs_current=True),
    Check("the indexes", structure.find_broken_indexes, _MARKED, needs_current=True),
    Check("functions and triggers", structure.find_missing_code, _MARKED, needs_current=True),
    Check("whether Citus commits in two phases", citus.find_one_phase, _MARKED),
    Check("the plans of claims", citus.find_refused_claims, _JOB | {"queue", "relay"}, needs_current=True),
    Check("dead rows and autovacuum", vacuum.find_neglected_tables, _JOB),
    Check("the settings for vacuum", vacuum.find_changed_settings, _JOB, needs_current=True),
    Check("the size of indexes", vacuum.find_wasted_indexes, _JOB),
    Check("the kinds that wait", work.find_unknown_kinds, _JOB, grant="SELECT on the table job"),
    Check("the queues", queues.find_late_queues, _JOB | {"queue"}, grant="SELECT on the tables job and queue"),
    Check(
        "the kinds that relays know",
        queues.find_unserved_kinds,
        _JOB | {"relay_status"},
        grant="SELECT on the tables job and relay_status",
    ),
    Check("groups", work.find_blocked_groups, _JOB, grant="SELECT on the table job"),
    Check(
        "the limits of queues",
        limits.find_limited_queues,
        _JOB | {"queue", "rate"},
        grant="SELECT on the tables job, queue and rate",
    ),
    Check("who holds limits, groups and windows", limits.find_held_turns),
    Check(
        "dead letters",
        dead_letters.find_overdue_dead_letters,
        frozenset({"dead_job", "queue"}),
        grant="SELECT on the tables dead_job and queue",
    ),
    Check("suspects", work.find_suspects, _JOB, grant="SELECT on the table job"),
    Check("leases", work.find_orphaned_leases, _JOB | {"relay"}, grant="SELECT on the tables job and relay"),
    Check(
        "cancellations",
        cancellation.find_unanswered_requests,
        _JOB | {"cancel_request"},
        grant="SELECT on the tables job and cancel_request",
    ),
    Check("paused kinds", cancellation.find_paused_kinds, frozenset({"paused_kind"}), grant="SELECT on paused_kind"),
    Check("unknown effects", effects.find_unknown_effects, _EFFECT, grant="SELECT on the table effect"),
    Check("effects that were started", effects.find_abandoned_effects, _EFFECT, grant="SELECT on the table effect"),
    Check("late schedules", schedules.find_late_schedules, _SCHEDULE, grant=_READS_SCHEDULES),
    Check("the times of schedules", schedules.find_schedules_ahead, _SCHEDULE, grant=_READS_SCHEDULES),
    Check("paused schedules", schedules.find_paused_schedules, _SCHEDULE, grant=_READS_SCHEDULES),
    Check("the kinds of schedules", schedules.find_unhandled_schedules, _SCHEDULE, grant=_READS_SCHEDULES),
    Check(
        "dead letters of schedules",
        schedules.find_dying_schedules,
        _SCHEDULE | {"dead_job"},
        grant="SELECT on the tables schedule and dead_job",
    ),
    Check(
        "batches",
        callback_batches.find_unfinished_batches,
        _JOB | {"batch"},
        grant="SELECT on the tables job and batch",
    ),
    Check("which sessions hold jobs", sessions.find_lock_holders, _JOB),
    Check("which session pins the oldest snapshot", sessions.find_pinned_snapshot),
    Check("the age of transactions", sessions.find_hidden_sessions),
    Check("prepared transactions", sessions.find_prepared_transactions),
    Check("replication slots", sessions.find_slots),
    Check("the feedback of standbys", sessions.find_standby_feedback),
    Check("the rights of this role", rights.find_missing_rights, _MARKED),
    Check("the rights of producers", rights.find_wide_producers, _MARKED),
    Check("row level security", rights.find_hidden_rows, _MARKED),
    Check("the search path", rights.find_open_schemas),
    Check("whether this is a standby", server.find_standby),
    Check("the server's version and the encoding", server.find_unsupported_server),
    Check("time-outs", server.find_short_timeouts),
    Check("settings of the server", server.find_unsafe_settings),
    Check("the number of connections", server.find_used_up_connections),
)

# No session is held up: the longest check is bounded, and a locked table is skipped.
_SETTINGS = (
    f"SET TRANSACTION READ ONLY; {SET_OURS}SET LOCAL statement_timeout = '10s'; SET LOCAL lock_timeout = '200ms'"
)
_INSUFFICIENT_PRIVILEGE = "42501"
_AGAIN = "Run the doctor again; see the other findings for what may be in the way."
# Errors of reading a value, here and in the driver: a number, a time or a text that Python cannot represent; deep JSON.
_OF_A_VALUE = (ArithmeticError, ValueError, RecursionError, DataError, psycopg.DataError)
_REASONS = {
    "57014": "it took longer than 10 seconds",
    "55P03": "a table is locked by another session",
}


def run_checks(
    connect: Connect,
    *,
    schema: str = SCHEMA,
    limits: Limits | None = None,
    use: Part | None = None,
    registry: Registry | None = None,
    listen_connect: Connect | None = None,
) -> list[Finding]:
    """Make every check that is possible; return the findings, the most severe first.

    Args:
        connect: Opens a connection to the database; called twice, to detect a transaction pooler.
        use: The purpose of this database role, which decides the rights that it needs. If None, it follows from the
            role's membership in the groups of `outboxq roles`; without any, it is a relay's.
        registry: The application's registry, to report kinds of waiting jobs that have no handler in it.
        listen_connect: Opens a connection by the URL that relays listen on, if they have one of their own.
    """
    with connect() as given, unprepared(given):
        connection = given.execution_options(isolation_level="READ COMMITTED", schema_translate_map={SCHEMA: schema})
        context = CheckContext(
            connection=connection, schema=schema, limits=limits or Limits(), use=use or "relay", registry=registry
        )
        found: list[Finding] = []
        try:
            if use is None:
                with _reporting("what this role is for", "", context, found), _transaction(connection):
                    context = replace(context, use=rights.use_of(context))
            context = _look_at_tables(context, found)
            for check in CHECKS:
                if check.fits(context):
                    with _reporting(check.subject, check.grant, context, found), _transaction(connection):
                        found += check.find(context)
            with _reporting(pooler.SUBJECT, "pg_monitor", context, found):
                found += pooler.look_at_pooler(connection, connect, listen_connect)
        except ConnectionLost as lost:
            # Closing it would send a ROLLBACK to a server that is gone.
            given.invalidate()
            found = [lost.finding]
    order = ("problem", "warning", "info")
    return sorted(found, key=lambda finding: order.index(finding.severity))


class ConnectionLost(Exception):
    """The connection was lost during a check, so that no other check is possible; `finding` reports it."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.title)
        self.finding = finding


def _look_at_tables(context: CheckContext, found: list[Finding]) -> CheckContext:
    """Return the context with the names of the existing tables filled in.

    If the version of the tables is not the latest, a finding is added to `found`.
    """
    tables: frozenset[str] = frozenset()
    with _reporting("the schema", "USAGE on it", context, found), _transaction(context.connection):
        tables = frozenset(context.scalars(statements.tables(context.schema)))
    context = replace(context, tables=tables)
    version: Finding | None = None
    grant = f"SELECT on {context.schema}.migration"
    with _reporting("the version of the tables", grant, context, found), _transaction(context.connection):
        version = structure.look_at_version(context)
    if version is None:
        return replace(context, is_current=bool(tables))
    found.append(version)
    return replace(context, tables=frozenset()) if version.code == structure.TABLES_MISSING else context


@contextmanager
def _transaction(connection: Connection) -> Iterator[None]:
    with connection.begin():
        run_script(connection, _SETTINGS)
        yield


@contextmanager
def _reporting(subject: str, grant: str, context: CheckContext, found: list[Finding]) -> Iterator[None]:
    """Run a block that makes a check; if the block fails, add a finding with the reason to `found`.

    Raises:
        ConnectionLost: the connection was lost, so that no other check is possible; its `finding` reports that.
    """
    try:
        yield
    except Exception as error:
        original = error.orig if isinstance(error, DBAPIError) else error
        sqlstate = sqlstate_of(error)
        is_of_connection = isinstance(original, psycopg.OperationalError | psycopg.InterfaceError)
        if (sqlstate is None and is_of_connection) or is_lost(context.connection):
            raise ConnectionLost(
                Finding(
                    "connection-lost",
                    "problem",
                    f"the connection to the database was lost while the doctor looked at {subject}",
                    {"check": subject},
                    "Run the doctor again; if it happens again, read the server's log.",
                )
            ) from error
        found.append(_refused(subject, grant, sqlstate, original))


def _refused(subject: str, grant: str, sqlstate: str | None, original: BaseException | None) -> Finding:
    denied = sqlstate == _INSUFFICIENT_PRIVILEGE
    reason, advice = _why(sqlstate, original)
    return Finding(
        "check-not-made",
        "warning",
        f"could not look at {subject}: {reason}",
        {"check": subject, "reason": reason, "sqlstate": sqlstate, "grant": grant if denied else None},
        f"Run the doctor as a role that has {grant}, or grant it." if denied else advice,
    )


def _why(sqlstate: str | None, original: BaseException | None) -> tuple[str, str]:
    """Return the reason why a check could not be made, and advice.

    The reason quotes no text that may contain a row's value.
    """
    if sqlstate is not None:
        # Class 22, data exceptions, quotes the value.
        message = (
            original.diag.message_primary if isinstance(original, psycopg.Error) and sqlstate[:2] != "22" else None
        )
        return _REASONS.get(sqlstate) or message or f"the database refused (SQLSTATE {sqlstate})", _AGAIN
    if isinstance(original, OutboxqError):
        return str(original), _AGAIN
    if isinstance(original, _OF_A_VALUE):
        return f"there is a row that cannot be read ({type(original).__name__})", _AGAIN
    where = "" if original is None else name_and_line(original)
    return f"a defect of outboxq: {where}", "Please report it, with this line; the other checks were made."
