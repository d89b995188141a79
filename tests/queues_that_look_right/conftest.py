"""The page's table, in a database of the test's own."""

from collections.abc import Iterator

import pytest

from outboxq.postgres import Database
from tests.queues_that_look_right.scene import Crew
from tests.support.urls import libpq_url


@pytest.fixture
def crew(outboxq_database: Database) -> Iterator[Crew]:
    """Workers on the page's table."""
    crew = Crew(libpq_url(outboxq_database.url))
    yield crew
    crew.looker.close()
