"""Batches under kills, as `python -m tests.job_batches.under_kills` runs them for longer."""

import pytest

from outboxq.postgres import Database
from tests.job_batches.under_kills import run_under_kills


@pytest.mark.large
@pytest.mark.parametrize("mode", ["transaction", "lease"])
def test_every_callback_runs_once_and_behind_all_members(outboxq_database: Database, mode: str) -> None:
    """While relays are killed and their backends terminated; nothing is left open."""
    outcome = run_under_kills(outboxq_database, seconds=3, mode=mode, seed=1)
    assert outcome.is_good, outcome
    assert outcome.batches > 2
