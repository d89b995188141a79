"""`python -m outboxq.testing`: a relay process for tests, which `RelayProcess` starts.

The first line of its standard input is JSON, a `RelayOrder` with all that it needs. The end of its standard input means
that its parent process has ended, and stops the relay.
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
    """Read the order from standard input, and run the relay that it describes until SIGTERM or the parent's death."""
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
