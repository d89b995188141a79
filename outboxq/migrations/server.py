"""The server and the database below outboxq's tables: unsuitable ones are refused before anything is written."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, event

from outboxq.errors import ConfigError
from outboxq.statements.server import ENCODING, OLDEST_MAJOR, ServerFacts, server_facts


def check_server(connection: Connection) -> ServerFacts:
    """The server's facts; refuses one that is too old, and a database that does not keep its texts in UTF-8.

    Raises:
        ConfigError: says what was found, and what to do.
    """
    facts = server_facts(connection)
    for reason, advice in unsupported(facts):
        raise ConfigError(f"{reason}: {advice}")
    return facts


def unsupported(facts: ServerFacts) -> Iterator[tuple[str, str]]:
    """What outboxq cannot work on, and what to do about it."""
    if facts.major < OLDEST_MAJOR:
        yield (
            f"outboxq needs PostgreSQL {OLDEST_MAJOR} or later, and this server is {facts.version}",
            "upgrade the server",
        )
    if facts.encoding != ENCODING:
        yield _wrong_encoding(facts.encoding)


@contextmanager
def refusing_bytes(engine: Engine) -> Iterator[None]:
    """Within the block, refuse a database whose texts come as bytes when the user's engine first connects to it.

    psycopg cannot decode SQL_ASCII, so that SQLAlchemy's own first question fails with a TypeError, before ours.

    Raises:
        ConfigError: the database's encoding is SQL_ASCII; the message says what to do.
    """

    def look(dbapi_connection: Any, _record: object) -> None:
        # The async engine's adapter stands around the driver's connection.
        driver = getattr(dbapi_connection, "driver_connection", dbapi_connection)
        if driver.info.parameter_status("server_encoding") == "SQL_ASCII":
            # Below the pool, which would leave it open.
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
