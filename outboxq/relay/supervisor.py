"""The supervisor: several relay processes on one machine, because one interpreter uses one core.

Each of several databases has its own set of processes: if one is down, work on the others goes on.

The supervisor starts the children, replaces those that die or show no sign of life, and ends them when it stops.
Children hold the read end of a pipe, and drain when the supervisor closes the pipe or dies, SIGKILL included. Each
child has its own pipe, which shows that it lives, and its state.
"""

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from outboxq.config import HEARTBEAT_PIPE_VARIABLE, METRICS_SOCKET_VARIABLE, PARENT_PIPE_VARIABLE
from outboxq.emitter import Emitter
from outboxq.errors import ConfigError
from outboxq.events import ChildDied, ChildStopTimedOut, ChildStuck, ChildUnresponsive
from outboxq.relay.health import BEAT_SECONDS, Health, State, health_file, read_beats
from outboxq.relay.metrics import ChildMetrics, ChildSocket, EndReason
from outboxq.relay.signals import stop_signals

EXIT_STARTED_WRONGLY = 2
# Exit code: a handler could not be freed, so that the process must be replaced.
EXIT_STUCK = 3
# Exit code: a child's login was refused for long; the next start may have another one.
EXIT_REFUSED = 4

_TEND_SECONDS = 0.05
# Several beats may be late on a busy machine.
_LEAST_STALL_SECONDS = 4 * BEAT_SECONDS


class _Child:
    """A relay process, and the pipe through which it shows the supervisor that it lives."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        parent_pipe: int,
        database: str = "",
        metrics: ChildMetrics | None = None,
    ) -> None:
        self.started_at = time.monotonic()
        self.state: State = "starting"
        self.has_reported = False
        self.silent_seconds = self.stopping_seconds = 0.0
        # The reason why it was killed, if any.
        self.killed_as: EndReason | None = None
        self._socket: ChildSocket | None = None
        self._read_end, write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        numbers = {PARENT_PIPE_VARIABLE: parent_pipe, HEARTBEAT_PIPE_VARIABLE: write_end}
        try:
            with ExitStack() as inherited:
                inherited.callback(os.close, write_end)
                if metrics is not None:
                    self._socket, theirs = metrics.open(database)
                    numbers[METRICS_SOCKET_VARIABLE] = inherited.enter_context(theirs).fileno()
                pipes = {name: str(number) for name, number in numbers.items()}
                # A session of its own: a Ctrl-C at the terminal reaches only the supervisor, which then ends the
                # children.
                self.process = subprocess.Popen(  # noqa: S603  # our own command line
                    command, env={**environment, **pipes}, pass_fds=tuple(numbers.values()), start_new_session=True
                )
        except BaseException:
            self.close()
            raise

    def listen(self, elapsed_seconds: float) -> None:
        """Read what the child has written to its pipe; update its state and the seconds for which it wrote nothing.

        Args:
            elapsed_seconds: The time since the last call.
        """
        state = read_beats(self._read_end)
        if state is not None:
            self.state, self.has_reported, self.silent_seconds = state, True, 0.0
        elif self.has_reported:
            self.silent_seconds += elapsed_seconds
        if self.state == "stopping":
            self.stopping_seconds += elapsed_seconds

    def close(self) -> None:
        """Close the pipe and the socket of a child that has ended."""
        os.close(self._read_end)
        if self._socket is not None:
            self._socket.close()


@dataclass(slots=True)
class _Place:
    """One of the `processes` places of a database: it holds its running child, or the time when the next one starts.

    Attributes:
        restart_seconds: The pause after the next death of a child.
        environment: The whole environment of the child.
        database: The name of the database; empty if there is only one.
        child: The running child; None while none runs.
        restart_at: The time (monotonic) from which the next child may start.
        finished: True if the child has ended by itself, and no other is to start.
        is_wrong: True if the last child exited with "started wrongly" or "refused", and none has served since.
    """

    restart_seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    database: str = ""
    child: _Child | None = None
    restart_at: float = 0.0
    finished: bool = False
    # True if the last child exited with "started wrongly" or "refused", and none has served since.
    is_wrong: bool = False


@dataclass(slots=True)
class Supervisor:
    """Keeps `processes` copies of `command` running until SIGTERM or SIGINT, or until all have finished.

    A child that exits with 2 was started wrongly, and one that exits with 4 has a login that the database refuses: no
    restart with the same environment helps, and this process ends with that code. With several databases, one of them
    may be repaired while relays of the others work, so its children are started again after pauses. A child that exits
    with 3 had a handler that could not be freed: it is replaced at once. Any other child is replaced after pauses that
    double. A second signal kills the children and ends this process by that signal.

    Args:
        command: Stops when the pipe `OUTBOXQ_PARENT_PIPE` is closed (`outboxq.relay.signals.stop_when_parent_dies`),
            and may show that it lives through `OUTBOXQ_HEARTBEAT_PIPE` (`outboxq.relay.health.send_beats`).
        environment: The children's whole environment.
        databases: If there are several: by name, additions to the environment of its children; `processes` children run
            for each.
        drain_seconds: How long children may take to finish their jobs; `kill_after_drain_seconds` later they are
            killed. A child whose drain time has ended gives its jobs back, which takes up to 15 s on a slow database.
        finite: True if the command ends by itself (it drains): a child that exits with 0 has finished and is not
            replaced.
        stall_seconds: A child that sent beats, and then none for this long, is killed and replaced. 0: never.
        health_path: The file to which the state of this process and its children is written, once a second.
        metrics: Adds up the children's counts, if they are to send them.
        first_restart_seconds: The first pause before a child is replaced.
        restart_cap_seconds: The longest pause.
        well_after_seconds: After a child that lived this long, the next restart is quick again.

    Raises:
        ConfigError: `stall_seconds` is shorter than the permitted delay of beats.
    """

    command: Sequence[str]
    processes: int
    environment: Mapping[str, str]
    drain_seconds: float
    emit: Emitter
    databases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    finite: bool = False
    stall_seconds: float = 0.0
    health_path: Path | None = None
    metrics: ChildMetrics | None = None
    first_restart_seconds: float = 0.5
    restart_cap_seconds: float = 30.0
    well_after_seconds: float = 60.0
    kill_after_drain_seconds: float = 20.0
    _places: list[_Place] = field(init=False)
    _stopping: threading.Event = field(default_factory=threading.Event, init=False)
    # The children drain when the other end of this pipe is closed.
    _read_end: int = field(default=-1, init=False)
    _checked_at: float = field(default_factory=time.monotonic, init=False)

    def __post_init__(self) -> None:
        if self.stall_seconds != 0 and not _LEAST_STALL_SECONDS <= self.stall_seconds <= 86_400:
            raise ConfigError(
                f"stall_seconds takes {_LEAST_STALL_SECONDS:g} to 86400, or 0 to never kill a silent process, "
                f"got {self.stall_seconds:g}"
            )
        databases: Mapping[str, Mapping[str, str]] = self.databases or {"": {}}
        self._places = [
            _Place(self.first_restart_seconds, {**self.environment, **extra}, name)
            for name, extra in databases.items()
            for _ in range(self.processes)
        ]

    def run(self) -> int:
        """Run the children to their end; returns 0, or the code of a child whose exit ends the supervisor.

        Raises:
            ConfigError: the health file cannot be written.
        """
        with ExitStack() as stack:
            stack.enter_context(health_file(self.health_path, self.health))
            self._read_end, write_end = os.pipe()
            stack.callback(os.close, self._read_end)
            # The children also drain if the supervisor fails.
            parent_pipe = stack.enter_context(open(write_end, "wb", buffering=0))
            stack.enter_context(stop_signals(self._stopping.set, before_death=self._kill_children))
            exit_code = 0
            while not self._stopping.is_set() and not all(place.finished for place in self._places):
                elapsed_seconds = self._elapsed_seconds()
                exit_code = max((self._tend(place, elapsed_seconds) for place in self._places), default=0)
                if exit_code:
                    self._stopping.set()
                self._stopping.wait(_TEND_SECONDS)
            # Through the pipe and not by SIGTERM: a service manager may have sent SIGTERM to all processes, and a
            # second one would end them at once.
            parent_pipe.close()
            self._end_children()
            return exit_code

    def health(self) -> Health:
        """Return the state of all children together: "serving" if any child serves."""
        children = [place.child for place in self._places]
        states = {child.state for child in children if child is not None}
        state: State = "starting"
        if self._stopping.is_set():
            state = "stopping"
        elif "serving" in states:
            state = "serving"
        elif "waiting_for_database" in states:
            state = "waiting_for_database"
        return Health(state, processes=len(self._places), running=sum(child is not None for child in children))

    def _elapsed_seconds(self) -> float:
        """Return the seconds since the last call, but at most the interval at which children show that they live.

        If this process was stopped (a paused container), the children may have been stopped too, so their silence in
        that time proves nothing.
        """
        now = time.monotonic()
        elapsed_seconds, self._checked_at = now - self._checked_at, now
        return min(elapsed_seconds, BEAT_SECONDS)

    def _tend(self, place: _Place, elapsed_seconds: float) -> int:
        """Start, check or replace the child of one place; return its exit code if that ends the supervisor, else 0."""
        if place.finished:
            return 0
        if place.child is None:
            if time.monotonic() >= place.restart_at:
                place.child = _Child(self.command, place.environment, self._read_end, place.database, self.metrics)
            return 0
        code = place.child.process.poll()
        if code is None:
            self._check(place.child, place.database, elapsed_seconds)
            place.is_wrong = place.is_wrong and place.child.state != "serving"
            return 0
        return self._after_exit(place, place.child, code)

    def _check(self, child: _Child, database: str, elapsed_seconds: float) -> None:
        child.listen(elapsed_seconds)
        if self.stall_seconds and child.silent_seconds >= self.stall_seconds:
            self.emit(ChildUnresponsive(child.process.pid, child.silent_seconds, database))
            # SIGKILL, because other signals do not reach a stopped process or a blocked interpreter.
            child.process.kill()
            child.silent_seconds, child.killed_as = 0.0, "silent"
        # There is no other bound on the end of a child that stops by itself after a failure.
        if child.stopping_seconds >= self.drain_seconds + self.kill_after_drain_seconds:
            self.emit(ChildStopTimedOut(child.process.pid, child.stopping_seconds, database))
            child.process.kill()
            child.stopping_seconds, child.killed_as = 0.0, "lingers"

    def _after_exit(self, place: _Place, child: _Child, code: int) -> int:
        place.child = None
        child.close()
        if code in (EXIT_STARTED_WRONGLY, EXIT_REFUSED):
            place.is_wrong = True
            if not self.databases or all(each.is_wrong for each in self._places):
                return code
        if code == 0 and self.finite:
            place.finished = True
        elif code == EXIT_STUCK:
            # The child's job is the cause, and its attempt will count.
            self.emit(ChildStuck(child.process.pid, place.database))
            self._count_end(place, "stuck")
        else:
            self._count_end(place, child.killed_as or "died")
            if time.monotonic() - child.started_at >= self.well_after_seconds:
                place.restart_seconds = self.first_restart_seconds
            self.emit(ChildDied(child.process.pid, code, place.restart_seconds, place.database))
            place.restart_at = time.monotonic() + place.restart_seconds
            place.restart_seconds = min(place.restart_seconds * 2, self.restart_cap_seconds)
        return 0

    def _count_end(self, place: _Place, reason: EndReason) -> None:
        if self.metrics is not None:
            self.metrics.count_end(place.database, reason)

    def _children(self) -> list[_Child]:
        return [place.child for place in self._places if place.child is not None]

    def _end_children(self) -> None:
        """Wait for the children to drain, and kill those that take too long."""
        children = self._children()
        for child in children:
            # A child that has not reported yet may not watch the pipe, and has nothing to finish.
            if not child.has_reported:
                child.process.terminate()
        deadline = time.monotonic() + self.drain_seconds + self.kill_after_drain_seconds
        for child in children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                # The server rolls back the child's uncommitted transactions.
                child.process.kill()
                child.process.wait()
            child.close()

    def _kill_children(self) -> None:
        for child in self._children():
            child.process.kill()
