"""Serving the dashboard by itself: its address, the link that logs in once, and the server."""

import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from outboxq.dashboard.logins import TokenLogin
from outboxq.dashboard.origins import is_loopback

_BACKLOG, _GRACE_SECONDS = 128, 2
# Including those of live pages, of which there are 500 at most.
_MOST_CONNECTIONS = 1_000


def is_open(host: str) -> bool:
    """Return True if others than this machine may reach an address."""
    return not is_loopback(host)


def hosts_of(host: str, names: Sequence[str]) -> list[str]:
    """The names that the Host header may have; `*` for any IP address."""
    shown = f"[{host}]" if ":" in host else host
    return [shown, *names, *(["*"] if host in ("0.0.0.0", "::") else [])]  # noqa: S104  # compared, not listened on


@contextmanager
def listen(host: str, port: int) -> Iterator[tuple[socket.socket, str]]:
    """A socket that listens, and its address as browsers write it.

    Raises:
        OSError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=_BACKLOG) as listening:
        bound = listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        yield listening, f"http://{shown}:{bound}"


def announced(address: str, login: object) -> str:
    """The message at the start: the address, and the link that logs in."""
    if isinstance(login, TokenLogin) and login.link_token is not None:
        link = f"{address}/login?token={login.link_token}"
        return f"The dashboard is at {link}\nThe link logs in once, within ten minutes. Ctrl-C ends it."
    return f"The dashboard is at {address}/\nCtrl-C ends it."


class _Server(uvicorn.Server):
    """A server that leaves signals to the command."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture none: `serve` stops the server."""
        yield


def serve(
    app: ASGIApp, listening: socket.socket, stopping: Callable[[Callable[[], None]], AbstractContextManager[object]]
) -> None:
    """Serve until a signal.

    Args:
        stopping: Calls what it is given when the process is to stop.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        # Its lines would have the token of the link.
        access_log=False,
        proxy_headers=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=_GRACE_SECONDS,
        limit_concurrency=_MOST_CONNECTIONS,
    )
    server = _Server(config)

    def stop() -> None:
        server.should_exit = True

    with stopping(stop):
        server.run(sockets=[listening])
