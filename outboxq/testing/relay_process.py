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
    """The settings of a relay process, which `RelayProcess` writes to the standard input of the process.

    The fields have the meaning of the arguments of `RelayProcess`. The application_name in `url` is the name of the
    process's connections.
    """

    target: str
    url: str = field(repr=False)
    config: RelayConfig
    kill_at: FaultPoint | None
    terminate_at: FaultPoint | None
    passing: int


class RelayProcess:
    """A relay in a process of its own, for tests. It imports modules by this process's `sys.path`.

    The relay process ends with the `with` block. It also ends when this process does, even if this process is killed.

    Args:
        target: The registry of jobs, such as `myapp.jobs:jobs`.
        database_url: The URL of its database.
        config: The relay's settings; by default those of `RelayConfig()`.
        kill_at: The fault point (a named step of a job's life) at which the process kills itself with SIGKILL.
        terminate_at: The fault point at which the process makes the server end all of its connections; not with
            `kill_at`.
        passing: The fault happens when the process passes the fault point for this time, counted from 1.
        name: The application name of its connections; None makes one that no other process has.
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
            # The pipe ends when this process does, for whichever reason: then the relay stops.
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # Ctrl-C at the terminal does not reach it. It gets no session of its own: a stopped process of this session
            # is woken and receives SIGHUP when its parent dies.
            process_group=0,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """The process id of the relay process."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code of the process, as in `subprocess` (-9 after SIGKILL); None while it runs."""
        return self._process.poll()

    @property
    def log(self) -> str:
        """The last 4,000 bytes of the process's output, or "(no output)"."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip() or "(no output)"

    def wait(self, seconds: float) -> int | None:
        """Wait for the end of the process; return its exit code, or None if it still runs after `seconds`."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end of the process."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Stop the process by SIGSTOP until `resume()`; its connections stay open."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT, so that a process paused by `pause()` goes on."""
        self._process.send_signal(signal.SIGCONT)

    def ask_to_stop(self) -> None:
        """Send SIGTERM (and SIGCONT), after which the relay finishes its running handlers and ends; return at once."""
        self._process.terminate()
        self.resume()

    def stop(self, seconds: float = _STOP_SECONDS) -> int | None:
        """Send SIGTERM, wait, and return the exit code; None if the process does not end within `seconds`."""
        self.ask_to_stop()
        return self.wait(seconds)

    def close(self) -> None:
        """End the process, by SIGKILL if it does not end after SIGTERM, and close its log."""
        if self.stop() is None:
            self.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
