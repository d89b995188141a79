"""A child process of this interpreter whose output is kept."""

import os
import signal
import subprocess
import sys
import tempfile
from typing import Any, Self

from outboxq.config import child_environment

_LOG_TAIL_BYTES = 4_000
_STOP_SECONDS = 20.0


class ChildProcess:
    """`python -m` with arguments, as a process that is ended with the `with` block.

    Args:
        environment: Variables on top of this process's own; its settings of outboxq are left out.
        popen: Options of `subprocess.Popen`.
    """

    def __init__(self, *arguments: str, environment: dict[str, str], **popen: Any) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        self._process = subprocess.Popen(  # noqa: S603  # this interpreter, with a module of this package
            [sys.executable, "-m", *arguments],
            env=child_environment(environment),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # A Ctrl-C at the terminal does not reach it. Not a session of its own: a stopped process of this session is
            # woken and hung up when its parent dies.
            process_group=0,
            **popen,
        )

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
        """SIGTERM, after which a relay finishes its running handlers."""
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
