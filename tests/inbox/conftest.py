"""Transactions that accept messages, of every sort of session."""

from collections.abc import Iterator

import pytest

from outboxq.postgres import Database
from tests.support.inbox_targets import FLAVOURS, OneTarget, Target, targets


@pytest.fixture
def open_target(outboxq_database: Database) -> Iterator[OneTarget]:
    """Opens a transaction of a flavour."""
    with targets(outboxq_database.url) as opened:
        yield opened


@pytest.fixture(params=FLAVOURS)
def target(open_target: OneTarget, request: pytest.FixtureRequest) -> Target:
    """A transaction of each flavour."""
    return open_target(request.param)
