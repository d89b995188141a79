"""Set-based updates: many executions of an UPDATE by primary key, sent as one statement over arrays.

Only where PostgreSQL does the same for both: each execution changes at most one row, no row is changed twice, and what
a row becomes depends on nothing but itself and the parameters. Whatever else is deferred stays an executemany.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any, TypeAlias, cast
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    BinaryExpression,
    BindParameter,
    Boolean,
    Case,
    Cast,
    Column,
    Date,
    DateTime,
    Delete,
    Enum,
    Float,
    Insert,
    Integer,
    LargeBinary,
    Null,
    Numeric,
    String,
    Table,
    TextClause,
    UnaryExpression,
    Update,
    Uuid,
    any_,
    bindparam,
    column,
    func,
)
from sqlalchemy.sql import functions, operators, visitors
from sqlalchemy.sql.elements import BooleanClauseList, ClauseList, ExpressionClauseList, Grouping, TypeClause
from sqlalchemy.types import NullType, TypeEngine

Statement: TypeAlias = Insert | Update | Delete | TextClause
Row: TypeAlias = dict[str, object]

# With fewer rows there is nothing to win.
_LEAST_ROWS = 4
# Of these an array holds what each value would be by itself.
_TYPES = (Boolean, Date, DateTime, Float, Integer, LargeBinary, Numeric, String, Uuid)
_VALUES = frozenset({bool, bytes, date, datetime, Decimal, float, int, str, UUID, type(None)})
# Keys that Python and the server find equal alike; texts depend on a collation.
_KEYS: dict[type[TypeEngine[Any]], type[object]] = {Integer: int, Uuid: UUID}
# These compute a value from the row and the parameters: no other table, and no function but SQLAlchemy's own.
_COMPUTING = (
    BinaryExpression,
    BindParameter,
    Case,
    Cast,
    ClauseList,
    ExpressionClauseList,
    Grouping,
    Null,
    TypeClause,
    UnaryExpression,
)
# What an UPDATE may say besides which rows become what.
_MORE = ("_independent_ctes", "_prefixes", "_hints", "_with_options", "_returning", "_ordered_values", "_multi_values")


@dataclass(frozen=True, slots=True)
class _SetBased:
    """An UPDATE over an array for each of `names`; the values of `key` are primary keys."""

    statement: Update
    key: str
    key_type: type[object]
    names: tuple[str, ...]


def executions(statement: Statement, rows: Sequence[Row]) -> Iterator[tuple[Statement, Row | Sequence[Row]]]:
    """What to execute, one after the other, to the effect of `statement` with each of `rows`, which name the same."""
    if len(rows) > 1 and _takes_lists(statement):
        # SQLAlchemy writes them out, and refuses an executemany.
        for row in rows:
            yield statement, row
        return
    if type(statement) is not Update or len(rows) < _LEAST_ROWS:
        yield statement, rows
        return
    set_based = _set_based(statement, frozenset(rows[0]))
    if set_based is None:
        yield statement, rows
        return
    # Who changes a row again finds what the first one made of it: these come behind, in their order.
    first: dict[object, Row] = {}
    again = [row for row in rows if first.setdefault(row[set_based.key], row) is not row]
    arrays = {name: [row[name] for row in first.values()] for name in set_based.names}
    fits = all(type(key) is set_based.key_type for key in first) and all(map(_is_uniform, arrays.values()))
    if len(first) < max(_LEAST_ROWS, len(again)) or not fits:
        yield statement, rows
        return
    yield set_based.statement, {_array(name): values for name, values in arrays.items()}
    if again:
        yield statement, again


def _array(name: str) -> str:
    return f"oq_{name}"


def _is_uniform(values: list[Any]) -> bool:
    """Whether the driver makes of each in an array what it makes of it alone."""
    types = set(map(type, values))
    if not types <= _VALUES or len(types - {type(None)}) > 1:
        return False
    return datetime not in types or len({value.tzinfo is None for value in values if value is not None}) == 1


@lru_cache(256)
def _takes_lists(statement: Statement) -> bool:
    binds = (element for element in visitors.iterate(statement) if isinstance(element, BindParameter))
    return any(bind.expanding or bind.literal_execute for bind in binds)


@lru_cache(256)
def _set_based(statement: Update, names: frozenset[str]) -> _SetBased | None:
    if any(getattr(statement, part, None) for part in _MORE) or not isinstance(statement.table, Table):
        return None
    table = statement.table._deannotate()  # noqa: SLF001  # of a mapped class it is another object
    elements = [element for element in visitors.iterate(statement) if element is not statement]
    if len(table.primary_key.columns) != 1 or not all(_only_computes(element, table) for element in elements):
        return None
    if any(column.onupdate is not None and not _is_computed(column.onupdate.arg) for column in table.columns):
        # Called for each execution.
        return None
    primary_key = table.primary_key.columns[0]
    assigned, key = _assigned(statement, table), _key(statement, primary_key, names)
    types = _types(assigned, elements, names)
    if types is None or key is None or primary_key in assigned:
        return None
    for sql_type, python_type in _KEYS.items():
        if isinstance(types[key], sql_type) and isinstance(primary_key.type, sql_type):
            over_arrays = _over_arrays(statement, primary_key, key, types)
            return _SetBased(over_arrays, key, python_type, tuple(types))
    return None


def _only_computes(element: Any, table: Table) -> bool:
    if isinstance(element, Table):
        return element._deannotate() is table  # noqa: SLF001  # as above
    if isinstance(element, Column):
        return element.table is not None and element.table._deannotate() is table  # noqa: SLF001  # as above
    return isinstance(element, _COMPUTING) or _is_computed(element)


def _is_computed(element: object) -> bool:
    """Whether it is a function that SQLAlchemy knows: now, coalesce and their like read no table."""
    is_function = isinstance(element, functions.FunctionElement) and type(element) is not functions.Function
    return is_function and type(element).__module__ == functions.__name__


def _assigned(statement: Update, table: Table) -> dict[Any, object]:
    """What is assigned to each column; to None where the column is not known."""
    # By name it is an attribute, where a mapped class is updated.
    mapper = statement._propagate_attrs.get("plugin_subject")  # noqa: SLF001  # as below
    columns = table.columns if mapper is None else mapper.columns
    values: Any = statement._values or {}  # noqa: SLF001  # SQLAlchemy has no other name for it
    named = {columns.get(column) if isinstance(column, str) else column: value for column, value in values.items()}
    return {table.columns.get(getattr(column, "key", "")): value for column, value in named.items()}


def _types(assigned: dict[Any, object], elements: list[Any], names: frozenset[str]) -> dict[str, Any] | None:
    """The type of each parameter; None where one has none or several, cannot be in an array, or is not given."""
    if None in assigned:
        return None
    binds = [element for element in elements if isinstance(element, BindParameter)]
    types = [(bind.key, bind.type) for bind in binds if not isinstance(bind.type, NullType)]
    types += [(bind.key, column.type) for column, bind in assigned.items() if isinstance(bind, BindParameter)]
    given = {(key, repr(sql_type)): sql_type for key, sql_type in types if key in names}
    found = {key: _element(sql_type) for (key, _), sql_type in given.items()}
    is_clear = len(given) == len(names) and None not in found.values()
    is_complete = names == set(found) and not any(bind.required and bind.key not in names for bind in binds)
    return found if is_clear and is_complete else None


def _element(sql_type: TypeEngine[Any]) -> TypeEngine[Any] | None:
    """Of an array that means the same; None where there is none."""
    is_known = isinstance(sql_type, _TYPES) and not isinstance(sql_type, Enum)
    if not is_known or not type(sql_type).__module__.startswith("sqlalchemy."):
        return None
    if not isinstance(sql_type, String):
        return sql_type
    # Cast to a length, a text would be cut off. A collation is no longer explicit in an array.
    return None if sql_type.collation else String() if sql_type.length else sql_type


def _key(statement: Update, primary_key: Column[Any], names: frozenset[str]) -> str | None:
    """The parameter that the primary key has to equal; None where there is none."""
    for criterion in _conjuncts(statement.whereclause):
        if isinstance(criterion, BinaryExpression) and criterion.operator is operators.eq:
            sides = (criterion.left, criterion.right)
            is_key = any(isinstance(side, Column) and side.name == primary_key.name for side in sides)
            given = [side.key for side in sides if isinstance(side, BindParameter) and side.key in names]
            if is_key and given:
                return given[0]
    return None


def _conjuncts(where: Any) -> Iterator[Any]:
    if isinstance(where, BooleanClauseList) and where.operator is operators.and_:
        for clause in where.clauses:
            yield from _conjuncts(clause)
    else:
        yield where


def _over_arrays(statement: Update, primary_key: Column[Any], key: str, types: dict[str, Any]) -> Update:
    arrays = {name: bindparam(_array(name), type_=ARRAY(sql_type)) for name, sql_type in types.items()}
    columns = (column(name, sql_type) for name, sql_type in types.items())
    rows = func.unnest(*arrays.values()).table_valued(*columns).render_derived(name="oq_rows")

    def replace(element: Any, **_: Any) -> Any:
        return rows.c[element.key] if isinstance(element, BindParameter) and element.key in types else None

    # The array by itself keeps the server to the primary key, also by a plan made while the table was small.
    return cast("Update", visitors.replacement_traverse(statement, {}, replace)).where(primary_key == any_(arrays[key]))
