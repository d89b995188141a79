"""What the steps of one handler's run work on: its session, the rows that it holds, and the log of what it saw."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, TypeAlias

from sqlalchemy import ColumnElement, FromClause, inspect
from sqlalchemy.orm import Session
from sqlalchemy.sql import ClauseElement

from tests.fuzz.models import CLASSES, VALUE_CLASS
from tests.fuzz.program import Task
from tests.fuzz.schema import MODULUS

StepFunction: TypeAlias = Callable[..., object]
STEPS: dict[str, StepFunction] = {}


@dataclass
class Frame:
    """One run of one handler. Its session is named when a step first needs it, as handlers do."""

    name_session: Callable[[], Session]
    defer: Callable[..., None]
    add_task: Callable[[Task, int], None]
    held: list[Any]
    # Outlives the handler, as a module's own dictionary does.
    kept: dict[str, Any]
    log: list[object] = field(default_factory=list)

    @property
    def session(self) -> Session:
        return self.name_session()

    def hold(self, *entities: object) -> object:
        """Keep rows for the steps that follow; what they show as they came."""
        self.held += [entity for entity in entities if entity is not None]
        return [seen(entity) for entity in entities]

    def at(self, place: int) -> Any:
        """The row held at a place, counted round; None if there is none."""
        return self.held[place % len(self.held)] if self.held else None


def step_function(function: StepFunction) -> StepFunction:
    """Register a step: it is called with the frame, and what it returns is what the handler saw."""
    STEPS[function.__name__] = function
    return function


def on_held(function: StepFunction) -> StepFunction:
    """A step on a row that is held; without one it does nothing."""

    def run(frame: Frame, place: int, *args: object) -> object:
        entity = frame.at(place)
        return "nothing held" if entity is None else function(frame, entity, *args)

    run.__name__ = function.__name__
    return step_function(run)


def mix(value: int, n: int) -> int:
    """Another value, that depends on the order in which it is done with different `n`."""
    return (value * 2 + n) % MODULUS


def mixed(column: Any, n: Any) -> ColumnElement[int]:
    """The same in SQL."""
    return (column * 2 + n) % MODULUS


def number_of(name: str, key: int) -> int:
    """The `id` of a row of a class."""
    return key + 10 if name == "Cat" else key


def key_of(name: str, key: int) -> object:
    """The primary key of a row of a class."""
    return (key, "l") if name == "Pair" else number_of(name, key)


def value_table(name: str) -> FromClause:
    """The table that holds the values of a class."""
    return VALUE_CLASS[name].__table__


def new_row(name: str, key: int, **values: object) -> Any:
    """A new object of a class, with its key."""
    return CLASSES[name](id=number_of(name, key), **({"side": "l"} if name == "Pair" else {}), **values)


def shown(value: object) -> object:
    """A value as it can be kept and compared."""
    if isinstance(value, ClauseElement):
        return "an expression"
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, Mapping):
        return copy.deepcopy(dict(value))
    return value


def seen(entity: object) -> object:
    """A row as it lies in its session, without loading anything."""
    if entity is None:
        return None
    state = inspect(entity)
    assert state is not None
    columns = {attribute.key for attribute in state.mapper.column_attrs} | {"loaded_with"}
    loaded = {name: shown(value) for name, value in sorted(state.dict.items()) if name in columns}
    standing = [name for name in ("transient", "pending", "deleted", "detached") if getattr(state, name)]
    return [type(entity).__name__, loaded, *standing]
