"""A PostgreSQL server in a Docker container, through testcontainers if that package is installed.

testcontainers' own reaper container removes the server when its owner is killed.
"""

import contextlib
import importlib.util
import socket
from collections.abc import Callable, Mapping
from types import ModuleType

from outboxq.postgres.binaries import SourceFailed

CONTAINER_SOURCE = "testcontainers"

_IMAGE = "postgres:18"
_PASSWORD = "outboxq"  # noqa: S105 - of a throw-away server, which the image does not start without
_PROBE_SECONDS = 2


def start_container(settings: Mapping[str, str]) -> tuple[str, Callable[[], None]]:
    """Start a server with `settings` in a container; its URL, and what removes it.

    Raises:
        SourceFailed: testcontainers is not installed, no engine answers, or the container does not start.
    """
    if importlib.util.find_spec("testcontainers") is None:
        raise SourceFailed(CONTAINER_SOURCE, "the package testcontainers is not installed", "install it, and Docker")
    docker = importlib.import_module("docker")
    # What docker and testcontainers raise for an engine that is gone, an image that is not to be had, and a container
    # that ends or hangs.
    expected: tuple[type[Exception], ...] = (docker.errors.DockerException, OSError, RuntimeError)
    try:
        _ping_engine(docker)
    except expected as error:
        raise SourceFailed(CONTAINER_SOURCE, f"no Docker engine answers ({error})", "start Docker") from error
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
        raise SourceFailed(f"{CONTAINER_SOURCE} ({_IMAGE})", reason, "see the engine's own messages") from error
    return container.get_connection_url(), container.stop


def _ping_engine(docker: ModuleType) -> None:
    # If nothing listens on the engine's Unix socket, docker's client leaks its own, and Python warns of that. So
    # look there first; a client that is given a version connects to nothing before it is asked to.
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
    # Imported after the probe only: this takes longer than all the rest. If both modules exist, the old one warns.
    try:
        return importlib.import_module("testcontainers.community.postgres")
    except ModuleNotFoundError:
        return importlib.import_module("testcontainers.postgres")
