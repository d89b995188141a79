"""haproxy, the distribution's, in front of two servers, of which it asks who is the primary.

Its configuration is the one of docs/database-trouble.md with the addresses of the test.
"""

import contextlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import psycopg

from tests.support.programs import free_port, program
from tests.support.waiting import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "database-trouble.md"


@contextmanager
def haproxy(urls: list[str]) -> Iterator[int]:
    """The port that leads to whichever server of `urls`, in libpq's spelling, is no standby.

    Skips the test where there is no haproxy and none can be installed.
    """
    executable = program("haproxy")
    with ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="outboxq-haproxy-", dir="/tmp"))
        stack.callback(shutil.rmtree, directory)
        port = free_port()
        servers = [(psycopg.conninfo.conninfo_to_dict(url)["port"], stack.enter_context(_patroni(url))) for url in urls]
        configuration = directory / "haproxy.cfg"
        configuration.write_text(_configuration(port, servers))
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                [executable, "-db", "-f", str(configuration)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        stack.callback(process.wait, 10)
        stack.callback(process.terminate)

        def answers() -> bool:
            assert process.poll() is None, (directory / "log").read_text()
            # Until its first looks it leads to each server in turn.
            return all(_is_primary(urls[0], port=port) for _ in range(2 * len(urls)))

        wait_until(answers, "haproxy to lead to the primary alone")
        yield port


def _configuration(port: int, servers: list[tuple[object, int]]) -> str:
    block = re.search(r"```haproxy\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    kept = [line for line in block[1].splitlines() if not line.strip().startswith(("server ", "bind "))]
    bound = [f"    bind 127.0.0.1:{port}"]
    listed = [f"    server db{place} 127.0.0.1:{of} check port {asked}" for place, (of, asked) in enumerate(servers)]
    return "\n".join([*kept, *bound, *listed, ""])


@contextmanager
def _patroni(url: str) -> Iterator[int]:
    """The port of what answers as Patroni's REST interface beside the server of `url`: 200 if it is the primary."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if _is_primary(url) else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing is logged."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def _is_primary(url: str, **more: int) -> bool:
    with (
        contextlib.suppress(psycopg.OperationalError),
        psycopg.connect(url, connect_timeout=2, autocommit=True, **more) as connection,
    ):
        return connection.execute("SELECT NOT pg_is_in_recovery()").fetchone() == (True,)
    return False
