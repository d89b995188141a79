"""Relays as users start them, `outboxq relay`, each a process of its own, and how fast they work a queue off."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.apps.counting import COUNTER_BYTES, DIRECTORY_VARIABLE
from benchmarks.bench import CENTS, Bench, MeasurementFailed, Workbench
from benchmarks.gauges import processor_seconds
from outboxq.config import DATABASE_URL_VARIABLE, child_environment

_ROOT = Path(__file__).parent.parent
_START_SECONDS = 60.0
_STOP_SECONDS = 45.0
_LOOK_SECONDS = 0.01
# A process that stood still is at work again, with what it needs back in the caches.
_SETTLE_SECONDS = 0.03


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """The options with which a relay is started."""

    app: str
    batch_size: int = 1
    slots: int = 1
    processes: int = 1
    queue: str = "bench"
    more: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """The command line."""
        command = [sys.executable, "-m", "outboxq", "relay", f"benchmarks.apps.{self.app}:jobs"]
        command += ["--queue", f"{self.queue}={self.slots}", "--batch-size", str(self.batch_size)]
        return [*command, "--processes", str(self.processes), *self.more]

    @property
    def claimable(self) -> int:
        """Return the number of jobs that may be claimed at the same time."""
        return self.batch_size * self.slots * self.processes


@dataclass(frozen=True, slots=True)
class Counted:
    """Jobs that were done, and the seconds that they took."""

    jobs: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Counted") -> "Counted":
        return Counted(self.jobs + other.jobs, self.seconds + other.seconds)

    @property
    def rate(self) -> float:
        """Jobs a second.

        Raises:
            MeasurementFailed: none was done.
        """
        if self.jobs == 0:
            raise MeasurementFailed(f"no job was seen done in {self.seconds:.2f} s: ask for more seconds")
        return self.jobs / self.seconds


class RunningRelay:
    """Relay processes at work, and how many jobs they have run."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path) -> None:
        self.process = process
        self._directory = directory

    def counts(self) -> list[int]:
        """Jobs run so far, a number for each process that has loaded its handlers."""
        contents = [path.read_bytes() for path in self._directory.glob("*.count")]
        return [int.from_bytes(each, sys.byteorder) for each in contents if len(each) == COUNTER_BYTES]

    def stop(self) -> None:
        """Ask it to stop, and see it stopped.

        Raises:
            MeasurementFailed: it did not end well.
        """
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            # While the process is stopped it notices nothing else.
            self.process.send_signal(signal.SIGCONT)
        code = self.process.wait(_STOP_SECONDS)
        if code != 0:
            raise MeasurementFailed(f"the relay ended with {code}: {self.log()[-2000:]}")

    def stand_still(self) -> None:
        """Stop the process (SIGSTOP) at any point, until its next turn or its stop. Only for a relay of one process."""
        self.process.send_signal(signal.SIGSTOP)

    def take_turn(self, seconds: float) -> Counted:
        """Continue the process (SIGCONT) for this time, and stop it again."""
        self.process.send_signal(signal.SIGCONT)
        time.sleep(_SETTLE_SECONDS)
        begun, before = time.monotonic(), sum(self.counts())
        time.sleep(seconds)
        found = Counted(sum(self.counts()) - before, time.monotonic() - begun)
        self.stand_still()
        return found

    def log(self) -> str:
        """Return its output."""
        return (self._directory / "log").read_text()

    def wait_until(self, is_so: Callable[[], bool], what: str, timeout_seconds: float = _START_SECONDS) -> None:
        """Look often.

        Raises:
            MeasurementFailed: the relay ended, or it took too long.
        """
        deadline = time.monotonic() + timeout_seconds
        while not is_so():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise MeasurementFailed(f"waited for {what}, but: {self.log()[-2000:] or 'nothing was said'}")
            time.sleep(0.002)


@contextmanager
def running_relay(
    url: str, options: RelayOptions, environment: Mapping[str, str] | None = None
) -> Iterator[RunningRelay]:
    """Start a relay; at the end of the block it is stopped, by force if an error came first."""
    with tempfile.TemporaryDirectory(prefix="outboxq-benchmark-") as name:
        directory = Path(name)
        own = {DATABASE_URL_VARIABLE: url, DIRECTORY_VARIABLE: name, **(environment or {})}
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                options.command, cwd=_ROOT, env=child_environment(own), stdout=log, stderr=log, start_new_session=True
            )
        relay = RunningRelay(process, directory)
        try:
            yield relay
            relay.stop()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class _Killed(Exception):
    """Leaves the block of a relay that no longer can be stopped."""


@contextmanager
def killed_relay(url: str, options: RelayOptions) -> Iterator[None]:
    """Start a relay of one process; at the end it is killed (SIGKILL)."""
    with suppress(_Killed), running_relay(url, options) as relay:
        yield
        relay.process.kill()
        relay.process.wait()
        raise _Killed


@contextmanager
def working_relay(
    bench: Workbench, options: RelayOptions, rows: int, *, url: str | None = None, updates: bool = False
) -> Iterator[RunningRelay]:
    """A relay whose processes are all at work on a queue of `rows` jobs; what it did is checked at the end.

    Args:
        url: The way to the database, where it is not the direct one.
        updates: True if each job adds its cents to an account; the sum is then compared with the jobs that are gone.

    Raises:
        MeasurementFailed: jobs failed, or are not as many fewer as were counted.
    """
    jobs, balance = bench.count_jobs(), bench.balance() if updates else 0
    with running_relay(url or bench.url, options) as relay:
        relay.wait_until(lambda: _all_work(relay.counts(), options.processes, rows), "the first job")
        yield relay
        relay.stop()
        counted = sum(relay.counts())
    gone = jobs - bench.count_jobs()
    if abs(gone - counted) > options.claimable:
        raise MeasurementFailed(f"{counted} jobs were counted, and {gone} are gone")
    if updates and bench.balance() - balance != gone * CENTS:
        raise MeasurementFailed(f"{gone} jobs are gone, and the accounts have {bench.balance() - balance} more")


def drain(
    bench: Workbench,
    options: RelayOptions,
    rows: int,
    *,
    seconds: float,
    warm_up_seconds: float = 0.0,
    url: str | None = None,
    updates: bool = False,
    cpu_us: list[float] | None = None,
) -> Counted:
    """Work off a queue of `rows` jobs; the start of the processes is not in it.

    Args:
        seconds: Stop then, if the queue is not nearly empty before.
        url: As of `working_relay`.
        updates: As of `working_relay`.
        cpu_us: Gets the processor time of a job in µs, of a relay of one process.

    Raises:
        MeasurementFailed: as of `working_relay`, or processor time cannot be read here.
    """
    with working_relay(bench, options, rows, url=url, updates=updates) as relay:
        time.sleep(warm_up_seconds)
        spent = 0.0 if cpu_us is None else processor_seconds(relay.process.pid)
        begun, before = time.monotonic(), sum(relay.counts())
        while time.monotonic() - begun < seconds and sum(relay.counts()) < rows - options.claimable:
            if relay.process.poll() is not None:
                break
            time.sleep(_LOOK_SECONDS)
        counted = Counted(sum(relay.counts()) - before, time.monotonic() - begun)
        if cpu_us is not None and counted.jobs:
            cpu_us.append((processor_seconds(relay.process.pid) - spent) / counted.jobs * 1e6)
        return counted


def _all_work(counts: Sequence[int], processes: int, rows: int) -> bool:
    # A late process is not waited for until nothing is left to measure.
    return (len(counts) >= processes and all(counts)) or sum(counts) > rows / 4


def fill_and_drain(
    bench: Bench,
    workbench: Workbench,
    options: RelayOptions,
    rows: int,
    *,
    url: str | None = None,
    cpu_us: list[float] | None = None,
) -> float:
    """Fill the queue with `rows` jobs that add to accounts; return how many a second are done in a repeat.

    Args, Raises: as of `drain`.
    """
    workbench.fill(rows)
    size = bench.size
    times = {"seconds": size.seconds, "warm_up_seconds": size.warm_up_seconds}
    return drain(workbench, options, rows, **times, url=url, updates=True, cpu_us=cpu_us).rate
