"""Giving an installation another id: a copy of a database that talks to the same services needs keys of its own.

The provider keys of calls are made of the id, so two databases with one id give the same key to different calls, and a
service that honours keys answers one of them with the result of the other.
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
    """An installation that got another id, and what became of the calls that were not settled.

    `doubted`: they may have been applied, and are `unknown` now. `forgotten`: they were certainly not applied, and are
    called with a key of the new id. `unknown`: all effects that are unknown now, earlier ones included.
    """

    id: UUID
    former_id: UUID
    doubted: int
    forgotten: int
    unknown: int


def renew_installation(connection: Connection) -> NewInstallation:
    """Give the installation another id, in the caller's transaction: no call is made with a key of the former one.

    Processes read the id once and go on with it: all must be stopped before, and started again. Relays in transaction
    mode, and other processes between two calls, are not seen.

    Raises:
        InstallationInUse: a relay in lease mode is alive, or a call is under way.
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
