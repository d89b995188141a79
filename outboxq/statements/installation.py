"""The installation's id, from which the keys for other services are made, and its replacement."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Executable, Select, and_, delete, literal_column, or_, select, update

from outboxq.statements.builtin import count, pg
from outboxq.tables import deployment, effect, relay

_now = pg.clock_timestamp
# The condition of the index effect_open.
_OPEN = (effect.c.expires_at.is_(None), effect.c.status != literal_column("'unknown'"))


def lock_installation() -> Select[Any]:
    """The present id. One row. Locks: that row, so that a second change waits for the first."""
    return select(deployment.c.id).with_for_update()


def select_use() -> Executable:
    """The number of relays alive, and of calls under way; one row. Index: effect_open; no locks."""
    alive = select(count()).select_from(relay).where(relay.c.alive_until > _now()).scalar_subquery()
    under_way = (
        select(count())
        .select_from(effect)
        .where(*_OPEN, effect.c.status == "started", effect.c.locked_until > _now())
        .scalar_subquery()
    )
    return select(alive.label("relays"), under_way.label("calls"))


def give_new_id() -> Executable:
    """Replace the id; one row with the new one."""
    return update(deployment).values(id=pg.gen_random_uuid()).returning(deployment.c.id)


def doubt_open(reason: str) -> Executable:
    """Make effects in doubt unknown, so that none is called with a key of the former id. Index: effect_open.

    Locks: the rows. A caller that hung and wakes later can neither record its call nor extend its lock.
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
    """Delete effects of a stretch that were surely not applied: later calls get keys of the new id. Locks: the rows."""
    return delete(effect).where(effect.c.status == "retryable", ~effect.c.in_doubt, *stretch)
