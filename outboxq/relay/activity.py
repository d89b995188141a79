"""What a relay is at, and who it is, as it says so in the history's tables."""

import os
import socket
from collections.abc import Iterable
from itertools import islice

import msgspec

from outboxq import __version__
from outboxq.observability.flush import RelayActivity, RelayIdentity
from outboxq.relay.slot import Slot
from outboxq.relay.state import RelayState
from outboxq.statements.relays import MOST_KINDS

_RUNNING_MOST = 50
# Jobs that have run for so long are named.
_LONG_SECONDS = 1.0


def identity_of(state: RelayState, queues: tuple[str, ...], slots: int) -> RelayIdentity:
    """Who a relay is."""
    return RelayIdentity(
        id=state.lease.owner,
        host=socket.gethostname(),
        pid=os.getpid(),
        version=__version__,
        queues=queues,
        kinds=tuple(sorted(state.registry.handlers))[:MOST_KINDS],
        slots=slots,
        listens=state.listener is not None,
    )


def activity_of(state: str, slots: Iterable[Slot]) -> RelayActivity:
    """What these slots are at, as far as it can be read while they work."""
    slots = list(slots)
    busy = sum(slot.running > 0 for slot in slots)
    free = dict.fromkeys(queue for slot in slots if not slot.running for queue in slot.queues)
    running = list(islice((job for slot in slots for job in _running_on(slot)), _RUNNING_MOST))
    return RelayActivity(state, busy, tuple(free), msgspec.json.encode(running).decode())


def _running_on(slot: Slot) -> list[dict[str, object]]:
    batch = slot.batch
    seconds = None if batch is None else batch.running_seconds
    if batch is None or seconds is None or seconds < _LONG_SECONDS:
        return []
    transaction = batch.transaction
    pid = None if transaction is None else transaction.pid
    return [
        {"id": job.id, "queue": job.queue, "kind": job.kind, "attempt": job.attempt, "seconds": seconds, "pid": pid}
        for job in batch.running_jobs
    ]
