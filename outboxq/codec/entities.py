"""Entities: objects mapped by SQLAlchemy's ORM as arguments of jobs, stored as their primary keys."""

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
    """The primary key of an entity argument, as read from a job, by which the handler's session loads the entity.

    Attributes:
        entity: The mapped class.
        identity: The primary key, as a tuple, even if it has only one column.
        optional: True if the handler receives None in place of a row that does not exist any more.
        locked: True if the row is locked when it is loaded.
    """

    entity: type[object]
    identity: tuple[object, ...]
    optional: bool
    locked: bool = False


def entity_mapper(annotation: object) -> Mapper[object] | None:
    """Return the mapper of a mapped class; None for any other object."""
    if not isinstance(annotation, type):
        return None
    found: object = sqlalchemy_inspect(annotation, raiseerr=False)
    return found if isinstance(found, Mapper) else None


def entity_state(value: object) -> InstanceState[object] | None:
    """Return SQLAlchemy's state of a mapped object; None for any other object."""
    found: object = sqlalchemy_inspect(value, raiseerr=False)
    return found if isinstance(found, InstanceState) else None


class EntityArgument(msgspec.Struct, frozen=True, eq=False):
    """An entity given as argument of an added job, kept until the session's flush writes the job.

    Before that flush a new entity may have no primary key, which the stored arguments need.

    Attributes:
        entity: The mapped object itself.
        key: The entity's identity key when the job was added; None if it had none yet.
        optional: True if the handler receives None in place of a row that does not exist any more.
    """

    entity: object
    key: tuple[Any, ...] | None
    optional: bool

    def current(self) -> "EntityArgument":
        """Return this argument with the identity key that the entity has now: a flush may have set or changed it."""
        key = instance_state(self.entity).key
        return self if key == self.key else EntityArgument(self.entity, key, self.optional)

    def is_pending(self) -> bool:
        """Return True if the entity has no primary key yet, because it was not flushed."""
        return instance_state(self.entity).key is None

    def is_deleted(self) -> bool:
        """Return True if the entity's row was deleted by a flush that was not rolled back."""
        return instance_state(self.entity).was_deleted


def entities_of(values: Mapping[str, object], optional: Mapping[str, bool]) -> dict[str, EntityArgument]:
    """Return the entities among the arguments `values`, as `{name: EntityArgument}`.

    `optional` maps an argument's name to True if the handler's annotation allows None.
    """
    states = {name: state for name, value in values.items() if (state := entity_state(value)) is not None}
    return {name: EntityArgument(values[name], state.key, optional.get(name, False)) for name, state in states.items()}


def primary_key_of(entity: object) -> object:
    """Return an entity's primary key as stored in arguments: one value, or a list if the key has several columns.

    Raises:
        ArgumentError: the entity was never flushed.
    """
    state = entity_state(entity)
    if state is None or state.key is None:
        raise ArgumentError(f"this {type(entity).__name__} has no primary key yet: flush its session first")
    values = tuple(state.key[1])
    return values[0] if len(values) == 1 else list(values)


def entity_of(annotation: object) -> tuple[type[object] | None, bool]:
    """Return the mapped class that an annotation names, and True if the annotation allows None (`Account | None`).

    Returns (None, False) if the annotation is no mapped class.
    """
    if typing.get_origin(annotation) is Annotated:
        return entity_of(typing.get_args(annotation)[0])
    if _is_union(annotation):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        is_mapped = len(members) == 1 and entity_mapper(members[0]) is not None
        return (members[0], True) if is_mapped else (None, False)
    return (cast("type[object]", annotation), False) if entity_mapper(annotation) is not None else (None, False)


def is_locked(annotation: object) -> bool:
    """Return True if an annotation requests a lock on the entity's row: `Locked[Account]`, with or without `| None`."""
    if typing.get_origin(annotation) is Annotated:
        return LOCKED in typing.get_args(annotation)[1:]
    return _is_union(annotation) and any(map(is_locked, typing.get_args(annotation)))


def _is_union(annotation: object) -> bool:
    return typing.get_origin(annotation) in (Union, types.UnionType)


def primary_key_type(entity: type[object]) -> object:
    """Return the type by which a mapped class's primary key is decoded from JSON.

    The type is that of the column, or a tuple of types if the key has several columns.
    """
    mapper = entity_mapper(entity)
    assert mapper is not None
    types = [_column_type(mapper, column) for column in mapper.primary_key]
    return types[0] if len(types) == 1 else tuple[tuple(types)]  # type: ignore[misc]  # built at run time


def is_same_key(entity: type[object], key: tuple[object, ...], identity: tuple[object, ...]) -> bool:
    """Return True if `key`, a primary key read from JSON, finds the row with the primary key `identity`.

    Each value of `key` must be equal to the one in `identity` and have its type, or the column must convert both to
    equal values for the driver.
    """
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
    # SQLAlchemy knows no Python type for users' types and some of the server's: then the class's annotation is used.
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
    """Return the value that a column's type passes to the driver for `value`, so that two keys can be compared.

    If the type refuses the value, return a new object, which equals no other value.
    """
    process = column_type.dialect_impl(_DIALECT).bind_processor(_DIALECT)
    try:
        return value if process is None else process(value)
    except Exception:  # noqa: BLE001  # code of the user's
        return object()
