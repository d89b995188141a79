"""`python -m outboxq.testing`: a relay process for tests, which obeys the order on its standard input.

One line of JSON is its order; the end of standard input is the death of its parent. `RelayProcess` starts it.
"""

import logging
import sys
from contextlib import AbstractContextManager, nullcontext

import msgspec

from outboxq.handlers.loading import load_jobs
from outboxq.relay.relay import Relay
from outboxq.relay.signals import stop_when_parent_dies
from outboxq.testing.faults import kill_process_at, on_passing, terminate_backends
from outboxq.testing.relay_process import RelayOrder


def main() -> None:
    """Obey the order on standard input, until SIGTERM or the parent's death."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=RelayOrder)
    logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname)s [%(process)d] %(message)s")
    relay = Relay(order.url, load_jobs(order.target), order.config)
    stop_when_parent_dies(sys.stdin.fileno(), relay.stop)
    with _fault(order):
        relay.run()


def _fault(order: RelayOrder) -> AbstractContextManager[None]:
    if order.kill_at is not None:
        return kill_process_at(order.kill_at, order.passing)
    if order.terminate_at is not None:
        return on_passing(order.terminate_at, order.passing, lambda: terminate_backends(order.url))
    return nullcontext()


main()
