"""Which server and which database this is."""

from dataclasses import dataclass

from sqlalchemy import Connection, text

# The oldest that the tests run on.
OLDEST_MAJOR = 15
ENCODING = "UTF8"

_FACTS = text(
    "SELECT pg_catalog.current_setting('server_version_num')::int / 10000 AS major,"
    " pg_catalog.current_setting('server_version') AS version,"
    " pg_catalog.getdatabaseencoding()::text AS encoding"
)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The server's version and the database's encoding, in PostgreSQL's words."""

    major: int
    version: str
    encoding: str


def server_facts(connection: Connection) -> ServerFacts:
    """Read them from the server. Takes no lock."""
    row = connection.execute(_FACTS).one()
    return ServerFacts(row.major, row.version, row.encoding)
