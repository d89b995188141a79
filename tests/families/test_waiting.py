"""Producers of a key wait for no handler of it."""

import pytest

from outboxq.postgres import Database
from tests.families.waiting import MODES, SORTS, slowest_add


@pytest.mark.first_and_last
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sort", SORTS)
def test_adds_of_a_key_wait_for_no_handler_of_it(outboxq_database: Database, sort: str, mode: str) -> None:
    """The handler works until they are all committed: one that waited for it would meet its own timeout first."""
    slowest_add(sort, mode, outboxq_database.url, seconds=300, patience_seconds=10)
