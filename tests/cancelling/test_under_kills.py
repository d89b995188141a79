"""Cancellations under kills: nothing of a cancelled job stands, and no other job is lost or done twice."""

import pytest

from outboxq.postgres import Database
from tests.cancelling.under_kills import run


@pytest.mark.large
@pytest.mark.parametrize("mode", ["transaction", "lease"])
def test_under_kills_nothing_of_a_cancelled_job_stands_and_no_other_is_lost(
    outboxq_database: Database, mode: str
) -> None:
    """`python -m tests.cancelling.under_kills`, in short."""
    report = run(outboxq_database.url, seconds=4.0, mode=mode, seed=1, relays=2)
    assert report.problems == 0, report
    assert report.added > 5
    assert report.requested > 0
    assert report.kills > 0
