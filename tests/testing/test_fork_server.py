"""The fork server of the tests: its processes are what `subprocess` was asked for."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import psutil
import pytest

from tests.support.fork_server import SERVER_NAME, fresh
from tests.support.waiting import PATIENCE

TELL = """
import faulthandler, json, os, pathlib, signal, sys
told = {
    "imported": "outboxq.relay.relay" in sys.modules,
    "arguments": sys.argv[1:],
    "directory": os.getcwd(),
    "paths": sys.path[:2],
    "variables": {name: value for name, value in os.environ.items() if name in ("GIVEN", "HOME", "PYTHONPATH")},
    "parent": os.getppid(),
    "leads": [os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid()],
    "asked": sys.stdin.read(),
    "pipes": sorted(
        int(link.name) for link in pathlib.Path("/proc/self/fd").iterdir()
        if link.is_symlink() and str(os.readlink(link)).startswith("pipe:")
    ),
    "passed": os.read(int(os.environ["GIVEN"]), 100).decode(),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "shows_crashes": faulthandler.is_enabled(),
}
print("to the errors", file=sys.stderr)
print(json.dumps(told))
sys.exit(7)
"""


def program(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.program", code, *arguments]


@pytest.mark.first_and_last
@pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux")
@pytest.mark.parametrize("options", [{}, {"start_new_session": True}, {"process_group": 0}], ids=str)
@pytest.mark.parametrize("way", [nullcontext, fresh], ids=["forked", "fresh"])
def test_a_process_is_what_was_asked_for(
    way: Callable[[], AbstractContextManager[None]], options: dict[str, object], tmp_path: Path
) -> None:
    """Forked or not: arguments, directory, variables, descriptors, session, group, and how it ends."""
    read_end, write_end = os.pipe()
    os.write(write_end, b"through a pipe")
    repository = str(Path(__file__).parents[2])
    with way():
        process = subprocess.Popen(
            program(TELL, "one", "two"),
            cwd=tmp_path,
            env={**os.environ, "GIVEN": str(read_end), "PYTHONPATH": repository},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(read_end,),
            text=True,
            **options,
        )
    out, errors = process.communicate("a question", timeout=PATIENCE)
    os.close(read_end)
    os.close(write_end)
    told = json.loads(out)
    assert told == {
        "imported": way is nullcontext,
        "arguments": ["one", "two"],
        "directory": str(tmp_path),
        "paths": [str(tmp_path), repository],
        "variables": {"GIVEN": str(read_end), "HOME": os.environ["HOME"], "PYTHONPATH": repository},
        "parent": os.getpid(),
        "leads": [bool(options), "start_new_session" in options],
        "asked": "a question",
        "pipes": [0, 1, 2, read_end],
        "passed": "through a pipe",
        "interrupt": True,
        "shows_crashes": True,
    }
    assert errors == "to the errors\n"
    assert process.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_forked_process_as_it_ends_any(number: signal.Signals) -> None:
    """The return code is the signal's, and no process is left."""
    code = "import time; print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen(program(code), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(60) == -number
    assert not psutil.pid_exists(process.pid)


@pytest.mark.wide
@pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux")
def test_a_forked_process_forks_its_children_from_a_server_of_its_own() -> None:
    """They are its children, and have everything imported; the server ends with it."""
    child = "import os, sys; print(os.getppid(), 'outboxq.relay.relay' in sys.modules)"
    code = (
        "import os, subprocess, sys\n"
        f"command = [sys.executable, '-m', 'tests.support.program', {child!r}]\n"
        "print(os.getpid(), subprocess.run(command, capture_output=True, text=True).stdout, flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(program(code), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{process.pid} {process.pid} True\n"
        (server,) = psutil.Process(process.pid).children()
        assert server.name() == SERVER_NAME
        process.communicate(timeout=PATIENCE)
    assert psutil.wait_procs([server], timeout=PATIENCE)[1] == []
