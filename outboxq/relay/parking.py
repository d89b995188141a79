"""Parking: jobs of kinds that a slot cannot run are put off together, those at the head of their queue."""

import logging

import psycopg
from sqlalchemy import Connection

from outboxq.database.errors import describe_error
from outboxq.execution.aside import is_of_a_row
from outboxq.execution.claim import park_unknown

logger = logging.getLogger("outboxq.relay")


def park_at_head(connection: Connection, schema: str, queue: str, kinds: tuple[str, ...]) -> int:
    """Park the jobs at the head of a queue that are of other kinds than these; how many were parked."""
    try:
        with connection.begin():
            return park_unknown(connection, schema, queue, kinds)
    except psycopg.Error as error:
        if not is_of_a_row(error):
            raise
        logger.warning("jobs of unknown kinds in queue %r are put off one by one: %s", queue, describe_error(error))
    # Each is parked when it is claimed.
    with connection.begin():
        park_unknown(connection, schema, queue, kinds, only_marks=True)
    return 0
