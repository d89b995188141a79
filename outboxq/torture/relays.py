"""The relay processes of a run; each that ends is replaced."""

import signal
import time

from outboxq.config import RelayConfig
from outboxq.testing.relay_process import RelayProcess
from outboxq.torture import Mode
from outboxq.torture.app import EXIT_CODE

LEASE_SECONDS = 2.0
MAX_CRASHES = 10
# A relay of each size: alone, in small batches, in large ones.
BATCH_SIZES = (1, 5, 20)
SLOTS_PER_QUEUE = 2

_TARGETS: dict[Mode, str] = {
    "transaction": "outboxq.torture.app:jobs",
    "lease": "outboxq.torture.app:leased",
    "mixed": "outboxq.torture.app:mixed",
}


class Relays:
    """As many relay processes as the run has, some of them stopped for a while."""

    def __init__(self, url: str, mode: Mode, number: int) -> None:
        self.started = 0
        self.problems: list[str] = []
        self._url = url
        self._target = _TARGETS[mode]
        self._running = [self._start(position) for position in range(number)]
        self._paused: dict[int, float] = {}

    def names(self) -> set[str]:
        """The running ones, by the names of their connections."""
        return {relay.name for relay in self._running if relay.returncode is None}

    def kill(self, fraction: float) -> None:
        """Kill one of them with SIGKILL."""
        self._running[int(fraction * len(self._running))].kill()

    def pause(self, fraction: float, seconds: float) -> None:
        """Stop one with SIGSTOP; `tend` wakes it after `seconds`."""
        position = int(fraction * len(self._running))
        self._running[position].pause()
        self._paused[position] = time.monotonic() + seconds

    def tend(self) -> None:
        """Wake those that have slept long enough, and replace those that have ended."""
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
        """Let all finish in order."""
        for relay in self._running:
            code = relay.stop(30)
            if code != 0:
                self.problems.append(f"a relay that was told to stop ended with {code}: {relay.log[-500:]}")

    def close(self) -> None:
        """End all processes."""
        for relay in self._running:
            relay.close()

    def _start(self, position: int) -> RelayProcess:
        self.started += 1
        config = RelayConfig(
            batch_size=BATCH_SIZES[position % len(BATCH_SIZES)],
            slots_per_queue=SLOTS_PER_QUEUE,
            poll_seconds=0.5,
            lease_seconds=LEASE_SECONDS,
            max_crashes=MAX_CRASHES,
        )
        return RelayProcess(self._target, self._url, config)
