"""The last suspects: a relay that drains queries them, and waits for the lease that they run under."""

from dataclasses import dataclass

from sqlalchemy import Connection

from outboxq.database.driver import pause, run_script
from outboxq.relay.state import RelayState
from outboxq.statements.lease import look_around

# The most waits of a slot for the lease, and the time of each.
_WAITS, _WAIT_SECONDS = 500, 0.02


@dataclass
class LastSuspects:
    """The suspects that may be left when nothing else waits in the queues of one slot."""

    state: RelayState
    queues: tuple[str, ...]
    _waits: int = 0

    def remain(self, connection: Connection) -> bool | None:
        """Query the suspects; return True if the slot may claim some, None if it has waited a moment for the lease."""
        with connection.begin():
            # In all queues of the relay: the result replaces what all of its slots know.
            rows = run_script(connection, look_around(self.state.config.schema, self.state.lease.queues))
        seen, quarantine, lease = self.state.flow.record(rows), self.state.quarantine, self.state.lease
        quarantine.queues |= seen.suspects
        quarantine.groups |= seen.group_suspects
        if not quarantine.known_in(self.queues):
            return False
        if lease.want():
            return True
        self._waits += 1
        pause(connection, _WAIT_SECONDS)
        return None if self._waits < _WAITS else False
