"""The version marker that migrations leave in the schema."""

from psycopg import sql
from sqlalchemy import Connection, text

NEEDED_VERSION = 6


def schema_version(connection: Connection, schema: str) -> int | None:
    """The last migration step of `schema`; None where outboxq was never installed. Takes no lock beyond a read."""
    marker = sql.Identifier(schema, "migration").as_string(None)
    if connection.execute(text("SELECT to_regclass(:marker)"), {"marker": marker}).scalar() is None:
        return None
    # Escaped, a colon in the schema's name is no bound parameter.
    return connection.execute(text(f"SELECT max(step) FROM {marker}".replace(":", r"\:"))).scalar()


def lock_version(connection: Connection, schema: str) -> None:
    """Wait for a migration of `schema` that is under way, and keep others out until the transaction ends.

    The same advisory lock that every migration step takes.
    """
    connection.execute(
        text("SELECT pg_advisory_xact_lock(hashtext('outboxq migrations'), hashtext(:schema))"), {"schema": schema}
    )
