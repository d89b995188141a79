"""How tests of shared batches drain."""

from collections.abc import Callable

import pytest

from outboxq import Jobs, Relay, RelayConfig
from outboxq.postgres import Database
from outboxq.relay.state import RelayReport
from tests.support.limits import many_at_once


@pytest.fixture
def drain_fifty(outboxq_database: Database) -> Callable[[Jobs], RelayReport]:
    """Runs what waits, in one slot and batches of 50."""
    config = RelayConfig(slots_per_queue=1, batch_size=50)
    return lambda jobs: Relay(outboxq_database.url, jobs, many_at_once(jobs, config), hooks=()).drain()
