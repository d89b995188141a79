"""Unlocked: entity arguments whose rows are not locked, and a handler that changes them all the same.

Such a handler may undo what another job has written since the row was read. That is said once for each kind.
"""

import logging
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from sqlalchemy.ext.mutable import MutableBase
from sqlalchemy.orm import InstanceState
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.orm.base import NO_VALUE
from sqlalchemy.sql.elements import ClauseElement

logger = logging.getLogger("outboxq.relay")


class UnlockedChanges:
    """Says once that the handler of one kind changes rows which it has not locked."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        # Taken for good by the first that says it.
        self._said = threading.Lock()

    @property
    def is_said(self) -> bool:
        """Whether there is nothing more to look for."""
        return self._said.locked()

    def look(self, entities: Iterable[object]) -> None:
        """Say it if one of these, as they are before their flush, has a new value that no statement computes."""
        for entity in entities:
            state = instance_state(entity)
            if state.committed_state:
                names = sorted(_changed(state))
                if names and self._said.acquire(blocking=False):
                    self._say(type(entity).__name__, ", ".join(names))

    def _say(self, entity: str, attributes: str) -> None:
        fields = {"kind": self._kind, "entity": entity, "attributes": attributes}
        logger.warning(
            "a handler changes an entity whose row it has not locked: kind=%s entity=%s attributes=%s; if a new "
            "value comes from the one that was read, another job's change may be lost: annotate the argument with "
            "Locked[%s], or assign an SQL expression",
            *fields.values(),
            entity,
            extra={f"outboxq_{name}": value for name, value in fields.items()},
        )


def _changed(state: InstanceState[Any]) -> Iterator[str]:
    """The columns whose loaded value was replaced by another one, or changed in place."""
    mapper = state.manager.mapper
    # A flush that finds another version than the one that was read is a failed attempt.
    if mapper.version_id_col is not None:
        return
    for name, before in state.committed_state.items():
        value = state.dict.get(name)
        if name not in mapper.column_attrs or isinstance(value, ClauseElement) or hasattr(value, "__clause_element__"):
            continue
        if before is NO_VALUE:
            # Changed in place, or never loaded and so never read.
            is_changed = isinstance(value, MutableBase | dict | list)
        else:
            # As a flush compares them.
            is_changed = mapper.column_attrs[name].columns[0].type.compare_values(value, before) is not True
        if is_changed:
            yield name
