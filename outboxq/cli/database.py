"""Connections of commands to a database, with short transactions that fail soon if another session locks a table."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TypeAlias

from outboxq.cli.errors import CommandFailed, DatabaseUnreachable, WrongUsage, explain
from outboxq.errors import ConfigError

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection

Begin: TypeAlias = "Callable[[], AbstractContextManager[Connection]]"

# Row locks are never waited for; a migration that is under way locks whole tables. LOCAL, because a transaction pooler
# would keep anything else for the next client.
_SETTINGS = "SET LOCAL lock_timeout = '5s'"


@contextmanager
def open_database(database_url: str | None, schema: str) -> Iterator[Begin]:
    """Connect, check that the tables are there, and yield a function that begins a transaction.

    Raises:
        ConfigError: no URL, or one that cannot be used.
        DatabaseUnreachable: no server answers, or it refuses the connection.
        SchemaError: the tables are missing or too old.
    """
    from outboxq import config
    from outboxq.database.driver import run_script
    from outboxq.database.settings import SET_OURS
    from outboxq.migrations.server import check_server
    from outboxq.relay.startup import check_version
    from outboxq.tables import SCHEMA

    url = config.database_url(database_url)
    config.check_schema(schema)
    with connect(url) as plain:
        connection = plain.execution_options(isolation_level="READ COMMITTED", schema_translate_map={SCHEMA: schema})

        @contextmanager
        def begin() -> "Iterator[Connection]":
            with connection.begin():
                run_script(connection, SET_OURS + _SETTINGS)
                yield connection

        with begin():
            check_server(connection)
            check_version(connection, schema)
        yield begin


@contextmanager
def connect(url: "URL") -> "Iterator[Connection]":
    """Yield an open connection, which is closed at the end of the `with` block.

    If it cannot be opened, the error names the server that did not answer.

    Raises:
        ConfigError: an option in the URL that libpq does not know.
        DatabaseUnreachable: no server answers, or it refuses the connection.
    """
    from sqlalchemy.exc import DBAPIError

    from outboxq.database.engines import make_engine
    from outboxq.database.errors import is_refused

    engine = make_engine(url, application_name="outboxq cli")
    try:
        connection = engine.connect()
    except DBAPIError as error:
        if type(error.orig).__name__ == "ProgrammingError":
            raise ConfigError(f"the database URL cannot be used: {_reason(error, url)}") from error
        message = f"no connection to the database at {address(url)}: {_reason(error, url)}"
        raise DatabaseUnreachable(message, refused=is_refused(error)) from error
    try:
        yield connection
    finally:
        connection.close()
        engine.dispose()


def named_databases(given: "Sequence[str] | None", urls: "Sequence[str] | None") -> "dict[str, URL]":
    """Return the URLs of databases by name.

    They come from --database NAME=URL; if that is not given, from --database-url or OUTBOXQ_DATABASE_URL.

    Raises:
        ConfigError: no database is given, or an option is malformed or names one twice.
    """
    from outboxq import config
    from outboxq.database.urls import psycopg_url

    if not given:
        return config.database_urls(urls)
    if urls:
        raise WrongUsage("--database and --database-url name databases twice: leave one out")
    named: dict[str, URL] = {}
    for each in given:
        name, equals, url = each.partition("=")
        if not name or not equals or name in named:
            raise WrongUsage("--database takes NAME=URL, each name once, such as orders=postgresql://host/orders")
        named[name] = psycopg_url(url)
    return named


@contextmanager
def naming(database: str | None) -> Iterator[None]:
    """Put a database's name before the message of an error in the block; if the name is None, leave errors unchanged.

    Raises:
        ConfigError: the block raised an error with exit code 2.
        CommandFailed: the block raised an error with exit code 1.
    """
    try:
        yield
    except Exception as error:
        failure = None if database is None else explain(error)
        if failure is None:
            raise
        kind = ConfigError if failure.exit_code == 2 else CommandFailed
        raise kind(f"{database}: {failure.message}") from error


def address(url: "URL") -> str:
    """Return the host and port of a URL as text, without role and password; all hosts if the URL has several."""
    from outboxq.database.urls import host_names

    hosts = host_names(url) or ("the local socket",)
    ports = str(url.port or url.query.get("port") or 5432).split(",")
    return ", ".join(
        f"{host} ({port})" if host.startswith(("/", "the ")) else f"{host}:{port}"
        for host, port in zip(hosts, ports if len(ports) == len(hosts) else ports * len(hosts), strict=True)
    )


def _reason(error: Exception, url: "URL") -> str:
    """Return the line of libpq's error message that says why a connection failed, such as a wrong password.

    The password is masked.
    """
    lines = [line.strip() for line in str(getattr(error, "orig", error)).splitlines() if line.strip()]
    # Advice, such as "Is the server running", may follow on a line of its own.
    complaints = [line.rpartition("failed: ")[2] for line in lines if "failed: " in line] or lines
    reason = complaints[-1].removeprefix("FATAL:").strip() if complaints else "no reason was given"
    return reason.replace(str(url.password), "***") if url.password else reason
