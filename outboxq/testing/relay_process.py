"""A relay in a process of its own, for tests that stop, kill or disconnect it."""

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from typing import Self
from uuid import uuid4

import msgspec
from sqlalchemy import URL

from outboxq.config import RelayConfig, child_environment
from outboxq.database.urls import psycopg_url
from outboxq.fault_points import FaultPoint

_LOG_TAIL_BYTES = 4_000
_STOP_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOrder:
    """The order to a relay process; the URL's application_name is the relay's name."""

    target: str
    url: str = field(repr=False)
    config: RelayConfig
    kill_at: FaultPoint | None
    terminate_at: FaultPoint | None
    passing: int


class RelayProcess:
    """A relay in a process of its own, with the import path of this one; ended with the `with` block.

    It also ends when this process does, however that happens.

    Args:
        target: The registry, as `myapp.jobs:jobs`.
        database_url: The database it works on.
        config: Its settings.
        kill_at: The fault point at whose `passing`-th passing it is killed with SIGKILL.
        terminate_at: The fault point at which all of its connections are ended by the server.
        name: The name of its connections; None makes one that no other process has.
    """

    def __init__(
        self,
        target: str,
        database_url: str | URL,
        config: RelayConfig | None = None,
        *,
        kill_at: FaultPoint | None = None,
        terminate_at: FaultPoint | None = None,
        passing: int = 1,
        name: str | None = None,
    ) -> None:
        self.name = name or f"outboxq relay {uuid4().hex[:12]}"
        url = psycopg_url(database_url).update_query_dict({"application_name": self.name})
        order = RelayOrder(
            target=target,
            url=url.render_as_string(hide_password=False),
            config=config or RelayConfig(),
            kill_at=kill_at,
            terminate_at=terminate_at,
            passing=passing,
        )
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process; close() closes it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "outboxq.testing"],
            env=child_environment({"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}),
            # The pipe ends when this process does, however that happens: then the relay stops.
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # A Ctrl-C at the terminal does not reach it. Not a session of its own: a stopped process of this session is
            # woken and hung up when its parent dies.
            process_group=0,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, as `subprocess` puts it (-9 after SIGKILL); None while it runs."""
        return self._process.poll()

    @property
    def log(self) -> str:
        """The end of its output."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip() or "(no output)"

    def wait(self, seconds: float) -> int | None:
        """Wait for its end; None if it still runs after `seconds`."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def ask_to_stop(self) -> None:
        """SIGTERM, after which the relay finishes its running handlers."""
        self._process.terminate()
        self.resume()

    def stop(self, seconds: float = _STOP_SECONDS) -> int | None:
        """SIGTERM, and its exit code when it has ended; None if that takes longer than `seconds`."""
        self.ask_to_stop()
        return self.wait(seconds)

    def close(self) -> None:
        """End it, by force if it does not end by itself."""
        if self.stop() is None:
            self.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
