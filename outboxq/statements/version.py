"""The version marker that migrations leave in the schema."""

from psycopg import sql
from sqlalchemy import Connection, text

# Later steps may follow a deployment: what they add, this code can do without.
NEEDED_VERSION = 6


def schema_version(connection: Connection, schema: str) -> int | None:
    """The last migration step of `schema`; None where outboxq was never installed. Takes no lock beyond a read."""
    marker = sql.Identifier(schema, "migration").as_string(None)
    if connection.execute(text("SELECT to_regclass(:marker)"), {"marker": marker}).scalar() is None:
        return None
    # Escaped, a colon in the schema's name is no bound parameter.
    return connection.execute(text(f"SELECT max(step) FROM {marker}".replace(":", r"\:"))).scalar()


def try_lock_version(connection: Connection, schema: str) -> bool:
    """As `lock_version`, where no other migration of `schema` is under way; False, and nothing locked, where one is."""
    tried = text("SELECT pg_try_advisory_xact_lock(hashtext('outboxq migrations'), hashtext(:schema))")
    return bool(connection.execute(tried, {"schema": schema}).scalar_one())


def lock_version(connection: Connection, schema: str) -> None:
    """Wait for a migration of `schema` that is under way, and keep others out until the transaction ends.

    The same advisory lock that every migration step takes.
    """
    connection.execute(
        text("SELECT pg_advisory_xact_lock(hashtext('outboxq migrations'), hashtext(:schema))"), {"schema": schema}
    )


def version_lock_holders(connection: Connection, schema: str) -> list[str]:
    """Who has the lock of `lock_version`: a text for each session, as far as this role may know."""
    holders = text(
        """\
SELECT concat_ws(', ', 'process ' || held.pid, 'role ' || session.usename, nullif(session.application_name, ''),
  'since ' || date_trunc('second', session.xact_start))
FROM pg_locks AS held LEFT JOIN pg_stat_activity AS session ON session.pid = held.pid
WHERE held.locktype = 'advisory' AND held.granted AND held.objsubid = 2
  AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND held.classid::bigint = hashtext('outboxq migrations')::bigint & 4294967295
  AND held.objid::bigint = hashtext(:schema)::bigint & 4294967295
ORDER BY held.pid""".replace("::", r"\:\:")
    )
    return [str(holder) for holder in connection.execute(holders, {"schema": schema}).scalars()]
