"""Entities: mapped objects as arguments, which are stored as their primary keys."""

import types
import typing
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias, TypeGuard, TypeVar, Union, cast

from sqlalchemy import inspect as sqlalchemy_inspect
from sqlalchemy.orm import InstanceState, Mapper

from outboxq.errors import ArgumentError

T = TypeVar("T")


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
    """The stored primary key of an entity argument, to be loaded in the handler's session, and locked if asked for.

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


def is_pending(value: object) -> TypeGuard[object]:
    """Whether `value` is an entity whose primary key is known only after its flush."""
    state = entity_state(value)
    return state is not None and state.key is None


def primary_key_of(entity: object) -> object:
    """The primary key as stored in arguments: one value, or a list where the key is composite.

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
    if typing.get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        mapped = [member for member in members if entity_mapper(member) is not None]
        if len(members) == 1 and mapped:
            return mapped[0], True
        return None, False
    return (cast("type[object]", annotation), False) if entity_mapper(annotation) is not None else (None, False)


def is_locked(annotation: object) -> bool:
    """Whether it is `Locked[Account]`, `Locked[Account | None]` or `Locked[Account] | None`."""
    if typing.get_origin(annotation) is Annotated:
        return LOCKED in typing.get_args(annotation)[1:]
    members = typing.get_args(annotation) if typing.get_origin(annotation) in (Union, types.UnionType) else ()
    return any(map(is_locked, members))


def primary_key_type(entity: type[object]) -> object:
    mapper = entity_mapper(entity)
    assert mapper is not None
    columns = [_python_type(column.type) for column in mapper.primary_key]
    return columns[0] if len(columns) == 1 else tuple[tuple(columns)]  # type: ignore[misc]  # built at run time


def _python_type(column_type: object) -> object:
    try:
        return cast("type[object]", column_type.python_type)  # type: ignore[attr-defined]  # any TypeEngine
    except NotImplementedError:
        return typing.Any
