"""The search for the last jobs of a slot before it ends, if its relay drains (works until no job is left, and ends).

Two sorts of jobs may be left: suspects (jobs that ran when their relay died), which run only under this relay's lease,
and jobs of held queues, from which no slot claims for a moment because of a limit or rate.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection

from outboxq.database.driver import pause, run_script
from outboxq.relay.state import RelayState
from outboxq.statements.lease import look_around

# The most waits of a slot for the lease, and the time of each.
_WAITS, _WAIT_SECONDS = 500, 0.02


@dataclass
class LastJobs:
    """Finds the jobs that may be left after a draining slot has claimed from all of its queues and found none."""

    state: RelayState
    queues: tuple[str, ...]
    _waits: int = 0

    def work_off(self, connection: Connection, work_once: Callable[[], bool], began_at: float) -> bool:
        """Run a suspect that is left, or wait until a queue may be claimed from again.

        Returns True if the slot is to claim from all of its queues once more; False if it may end.

        Args:
            work_once: Claims and runs jobs of the slot's queues once; returns False if it found none.
            began_at: The time (monotonic) at which the slot last began to claim from all of its queues. It may have
                left out queues that were held then and are free now.
        """
        with connection.begin():
            # For all queues of the relay, because the result replaces the knowledge of all its slots.
            rows = run_script(connection, look_around(self.state.config.schema, self.state.lease.queues))
        seen, quarantine = self.state.flow.record(rows), self.state.quarantine
        quarantine.queues |= seen.suspects
        quarantine.groups |= seen.group_suspects
        if quarantine.known_in(self.queues):
            if self.state.lease.want():
                if work_once():
                    return True
            else:
                self._waits += 1
                pause(connection, _WAIT_SECONDS)
                if self._waits < _WAITS:
                    return True
        held_seconds = self.state.poller.held_seconds(self.queues)
        if held_seconds is not None:
            pause(connection, held_seconds)
            return True
        given_back_at = self.state.admission.given_back_at
        return any(given_back_at.get(name, 0.0) >= began_at for name in self.queues)
