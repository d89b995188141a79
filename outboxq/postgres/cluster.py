"""A temporary PostgreSQL server, made in a second, that ends with the process that started it (its owner).

The owner never runs the server itself. It sends commands to a watchdog process (`watchdog.py`), which runs the server,
and removes everything once the owner closes its end of a pipe or dies. The kernel's parent-death signal could not do
that: it is sent when the *thread* that started the server ends.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from outboxq.postgres.binaries import Binaries, ServerUser, SourceFailed, can_enter, shared_temp_directory
from outboxq.postgres.watchdog import STOP_SECONDS, Command, Reply

SUPERUSER = "postgres"

_LISTEN_SETTINGS: Mapping[str, str] = {"listen_addresses": "127.0.0.1", "unix_socket_directories": ""}

# Below the ports that systems assign to outgoing connections: otherwise a client that keeps connecting to a stopped
# server's port could get that very port, connect to itself, and keep the server from starting again.
_FIRST_PORT, _LAST_PORT = 20_000, 32_000
_PORT_ATTEMPTS = 10

# In a container this directory is often too small for a server.
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - mkdtemp works in it
_MEMORY_BYTES = 4 * 2**30

_LOG_TAIL_LINES = 20


class Cluster:
    """One temporary server with a directory of its own, run by a watchdog process."""

    def __init__(self, binaries: Binaries, settings: Mapping[str, str], *, durable: bool) -> None:
        """Make a directory, create a server's data in it by `initdb`, and start the server on a free port of 127.0.0.1.

        Args:
            settings: Server settings by name.
            durable: True if its data is to survive a crash of the machine; otherwise it may be in shared memory.

        Raises:
            SourceFailed: a step failed; the reason contains the end of the log. The directory is removed again.
        """
        self.port = 0
        self.durable = durable
        self.pid: int | None = None
        self._binaries = binaries
        self._lock = threading.RLock()
        self._is_closed = False
        in_memory = not durable and _has_room_in_memory(binaries.user)
        parent = _SHARED_MEMORY if in_memory else shared_temp_directory(binaries.user)
        self.directory = Path(tempfile.mkdtemp(prefix="outboxq-postgres-", dir=parent))
        try:
            self._watchdog, self._commands, self._replies = _start_watchdog(self.directory)
        except BaseException:
            shutil.rmtree(self.directory)
            raise
        try:
            self._make_data_directory()
            self._write_settings({**_LISTEN_SETTINGS, **settings})
            self._initdb(durable=durable)
            self._start_on_a_free_port()
        except BaseException:
            self.close()
            raise

    def stop_immediately(self) -> None:
        """Stop the server as a crash would: no checkpoint, and no time for its backends to finish.

        Raises:
            SourceFailed: it was closed, or its watchdog was killed.
        """
        reply = self._ask("stop")
        if "problem" in reply:
            raise self._failure(f"the server did not stop ({_described(reply)})")
        self.pid = None

    def start_again(self) -> None:
        """Start the stopped server on the same port, with the same data.

        Raises:
            SourceFailed: it did not start; the reason holds the end of its log.
        """
        reply = self._start()
        if self.pid is None:
            raise self._failure(f"the server did not start again on port {self.port} ({_described(reply)})")

    def close(self) -> None:
        """Stop the server and remove its directory."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self.pid = None
            self._commands.close()
            exit_status = self._watchdog.wait()
            self._replies.close()
            if exit_status != 0:
                self._end_what_a_killed_watchdog_left()

    def _make_data_directory(self) -> None:
        self._data.mkdir(0o700)
        user = self._binaries.user
        if user is not None:
            # The server's user can pass through to the data, and owns nothing else here.
            self.directory.chmod(0o711)
            os.chown(self._data, user.uid, user.gid)

    def _initdb(self, *, durable: bool) -> None:
        options = ["--auth=trust", "--encoding=UTF8", "--locale=C", "--no-instructions"]
        if not durable:
            options.append("--no-sync")
        reply = self._ask("initdb", "initdb", "-D", str(self._data), "-U", SUPERUSER, *options)
        if reply.get("exit_status") != 0:
            raise self._failure(f"initdb failed ({_described(reply)})")

    def _start_on_a_free_port(self) -> None:
        for _ in range(_PORT_ATTEMPTS):
            self.port = _free_port()
            seen_bytes = self._log.stat().st_size
            reply = self._start()
            if self.pid is not None:
                return
            # Another process may have taken the port since it was chosen.
            if b"could not bind" not in self._log.read_bytes()[seen_bytes:]:
                raise self._failure(f"the server did not start ({_described(reply)})")
        raise self._failure(f"{_PORT_ATTEMPTS} ports in a row were taken before the server could listen on them")

    def _start(self) -> Reply:
        config_file = f"config_file={self._config_file}"
        reply = self._ask("start", "postgres", "-D", str(self._data), "-c", config_file, "-p", str(self.port))
        self.pid = reply.get("pid")
        return reply

    def _write_settings(self, settings: Mapping[str, str]) -> None:
        # A file and no options on the command line: those would override a test's ALTER SYSTEM.
        lines = [f"include = {_quoted(str(self._data / 'postgresql.conf'))}"]
        lines += [f"{name} = {_quoted(value)}" for name, value in settings.items()]
        self._config_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self._config_file.chmod(0o644)

    def _ask(self, verb: str, program: str = "", *options: str) -> Reply:
        user = self._binaries.user
        command: Command = {
            "verb": verb,
            "arguments": [str(self._binaries.directory / program), *options],
            "uid": None if user is None else user.uid,
            "gid": None if user is None else user.gid,
        }
        with self._lock:
            if self._is_closed:
                raise SourceFailed(self._binaries.source, "the server was closed", "start another one")
            try:
                return self._exchange(json.dumps(command).encode() + b"\n")
            except BaseException:
                # An interrupted exchange would leave its reply to the next one.
                self.close()
                raise

    def _exchange(self, line: bytes) -> Reply:
        with contextlib.suppress(BrokenPipeError):
            self._commands.write(line)
        answer = self._replies.readline()
        if not answer:
            raise self._failure("its watchdog process has ended")
        reply: Reply = json.loads(answer)
        return reply

    def _end_what_a_killed_watchdog_left(self) -> None:
        # The server is in the watchdog's process group: while the watchdog lives, no other process gets that number.
        group = self._watchdog.pid
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGQUIT)
        # The server removes this file when it ends. As a zombie it may stay in the group for long.
        lock_file, deadline = self._data / "postmaster.pid", time.monotonic() + STOP_SECONDS
        while lock_file.exists() and _has_members(group) and time.monotonic() < deadline:
            time.sleep(0.01)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _failure(self, reason: str) -> SourceFailed:
        lines: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            lines = self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        tail = "\n    ".join(["see the end of its log:", *(lines or ["(empty)"])])
        return SourceFailed(self._binaries.source, reason, tail)

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @property
    def _log(self) -> Path:
        return self.directory / "log"

    @property
    def _config_file(self) -> Path:
        return self.directory / "postgresql.conf"


def _has_room_in_memory(user: ServerUser | None) -> bool:
    # Half the time of initdb and of CREATE DATABASE is file work. A user who sets TMPDIR has already chosen a place.
    if tempfile.gettempdir() != "/tmp" or not os.access(_SHARED_MEMORY, os.W_OK | os.X_OK):  # noqa: S108 - compared
        return False
    return can_enter(_SHARED_MEMORY, user) and shutil.disk_usage(_SHARED_MEMORY).free >= _MEMORY_BYTES


def _start_watchdog(directory: Path) -> tuple[subprocess.Popen[bytes], FileIO, FileIO]:
    their_commands, our_commands = os.pipe()
    our_replies, their_replies = os.pipe()
    commands, replies = FileIO(our_commands, "w"), FileIO(our_replies, "r")
    # A child that was forked without exec shares the pipe, and would keep the server alive after its owner's death.
    os.register_at_fork(after_in_child=commands.close)
    script = Path(__file__).with_name("watchdog.py")
    try:
        with (directory / "log").open("ab") as log:
            watchdog = subprocess.Popen(  # noqa: S603 - this interpreter, with a file of this package
                [sys.executable, "-I", "-S", str(script), str(directory)],
                cwd="/",
                stdin=their_commands,
                stdout=their_replies,
                stderr=log,
                # Ctrl-C at the terminal goes to the owner, which may still need the server to end in order.
                start_new_session=True,
            )
    except BaseException:
        commands.close()
        replies.close()
        raise
    finally:
        os.close(their_commands)
        os.close(their_replies)
    return watchdog, commands, replies


def _free_port() -> int:
    # A seeded `random` would give every test worker the same port at the same time.
    for _ in range(1000):
        port = _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise SourceFailed("the server's port", f"no free one in {_FIRST_PORT} to {_LAST_PORT}", "stop other servers")


def _quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def _described(reply: Reply) -> str:
    return reply.get("problem") or f"exit status {reply.get('exit_status')}"


def _has_members(process_group: int) -> bool:
    try:
        os.killpg(process_group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
