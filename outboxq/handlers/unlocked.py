"""Warnings about handlers that change entity arguments whose rows they have not locked.

Such a handler may overwrite a change that another job has made since the row was read. That is logged once for each
kind.
"""

import dis
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

from sqlalchemy.ext.mutable import MutableBase
from sqlalchemy.orm import InstanceState
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.orm.base import NO_VALUE
from sqlalchemy.sql.elements import ClauseElement

logger = logging.getLogger("outboxq.relay")

# Python up to 3.11 reads methods by a separate instruction.
_READS = ("LOAD_ATTR", "LOAD_METHOD")


class UnlockedChanges:
    """Logs a warning, once, that the handler of a kind changes rows that it has not locked."""

    def __init__(self, kind: str, function: Callable[..., object]) -> None:
        self._kind = kind
        self._function = function
        # The first thread that logs it takes this lock and keeps it.
        self._said = threading.Lock()

    @property
    def is_said(self) -> bool:
        """True if a change was logged already, so that no further check is needed."""
        return self._said.locked()

    def look(self, entities: Iterable[object]) -> None:
        """Check entities before their flush; log a warning if a new value may be computed from the one read."""
        for entity in entities:
            state = instance_state(entity)
            if state.committed_state:
                names = sorted(name for name in _changed(state) if name not in self._unread)
                if names and self._said.acquire(blocking=False):
                    self._say(type(entity).__name__, ", ".join(names))

    @functools.cached_property
    def _unread(self) -> frozenset[str]:
        """The names of attributes that the handler's code assigns and never reads.

        Their new values cannot derive from the old ones, so no other job's change can be lost by mistake.
        """
        read, assigned = set[str](), set[str]()
        for code in _code_of(self._function):
            for step in dis.get_instructions(code):
                if step.opname == "STORE_ATTR":
                    assigned.add(str(step.argval))
                elif step.opname in _READS:
                    read.add(str(step.argval))
        return frozenset(assigned - read)

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


def _code_of(function: Callable[..., object]) -> Iterator[CodeType]:
    """Yield the code of a function without its decorators, and of functions and classes defined within it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    pending = [code] if isinstance(code, CodeType) else []
    while pending:
        code = pending.pop()
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        yield code


def _changed(state: InstanceState[Any]) -> Iterator[str]:
    """Yield the names of columns whose loaded value was replaced or changed; none for a class with a version column."""
    mapper = state.manager.mapper
    # A flush that finds another version than the one read fails the attempt.
    if mapper.version_id_col is not None:
        return
    for name, before in state.committed_state.items():
        value = state.dict.get(name)
        if name not in mapper.column_attrs or isinstance(value, ClauseElement) or hasattr(value, "__clause_element__"):
            continue
        if before is NO_VALUE:
            # The value was changed in place, or never loaded and so never read.
            is_changed = isinstance(value, MutableBase | dict | list)
        else:
            # Compared as in a flush.
            is_changed = mapper.column_attrs[name].columns[0].type.compare_values(value, before) is not True
        if is_changed:
            yield name
