"""The HTTP server of metrics: /metrics and /healthz, in daemon threads.

A client that is slow, or sends invalid requests, is cut off: a read or a write may take a second, a connection four,
and there are eight at a time.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

from outboxq.errors import ConfigError
from outboxq.forks import cut_off_in_children

logger = logging.getLogger("outboxq.metrics")

Expose: TypeAlias = Callable[[str], tuple[bytes, str]]
Address: TypeAlias = tuple[str, int]

_READ_SECONDS, _CLIENT_SECONDS = 1.0, 4.0
_CLIENTS_MOST = 8
_PLAIN_TEXT = "text/plain; charset=utf-8"


def parse_address(text: str, host: str = "127.0.0.1") -> Address:
    """Return the address that `[HOST:]PORT` names; an IPv6 host is in brackets. Port 0 means a free port.

    Raises:
        ConfigError: the text is no address.
    """
    given, colon, port = text.rpartition(":")
    name = given.removeprefix("[").removesuffix("]") if colon else host
    is_bracketed = given.startswith("[") and given.endswith("]")
    is_port = port.isascii() and port.isdigit() and int(port) <= 65_535
    if not is_port or not name or (":" in name and not is_bracketed):
        raise ConfigError(f"an address is [HOST:]PORT, such as 9464, 0.0.0.0:9464 or [::1]:9464, got {text!r}")
    return name, int(port)


class _Server(ThreadingHTTPServer):
    """The HTTP server, which answers each connection in a thread, eight connections at a time at the most."""

    daemon_threads = True
    # Otherwise the end would wait for clients.
    block_on_close = False

    def __init__(self, address: Address, expose: Expose, is_healthy: Callable[[], bool]) -> None:
        self.expose = expose
        self.is_healthy = is_healthy
        self._room = threading.Semaphore(_CLIENTS_MOST)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        cut_off_in_children(self.socket)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or close the connection if eight clients are being answered."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one client, and cut it off after four seconds."""
        ends = threading.Timer(_CLIENT_SECONDS, _cut_off, (request,))
        ends.daemon = True
        ends.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            ends.cancel()
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  # the signature of the base
        """Log the error at debug level only: a client that went away, or was cut off, is no error of outboxq."""
        logger.debug("a client of the metrics was not answered", exc_info=True)


def _cut_off(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests GET /metrics and /healthz of one connection."""

    # The time that one read or write may take.
    timeout = _READ_SECONDS
    server_version, sys_version = "outboxq", ""

    def do_GET(self) -> None:  # the name that the base calls
        """Answer a scrape or a probe."""
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(*self._metrics())
        elif path == "/healthz":
            is_healthy = self._ours.is_healthy()
            status = HTTPStatus.OK if is_healthy else HTTPStatus.SERVICE_UNAVAILABLE
            self._answer(status, b"ok\n" if is_healthy else b"not well\n", _PLAIN_TEXT)
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"there is /metrics, and /healthz\n", _PLAIN_TEXT)

    @property
    def _ours(self) -> _Server:
        assert isinstance(self.server, _Server)
        return self.server

    def _metrics(self) -> tuple[HTTPStatus, bytes, str]:
        try:
            body, content_type = self._ours.expose(self.headers.get("Accept", ""))
        except Exception:
            # The main work of the process is more important.
            logger.exception("the metrics could not be read")
            return HTTPStatus.INTERNAL_SERVER_ERROR, b"the metrics could not be read\n", _PLAIN_TEXT
        return HTTPStatus.OK, body, content_type

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the signature of the base
        """Do not log requests."""


@contextmanager
def serving(address: Address, expose: Expose, is_healthy: Callable[[], bool] = lambda: True) -> Iterator[Address]:
    """Serve metrics and health over HTTP while the block runs; yield the address, with the port that is used.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    try:
        server = _Server(address, expose, is_healthy)
    except OSError as error:
        shown = f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"
        raise ConfigError(
            f"metrics cannot be served on {shown} ({error.strerror or error}): name another address, or free this one"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="outboxq-metrics", daemon=True)
    thread.start()
    try:
        host, port, *_ = server.server_address
        logger.info("metrics are served: host=%s port=%d", host, port)
        yield str(host), int(port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
