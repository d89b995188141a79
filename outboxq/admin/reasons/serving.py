"""Which relays serve a queue, as far as the database shows it."""

from collections.abc import Iterator
from dataclasses import dataclass

from outboxq.admin.reasons.looks import Looks
from outboxq.admin.reasons.reason import Reason
from outboxq.statements.doctor import work


@dataclass(frozen=True, slots=True)
class ServingRelays:
    """How many relays are to be seen: connections by their name, and leases that have not run out.

    `by_queue`: whether they are those of the queue that was asked for; else they may serve others.
    """

    connections: int
    leases: int
    by_queue: bool = False

    @property
    def are_seen(self) -> bool:
        """Whether there is any."""
        return self.connections + self.leases > 0


def relays_serving(looks: Looks, queue: str) -> ServingRelays | None:
    """The relays that may serve a queue; None if that is not known. No row says which queues a relay serves."""
    del queue
    connected = looks.row("the connections of relays", work.connected_relays())
    living = looks.row("the leases of relays", work.living_relays(looks.schema))
    if connected is None or living is None:
        return None
    return ServingRelays(connected[0], living[0])


def find_missing_relay(looks: Looks, queue: str) -> Iterator[Reason]:
    """No relay that could run jobs of the queue is connected."""
    relays = relays_serving(looks, queue)
    if relays is not None and not relays.are_seen:
        yield Reason(
            "no-relay",
            f"no relay that serves queue {queue!r} is connected to the database",
            {"queue": queue},
            "Start one: outboxq relay MODULE:ATTRIBUTE. (A relay on an engine of your own is seen when its "
            "application_name is 'outboxq relay'.)",
        )
