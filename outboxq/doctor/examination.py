"""The doctor's round: every check in a transaction of its own, so that one that fails takes no other with it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import psycopg
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from outboxq.admin.roles import Part
from outboxq.database.driver import driver_connection, is_lost, run_script
from outboxq.doctor import effects, pooler, rights, server, sessions, vacuum, work
from outboxq.doctor import schema as structure
from outboxq.doctor.findings import Check, CheckContext, Connect, Finding, Limits
from outboxq.handlers.registry import Registry
from outboxq.tables import SCHEMA

CHECKS: tuple[Check, ...] = (
    *structure.CHECKS,
    *vacuum.CHECKS,
    *work.CHECKS,
    *effects.CHECKS,
    *sessions.CHECKS,
    *rights.CHECKS,
    *server.CHECKS,
)

# LOCAL, because a transaction pooler would keep anything else for the next client. No session is held up: the longest
# look is bounded, and a table that is locked is passed by.
_SETTINGS = (
    "SET TRANSACTION READ ONLY; SET LOCAL statement_timeout = '10s'; SET LOCAL lock_timeout = '200ms'; "
    "SET LOCAL timezone = 'UTC'"
)
_INSUFFICIENT_PRIVILEGE = "42501"
_REASONS = {
    "57014": "it took longer than 10 seconds",
    "55P03": "a table is locked by another session",
}


def run_checks(
    connect: Connect,
    *,
    schema: str = SCHEMA,
    limits: Limits | None = None,
    use: Part = "relay",
    registry: Registry | None = None,
    listen_connect: Connect | None = None,
) -> list[Finding]:
    """Make every check that can be made; the gravest findings first.

    Args:
        connect: Opens a connection to the database; called twice, to tell a transaction pooler.
        use: What the role is for, which decides the rights that it needs.
        registry: Kinds that wait are compared with it.
        listen_connect: Opens a connection by the URL that relays listen on, if they have one.
    """
    with connect() as given:
        # A pooler's next backend does not know what was prepared on this one.
        driver_connection(given).prepare_threshold = None
        connection = given.execution_options(isolation_level="READ COMMITTED", schema_translate_map={SCHEMA: schema})
        start = CheckContext(
            connection=connection, schema=schema, limits=limits or Limits(), use=use, registry=registry
        )
        try:
            found = [*_round(start), *_look_at_pooler(start, connect, listen_connect)]
        except ConnectionLost as lost:
            # Closing it would want to roll back what is gone.
            given.invalidate()
            found = [lost.finding]
    order = ("problem", "warning", "info")
    return sorted(found, key=lambda finding: order.index(finding.severity))


class ConnectionLost(Exception):
    """The connection went away during a check, and nothing more can be learnt."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.title)
        self.finding = finding


def _round(start: CheckContext) -> Iterator[Finding]:
    findings: list[Finding] = []
    tables: frozenset[str] = frozenset()
    with _not_made(start.connection, "the schema", "USAGE on it", findings), _transaction(start.connection):
        tables = structure.existing_tables(start)
    installed = replace(start, tables=tables)
    outcome = structure.Version(findings=(), is_usable=bool(tables), is_current=bool(tables))
    grant = f"SELECT on {start.schema}.migration"
    with _not_made(start.connection, "the version of the tables", grant, findings), _transaction(start.connection):
        outcome = structure.look_at_version(installed)
    yield from findings
    yield from outcome.findings
    examination = replace(installed, tables=tables if outcome.is_usable else frozenset(), is_current=outcome.is_current)
    for check in CHECKS:
        if check.tables <= examination.tables and (examination.is_current or not check.needs_current):
            yield from _make(check, examination)


def _make(check: Check, examination: CheckContext) -> Iterable[Finding]:
    findings: list[Finding] = []
    with _not_made(examination.connection, check.subject, check.grant, findings), _transaction(examination.connection):
        findings += check.find(examination)
    return findings


def _look_at_pooler(start: CheckContext, connect: Connect, listen_connect: Connect | None) -> list[Finding]:
    findings: list[Finding] = []
    with _not_made(start.connection, pooler.SUBJECT, "pg_monitor", findings):
        findings += pooler.look_at_pooler(start.connection, connect, listen_connect)
    return findings


@contextmanager
def _transaction(connection: Connection) -> Iterator[None]:
    with connection.begin():
        run_script(connection, _SETTINGS)
        yield


@contextmanager
def _not_made(connection: Connection, subject: str, grant: str, findings: list[Finding]) -> Iterator[None]:
    """A check that the database refuses is a finding; one that loses the connection ends the round."""
    try:
        yield
    except (DBAPIError, psycopg.Error) as error:
        original = error.orig if isinstance(error, DBAPIError) else error
        sqlstate = original.sqlstate if isinstance(original, psycopg.Error) else None
        if sqlstate is None or is_lost(connection):
            raise ConnectionLost(_lost(subject)) from error
        findings.append(_refused(subject, grant, sqlstate, original))


def _lost(subject: str) -> Finding:
    return Finding(
        "connection-lost",
        "problem",
        f"the connection to the database was lost while the doctor looked at {subject}",
        {"check": subject},
        "Run the doctor again; if it happens again, read the server's log.",
    )


def _refused(subject: str, grant: str, sqlstate: str, original: BaseException | None) -> Finding:
    denied = sqlstate == _INSUFFICIENT_PRIVILEGE
    message = original.diag.message_primary if isinstance(original, psycopg.Error) else None
    reason = _REASONS.get(sqlstate) or message or "the database refused"
    return Finding(
        "check-not-made",
        "warning",
        f"could not look at {subject}: {reason}",
        {"check": subject, "reason": reason, "sqlstate": sqlstate, "grant": grant if denied else None},
        f"Run the doctor as a role that has {grant}, or grant it."
        if denied
        else "Run the doctor again; see the other findings for who may be in the way.",
    )
