"""Parking: jobs of kinds that no handler of a relay knows are put off, those at the head of a queue at once."""

import logging

import psycopg
from sqlalchemy import Connection

from outboxq.database.driver import run_script
from outboxq.database.errors import describe_error
from outboxq.execution.aside import is_of_a_row
from outboxq.statements.park import park_head
from outboxq.statements.transaction import UNTIMED

logger = logging.getLogger("outboxq.relay")

PARK_LIMIT = 10_000


def park_unknown_kinds(connection: Connection, schema: str, queue: str, known_kinds: tuple[str, ...]) -> int:
    """Put off the jobs of unknown kinds at the head of a queue, in one transaction; returns how many."""
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


def park_unknown(
    connection: Connection,
    schema: str,
    queue: str,
    known_kinds: tuple[str, ...],
    limit: int = PARK_LIMIT,
    *,
    only_marks: bool = False,
) -> int:
    """Park the jobs of unknown kinds among the next jobs of a queue, ready and due; returns how many.

    Args:
        only_marks: Only clear the marks that a failed parking left in their rows.
    """
    states = ("ready", "scheduled")
    scripts = [park_head(schema, queue, state, known_kinds, limit, only_marks=only_marks) for state in states]
    return sum(parked for (parked,) in run_script(connection, UNTIMED, *scripts))
