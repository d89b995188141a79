"""Serving the dashboard by itself: its address, the link that logs in once, and the server."""

import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from outboxq.dashboard.logins import TokenLogin
from outboxq.dashboard.origins import is_loopback

_BACKLOG, _GRACE_SECONDS = 128, 2
# The most connections, those of live pages included, of which there are at most 500.
_MOST_CONNECTIONS = 1_000


def is_open(host: str) -> bool:
    """Return True if a server that listens at this host may be reached from other machines."""
    return not is_loopback(host)


def hosts_of(host: str, names: Sequence[str]) -> list[str]:
    """Return the names that the dashboard accepts in a Host header: the host at which the server listens, and `names`.

    If the server listens on all addresses, the result also has `*`, which allows any IP address.
    """
    shown = f"[{host}]" if ":" in host else host
    return [shown, *names, *(["*"] if host in ("0.0.0.0", "::") else [])]  # noqa: S104  # compared, not listened on


@contextmanager
def listen(host: str, port: int) -> Iterator[tuple[socket.socket, str]]:
    """Open a listening socket; yield it, and its address as a URL such as `http://127.0.0.1:8484`.

    Raises:
        OSError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=_BACKLOG) as listening:
        bound = listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        yield listening, f"http://{shown}:{bound}"


def announced(address: str, login: object) -> str:
    """Return the message to print at the start: the dashboard's address, or a link that logs in if `login` has one."""
    if isinstance(login, TokenLogin) and login.link_token is not None:
        link = f"{address}/login?token={login.link_token}"
        return f"The dashboard is at {link}\nThe link logs in once, within ten minutes. Ctrl-C ends it."
    return f"The dashboard is at {address}/\nCtrl-C ends it."


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the command which runs it."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Do nothing, where uvicorn would begin to handle signals: `serve` stops the server."""
        yield


def serve(
    app: ASGIApp, listening: socket.socket, stopping: Callable[[Callable[[], None]], AbstractContextManager[object]]
) -> None:
    """Serve an application on a listening socket until the process is to stop.

    Args:
        stopping: Returns a context manager. Within it, the given function is called when the process is to stop.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        # No access log: its lines would contain the token of the link.
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
