"""Owners of schedules: the registry whose code declares them, or operators.

When relays of a registry start, they store the schedules that its code declares, and disable those that it declared
earlier and no longer does: a disabled schedule is paused until its owner's code declares it again.
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
    """A schedule that an application's code declared earlier, and no longer declares, as `find_gone` returns it.

    `owner`: the name of the registry that declared it; None if an older version of outboxq stored it, without an owner.
    """

    name: str
    kind: str
    queue: str
    owner: str | None


def declare(connection: Executor, schedules: Sequence[NewSchedule], *, with_owners: bool = True) -> None:
    """Store the schedules that an application's code declares, and enable those of them that were disabled.

    A schedule is disabled, so that it adds no jobs, when its owner's code no longer declares it. Many relays may call
    this at once. Schedules that operators have paused stay paused.

    Args:
        with_owners: True if the table `schedule` has the column `owner`, which older tables lack.

    Raises:
        ScheduleOwned: another registry's code declares a schedule of the same name.
    """
    if not schedules:
        return
    now = clock_of(connection)
    # Sorted: relays that start at the same time lock the rows in the same order.
    wanted = {new.name: new for new in sorted(schedules, key=attrgetter("name"))}
    rows = [new.as_row(now, declared=True) | ({"owner": new.owner} if with_owners else {}) for new in wanted.values()]
    connection.execute(statements.put(rows, keep_declared=False))
    if with_owners:
        _refuse_those_of_others(connection, wanted)


def _refuse_those_of_others(connection: Executor, wanted: Mapping[str, NewSchedule]) -> None:
    """Raise an error if one of these schedules belongs to another registry, so that `declare` has not changed it.

    Raises:
        ScheduleOwned: the message names the schedules of one such registry.
    """
    claims: dict[tuple[str, str], list[str]] = {}
    for row in connection.execute(statements.select_owners(wanted)):
        claimant = wanted[row.name].owner
        if claimant is not None and row.owner != claimant:
            claims.setdefault((row.owner, claimant), []).append(row.name)
    for (owner, claimant), names in sorted(claims.items()):
        raise ScheduleOwned(sorted(names), owner, claimant)


def find_gone(connection: Executor, schedules: Sequence[NewSchedule], owners: Collection[str]) -> tuple[Gone, ...]:
    """Return the schedules that code declared earlier and that are not among `schedules`, for a relay to disable.

    Paused schedules are left out, and schedules whose owner is known and is not one of `owners`.

    Args:
        owners: The names of registries.
    """
    wanted = {new.name for new in schedules}
    found = connection.execute(statements.select_declared(owners))
    return tuple(sorted((Gone(*row) for row in found if row.name not in wanted), key=attrgetter("name")))


def disable(connection: Executor, gone: Gone) -> bool:
    """Disable a schedule: relays add none of its jobs until its owner's code declares it again.

    Returns False if another call had disabled it already, if an operator has paused it, or if its owner has changed.
    """
    assert gone.owner is not None
    return connection.execute(statements.disable(gone.name, gone.owner)).one_or_none() is not None


def adopt(connection: Executor, names: Sequence[str], owner: str | None = None) -> tuple[str, ...]:
    """Make the registry `owner` the owner of these schedules, or operators if `owner` is None.

    Use it if a registry was renamed, or a schedule has moved to another one.

    Returns:
        The names of the schedules whose owner has changed.

    Raises:
        SchemaError: the tables are older than the migration step that adds owners.
    """
    if owner is not None:
        check_key("name of the registry", owner, MAX_SCOPE_BYTES)
    with missing_tables_explained():
        return tuple(sorted(connection.execute(statements.adopt(sorted_names(names), owner)).scalars()))
