"""Real HTTP servers on loopback, in a thread or as a process, and what their clients see."""

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from sqlalchemy import Engine, text

from tests.support.http_app import GATE
from tests.support.waiting import wait_until

_ROOT = Path(__file__).parents[2]
_LIMIT_SECONDS = 60


@contextmanager
def serve(app: Any) -> Iterator[str]:
    """The application on a free port, in a thread; its address."""
    config = uvicorn.Config(app, port=0, log_level="critical", ws="none", loop="asyncio")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive(), "the server")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(_LIMIT_SECONDS)
    assert not thread.is_alive(), "the server did not stop"


class ServerProcess:
    """A server with a life of its own, to be killed or stopped."""

    def __init__(self, process: "subprocess.Popen[bytes]", address: str) -> None:
        self.process = process
        self.address = address

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(_LIMIT_SECONDS)


@contextmanager
def serve_process(url: str, *, lease_seconds: float) -> Iterator[ServerProcess]:
    """`tests/support/http_app.py` in a process of its own."""
    command = [sys.executable, "-m", "uvicorn", "--factory", "tests.support.http_app:create_app", "--port", "0"]
    environment = {**os.environ, "HTTP_APP_URL": url, "HTTP_APP_LEASE": str(lease_seconds)}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=environment, cwd=_ROOT, stderr=log, stdout=subprocess.DEVNULL)

        def read_address() -> str | None:
            log.seek(0)
            written = log.read()
            assert process.poll() is None, written
            found = re.search(r"running on (http://\S+:\d+)", written)
            return found and found[1]

        try:
            yield ServerProcess(process, str(wait_until(read_address, "the server process", 60)))
        finally:
            process.kill()
            process.wait(_LIMIT_SECONDS)


@contextmanager
def closed_gate(engine: Engine) -> Iterator[None]:
    """Within the block, endpoints wait at the gate."""
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:gate)"), {"gate": GATE})
        yield
        connection.rollback()


def wait_at_gate(engine: Engine, number: int = 1) -> None:
    """Wait until so many endpoints do."""
    waiting = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = :gate")

    def arrived() -> bool:
        with engine.connect() as connection:
            return connection.execute(waiting, {"gate": GATE}).scalar_one() >= number

    wait_until(arrived, "endpoints at the gate")


# Of the connection, or of the moment; the rest of a replay is the first answer.
_NOT_COMPARED = {"date", "server", "connection", "x-hop", "set-cookie", "idempotent-replayed", "transfer-encoding"}


def seen(response: httpx.Response) -> tuple[int, list[tuple[str, str]], bytes]:
    """What of an answer a replay must repeat, in its order."""
    headers = [(name, value) for name, value in response.headers.multi_items() if name not in _NOT_COMPARED]
    return response.status_code, headers, response.content


def is_replay(response: httpx.Response) -> bool:
    return response.headers.get("idempotent-replayed") == "true"


def problem(response: httpx.Response) -> str:
    """The kind of problem that an answer of ours tells, after a look at its form (RFC 9457)."""
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert set(body) == {"type", "title", "status", "detail"}
    assert body["status"] == response.status_code
    return body["type"].removeprefix("urn:outboxq:problem:")
