"""Queues, for operators to list, pause and resume.

Jobs can be added to a paused queue, but relays do not claim from it. Jobs that run already go on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from outboxq.database.driver import run_script
from outboxq.names import check_name
from outboxq.statements import queues as statements
from outboxq.statements import wake
from outboxq.tables import mapped_schema


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue, and since when it is paused."""

    queue: str
    paused_at: datetime | None


def list_queues(connection: Connection) -> list[Queue]:
    """Every queue that has a setting, a job or a dead letter, by name."""
    return [Queue(row.queue, row.paused_at) for row in connection.execute(statements.known_queues())]


def pause(connection: Connection, names: Sequence[str]) -> tuple[str, ...]:
    """Keep relays from claiming from these queues, whether anything waits in them or not.

    Returns:
        Those that were not paused before.

    Raises:
        ArgumentError: a name that no queue can have.
    """
    changed = connection.execute(statements.pause(_checked(names))).scalars()
    return tuple(sorted(changed))


def resume(connection: Connection, names: Sequence[str]) -> tuple[str, ...]:
    """Let relays claim from these queues again, and wake those that sleep, when the transaction commits.

    Returns:
        Those that were paused.

    Raises:
        ArgumentError: a name that no queue can have.
    """
    changed = tuple(sorted(connection.execute(statements.resume(_checked(names))).scalars()))
    if changed:
        run_script(connection, "; ".join(wake.notify(mapped_schema(connection), name) for name in changed))
    return changed


def _checked(names: Sequence[str]) -> list[str]:
    # Sorted: two operators who change several queues lock them in the same order.
    return sorted({check_name("queue", name) for name in names})
