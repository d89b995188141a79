"""The watchdog of one throw-away PostgreSQL server: a process between the server and its owner.

The owner is the process that wants the server. It runs this file as a script, with only the standard library: `python
-I -S watchdog.py WORK_DIRECTORY`. The watchdog is the server's parent, so its signals cannot reach another process that
got the server's pid later. It reads commands from stdin and writes one reply to each to stdout, as lines of JSON; the
server's output goes to stderr. Only the owner holds the other end of stdin: its end of file means that the owner is
gone, for any reason. Then, at any point of the watchdog's work, the server is stopped and the work directory removed.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypedDict

INITDB_SECONDS = 120
START_SECONDS = 60
STOP_SECONDS = 10
POLL_SECONDS = 0.005

LOG_FD = 2


class Command(TypedDict):
    """A command that the owner sends to the watchdog, as a line of JSON.

    Attributes:
        verb: "initdb", "start" or "stop".
        arguments: The command line of the program to run; unused by "stop".
        uid: The user as which the program runs; None for the current one.
        gid: The group as which the program runs; None for the current one.
    """

    verb: str
    arguments: list[str]
    uid: int | None
    gid: int | None


class Reply(TypedDict, total=False):
    """The watchdog's reply to a command, as a line of JSON; it is empty after "stop".

    Attributes:
        pid: The process id of the started server.
        exit_status: The exit status of a program that has ended.
        problem: The reason of a failure, in words.
    """

    pid: int
    exit_status: int
    problem: str


class Watchdog:
    """Executes the owner's commands, for one work directory and at most one server at a time."""

    def __init__(self, work_directory: Path) -> None:
        self._work_directory = work_directory
        self._commands = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - stdin, for as long as we live
        self._server: subprocess.Popen[bytes] | None = None

    def obey(self) -> None:
        """Execute the owner's commands, and reply to each, until the owner closes its end of the pipe."""
        while line := self._commands.readline():
            reply = json.dumps(self._answer(json.loads(line)))
            # An owner that died during the work reads no reply; the end of file that follows shows it.
            with contextlib.suppress(BrokenPipeError):
                os.write(1, reply.encode() + b"\n")

    def clean_up(self) -> None:
        """Stop the server and remove the work directory."""
        self._stop()
        for _ in range(round(STOP_SECONDS / POLL_SECONDS)):
            shutil.rmtree(self._work_directory, ignore_errors=True)
            if not self._work_directory.exists():
                return
            # A process that was killed a moment ago may still write a last file.
            time.sleep(POLL_SECONDS)

    def _answer(self, command: Command) -> Reply:
        try:
            if command["verb"] == "initdb":
                return self._initdb(command)
            if command["verb"] == "start":
                return self._start(command)
            self._stop()
            return {}
        except OSError as error:
            return {"problem": str(error)}

    def _initdb(self, command: Command) -> Reply:
        initdb = self._spawn(command, process_group=0)
        try:
            self._wait_until(lambda: initdb.poll() is not None, INITDB_SECONDS)
        finally:
            self._end_initdb(initdb)
        return {"exit_status": initdb.returncode}

    def _end_initdb(self, initdb: subprocess.Popen[bytes]) -> None:
        # Only initdb receives the signal: it waits for the single-user server of its current step, whose shared memory
        # would stay if that were killed.
        initdb.terminate()
        try:
            initdb.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(initdb.pid, signal.SIGKILL)
            initdb.wait()

    def _start(self, command: Command) -> Reply:
        # In the watchdog's own process group, through which the owner can end both if the watchdog is killed.
        server = self._server = self._spawn(command, process_group=None)
        self._wait_until(lambda: server.poll() is not None or self._is_ready(server.pid), START_SECONDS)
        if server.poll() is not None:
            return {"exit_status": server.returncode}
        if self._is_ready(server.pid):
            return {"pid": server.pid}
        self._stop()
        return {"problem": f"the server was not ready within {START_SECONDS} s"}

    def _stop(self) -> None:
        # SIGQUIT is the immediate shutdown. Temporary or crash-tested data needs no checkpoint, and the gentler
        # shutdowns wait for clients.
        server, self._server = self._server, None
        if server is None:
            return
        server.send_signal(signal.SIGQUIT)
        try:
            server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()

    def _spawn(self, command: Command, *, process_group: int | None) -> subprocess.Popen[bytes]:
        # With a new environment: the owner's may contain secrets, and libpq's settings.
        return subprocess.Popen(  # noqa: S603 - a program of PostgreSQL
            command["arguments"],
            user=command["uid"],
            group=command["gid"],
            extra_groups=None if command["uid"] is None else [],
            process_group=process_group,
            cwd=self._work_directory,
            env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
            stdin=subprocess.DEVNULL,
            stdout=LOG_FD,
            stderr=LOG_FD,
        )

    def _is_ready(self, pid: int) -> bool:
        # The server writes its pid in the first line of this file and its state in the eighth; pg_ctl reads it too.
        try:
            lines = (self._work_directory / "data" / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _wait_until(self, done: Callable[[], bool], seconds: float) -> bool:
        # While the owner waits for a reply it sends nothing, so anything readable is the end of file.
        deadline = time.monotonic() + seconds
        while not done():
            owner_is_gone = bool(select.select([self._commands], [], [], POLL_SECONDS)[0])
            if owner_is_gone or time.monotonic() > deadline:
                return False
        return True


def exit_at_signal(signal_number: int, _frame: FrameType | None) -> None:
    """A signal handler: end the process by `SystemExit`, so that `finally` blocks run; later signals are ignored."""
    ignore_signals()
    sys.exit(128 + signal_number)


def ignore_signals() -> None:
    """Ignore SIGTERM, SIGINT and SIGHUP from now on, so that only SIGKILL can interrupt the cleaning up."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def main(work_directory: str) -> None:
    """Execute the owner's commands until the owner is gone; then stop the server, and remove `work_directory`."""
    watchdog = Watchdog(Path(work_directory))
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, exit_at_signal)
        watchdog.obey()
    finally:
        ignore_signals()
        watchdog.clean_up()


if __name__ == "__main__":
    main(sys.argv[1])
