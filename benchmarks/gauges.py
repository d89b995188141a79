"""Gauges of a relay process: connections of the server, memory, processor time."""

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench import MeasurementFailed, Workbench

_LOOK_SECONDS = 0.05
_CONNECTIONS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend' "
    "AND application_name LIKE 'outboxq%'"
)
# Of /proc/PID/stat, counted from the state, which follows the name in its brackets.
_USER_TICKS, _SYSTEM_TICKS = 11, 12


@dataclass(frozen=True, slots=True)
class Held:
    """The most connections and memory at a time, and the processor time, in percent of one processor."""

    connections: int
    megabytes: float
    cpu_percent: float

    def __str__(self) -> str:
        return f"{self.connections} connections, {self.megabytes:.0f} MB, {self.cpu_percent:.0f} % of a processor"


class Watch:
    """Samples of a relay in a thread, until it is stopped."""

    def __init__(self, workbench: Workbench, pid: int) -> None:
        self._workbench, self._pid = workbench, pid
        self.most_connections, self._megabytes = 0, 0.0
        self._stopping = threading.Event()
        self._begun, self._ticks = time.monotonic(), processor_seconds(pid)
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> Held:
        """End the thread; return the highest values that it saw."""
        percent = 100 * (processor_seconds(self._pid) - self._ticks) / (time.monotonic() - self._begun)
        self._stopping.set()
        self._thread.join()
        if not self.most_connections:
            raise MeasurementFailed(f"no connection of the relay (process {self._pid}) was seen")
        return Held(self.most_connections, self._megabytes, percent)

    def _look(self) -> None:
        with self._workbench.connected() as connection:
            while not self._stopping.wait(_LOOK_SECONDS):
                row = connection.execute(_CONNECTIONS).fetchone()
                self.most_connections = max(self.most_connections, 0 if row is None else int(row[0]))
                self._megabytes = max(self._megabytes, resident_megabytes(self._pid))


@contextmanager
def watched(workbench: Workbench, pid: int, into: list[Held]) -> Iterator[None]:
    """Watch for as long as the block runs, and add the result to `into`."""
    watch = Watch(workbench, pid)
    try:
        yield
    finally:
        into.append(watch.stop())


def resident_megabytes(pid: int) -> float:
    """Resident memory, from Linux (VmRSS), elsewhere from `ps`."""
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        found = re.search(r"^VmRSS:\s+(\d+) kB", status.read_text(), re.MULTILINE)
    else:
        command = ["ps", "-o", "rss=", "-p", str(pid)]
        found = re.search(r"(\d+)", subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    if found is None:
        raise MeasurementFailed(f"how much memory process {pid} of {os.uname().sysname} has is not known")
    return int(found.group(1)) * 1024 / 1e6


def processor_seconds(pid: int) -> float:
    """User and system time since the start of a process, from Linux.

    Raises:
        MeasurementFailed: there is no such file here.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as error:
        raise MeasurementFailed(f"the processor time of process {pid} cannot be read: {error}") from error
    return (int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / os.sysconf("SC_CLK_TCK")
