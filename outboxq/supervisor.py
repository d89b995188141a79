"""The supervisor: several relay processes on one machine, because one interpreter uses one core.

It starts the children, replaces those that die, and ends them when it is told to end. Children hold the read end of a
pipe: should the supervisor die, SIGKILL included, they see its end and drain.
"""

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outboxq.config import PARENT_PIPE_VARIABLE
from outboxq.events import ChildDied, Emitter
from outboxq.signals import stop_signals

FIRST_RESTART_SECONDS = 0.5
RESTART_CAP_SECONDS = 30.0
# A child that lived this long was well: the next restart is quick again.
WELL_AFTER_SECONDS = 60.0
_KILL_AFTER_DRAIN_SECONDS = 5.0


@dataclass(slots=True)
class _Place:
    """One child's place: who stands in it, or when the next one starts."""

    process: "subprocess.Popen[bytes] | None" = None
    started_at: float = 0.0
    restart_at: float = 0.0
    restart_seconds: float = FIRST_RESTART_SECONDS
    finished: bool = False


def supervise(
    command: Sequence[str],
    processes: int,
    *,
    environment: Mapping[str, str],
    drain_seconds: float,
    emit: Emitter,
    finite: bool = False,
) -> int:
    """Keep `processes` copies of `command` running until SIGTERM or SIGINT, or until all have ended by themselves.

    A child that exits with 2 was started wrongly, which no restart can mend; any other is replaced, after pauses that
    grow.

    Args:
        environment: The children's whole environment.
        finite: The command ends by itself (it drains): a child that exits with 0 has finished and is not replaced.
        drain_seconds: How long children may take to finish their jobs; a little later they are killed.

    Returns:
        0, or 2 where a child could not be started as it was told.
    """
    return _Supervisor(command, processes, environment, drain_seconds, emit, finite=finite).run()


class _Supervisor:
    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        environment: Mapping[str, str],
        drain_seconds: float,
        emit: Emitter,
        *,
        finite: bool,
    ) -> None:
        self._command = list(command)
        self._places = [_Place() for _ in range(processes)]
        self._environment = environment
        self._drain_seconds = drain_seconds
        self._emit = emit
        self._finite = finite
        self._stopping = threading.Event()
        self._read_end, self._write_end = os.pipe()

    def run(self) -> int:
        exit_code = 0
        try:
            with stop_signals(self._stopping.set):
                while not self._stopping.is_set() and not all(place.finished for place in self._places):
                    exit_code = max((self._tend(place) for place in self._places), default=0)
                    if exit_code:
                        break
                    self._stopping.wait(0.05)
                self._end_children()
        finally:
            os.close(self._read_end)
            os.close(self._write_end)
        return exit_code

    def _tend(self, place: _Place) -> int:
        """Start, watch or replace one child; its exit code where that ends everything."""
        if place.finished:
            return 0
        if place.process is None:
            if time.monotonic() >= place.restart_at:
                self._start(place)
            return 0
        code = place.process.poll()
        if code is None:
            return 0
        if code == 0 and self._finite:
            place.finished = True
        elif code == 2:
            return code
        else:
            self._plan_restart(place, code)
        return 0

    def _start(self, place: _Place) -> None:
        place.started_at = time.monotonic()
        # A session of its own: a Ctrl-C at the terminal reaches the supervisor alone, which then ends the children.
        place.process = subprocess.Popen(  # noqa: S603  # our own command line
            self._command,
            env={**self._environment, PARENT_PIPE_VARIABLE: str(self._read_end)},
            pass_fds=(self._read_end,),
            start_new_session=True,
        )

    def _plan_restart(self, place: _Place, code: int) -> None:
        assert place.process is not None
        if time.monotonic() - place.started_at >= WELL_AFTER_SECONDS:
            place.restart_seconds = FIRST_RESTART_SECONDS
        self._emit(ChildDied(place.process.pid, code, place.restart_seconds))
        place.process = None
        place.restart_at = time.monotonic() + place.restart_seconds
        place.restart_seconds = min(place.restart_seconds * 2, RESTART_CAP_SECONDS)

    def _end_children(self) -> None:
        alive = [place.process for place in self._places if place.process is not None]
        for process in alive:
            process.terminate()
        deadline = time.monotonic() + self._drain_seconds + _KILL_AFTER_DRAIN_SECONDS
        for process in alive:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                # The server undoes what it had not committed.
                process.kill()
                process.wait()
