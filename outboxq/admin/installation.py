"""Gives a database another installation id, which a copy of a database needs if it calls the same services.

The idempotency keys of calls are made of this id. Two databases with the same id would send one key for different
calls, and the service would answer one call with the result of the other.
"""

from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection

from outboxq.errors import InstallationInUse
from outboxq.statements import installation as statements
from outboxq.statements.stats import count_unknown_effects
from outboxq.statements.stretches import stretches
from outboxq.tables import effect

_OPEN = "it was open when the installation got a new id; its provider key is the former installation's"


@dataclass(frozen=True, slots=True)
class NewInstallation:
    """The new id of an installation, its former id, and the numbers of its unsettled calls.

    `doubted`: the number of calls that may have been applied, and were made `unknown`. `forgotten`: the number of calls
    that were certainly not applied, and whose records were deleted, so that the next caller uses a new key. `unknown`:
    the number of all effects that are `unknown` now.
    """

    id: UUID
    former_id: UUID
    doubted: int
    forgotten: int
    unknown: int


def renew_installation(connection: Connection) -> NewInstallation:
    """Give the database another installation id, in the caller's transaction: later calls use keys made of the new id.

    Stop all processes before this call, and start them again afterwards, because each reads the id only once. The call
    does not notice a running relay in transaction mode, or another process that makes no call at this moment.

    Raises:
        InstallationInUse: a relay in lease mode is alive, or a process is making a call.
    """
    former_id: UUID = connection.execute(statements.lock_installation()).scalar_one()
    used = connection.execute(statements.select_use()).one()
    if used.relays or used.calls:
        raise InstallationInUse(used.relays, used.calls)
    doubted = connection.execute(statements.doubt_open(_OPEN)).rowcount
    expiry = effect.c.expires_at
    forgotten = connection.execute(statements.forget_unapplied([expiry.is_(None)])).rowcount
    for stretch in stretches(connection, expiry, expiry.is_not(None)):
        forgotten += connection.execute(statements.forget_unapplied(stretch)).rowcount
    return NewInstallation(
        id=connection.execute(statements.give_new_id()).scalar_one(),
        former_id=former_id,
        doubted=doubted,
        forgotten=forgotten,
        unknown=connection.execute(count_unknown_effects()).scalar_one(),
    )
