"""Parking: makes jobs whose kind no handler of this relay knows wait for a while, so that they hold up no other jobs.

All jobs of unknown kinds at the head of a queue are parked in one transaction.
"""

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
    """Make the jobs of unknown kinds at a queue's head wait for a while (park them); return their number.

    All are parked in one transaction. If the row of one of them cannot be changed, none is parked and 0 is returned.
    Each job is then parked when it is claimed.
    """
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
    """Make jobs of unknown kinds among the next ready and due jobs of a queue wait for a while; return their number.

    Args:
        limit: The most ready jobs, and the most due jobs, that are read; jobs of known kinds count too.
        only_marks: True to park no job, and only overwrite the marks (`xmax`) that a failed parking left in the rows.
    """
    states = ("ready", "scheduled")
    scripts = [park_head(schema, queue, state, known_kinds, limit, only_marks=only_marks) for state in states]
    return sum(parked for (parked,) in run_script(connection, UNTIMED, *scripts))
