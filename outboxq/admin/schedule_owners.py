"""Owners of schedules: the registry whose code declares them, or operators.

Relays of a registry store what it declares when they start, and disable what it declared once: such a schedule is
paused, until its owner's code declares it again.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from outboxq.admin.schedules import Executor, NewSchedule, clock_of, sorted_names
from outboxq.database.errors import missing_tables_explained
from outboxq.errors import ScheduleOwned
from outboxq.names import MAX_SCOPE_BYTES, check_key
from outboxq.statements import schedules as statements


@dataclass(frozen=True, slots=True)
class Gone:
    """A schedule that an application's code declared once, and that this code does not declare.

    `owner`: None if code of a version before declared it.
    """

    name: str
    kind: str
    queue: str
    owner: str | None


def declare(connection: Executor, schedules: Sequence[NewSchedule], *, with_owners: bool = True) -> None:
    """Make or change the schedules that an application's code declares; those that were disabled add jobs again.

    Many relays may do so at once. What operators have paused stays paused.

    Args:
        with_owners: True if the tables have a column for owners.

    Raises:
        ScheduleOwned: other code declares one of a name.
    """
    if not schedules:
        return
    now = clock_of(connection)
    # In their order: relays that start at the same time lock the rows in the same order.
    wanted = {new.name: new for new in sorted(schedules, key=attrgetter("name"))}
    rows = [new.as_row(now, declared=True) | ({"owner": new.owner} if with_owners else {}) for new in wanted.values()]
    connection.execute(statements.put(rows, keep_declared=False))
    if with_owners:
        _refuse_those_of_others(connection, wanted)


def _refuse_those_of_others(connection: Executor, wanted: Mapping[str, NewSchedule]) -> None:
    """Refuse schedules that were not changed because they belong to another registry; names the first of several.

    Raises:
        ScheduleOwned: with its name.
    """
    claims: dict[tuple[str, str], list[str]] = {}
    for row in connection.execute(statements.select_owners(wanted)):
        claimant = wanted[row.name].owner
        if claimant is not None and row.owner != claimant:
            claims.setdefault((row.owner, claimant), []).append(row.name)
    for (owner, claimant), names in sorted(claims.items()):
        raise ScheduleOwned(sorted(names), owner, claimant)


def find_gone(connection: Executor, schedules: Sequence[NewSchedule], owners: Collection[str]) -> tuple[Gone, ...]:
    """The schedules of these owners, or of code whose name is not known, that are not among `schedules`."""
    wanted = {new.name for new in schedules}
    found = connection.execute(statements.select_declared(owners))
    return tuple(sorted((Gone(*row) for row in found if row.name not in wanted), key=attrgetter("name")))


def disable(connection: Executor, gone: Gone) -> bool:
    """Keep a schedule from being fired until code declares it again; True if it was disabled by this call."""
    assert gone.owner is not None
    return connection.execute(statements.disable(gone.name, gone.owner)).one_or_none() is not None


def adopt(connection: Executor, names: Sequence[str], owner: str | None = None) -> tuple[str, ...]:
    """Give schedules to the registry of a name, whose code is to declare them, or to operators; those that changed.

    Raises:
        SchemaError: the tables are older than the step that brings owners.
    """
    if owner is not None:
        check_key("name of the registry", owner, MAX_SCOPE_BYTES)
    with missing_tables_explained():
        return tuple(sorted(connection.execute(statements.adopt(sorted_names(names), owner)).scalars()))
