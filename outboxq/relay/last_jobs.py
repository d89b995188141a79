"""The last jobs of a slot that drains: suspects, which wait for the lease, and the jobs of queues that are held."""

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
    """The jobs that may be left when a round of one slot's queues has found none."""

    state: RelayState
    queues: tuple[str, ...]
    _waits: int = 0

    def work_off(self, connection: Connection, work_once: Callable[[], bool], began_at: float) -> bool:
        """Make another round if suspects are left, or wait a moment for what is left; False if nothing is.

        Args:
            began_at: The time (monotonic) at which that round began. A queue that was held meanwhile is not in it.
        """
        with connection.begin():
            # In all queues of the relay: the result replaces what all of its slots know.
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
