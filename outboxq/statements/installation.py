"""The installation's id, from which idempotency keys for other services are made, and the change to a new id.

A copy of a database needs a new id, so that its calls of other services do not have the keys of the original's calls.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Executable, Select, and_, delete, literal_column, or_, select, update

from outboxq.statements.builtin import count, pg
from outboxq.tables import deployment, effect, relay

_now = pg.clock_timestamp
# The condition of the index effect_open.
_OPEN = (effect.c.expires_at.is_(None), effect.c.status != literal_column("'unknown'"))


def lock_installation() -> Select[Any]:
    """Return SQL that locks and selects the present id: one row.

    A second change of the id waits for the first at this lock.
    """
    return select(deployment.c.id).with_for_update()


def select_use() -> Executable:
    """Count the living relays in lease mode, and the calls in progress, as one row.

    If there are any, the installation's id must not change. Index: effect_open; no locks.
    """
    alive = select(count()).select_from(relay).where(relay.c.alive_until > _now()).scalar_subquery()
    under_way = (
        select(count())
        .select_from(effect)
        .where(*_OPEN, effect.c.status == "started", effect.c.locked_until > _now())
        .scalar_subquery()
    )
    return select(alive.label("relays"), under_way.label("calls"))


def give_new_id() -> Executable:
    """Return SQL that replaces the installation's id by a random one: one row, the new id."""
    return update(deployment).values(id=pg.gen_random_uuid()).returning(deployment.c.id)


def doubt_open(reason: str) -> Executable:
    """Return SQL that gives the status `unknown` to effects whose call may have been applied, with `reason` as error.

    It is for a change of the installation's id. A repeated call would have a key made from the new id, and the other
    service would take it for another call. Index: effect_open. Locks: the rows. A caller that was suspended and resumes
    later can neither record its call nor extend its lock.
    """
    in_doubt = or_(effect.c.status == "started", and_(effect.c.status == "retryable", effect.c.in_doubt))
    return (
        update(effect)
        .where(*_OPEN, in_doubt)
        .values(
            status="unknown",
            in_doubt=False,
            lock_token=pg.gen_random_uuid(),
            locked_until=_now(),
            changed_at=_now(),
            error=reason,
        )
    )


def forget_unapplied(stretch: Sequence[ColumnElement[bool]]) -> Executable:
    """Return SQL that deletes the effects that are to be called again and whose earlier calls were surely not applied.

    It is for a change of the installation's id: an effect's row contains a key made from the former id, and without its
    row the next call gets a key made from the new id. `stretch`: conditions from `stretches`, which limit the statement
    to one part of the table `effect`. Locks: the rows.
    """
    return delete(effect).where(effect.c.status == "retryable", ~effect.c.in_doubt, *stretch)
