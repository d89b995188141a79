"""Entities: mapped objects as arguments, which are stored as their primary keys."""

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Final, TypeAlias, TypeVar, Union, cast
from uuid import UUID

import msgspec
from sqlalchemy import ColumnElement
from sqlalchemy import inspect as sqlalchemy_inspect
from sqlalchemy.dialects.postgresql.base import PGDialect
from sqlalchemy.orm import InstanceState, Mapped, Mapper
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.types import TypeEngine

from outboxq.errors import ArgumentError

T = TypeVar("T")
_READ_FROM_JSON = frozenset((bool, int, float, str, bytes, UUID, Decimal, datetime, date, time, timedelta))
_DIALECT = PGDialect()  # type: ignore[no-untyped-call]  # SQLAlchemy has not typed it


class _Lock:
    def __repr__(self) -> str:
        return "LOCKED"


LOCKED: Final = _Lock()
Locked: TypeAlias = Annotated[T, LOCKED]
"""An entity argument whose row is locked before the handler runs: `account: Locked[Account]`.

It is loaded with FOR NO KEY UPDATE, so that `account.balance += cents` loses no other job's change. The rows of a batch
are locked together in the order of their primary keys, so that no two batches can deadlock over them.
"""


@dataclass(frozen=True, slots=True)
class EntityKey:
    """The stored primary key of an entity argument, to be loaded in the handler's session, and locked if `locked`.

    Attributes:
        identity: The primary key, a tuple also of one column.
    """

    entity: type[object]
    identity: tuple[object, ...]
    optional: bool
    locked: bool = False


def entity_mapper(annotation: object) -> Mapper[object] | None:
    """The mapper of a mapped class, else None."""
    if not isinstance(annotation, type):
        return None
    found: object = sqlalchemy_inspect(annotation, raiseerr=False)
    return found if isinstance(found, Mapper) else None


def entity_state(value: object) -> InstanceState[object] | None:
    """The ORM state of a mapped object, else None."""
    found: object = sqlalchemy_inspect(value, raiseerr=False)
    return found if isinstance(found, InstanceState) else None


class EntityArgument(msgspec.Struct, frozen=True, eq=False):
    """An entity among the arguments of a job, kept until the flush that writes the job: its primary key then counts.

    Attributes:
        key: Its identity key at the call, which the arguments have; None if it had none.
        optional: The handler receives None if the row is gone.
    """

    entity: object
    key: tuple[Any, ...] | None
    optional: bool

    def current(self) -> "EntityArgument":
        """The same entity with the identity key that it has now."""
        key = instance_state(self.entity).key
        return self if key == self.key else EntityArgument(self.entity, key, self.optional)

    def is_pending(self) -> bool:
        """Return True if the primary key is known only after a flush."""
        return instance_state(self.entity).key is None

    def is_deleted(self) -> bool:
        """Return True if a flush has deleted the entity, and no rollback has brought it back."""
        return instance_state(self.entity).was_deleted


def entities_of(values: Mapping[str, object], optional: Mapping[str, bool]) -> dict[str, EntityArgument]:
    """The entities among arguments by their names; `optional` has the names whose annotation allows None."""
    states = {name: state for name, value in values.items() if (state := entity_state(value)) is not None}
    return {name: EntityArgument(values[name], state.key, optional.get(name, False)) for name, state in states.items()}


def primary_key_of(entity: object) -> object:
    """The primary key as stored in arguments: one value, or a list of several.

    Raises:
        ArgumentError: the entity was never flushed.
    """
    state = entity_state(entity)
    if state is None or state.key is None:
        raise ArgumentError(f"this {type(entity).__name__} has no primary key yet: flush its session first")
    values = tuple(state.key[1])
    return values[0] if len(values) == 1 else list(values)


def entity_of(annotation: object) -> tuple[type[object] | None, bool]:
    """The mapped class of `Account` or `Account | None`, and whether None is allowed."""
    if typing.get_origin(annotation) is Annotated:
        return entity_of(typing.get_args(annotation)[0])
    if _is_union(annotation):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        is_mapped = len(members) == 1 and entity_mapper(members[0]) is not None
        return (members[0], True) if is_mapped else (None, False)
    return (cast("type[object]", annotation), False) if entity_mapper(annotation) is not None else (None, False)


def is_locked(annotation: object) -> bool:
    """Return True if the annotation is `Locked[Account]`, `Locked[Account | None]` or `Locked[Account] | None`."""
    if typing.get_origin(annotation) is Annotated:
        return LOCKED in typing.get_args(annotation)[1:]
    return _is_union(annotation) and any(map(is_locked, typing.get_args(annotation)))


def _is_union(annotation: object) -> bool:
    return typing.get_origin(annotation) in (Union, types.UnionType)


def primary_key_type(entity: type[object]) -> object:
    """The type as which the stored primary key is read: that of its column, or a tuple of several."""
    mapper = entity_mapper(entity)
    assert mapper is not None
    types = [_column_type(mapper, column) for column in mapper.primary_key]
    return types[0] if len(types) == 1 else tuple[tuple(types)]  # type: ignore[misc]  # built at run time


def is_same_key(entity: type[object], key: tuple[object, ...], identity: tuple[object, ...]) -> bool:
    """Return True if a key read from JSON leads to the row with this identity: it is equal, or sent as the same."""
    mapper = entity_mapper(entity)
    assert mapper is not None
    columns = mapper.primary_key
    return len(key) == len(columns) and all(
        (type(read) is type(value) and read == value) or _sent(column.type, read) == _sent(column.type, value)
        for column, read, value in zip(columns, key, identity, strict=True)
    )


def _column_type(mapper: Mapper[object], column: ColumnElement[Any]) -> object:
    try:
        found: object = column.type.python_type
    except NotImplementedError:
        found = object
    # SQLAlchemy knows no Python type for users' types and for some of the server's: then the class's annotation does.
    return _annotated_type(mapper, column) if found is object else found


def _annotated_type(mapper: Mapper[object], column: ColumnElement[Any]) -> object:
    try:
        hint = typing.get_type_hints(mapper.class_).get(mapper.get_property_by_column(column).key)
    except Exception:  # noqa: BLE001  # names that are there for type checkers only, or anything that users evaluate
        return Any
    members = typing.get_args(hint)
    stated = members[0] if len(members) == 1 and typing.get_origin(hint) is Mapped else hint
    is_read = isinstance(stated, type) and (stated in _READ_FROM_JSON or issubclass(stated, Enum))
    return stated if is_read else Any


def _sent(column_type: TypeEngine[Any], value: object) -> object:
    """The value that the driver receives; equal to nothing else if the type does not take it."""
    process = column_type.dialect_impl(_DIALECT).bind_processor(_DIALECT)
    try:
        return value if process is None else process(value)
    except Exception:  # noqa: BLE001  # code of the user's
        return object()
