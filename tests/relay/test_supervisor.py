"""The supervisor replaces children that die, and takes them with it when it ends or is killed."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from outboxq.emitter import Emitter
from outboxq.errors import ConfigError
from outboxq.events import ChildDied, ChildStopTimedOut, ChildStuck, Event
from outboxq.relay.health import State, read_beats, send_beats
from outboxq.relay.supervisor import Supervisor
from tests.support.waiting import PATIENCE, wait_until

# A child that notes its pid, tells of its life, and stops at SIGTERM or when its parent is gone, as a relay does.
CHILD = """
import os, pathlib, sys, threading
from outboxq import config
from outboxq.relay.health import send_beats
from outboxq.relay.signals import stop_signals, stop_when_parent_dies
stop = threading.Event()
stop_when_parent_dies(config.parent_pipe(), stop.set)
directory, mute = map(pathlib.Path, sys.argv[1:])
beats = config.heartbeat_pipe()
try:
    mute.symlink_to(str(os.getpid()))
except FileExistsError:
    send_beats(beats, lambda: "serving")
(directory / str(os.getpid())).touch()
with stop_signals(stop.set):
    while not stop.wait(0.1):
        pass
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where each child leaves a file with its pid as the name."""
    (tmp_path / "children").mkdir()
    return tmp_path / "children"


def pids(directory: Path) -> set[int]:
    return {int(path.name) for path in directory.iterdir()}


@contextmanager
def supervised(command: list[str], processes: int, **options: object) -> Iterator["subprocess.Popen[str]"]:
    """A supervisor in a process of its own, which prints its events; its children end with it."""
    program = (
        "import json, os, pathlib, sys\n"
        "from outboxq.emitter import Emitter\n"
        "from outboxq.relay.supervisor import Supervisor\n"
        "emit = Emitter([lambda event: print(repr(event), flush=True)], lambda hook, event: None)\n"
        "command, processes, options = map(json.loads, sys.argv[1:])\n"
        "options['health_path'] = pathlib.Path(options['health_path']) if 'health_path' in options else None\n"
        "sys.exit(Supervisor(command, processes, os.environ, drain_seconds=5, emit=emit, **options).run())"
    )
    arguments = [json.dumps(value) for value in (command, processes, options)]
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def child(directory: Path, mute: Path | None = None) -> list[str]:
    """The first child that can write the link `mute` never tells of its life; without it, all do."""
    return [sys.executable, "-c", CHILD, str(directory), str(mute or directory)]


def alive(wanted: set[int]) -> set[int]:
    return {pid for pid in wanted if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE}


@pytest.mark.large
def test_a_killed_child_is_replaced_and_sigterm_ends_all(directory: Path) -> None:
    """As many children as were asked for, whatever happens to them; none is left behind."""
    with supervised(child(directory), 2) as supervisor:
        first = wait_until(lambda: len(pids(directory)) == 2 and pids(directory), "two children")
        victim = min(first)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(pids(directory)) == 3, "the replacement")
        assert len(alive(pids(directory))) == 2
        supervisor.terminate()
        assert supervisor.wait(PATIENCE) == 0
        assert alive(pids(directory)) == set()
        assert supervisor.stdout is not None
        assert f"ChildDied(pid={victim}, exit_code=-9" in supervisor.stdout.read()


@pytest.mark.large
def test_children_end_when_the_supervisor_is_killed(directory: Path) -> None:
    """SIGKILL leaves it no time to tell them: the pipe does."""
    with supervised(child(directory), 2) as supervisor:
        wait_until(lambda: len(pids(directory)) == 2, "two children")
        supervisor.kill()
        wait_until(lambda: not alive(pids(directory)), "the children's end")


@pytest.mark.parametrize(("exit_code", "expected"), [(0, 0), (2, 2), (4, 4)])
def test_children_that_finish_or_were_started_wrongly_are_not_replaced(exit_code: int, expected: int) -> None:
    """0 means drained; 2 means wrong usage, and 4 a login that is refused, which no restart of a child mends."""
    events: list[Event] = []
    command = [sys.executable, "-c", f"raise SystemExit({exit_code})"]
    assert run(command, 2, events) == expected
    assert events == []


@pytest.mark.large
def test_a_child_that_was_told_to_stop_by_somebody_else_is_replaced(directory: Path) -> None:
    """Only a supervisor that drains takes an orderly end for the end of the work."""
    with supervised(child(directory), 1):
        (first,) = wait_until(lambda: len(pids(directory)) == 1 and pids(directory), "the child")
        os.kill(first, signal.SIGTERM)
        wait_until(lambda: len(pids(directory)) == 2, "the replacement")


# A child that notes when it starts, and ends at once with the exit codes of its arguments, one each time.
ENDS = """
import pathlib, sys, time
notes = pathlib.Path(sys.argv[1])
starts = notes.read_text().split() if notes.exists() else []
notes.write_text(" ".join([*starts, str(time.monotonic())]))
time.sleep(float(sys.argv[2]))
codes = sys.argv[3:]
sys.exit(int(codes[min(len(starts), len(codes) - 1)]))
"""


def deaths(
    notes: Path, *codes: int, deaths: int, life_seconds: float = 0.0, **limits: float
) -> tuple[list[Event], list[float]]:
    """What a supervisor of one such child tells until it died so often, and when the child was started each time."""
    events: list[Event] = []

    def hook(event: Event) -> None:
        events.append(event)
        if len(events) == deaths:
            os.kill(os.getpid(), signal.SIGTERM)

    command = [sys.executable, "-c", ENDS, str(notes), str(life_seconds), *map(str, codes)]
    emit = Emitter([hook], lambda *_: None)
    assert Supervisor(command, 1, environment(), drain_seconds=1, emit=emit, **limits).run() == 0
    return events[:deaths], [float(start) for start in notes.read_text().split()]


def pauses(events: list[Event]) -> list[float]:
    return [event.restart_seconds for event in events if isinstance(event, ChildDied)]


@pytest.mark.large
def test_pauses_between_restarts_grow(tmp_path: Path) -> None:
    """A child that dies at once is not restarted in a tight loop: the pauses that are told are kept, and double."""
    events, starts = deaths(tmp_path / "notes", 1, deaths=3)
    assert pauses(events) == [0.5, 1.0, 2.0]
    assert starts[1] - starts[0] >= 0.5
    assert starts[2] - starts[1] >= 1.0


def test_pauses_between_restarts_stop_growing(tmp_path: Path) -> None:
    """A child that cannot live for an hour is back within the cap once it can."""
    events, _ = deaths(tmp_path / "notes", 1, deaths=3, restart_cap_seconds=0.6)
    assert pauses(events) == [0.5, 0.6, 0.6]


@pytest.mark.large
def test_a_child_that_lived_long_is_replaced_soon(tmp_path: Path) -> None:
    """The pauses start anew after a life that was long enough."""
    events, _ = deaths(tmp_path / "notes", 1, deaths=3, life_seconds=0.3, well_after_seconds=0.2)
    assert pauses(events) == [0.5, 0.5, 0.5]


def test_a_child_with_a_stuck_handler_is_replaced_at_once(tmp_path: Path) -> None:
    """Exit code 3 is told as such, and costs no pause, then or later."""
    events, starts = deaths(tmp_path / "notes", 3, 3, 3, 3, 1, deaths=5)
    assert [type(event) for event in events] == [ChildStuck] * 4 + [ChildDied]
    assert pauses(events) == [0.5]
    # With pauses: 0.5, 1, 2 and 4 seconds.
    assert starts[4] - starts[0] < 7.5


@pytest.mark.large
def test_a_child_that_shows_no_life_is_killed_and_replaced(directory: Path, tmp_path: Path) -> None:
    """SIGSTOP stands for whatever keeps an interpreter from running; a child that never told anything is left alone."""
    mute = tmp_path / "mute"
    with supervised(child(directory, mute), 2, stall_seconds=2) as supervisor:
        wait_until(lambda: len(pids(directory)) == 2, "two children")
        silent = int(os.readlink(mute))
        (stopped,) = pids(directory) - {silent}
        assert supervisor.stdout is not None
        with stopped_process(stopped):
            assert supervisor.stdout.readline().startswith(f"ChildUnresponsive(pid={stopped}, silent_seconds=2.")
            wait_until(lambda: len(pids(directory)) == 3, "the replacement")
        assert supervisor.stdout.readline().startswith(f"ChildDied(pid={stopped}, exit_code=-9")
        assert alive(pids(directory)) == pids(directory) - {stopped}


@contextmanager
def stopped_process(pid: int) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end where it is still there: a process that stands still sees no pipe's end."""
    process = psutil.Process(pid)
    process.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


@pytest.mark.large
def test_a_supervisor_that_stood_still_itself_blames_nobody(directory: Path, tmp_path: Path) -> None:
    """After a pause of the whole machine or container, the children get the time to tell that they live."""
    health = tmp_path / "health.json"
    with supervised(child(directory), 1, stall_seconds=2, health_path=str(health)) as supervisor:
        wait_until(lambda: health.exists() and '"serving"' in health.read_text(), "the child's first beats")
        (only,) = pids(directory)
        with stopped_process(only):
            with stopped_process(supervisor.pid):
                time.sleep(2.2)  # time passes while both stand still: that is the point
                before = health.read_text()
            wait_until(lambda: health.read_text() != before, "the supervisor to look again")
        supervisor.terminate()
        assert supervisor.wait(PATIENCE) == 0
        assert supervisor.stdout is not None
        assert supervisor.stdout.read() == ""


def test_stall_seconds_that_beats_cannot_keep_are_refused() -> None:
    """A limit below the beats' own pace would kill healthy children."""
    for seconds in (1.9, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="2 to 86400, or 0"):
            Supervisor([], 1, {}, drain_seconds=1, emit=Emitter((), print), stall_seconds=seconds)


@pytest.mark.large
def test_a_heartbeat_never_blocks() -> None:
    """Into a pipe that nobody reads the thread goes on trying; when it is read again, it tells today's state."""
    read_end, write_end = os.pipe()
    os.write(write_end, bytes(fcntl.fcntl(write_end, fcntl.F_GETPIPE_SZ)))  # full
    asked: list[State] = []

    def read_state() -> State:
        asked.append("stopping")
        return asked[-1]

    send_beats(write_end, read_state)
    try:
        wait_until(lambda: len(asked) >= 3, "the thread to try again")
        os.set_blocking(read_end, False)
        wait_until(lambda: read_beats(read_end) == "stopping", "the next beat")
    finally:
        os.close(read_end)
        thread = next(thread for thread in threading.enumerate() if thread.name == "outboxq-heartbeat")
        thread.join(PATIENCE)
        os.close(write_end)
    assert not thread.is_alive(), "nobody can read any more, so it ends"


# A child that notes that it was asked to end, and does not.
STUBBORN = """
import os, pathlib, signal, sys, time
from outboxq import config
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.read(config.parent_pipe(), 1)
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
time.sleep(60)
"""


@pytest.mark.large
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_kills_the_children_and_the_supervisor(directory: Path, second: signal.Signals) -> None:
    """The first lets children drain; the second ends everything at once, by the signal itself."""
    with supervised([sys.executable, "-c", STUBBORN, str(directory)], 2) as supervisor:
        process = psutil.Process(supervisor.pid)
        wait_until(lambda: sum(ignores_sigterm(it.pid) for it in process.children()) == 2, "two children")
        supervisor.terminate()
        children = wait_until(lambda: len(pids(directory)) == 2 and pids(directory), "both to be asked")
        supervisor.send_signal(second)
        assert supervisor.wait(3) == -second
        wait_until(lambda: not alive(children), "the children's end", seconds=3)


def ignores_sigterm(pid: int) -> bool:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn:")]
    return bool(int(line.split()[1], 16) & 1 << (signal.SIGTERM - 1))


# The first child stops by itself, and never ends; the second ends.
LINGERING = """
import os, pathlib, sys, time
from outboxq import config
from outboxq.relay.health import send_beats
directory = pathlib.Path(sys.argv[1])
first = not list(directory.iterdir())
(directory / str(os.getpid())).touch()
if first:
    send_beats(config.heartbeat_pipe(), lambda: "stopping")
    time.sleep(60)
"""


@pytest.mark.large
def test_a_child_that_does_not_come_to_its_end_is_killed_and_replaced(directory: Path) -> None:
    """It stops after a failure of its own and hangs on the way: as long as one that was told to stop, and no longer."""
    events: list[Event] = []
    command = [sys.executable, "-c", LINGERING, str(directory)]
    assert run(command, 1, events, kill_after_drain_seconds=0.5) == 0
    lingers, died = events
    assert isinstance(lingers, ChildStopTimedOut)
    assert lingers.stopping_seconds >= 1.5
    assert isinstance(died, ChildDied)
    assert (died.pid, died.exit_code) == (lingers.pid, -signal.SIGKILL)
    assert len(pids(directory)) == 2


def run(command: list[str], processes: int, events: list[Event], **limits: float) -> int:
    emit = Emitter([events.append], lambda *_: None)
    return Supervisor(command, processes, environment(), drain_seconds=1, emit=emit, finite=True, **limits).run()


def environment() -> Mapping[str, str]:
    return dict(os.environ)
