"""`python -m outboxq.testing`: a relay process for tests, which obeys the order on its standard input.

One line of JSON is its order; the end of standard input is the death of its parent. `RelayProcess` starts it.
"""

import importlib
import logging
import sys
from contextlib import AbstractContextManager, nullcontext

import msgspec

from outboxq.errors import ConfigError
from outboxq.handlers.registry import Jobs
from outboxq.relay.relay import Relay
from outboxq.relay.signals import stop_when_parent_dies
from outboxq.testing.faults import kill_process_at, on_passing, terminate_backends
from outboxq.testing.relay_process import RelayOrder


def load_target(target: str) -> Jobs:
    """Import the registry that `MODULE:ATTRIBUTE` names.

    Raises:
        ConfigError: something else stands there.
    """
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"expected MODULE:ATTRIBUTE, for example myapp.jobs:jobs, got {target!r}")
    found: object = importlib.import_module(module_name)
    for name in attribute.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, Jobs):
        raise ConfigError(f"{target} is a {type(found).__name__}, and a relay needs an outboxq.Jobs")
    return found


def main() -> None:
    """Obey the order on standard input, until SIGTERM or the parent's death."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=RelayOrder)
    logging.basicConfig(level=order.log_level, format="%(asctime)s %(levelname)s [%(process)d] %(message)s")
    relay = Relay(order.url, load_target(order.target), order.config)
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
