"""Groups under kills, for a few seconds."""

import pytest

from outboxq.postgres import Database
from tests.groups import under_kills


@pytest.mark.large
@pytest.mark.parametrize("mode", ["transaction", "lease"])
def test_groups_keep_their_order_while_relays_are_killed(outboxq_database: Database, mode: str) -> None:
    """One at a time, in order, none lost and none doubled; `python -m tests.groups.under_kills` does it for longer."""
    report = under_kills.run(outboxq_database.url, seconds=3.0, mode=mode, seed=1, relays=2)
    assert report.problems == 0, report
    assert report.jobs > 0
    assert report.kills > 0
