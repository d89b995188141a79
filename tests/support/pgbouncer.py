"""pgbouncer, the distribution's, in front of a server of the tests: started for a `with` block, gone after it."""

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psycopg
from sqlalchemy import URL, make_url

from tests.support.programs import free_port, program
from tests.support.waiting import wait_until


@contextmanager
def pgbouncer(
    server_url: str, pool_mode: str = "transaction", settings: Mapping[str, object] | None = None
) -> Iterator[str]:
    """A pgbouncer in front of the server of `server_url`; yields the same URL, with the pooler's address.

    Skips the test where there is no pgbouncer and none can be installed.

    Args:
        settings: Lines of the `[pgbouncer]` section, on top of ours.
    """
    executable = program("pgbouncer")
    target = make_url(server_url)
    directory = Path(tempfile.mkdtemp(prefix="outboxq-pgbouncer-", dir="/tmp"))
    try:
        port = free_port()
        configuration = directory / "pgbouncer.ini"
        configuration.write_text(_configuration(target, port, pool_mode, settings or {}))
        # It refuses to run as root.
        user = "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        directory.chmod(0o755)
        configuration.chmod(0o644)
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                [executable, *(("-u", user) if os.geteuid() == 0 else ()), str(configuration)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            url = target.set(host="127.0.0.1", port=port)
            wait_until(lambda: _answers(url, process, directory), "pgbouncer to answer")
            yield url.render_as_string(hide_password=False)
        finally:
            # SIGTERM ends it at once; SIGINT would wait for its clients.
            process.terminate()
            process.wait(10)
    finally:
        shutil.rmtree(directory)


def _configuration(target: URL, port: int, pool_mode: str, settings: Mapping[str, object]) -> str:
    # The user is forced, and so no password is asked for on this side.
    password = f" password={target.password}" if target.password else ""
    database = f"* = host={target.host} port={target.port or 5432} user={target.username}{password}"
    lines: dict[str, object] = {
        "listen_addr": "127.0.0.1",
        "listen_port": port,
        "unix_socket_dir": "",
        "auth_type": "any",
        "pool_mode": pool_mode,
        "default_pool_size": 4,
        "max_client_conn": 200,
        # Both are 15 s by default: too long for a test that looks at what happens next.
        "server_login_retry": 1,
        "client_login_timeout": 10,
        **settings,
    }
    listed = "\n".join(f"{name} = {value}" for name, value in lines.items())
    return f"[databases]\n{database}\n\n[pgbouncer]\n{listed}\n"


def _answers(url: URL, process: "subprocess.Popen[bytes]", directory: Path) -> bool:
    if process.poll() is not None:
        raise AssertionError(f"pgbouncer ended with {process.returncode}: {(directory / 'log').read_text()}")
    conninfo = url.set(drivername="postgresql", query={}).render_as_string(hide_password=False)
    with (
        contextlib.suppress(psycopg.OperationalError),
        psycopg.connect(conninfo, connect_timeout=5, autocommit=True) as connection,
    ):
        connection.execute("SELECT 1")
        return True
    return False
