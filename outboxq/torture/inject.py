"""The relay processes of a torture test, and the planned faults, done to relays, producers and the server."""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sqlalchemy import TextClause, text

from outboxq.config import RelayConfig
from outboxq.postgres import Server
from outboxq.testing.crashes import COMMIT_SCRIPT
from outboxq.testing.proxy import CommitProxy, Trap
from outboxq.testing.relay_process import RelayProcess
from outboxq.torture import Mode
from outboxq.torture.app import EXIT_CODE
from outboxq.torture.faults import Fault
from outboxq.torture.watcher import Watcher

LEASE_SECONDS = 2.0
MAX_CRASHES = 10
# A relay of each sort: with single jobs, with small batches, with large ones.
BATCH_SIZES = (1, 5, 20)

_TARGETS: dict[Mode, str] = {
    "transaction": "outboxq.torture.app:jobs",
    "lease": "outboxq.torture.app:leased",
    "mixed": "outboxq.torture.app:mixed",
    "flow": "outboxq.torture.app:flow",
    "calls": "outboxq.torture.app:calls",
    "windows": "outboxq.torture.app:windows",
}

_FAULT_SECONDS = 5.0
# The text in the producers' transactions: the name of the table of business rows.
_REQUEST = "request"

_WORKING = text(
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND backend_xid IS NOT NULL "
    "AND pid <> pg_backend_pid() ORDER BY pid"
)
_RELAY_BACKENDS = text(
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
    "AND application_name LIKE 'outboxq relay %' ORDER BY pid"
)
# Processes with leased jobs. Killed ones are still among them until their jobs are reaped.
_HOLDERS = text(
    "SELECT relay.pid, count(*) FROM outboxq.job JOIN outboxq.relay ON relay.id = job.lease_owner "
    "WHERE job.state IN ('leased', 'group_leased') GROUP BY relay.pid"
)
_TERMINATE = text("SELECT pg_terminate_backend(:pid)")


class Relays:
    """The relay processes of a torture test. A relay that has ended is replaced, and some are suspended for a while."""

    def __init__(self, url: str, mode: Mode, number: int, slots: int) -> None:
        self.started = 0
        self._slots = slots
        self.problems: list[str] = []
        self._url = url
        self._target = _TARGETS[mode]
        # Under a lease each job has a slot of its own.
        self._has_batches = mode not in ("lease", "calls", "windows")
        self._running = [self._start(position) for position in range(number)]
        self._paused: dict[int, float] = {}

    def names(self) -> set[str]:
        """Return the names of the relays that are alive, which are also the application names of their connections."""
        return {relay.name for relay in self._running if relay.returncode is None}

    def alive(self, held: Mapping[int, int], least: int) -> dict[int, int]:
        """Return the entries of `held` for relays that are alive and have at least `least` leased jobs.

        Args:
            held: The number of leased jobs by process id.
        """
        running = {relay.pid for relay in self._running if relay.returncode is None}
        return {pid: jobs for pid, jobs in held.items() if pid in running and jobs >= least}

    def kill(self, fraction: float, held: Mapping[int, int]) -> int:
        """Kill a relay with SIGKILL, one with leased jobs if there is any; return the number of its leased jobs.

        Args:
            fraction: A number from 0 to 1 that selects one of the relays.
            held: The number of leased jobs by process id.
        """
        candidates = [relay for relay in self._running if relay.pid in held] or self._running
        killed = candidates[int(fraction * len(candidates))]
        killed.kill()
        return held.get(killed.pid, 0)

    def pause(self, fraction: float, seconds: float) -> None:
        """Suspend a relay with SIGSTOP; `tend` resumes it after `seconds`.

        Args:
            fraction: A number from 0 to 1 that selects one of the relays.
        """
        position = int(fraction * len(self._running))
        self._running[position].pause()
        self._paused[position] = time.monotonic() + seconds

    def tend(self) -> None:
        """Resume relays whose time of suspension has passed, and replace those that have ended."""
        for position in [position for position, until in self._paused.items() if until <= time.monotonic()]:
            del self._paused[position]
            self._running[position].resume()
        for position, relay in enumerate(self._running):
            code = relay.returncode
            if code is None:
                continue
            if code not in (-signal.SIGKILL, EXIT_CODE):
                self.problems.append(f"a relay ended by itself with code {code}: {relay.log[-500:]}")
            self._paused.pop(position, None)
            relay.close()
            self._running[position] = self._start(position)

    def stop(self) -> None:
        """Request all relays to stop, and wait until they have finished their jobs."""
        for relay in self._running:
            code = relay.stop(30)
            if code != 0:
                self.problems.append(f"a relay that was requested to stop ended with {code}: {relay.log[-500:]}")

    def close(self) -> None:
        """End all relay processes at once."""
        for relay in self._running:
            relay.close()

    def _start(self, position: int) -> RelayProcess:
        self.started += 1
        config = RelayConfig(
            batch_size=BATCH_SIZES[position % len(BATCH_SIZES)] if self._has_batches else 1,
            slots_per_queue=self._slots,
            poll_seconds=0.5,
            lease_seconds=LEASE_SECONDS,
            max_crashes=MAX_CRASHES,
        )
        return RelayProcess(self._target, self._url, config)


@dataclass(slots=True)
class FaultInjector:
    """Carries out planned faults on relays, producers and the server.

    Attributes:
        let_ahead: Called to allow the producers some more jobs, for a fault that waits for new work.
        full: Before a relay is killed, wait up to five seconds for one with this many leased jobs; 0 for no wait.
        jobs_of_killed_relays: The number of leased jobs that relays were running when they were killed.
    """

    server: Server
    watcher: Watcher
    relays: Relays
    relay_proxy: CommitProxy
    producer_proxy: CommitProxy
    interrupted: threading.Event
    let_ahead: Callable[[], None]
    full: int
    jobs_of_killed_relays: int = field(default=0, init=False)

    def inject(self, fault: Fault) -> bool:
        """Carry out a fault; return False if nothing was found that it could disturb."""
        match fault.kind:
            case "relay-killed" | "relay-stopped":
                return self._disturb_process(fault)
            case "backend-terminated" | "backend-killed":
                return self._disturb_backend(fault)
            case "server-stopped":
                return self._stop_server(fault)
            case "all-connections-cut":
                return self.relay_proxy.cut() + self.producer_proxy.cut() > 0
            case "relay-frozen-at-commit":
                return self._freeze(fault)
            case "relay-cut-before-commit":
                return self._wait_for(self.relay_proxy.cut_before_commit(containing=COMMIT_SCRIPT))
            case "relay-cut-after-commit":
                return self._wait_for(self.relay_proxy.cut_after_commit(containing=COMMIT_SCRIPT))
            case "producer-cut-before-commit":
                return self._wait_for(self.producer_proxy.cut_before_commit(containing=_REQUEST))
            case "producer-cut-after-commit":
                return self._wait_for(self.producer_proxy.cut_after_commit(containing=_REQUEST))

    def _disturb_process(self, fault: Fault) -> bool:
        if fault.kind == "relay-killed":
            self.jobs_of_killed_relays += self.relays.kill(fault.pick, self._wait_for_holders())
        else:
            self.relays.pause(fault.pick, fault.seconds)
        return True

    def _wait_for_holders(self) -> dict[int, int]:
        """Wait until a living relay has `full` leased jobs; return such relays: `{process id: number of leased jobs}`.

        If there is no such relay within five seconds, return the numbers of all relays.
        """
        deadline = time.monotonic() + _FAULT_SECONDS
        if self.full:
            self.let_ahead()
        while True:
            rows = self.watcher.ask(lambda connection: connection.execute(_HOLDERS).tuples().all())
            held = {int(pid): int(jobs) for pid, jobs in rows}
            enough = self.relays.alive(held, self.full)
            if enough or not self.full or time.monotonic() > deadline or self.interrupted.is_set():
                return enough or held
            self.relays.tend()
            time.sleep(0.02)

    def _stop_server(self, fault: Fault) -> bool:
        self.server.stop_immediately()
        self.interrupted.wait(fault.seconds)
        self.server.start_again()
        return True

    def _wait_for(self, trap: Trap) -> bool:
        """Wait until the trap, set in a proxy, has caught a COMMIT; return False if it catches none in five seconds.

        The producers are allowed some more jobs, so that there is something to commit.
        """
        deadline = time.monotonic() + _FAULT_SECONDS
        self.let_ahead()
        while not trap.reached.wait(0.05):
            self.relays.tend()
            if time.monotonic() > deadline or self.interrupted.is_set():
                trap.release()
                return False
        return True

    def _freeze(self, fault: Fault) -> bool:
        trap = self.relay_proxy.freeze_at_commit(arrives=fault.pick < 0.5, containing=COMMIT_SCRIPT)
        if not self._wait_for(trap):
            return False
        self.interrupted.wait(fault.seconds)
        if fault.gently:
            trap.release()
        else:
            self.relay_proxy.cut()
        return True

    def _disturb_backend(self, fault: Fault) -> bool:
        """Terminate a backend that writes, or kill a relay's backend, as planned.

        Return False if there is none within five seconds.
        """
        terminate = fault.kind == "backend-terminated"
        deadline = time.monotonic() + _FAULT_SECONDS
        while time.monotonic() < deadline and not self.interrupted.is_set():
            pids = self._pids(_WORKING if terminate else _RELAY_BACKENDS)
            if pids:
                pid = pids[int(fault.pick * len(pids))]
                return self._terminate(pid) if terminate else _kill(pid)
            self.relays.tend()
            time.sleep(0.005)
        return False

    def _pids(self, query: TextClause) -> list[int]:
        return self.watcher.ask(lambda connection: [int(pid) for pid in connection.execute(query).scalars()])

    def _terminate(self, pid: int) -> bool:
        return bool(self.watcher.ask(lambda connection: connection.execute(_TERMINATE, {"pid": pid}).scalar_one()))


def _kill(pid: int) -> bool:
    """Send SIGKILL to a backend of PostgreSQL, after which the server ends all other backends and recovers.

    Return False if the backend has ended already.
    """
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
