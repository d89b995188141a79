"""The last suspects: a relay that runs until nothing waits looks for them, and waits for the lease they run under."""

from dataclasses import dataclass

from sqlalchemy import Connection

from outboxq.database.driver import pause, run_script
from outboxq.relay.state import RelayState
from outboxq.statements.lease import look_around

# How often at most, and how long each time, a slot waits for the lease.
_WAITS, _WAIT_SECONDS = 500, 0.02


@dataclass
class LastSuspects:
    """The suspects that may be left when nothing else waits in the queues of one slot."""

    state: RelayState
    queues: tuple[str, ...]
    _waits: int = 0

    def remain(self, connection: Connection) -> bool:
        """Look whether there are any; returns once the slot may claim them, or whether the lease cannot be had."""
        with connection.begin():
            # In all queues of the relay: what is seen stands for all of its slots.
            rows = run_script(connection, look_around(self.state.config.schema, self.state.lease.queues))
        seen, quarantine, lease = self.state.flow.record(rows), self.state.quarantine, self.state.lease
        quarantine.queues |= seen.suspects
        quarantine.groups |= seen.group_suspects
        if not quarantine.known_in(self.queues):
            return False
        while not lease.want():
            if self._waits >= _WAITS or self.state.stopping.is_set():
                return False
            self._waits += 1
            pause(connection, _WAIT_SECONDS)
        return True
