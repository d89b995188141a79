"""The supervisor replaces children that die, and takes them with it when it ends or is killed."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from outboxq.events import ChildDied, Emitter, Event
from outboxq.supervisor import supervise
from tests.support.waiting import wait_until

# A child that notes its pid, and stops at SIGTERM or when its parent is gone, as a relay does.
CHILD = """
import os, pathlib, sys, threading
from outboxq import config
from outboxq.signals import stop_signals, stop_when_parent_dies
stop = threading.Event()
pipe = config.parent_pipe()
stop_when_parent_dies(pipe, stop.set)
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
with stop_signals(stop.set):
    while not stop.wait(0.1):
        pass
"""


def pids(directory: Path) -> set[int]:
    return {int(path.name) for path in directory.iterdir()}


@contextmanager
def supervised(directory: Path, command: list[str], processes: int) -> Iterator["subprocess.Popen[str]"]:
    """A supervisor in a process of its own; prints its events and its exit code."""
    program = (
        "import json, os, sys\n"
        "from outboxq.events import Emitter\n"
        "from outboxq.supervisor import supervise\n"
        "emit = Emitter([lambda event: print(repr(event), flush=True)], lambda hook, event: None)\n"
        f"sys.exit(supervise(json.loads(sys.argv[1]), {processes}, environment=os.environ, drain_seconds=5, emit=emit))"
    )
    process = subprocess.Popen([sys.executable, "-c", program, json.dumps(command)], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def child(directory: Path) -> list[str]:
    return [sys.executable, "-c", CHILD, str(directory)]


def alive(wanted: set[int]) -> set[int]:
    return {pid for pid in wanted if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE}


def test_a_killed_child_is_replaced_and_sigterm_ends_all(tmp_path: Path) -> None:
    """As many children as were asked for, whatever happens to them; none is left behind."""
    with supervised(tmp_path, child(tmp_path), 2) as supervisor:
        first = wait_until(lambda: len(pids(tmp_path)) == 2 and pids(tmp_path), "two children")
        victim = min(first)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(pids(tmp_path)) == 3, "the replacement")
        assert len(alive(pids(tmp_path))) == 2
        supervisor.terminate()
        assert supervisor.wait(10) == 0
        assert alive(pids(tmp_path)) == set()
        assert supervisor.stdout is not None
        assert f"ChildDied(pid={victim}, exit_code=-9" in supervisor.stdout.read()


def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    """SIGKILL leaves it no time to tell them: the pipe does."""
    with supervised(tmp_path, child(tmp_path), 2) as supervisor:
        wait_until(lambda: len(pids(tmp_path)) == 2, "two children")
        supervisor.kill()
        wait_until(lambda: not alive(pids(tmp_path)), "the children's end")


@pytest.mark.parametrize(("exit_code", "expected"), [(0, 0), (2, 2)])
def test_children_that_finish_or_were_started_wrongly_are_not_replaced(exit_code: int, expected: int) -> None:
    """0 means drained; 2 means wrong usage, which no restart mends."""
    events: list[Event] = []
    command = [sys.executable, "-c", f"raise SystemExit({exit_code})"]
    assert run(command, 2, events) == expected
    assert events == []


def test_a_child_that_was_told_to_stop_by_somebody_else_is_replaced(tmp_path: Path) -> None:
    """Only a supervisor that drains takes an orderly end for the end of the work."""
    with supervised(tmp_path, child(tmp_path), 1):
        (first,) = wait_until(lambda: len(pids(tmp_path)) == 1 and pids(tmp_path), "the child")
        os.kill(first, signal.SIGTERM)
        wait_until(lambda: len(pids(tmp_path)) == 2, "the replacement")


def test_pauses_between_restarts_grow(tmp_path: Path) -> None:
    """A child that dies at once must not be restarted in a tight loop."""
    events: list[Event] = []
    stopper = threading.Event()

    def hook(event: Event) -> None:
        events.append(event)
        if len(events) == 3:
            stopper.set()
            os.kill(os.getpid(), signal.SIGTERM)

    command = [sys.executable, "-c", "raise SystemExit(1)"]
    emit = Emitter([hook], lambda *_: None)
    assert supervise(command, 1, environment=environment(), drain_seconds=1, emit=emit) == 0
    assert [event.restart_seconds for event in events if isinstance(event, ChildDied)] == [0.5, 1.0, 2.0]


def run(command: list[str], processes: int, events: list[Event]) -> int:
    emit = Emitter([events.append], lambda *_: None)
    return supervise(command, processes, environment=environment(), drain_seconds=1, emit=emit, finite=True)


def environment() -> Mapping[str, str]:
    return dict(os.environ)
