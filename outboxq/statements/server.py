"""Which server and which database this is, and how durable its commits are."""

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

_SETTING = text("SELECT setting, source FROM pg_catalog.pg_settings WHERE name = 'synchronous_commit'")
_EPOCH = text(
    "SELECT extract(epoch FROM pg_catalog.pg_postmaster_start_time())::text || ' '"
    " || coalesce((SELECT extract(epoch FROM stats_reset)::text FROM pg_catalog.pg_stat_bgwriter), '')"
)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The server's version and the database's encoding, in PostgreSQL's words."""

    major: int
    version: str
    encoding: str


def server_facts(connection: Connection) -> ServerFacts:
    """Read them from the server. Takes no lock."""
    return ServerFacts(*connection.execute(_FACTS).one())


def synchronous_commit(connection: Connection) -> tuple[str, str]:
    """The value of `synchronous_commit` and, in PostgreSQL's words, where it comes from. Takes no lock."""
    row = connection.execute(_SETTING).one()
    return row.setting, row.source


def server_epoch(connection: Connection) -> str:
    """Which run of which server this is; differs after a restart, a crash of any backend, and a failover.

    The number of a transaction that a crash undid, or that a promoted standby never heard of, is given out again: what
    `pg_xact_status` says of it holds within one epoch only. The cumulative statistics are discarded by every crash
    recovery, also by one that the postmaster survives; reset by hand, they change the epoch for nothing, which is safe.
    """
    epoch: str = connection.execute(_EPOCH).scalar_one()
    return epoch
