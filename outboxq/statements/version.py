"""The version marker that migrations leave in the schema."""

from sqlalchemy import Connection, TextClause, text

from outboxq.statements.render import quote_identifier

# Later steps may follow a deployment: what they add, this code can do without.
NEEDED_VERSION = 6

_MARKER = text("SELECT pg_catalog.to_regclass(:marker)::text")
_TRY_LOCK = text(
    "SELECT pg_catalog.pg_try_advisory_xact_lock("
    "pg_catalog.hashtext('outboxq migrations'), pg_catalog.hashtext(:schema))"
)
_LOCK = text(
    "SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('outboxq migrations'), pg_catalog.hashtext(:schema))"
)
_HOLDERS = text(
    """\
SELECT pg_catalog.concat_ws(', ', 'process ' || held.pid::text, 'role ' || session.usename::text,
  nullif(session.application_name, ''), 'since ' || pg_catalog.date_trunc('second', session.xact_start)::text)
FROM pg_catalog.pg_locks AS held LEFT JOIN pg_catalog.pg_stat_activity AS session ON session.pid = held.pid
WHERE held.locktype = 'advisory' AND held.granted AND held.objsubid = 2
  AND held.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
  AND held.classid::bigint = pg_catalog.hashtext('outboxq migrations')::bigint & 4294967295
  AND held.objid::bigint = pg_catalog.hashtext(:schema)::bigint & 4294967295
ORDER BY held.pid"""
)


def schema_version(connection: Connection, schema: str) -> int | None:
    """The last migration step of `schema`; None if outboxq was never installed. Takes no lock beyond a read."""
    marker = quote_identifier(schema, "migration")
    if connection.execute(_MARKER, {"marker": marker}).scalar() is None:
        return None
    return connection.execute(newest_step(schema)).scalar()


def newest_step(schema: str) -> TextClause:
    """The last migration step that was made. Reads the small table `migration`; no locks."""
    marker = quote_identifier(schema, "migration")
    # Escaped, a colon in the schema's name is no bound parameter.
    return text(f"SELECT pg_catalog.max(step) FROM {marker}".replace(":", r"\:"))


def try_lock_version(connection: Connection, schema: str) -> bool:
    """Take the lock of `lock_version` without waiting; False if another migration of `schema` is under way."""
    return bool(connection.execute(_TRY_LOCK, {"schema": schema}).scalar_one())


def lock_version(connection: Connection, schema: str) -> None:
    """Wait for a migration of `schema` that is under way, and keep others out until the transaction ends.

    The same advisory lock that every migration step takes.
    """
    connection.execute(_LOCK, {"schema": schema})


def version_lock_holders(connection: Connection, schema: str) -> list[str]:
    """The sessions that have the lock of `lock_version`, a text for each, as far as this role may know."""
    return [str(holder) for holder in connection.execute(_HOLDERS, {"schema": schema}).scalars()]
