"""Processes that tests start by `python -m MODULE`, forked from one that has imported everything already.

Importing the package takes most of a second of processor time, and the suite starts about a thousand such processes.
What comes out is a process like any other: a child of the one that called `Popen`, with the descriptors, environment,
directory, session and process group that it asked for. It ends as the interpreter ends, except that nothing is torn
down after the functions of `atexit`: destructors that only the end of an interpreter calls are not called.

Fresh interpreters remain where something else is started than `_MODULES`, or with other variables that an interpreter
reads when it starts. A command that will start relays (a supervisor, the demo, the torture) has a fork server of its
own as its first child.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

# As its process is called, which a search for a command's children meets.
SERVER_NAME = "fork server"

_REPOSITORY = Path(__file__).parents[2]
_MODULES = ("alembic", "outboxq", "outboxq.testing", "tests.support.program", "uvicorn")
_IMPORTED = (
    "alembic.config",
    "outboxq.cli.app",
    "outboxq.cli.relay_process",
    "outboxq.doctor",
    "outboxq.migrations.runner",
    "rich.console",
    "rich.table",
    "sqlalchemy.dialects.postgresql.asyncpg",
    "sqlalchemy.dialects.postgresql.psycopg",
    "tests.support.app",
    "tests.support.http_app",
    "uvicorn.main",
)
# An interpreter, or a module of those above, reads them once.
_READ_AT_START = ("FORCE_", "LANG", "LC_", "LD_", "NO_COLOR", "PYTHON", "TERM", "TTY_", "TYPER", "TZ", "_TYPER")
# Read when they are needed, although their names begin like those.
_READ_LATER = ("PYTHONPATH", "TERM")
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_MESSAGE_BYTES = 2**20
_MOST_DESCRIPTORS = 64


class _Order(NamedTuple):
    """What a process is to be. The descriptors come beside it, in the order of `numbers`."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    directory: str
    numbers: list[int]
    new_session: bool
    process_group: int

    @property
    def starts_relays(self) -> bool:
        """Whether it is going to start processes that can be forked."""
        first = self.arguments[0] if self.module == "outboxq" and self.arguments else ""
        return first in ("demo", "torture") or "--processes" in self.arguments or self.module == "tests.support.program"


_Plain = subprocess.Popen


class _Popen(_Plain):
    """`subprocess.Popen`, which has the fork server start what it can start."""

    def _execute_child(self, *given: Any) -> None:
        asked = inspect.signature(super()._execute_child).bind(*given).arguments
        order = _order(asked)
        if order is None:
            super()._execute_child(*given)
            return
        theirs = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
        standard = [number if end == -1 else end for number, end in enumerate(theirs)]
        try:
            self.pid = _server.start(order, [*standard, *asked["pass_fds"]])
            self._child_created = True  # otherwise `wait` knows of no process
        finally:
            self._close_pipe_fds(*(asked[name] for name in _PIPES))


def _order(asked: Mapping[str, Any]) -> _Order | None:
    """The order for what `Popen` was asked for; None if that needs a fresh interpreter."""
    words = asked["args"]
    if not isinstance(words, list | tuple) or [*words[:2]] != [sys.executable, "-m"] or words[2] not in _MODULES:
        return None
    if asked["executable"] not in (None, sys.executable) or asked["preexec_fn"] or asked["shell"]:
        return None
    given = os.environ if asked["env"] is None else asked["env"]
    environment = {os.fsdecode(name): os.fsdecode(value) for name, value in given.items()}
    if _at_start(environment) != _at_start(os.environ):
        return None
    return _Order(
        module=words[2],
        arguments=[os.fsdecode(word) for word in words[3:]],
        environment=environment,
        directory=os.path.abspath(asked["cwd"] or "."),
        numbers=[0, 1, 2, *asked["pass_fds"]],
        new_session=asked["start_new_session"],
        process_group=asked["process_group"],
    )


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_START) and name not in _READ_LATER
    }


class _Server:
    """The fork server of this process, started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, order: _Order, descriptors: list[int]) -> int:
        """Start a process; its id."""
        with self._lock:
            if self._channel is None:
                self._launch()
            assert self._channel is not None
            with _adopting_orphans():
                socket.send_fds(self._channel, [json.dumps(order).encode()], descriptors)
                answer = self._channel.recv(_MESSAGE_BYTES)
        if not answer:
            raise ChildProcessError("the fork server has ended")
        return int(answer)

    def use(self, channel: socket.socket) -> None:
        """Have processes forked by the one at the other end of the channel."""
        self._channel = channel

    def close(self) -> None:
        """End it; the processes that it forked go on."""
        with self._lock:
            if self._channel is not None and self._process is not None:
                self._channel.close()
                self._process.wait()
            self._channel = self._process = None

    def _launch(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno())],
                cwd=_REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )


_server = _Server()


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Within the block, a process whose parent dies becomes a child of this one if it descends from it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _prctl(option: int, value: int | bytes) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


@contextmanager
def forking() -> Iterator[None]:
    """Within the block, `subprocess` starts processes by the fork server."""
    if sys.platform != "linux":
        yield
        return
    with _starting_by(_Popen):
        yield
    _server.close()


@contextmanager
def _starting_by(popen: type[subprocess.Popen]) -> Iterator[None]:
    before, subprocess.Popen = subprocess.Popen, popen  # type: ignore[misc]  # a class in the place of another
    try:
        yield
    finally:
        subprocess.Popen = before  # type: ignore[misc]  # and back again


def fresh() -> AbstractContextManager[None]:
    """Within the block, `subprocess` starts fresh interpreters, whose command lines are their own."""
    return _starting_by(_Plain)


def _next_order(channel: socket.socket) -> tuple[_Order, list[int]]:
    """Fork a process for each order that comes, which returns from here with it; the end of the channel ends us."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        read_end, write_end = os.pipe()
        between = os.fork()
        if between == 0:
            # The process's parent dies before the answer goes out, so the one that ordered it becomes its parent.
            between = os.getpid()
            pid = os.fork()
            if pid:
                os.write(write_end, str(pid).encode())
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)
            return _Order(*json.loads(message)), descriptors
        os.close(write_end)
        os.waitpid(between, 0)
        channel.send(os.read(read_end, 64))
        for descriptor in (read_end, *descriptors):
            os.close(descriptor)


def _become(order: _Order, descriptors: list[int], server: socket.socket | None) -> None:
    """Make this process what was ordered, up to the call of its main program."""
    numbers = order.numbers
    if server is not None:
        numbers = [*numbers, max(numbers) + 1]
        descriptors = [*descriptors, server.detach()]
    _place(descriptors, numbers)
    if server is not None:
        os.set_inheritable(numbers[-1], False)
        _server.use(socket.socket(fileno=numbers[-1]))
        subprocess.Popen = _Popen  # type: ignore[misc]  # a class in the place of another
    os.chdir(order.directory)
    own_paths = sys.path[1 + len(_python_path(os.environ)) :]
    os.environ.clear()
    os.environ.update(order.environment)
    sys.path[:] = [order.directory, *_python_path(os.environ), *own_paths]
    sys.argv[1:] = order.arguments
    importlib.invalidate_caches()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, name)
        mode, buffering = ("w", 1 if name == "stderr" else -1) if number else ("r", -1)
        stream = open(number, mode, buffering, before.encoding, before.errors, closefd=False)  # noqa: SIM115  # open to the end
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(module: str) -> None:
    """Run a main program, and end with it. What it raises, but for an exit with a number, ends the interpreter."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is not None and type(end.code) is not int:
            raise
        _exit(end.code or 0)
    _exit(0)


def _exit(code: int) -> NoReturn:
    """End as the interpreter does, but for taking its modules apart.

    That would copy each page of memory that is shared with the fork server: half of what a short command costs.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 0xFF)


def _place(descriptors: list[int], numbers: list[int]) -> None:
    """Give the descriptors their numbers, and close all others."""
    first_free = max(numbers) + 1
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, first_free) for descriptor in descriptors]
    for kept_as, number in zip(kept, numbers, strict=True):
        os.dup2(kept_as, number)
    for number in [int(name) for name in os.listdir("/proc/self/fd")]:
        if number not in numbers:
            with suppress(OSError):
                os.close(number)


def _python_path(environment: Mapping[str, str]) -> list[str]:
    return [os.path.abspath(part) for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]


def main() -> None:
    """The fork server; and what it forks, which comes out of the loop, or goes on in it as a fork server of its own."""
    # Ctrl-C is for those that it serves.
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    channel = socket.socket(fileno=int(sys.argv.pop()))
    while True:
        order, descriptors = _next_order(channel)
        channel.close()
        if order.new_session:
            os.setsid()
        elif order.process_group >= 0:
            os.setpgid(0, order.process_group)
        server = None
        if order.starts_relays:
            server, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if os.fork() == 0:
                server.close()
                _prctl(_PR_SET_NAME, SERVER_NAME.encode())
                for descriptor in descriptors:
                    os.close(descriptor)
                continue
            channel.close()
        signal.signal(signal.SIGINT, on_interrupt)
        # Its maker may have been called otherwise.
        _prctl(_PR_SET_NAME, b"python")
        _become(order, descriptors, server)
        _run(order.module)
        return


if __name__ == "__main__":
    main()
