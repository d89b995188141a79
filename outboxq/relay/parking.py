"""Parking: jobs of kinds that no handler of a relay knows are put off, those at the head of a queue at once."""

import logging

import psycopg
from sqlalchemy import Connection

from outboxq.database.errors import describe_error
from outboxq.execution.aside import is_of_a_row
from outboxq.execution.claim import park_unknown

logger = logging.getLogger("outboxq.relay")


def park_unknown_kinds(connection: Connection, schema: str, queue: str, known_kinds: tuple[str, ...]) -> int:
    """Put off the jobs at the head of a queue whose kinds are not known, in one transaction; returns how many."""
    try:
        with connection.begin():
            return park_unknown(connection, schema, queue, known_kinds)
    except psycopg.Error as error:
        if not is_of_a_row(error):
            raise
        logger.warning("jobs of unknown kinds in queue %r are put off one by one: %s", queue, describe_error(error))
    # Each is parked when it is claimed.
    with connection.begin():
        park_unknown(connection, schema, queue, known_kinds, only_marks=True)
    return 0
