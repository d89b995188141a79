"""Driver processes of the peers: start them, send them "go" and "stop", and read what they print."""

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.gauges import processor_seconds
from benchmarks.peers.definitions import DRIVERS

_ROOT = DRIVERS.parent.parent
_STEP_SECONDS = 120.0

Sample = tuple[int, int]


class DriverFailed(Exception):
    """A driver ended too early, printed an unknown line, or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The driver is connected as far as it can be, and waits."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The number of handlers of this process that have ended, at a time of the monotonic clock in ns."""

    at: int
    executed: int


@dataclass(frozen=True, slots=True)
class Done:
    """The driver's last line. Pairs are a job's index and a time of the monotonic clock in ns."""

    executed: int = 0
    started: Sequence[Sample] = field(default=())
    committed: Sequence[Sample] = field(default=())


Message = Ready | Progress | Done


def parse_line(line: str) -> Message:
    """Read what a driver printed.

    Raises:
        DriverFailed: it is none of the messages.
    """
    try:
        given = json.loads(line)
        match given.pop("event"):
            case "ready":
                return Ready(**given)
            case "progress":
                return Progress(**given)
            case "done":
                pairs: Any = {name: tuple(map(tuple, given.pop(name, ()))) for name in ("started", "committed")}
                return Done(**given, **pairs)
            case event:
                raise DriverFailed(f"a driver said {event!r}: expected ready, progress or done")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DriverFailed(f"a driver printed {line.strip()[:200]!r}: expected a message as JSON") from error


class Driver:
    """One process of a peer, ended at the end of a `with` block."""

    def __init__(self, command: Sequence[str], action: str, options: Mapping[str, object], home: Path) -> None:
        self.samples: list[Progress] = []
        self._messages: queue.SimpleQueue[Message | DriverFailed] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [*command, action, json.dumps(options)],
            cwd=home,
            env={**os.environ, "PYTHONPATH": f"{DRIVERS / 'driver_kit'}:{_ROOT}", "NODE_ENV": "production"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._errors: list[str] = []
        self._error_reader = threading.Thread(target=self._read_errors)
        self._threads = [self._error_reader, threading.Thread(target=self._read_messages)]
        for thread in self._threads:
            thread.start()

    @property
    def executed(self) -> int:
        """Return the number of ended handlers in its last report."""
        return self.samples[-1].executed if self.samples else 0

    @property
    def processor_seconds(self) -> float:
        """User and system time since its start."""
        return processor_seconds(self._process.pid)

    def wait_ready(self) -> None:
        """Wait until it is.

        Raises:
            DriverFailed: it says something else, ends, or takes too long. So do the other waits.
        """
        message = self._next()
        if not isinstance(message, Ready):
            raise DriverFailed(f"a driver was not ready, but said {message}")

    def wait_done(self) -> Done:
        """Wait for its last line and its end."""
        message = self._next()
        if not isinstance(message, Done):
            raise DriverFailed(f"a driver was not done, but said {message}")
        self._process.wait(_STEP_SECONDS)
        return message

    def check_alive(self) -> None:
        """Raise DriverFailed if it has ended."""
        if self._process.poll() is not None:
            raise self._failure()

    def tell(self) -> None:
        """Send the line that it waits for: to go, and later to stop."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure() from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _read_messages(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                message = parse_line(line)
                if isinstance(message, Progress):
                    self.samples.append(message)
                else:
                    self._messages.put(message)
        except DriverFailed as failure:
            self._messages.put(failure)
        else:
            self._messages.put(self._failure())

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors.extend(self._process.stderr)

    def _next(self) -> Message:
        try:
            message = self._messages.get(timeout=_STEP_SECONDS)
        except queue.Empty as error:
            raise DriverFailed(f"a driver said nothing for {_STEP_SECONDS:.0f} s") from error
        if isinstance(message, DriverFailed):
            raise message
        return message

    def _failure(self) -> DriverFailed:
        code = self._process.wait(_STEP_SECONDS)
        # Its last words may still be on their way.
        self._error_reader.join(_STEP_SECONDS)
        return DriverFailed(f"a driver ended with {code}: {''.join(self._errors)[-2000:].strip() or 'no error text'}")


@contextlib.contextmanager
def running(drivers: Sequence[Driver]) -> Iterator[Sequence[Driver]]:
    """Start all of them, wait until they are ready, let them work, and end them at the end of the block."""
    with contextlib.ExitStack() as stack:
        for driver in drivers:
            stack.enter_context(driver)
        for driver in drivers:
            driver.wait_ready()
        for driver in drivers:
            driver.tell()
        yield drivers


def wait_executed(drivers: Sequence[Driver], jobs: int, seconds: float) -> None:
    """Wait until they have executed so many together.

    Raises:
        DriverFailed: one of them ended, or the time has ended.
    """
    deadline = time.monotonic() + seconds
    while (executed := sum(driver.executed for driver in drivers)) < jobs:
        for driver in drivers:
            driver.check_alive()
        if time.monotonic() > deadline:
            raise DriverFailed(f"{executed} of {jobs} jobs were executed in {seconds:.0f} s")
        time.sleep(0.01)
