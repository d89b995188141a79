"""A relay inside a process of the application's own, which counts the objects that Python's collector knows.

python -m tests.soak.embedded FILE    with the database in OUTBOXQ_DATABASE_URL; ends with its standard input
"""

import gc
import logging
import os
import sys
import threading
from pathlib import Path

from outboxq import Relay, RelayConfig, config
from outboxq.relay.signals import stop_when_parent_dies
from tests.soak.app import jobs

COUNT_SECONDS = 5.0
MAX_CRASHES = 10
LEASE_SECONDS = 2.0


def relay_config() -> RelayConfig:
    """One slot a queue."""
    return RelayConfig(
        slots_per_queue=1,
        batch_size=10,
        poll_seconds=0.5,
        lease_seconds=LEASE_SECONDS,
        effect_lease_seconds=LEASE_SECONDS,
        max_crashes=MAX_CRASHES,
        prune_seconds=5.0,
    )


def main() -> None:
    """Run until SIGTERM or the parent's death."""
    logging.basicConfig(level=logging.ERROR)
    relay = Relay(config.database_url(), jobs, relay_config())
    stop_when_parent_dies(sys.stdin.fileno(), relay.stop)
    is_over = threading.Event()
    counter = threading.Thread(target=_count, args=(Path(sys.argv[1]), is_over))
    counter.start()
    try:
        relay.run()
    finally:
        is_over.set()
        counter.join()


def _count(path: Path, is_over: threading.Event) -> None:
    written = path.with_suffix(".new")
    while not is_over.wait(COUNT_SECONDS):
        # What only waits for the collector is no leak.
        gc.collect()
        written.write_text(str(len(gc.get_objects())))
        os.replace(written, path)


if __name__ == "__main__":
    main()
