"""Facts about the server and the database: version, run, durability of commits, and the tables' last migration step."""

from dataclasses import dataclass

from sqlalchemy import Connection, TextClause, text

from outboxq.statements.citus import HAS_CITUS
from outboxq.statements.render import quote_identifier
from outboxq.tables import LATEST_VERSION

# The oldest major version that the tests run on.
OLDEST_MAJOR = 15
ENCODING = "UTF8"

_FACTS = text(
    "SELECT pg_catalog.current_setting('server_version_num')::int / 10000 AS major,"
    " pg_catalog.current_setting('server_version') AS version,"
    " pg_catalog.getdatabaseencoding()::text AS encoding,"
    f" {HAS_CITUS} AS has_citus"
)

_SETTING = text("SELECT setting, source FROM pg_catalog.pg_settings WHERE name = 'synchronous_commit'")
_EPOCH = text(
    "SELECT extract(epoch FROM pg_catalog.pg_postmaster_start_time())::text || ' '"
    " || coalesce((SELECT extract(epoch FROM stats_reset)::text FROM pg_catalog.pg_stat_bgwriter), '') AS epoch,"
    f" {HAS_CITUS} AS has_citus"
)
_READ_ONLY = text(
    "SELECT pg_catalog.pg_is_in_recovery() OR pg_catalog.current_setting('default_transaction_read_only')::bool"
)
# If a receiver runs and nothing waits to be replayed, the standby has everything that it received. Otherwise it is as
# old as the last commit that it replayed; without one since its start, as old as the checkpoint from which it began.
_STANDBY_DELAY = text(
    """\
SELECT CASE
  WHEN NOT pg_catalog.pg_is_in_recovery() THEN NULL
  WHEN EXISTS (SELECT FROM pg_catalog.pg_stat_wal_receiver)
    AND pg_catalog.pg_last_wal_receive_lsn() <= pg_catalog.pg_last_wal_replay_lsn() THEN 0
  ELSE greatest(0, extract(epoch FROM pg_catalog.clock_timestamp() - coalesce(
    pg_catalog.pg_last_xact_replay_timestamp(),
    (SELECT checkpoint_time FROM pg_catalog.pg_control_checkpoint()))))
END::float8"""
)
_OTHER_SCHEMAS = text(
    "SELECT namespace.nspname::text FROM pg_catalog.pg_class AS marker "
    "JOIN pg_catalog.pg_class AS dead ON dead.relnamespace = marker.relnamespace AND dead.relname = 'dead_job'::name "
    "JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = marker.relnamespace "
    "WHERE marker.relname = 'migration'::name ORDER BY 1"
)
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


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts of a server and a database: version and encoding in PostgreSQL's words, and True if it has Citus."""

    major: int
    version: str
    encoding: str
    has_citus: bool


def server_facts(connection: Connection) -> ServerFacts:
    """Return the facts of the connection's server and database. Takes no lock."""
    return ServerFacts(*connection.execute(_FACTS).one())


def synchronous_commit(connection: Connection) -> tuple[str, str]:
    """Return the value of `synchronous_commit` and its source, in PostgreSQL's words. Takes no lock."""
    row = connection.execute(_SETTING).one()
    return row.setting, row.source


def server_epoch(connection: Connection) -> str:
    """Return an id of the server's present run; it changes with a restart, a crash of any backend, and a failover.

    The number of a transaction that a crash undid, or that a promoted standby never received, is used again: so an
    answer of `pg_xact_status` is valid within one epoch only. Every crash recovery discards the cumulative statistics,
    even one that the postmaster survives; a manual reset changes the epoch without need, which is safe.
    """
    return server_run(connection)[0]


def server_run(connection: Connection) -> tuple[str, bool]:
    """Return the id of the server's present run, as in `server_epoch`, and True if this database has Citus."""
    row = connection.execute(_EPOCH).one()
    return row.epoch, row.has_citus


def schema_version(connection: Connection, schema: str) -> int | None:
    """Return the last migration step of `schema`; None if outboxq was never installed.

    It only reads, without further locks.
    """
    marker = quote_identifier(schema, "migration")
    if connection.execute(_MARKER, {"marker": marker}).scalar() is None:
        return None
    return connection.execute(newest_step(schema)).scalar()


def missing_installation(connection: Connection, schema: str) -> str:
    """Return a message for a schema without migrated tables: what exists, and what to do.

    Reads catalogs; no locks.
    """
    if connection.execute(_MARKER, {"marker": quote_identifier(schema, "job")}).scalar() is not None:
        return (
            f"tables in schema {schema!r} without the rows of its table `migration`, as `pg_dump --schema-only` leaves "
            "them: restore the rows of the tables `migration` and `deployment` too, or drop the schema and run "
            "`outboxq migrate`"
        )
    others = connection.execute(_OTHER_SCHEMAS).scalars().all()
    if others:
        return (
            f"no outboxq tables in schema {schema!r}, but in {', '.join(map(repr, others))}: name that one with "
            "--schema, OUTBOXQ_SCHEMA or RelayConfig(schema=...)"
        )
    return (
        f"no outboxq tables in schema {schema!r} of this database: run `outboxq migrate`, or call "
        f"`outboxq.migrations.upgrade(op, to={LATEST_VERSION})` in a revision of your Alembic history"
    )


def newest_step(schema: str) -> TextClause:
    """Select the last migration step that was made. Reads the small table `migration`; no locks."""
    marker = quote_identifier(schema, "migration")
    # A colon in the schema's name is escaped; else it would begin a bound parameter.
    return text(f"SELECT pg_catalog.max(step) FROM {marker}".replace(":", r"\:"))


def try_lock_version(connection: Connection, schema: str) -> bool:
    """Take the lock of `lock_version` if it is free, and return True; return False if a migration of `schema` has it.

    It is held until the transaction ends.
    """
    return bool(connection.execute(_TRY_LOCK, {"schema": schema}).scalar_one())


def lock_version(connection: Connection, schema: str) -> None:
    """Wait for a migration of `schema` in progress, and keep others out until the transaction ends.

    It uses the advisory lock that every migration step takes.
    """
    connection.execute(_LOCK, {"schema": schema})


def version_lock_holders(connection: Connection, schema: str) -> list[str]:
    """Return a text about each session that holds the lock of `lock_version`, for a message about the wait.

    Sessions that this role may not see are left out.
    """
    return [str(holder) for holder in connection.execute(_HOLDERS, {"schema": schema}).scalars()]


def is_read_only(connection: Connection) -> bool:
    """Return True if this server accepts no changes: a replica, or one in read-only mode. Reads no table."""
    found: bool = connection.execute(_READ_ONLY).scalar_one()
    return found


def standby_delay_seconds(connection: Connection) -> float | None:
    """Return the age of a standby's data, in seconds; None if the server is no standby. Reads no table.

    The age is 0 if the standby has replayed everything that it received. Otherwise it is the difference between the
    present time by this server's clock and the time of the last replayed commit by the primary's clock.
    """
    found: float | None = connection.execute(_STANDBY_DELAY).scalar_one()
    return found
