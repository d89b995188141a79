"""Checks of the server and the database before a migration or a relay's start: unsupported ones are refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, event

from outboxq.errors import ConfigError
from outboxq.statements.server import ENCODING, OLDEST_MAJOR, ServerFacts, server_facts


def check_server(connection: Connection) -> ServerFacts:
    """Return the facts of the server and its database, or refuse a server that is too old or a database not in UTF-8.

    Raises:
        ConfigError: the server or database is unsuitable; the message says what to do.
    """
    facts = server_facts(connection)
    for reason, advice in unsupported(facts):
        raise ConfigError(f"{reason}: {advice}")
    return facts


def unsupported(facts: ServerFacts) -> Iterator[tuple[str, str]]:
    """Yield two texts for each property of these facts that outboxq does not support: a reason, and what to do."""
    if facts.major < OLDEST_MAJOR:
        yield (
            f"outboxq needs PostgreSQL {OLDEST_MAJOR} or later, and this server is {facts.version}",
            "upgrade the server",
        )
    if facts.encoding != ENCODING:
        yield _wrong_encoding(facts.encoding)


@contextmanager
def refusing_bytes(engine: Engine) -> Iterator[None]:
    """Raise a clear error in this block if the engine connects to a database whose encoding is SQL_ASCII.

    psycopg returns the texts of such a database as bytes, so SQLAlchemy's own first query would fail with a TypeError,
    before outboxq's check.

    Raises:
        ConfigError: the database's encoding is SQL_ASCII; the message says what to do.
    """

    def look(dbapi_connection: Any, _record: object) -> None:
        # The async engine's adapter wraps the driver's connection.
        driver = getattr(dbapi_connection, "driver_connection", dbapi_connection)
        if driver.info.parameter_status("server_encoding") == "SQL_ASCII":
            # Below the pool, which would leave the connection open.
            driver.pgconn.finish()
            raise ConfigError("{}: {}".format(*_wrong_encoding("SQL_ASCII")))

    event.listen(engine, "connect", look, insert=True)
    try:
        yield
    finally:
        event.remove(engine, "connect", look)


def _wrong_encoding(encoding: str) -> tuple[str, str]:
    return (
        f"outboxq needs a database whose encoding is {ENCODING}, and this one is {encoding}",
        f"make one with CREATE DATABASE ... ENCODING {ENCODING} TEMPLATE template0, and move into it with pg_dump",
    )
