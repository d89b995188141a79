"""Reads entities of plain classes on the driver's cursor, which is faster than reading them through a session.

Each entity equals the one that a session's SELECT would have made, but belongs to no session. `attach` puts it into
one.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from sqlalchemy import Column, Connection, Dialect, Select, Table
from sqlalchemy.orm import ColumnProperty, Mapper, RelationshipProperty, Session
from sqlalchemy.orm.attributes import instance_state

from outboxq.codec.entities import entity_mapper
from outboxq.database.direct import fetch
from outboxq.database.session_listeners import Listeners, is_listened_to
from outboxq.handlers.row_writes import is_sqlalchemy_type

# Loading strategies of a relationship that load nothing with the row; "noload" would set an empty value.
_LAZY = (True, "select", "raise", "raise_on_sql", "dynamic", "write_only")
# The strategy of a column that is loaded with its row.
_WITH_THE_ROW = (("deferred", False), ("instrument", True))
# Users' listeners for these events see an entity enter a session.
_AT_ATTACH: Listeners = attrgetter("before_attach", "after_attach", "detached_to_persistent")


def mapper_of(entity: type[object]) -> Mapper[Any]:
    """Return SQLAlchemy's mapper of a mapped class."""
    mapper = entity_mapper(entity)
    assert mapper is not None
    return mapper


def is_readable(entity: Any, *, own_types: bool = False) -> bool:
    """Return True if a class's entities consist of columns of one table, and no code runs when they are loaded.

    Args:
        own_types: True if all columns must have SQLAlchemy's own types: other types run users' code.
    """
    hooks = mapper_of(entity).class_manager.dispatch
    return _is_plain(entity) and not (hooks.load or hooks.refresh) and (not own_types or _has_own_types(entity))


@lru_cache(256)
def _is_plain(entity: Any) -> bool:
    mapper = mapper_of(entity)
    table = mapper.local_table
    is_own = isinstance(table, Table) and mapper.persist_selectable is table
    is_alone = mapper.inherits is None and mapper.polymorphic_on is None
    return is_own and is_alone and all(_is_plain_attribute(attribute, table) for attribute in mapper.attrs)


def _is_plain_attribute(attribute: object, table: object) -> bool:
    if isinstance(attribute, ColumnProperty):
        (column, *others) = attribute.columns
        is_loaded = attribute.strategy_key == _WITH_THE_ROW
        return is_loaded and not others and isinstance(column, Column) and column.table is table
    return isinstance(attribute, RelationshipProperty) and attribute.lazy in _LAZY


@lru_cache(256)
def _has_own_types(entity: Any) -> bool:
    return all(is_sqlalchemy_type(column.type) for column in mapper_of(entity).columns)


def read_rows(
    connection: Connection, entity: Any, statement: Select[Any], parameters: Mapping[str, object]
) -> list[object]:
    """Execute a SELECT of a class's `columns_of`, and return an entity for each row, in no session.

    The class must pass `is_readable`, and have a primary key of one column.

    Raises:
        sqlalchemy.exc.DBAPIError: the SELECT failed.
    """
    rows, types = fetch(connection, statement, parameters)
    maker = _maker(entity, connection.dialect, types)
    return [_made(maker, row) for row in rows]


@lru_cache(256)
def columns_of(entity: Any) -> tuple[Column[Any], ...]:
    """Return the columns of a readable class, in the order of its attributes."""
    return tuple(attribute.columns[0] for attribute in mapper_of(entity).column_attrs)  # type: ignore[misc]  # `_is_plain` has found that each is a Column


class _Maker(NamedTuple):
    """The instructions by which `_made` makes an entity of one class from a row.

    Attributes:
        names: The attributes, in the order of the columns.
        convert: The conversions of values, by attribute.
        key: The attribute of the primary key.
    """

    mapper: Mapper[Any]
    names: tuple[str, ...]
    convert: tuple[tuple[str, Callable[[Any], object]], ...]
    key: str


@lru_cache(256)
def _maker(entity: Any, dialect: Dialect, types: tuple[int, ...]) -> _Maker:
    mapper = mapper_of(entity)
    names = tuple(attribute.key for attribute in mapper.column_attrs)
    found = (
        (name, column.type._cached_result_processor(dialect, type_))  # noqa: SLF001  # as SQLAlchemy's own results do
        for name, column, type_ in zip(names, columns_of(entity), types, strict=True)
    )
    convert = tuple((name, converted) for name, converted in found if converted is not None)
    (key,) = mapper.primary_key
    return _Maker(mapper, names, convert, mapper.get_property_by_column(key).key)


def _made(maker: _Maker, row: tuple[object, ...]) -> object:
    mapper = maker.mapper
    entity: object = mapper.class_manager.new_instance()
    values = entity.__dict__
    values.update(zip(maker.names, row, strict=True))
    for name, converted in maker.convert:
        values[name] = converted(values[name])
    state = instance_state(entity)
    state.key = (mapper._identity_class, (values[maker.key],), None)  # noqa: SLF001  # as SQLAlchemy's own loading does
    state.load_path = mapper._path_registry  # noqa: SLF001  # as SQLAlchemy's own loading does
    return entity


def attach(session: Session, entity: object) -> object:
    """Put an entity that was read into its session, and return the entity.

    First the session takes its connection, as it would for a SELECT of its own: later commit() and rollback() calls of
    the handler then have the same effect on the transaction.
    """
    session.connection()
    state = instance_state(entity)
    if is_listened_to(session, _AT_ATTACH):
        # Otherwise it would belong to the state of the session before it was opened.
        state.session_id = None
        # As add(), without searching for related objects, since none were loaded.
        session._save_or_update_impl(state)  # noqa: SLF001  # what add() calls
    else:
        # These are all steps of add() for an entity that is new here.
        session.identity_map.add(state)
        state.session_id = session.hash_key
    return entity
