"""Set-based updates: many executions of an UPDATE by primary key, sent as one statement over arrays.

This is done only if the result is the same either way: each execution changes at most one row, no row is changed twice,
a row's new values depend only on the row and the parameters, and an UPDATE of the table runs no triggers and changes no
column that a constraint compares with other rows. Every other deferred statement stays an executemany, one execution
for each set of parameters.
"""

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from functools import cached_property, lru_cache
from typing import Any, TypeAlias, cast

from sqlalchemy import (
    ARRAY,
    BinaryExpression,
    BindParameter,
    Column,
    ColumnElement,
    Dialect,
    Table,
    TypeDecorator,
    Update,
    any_,
    bindparam,
    column,
    func,
    select,
    types,
)
from sqlalchemy.sql import functions, operators, visitors
from sqlalchemy.sql.elements import BooleanClauseList
from sqlalchemy.types import NullType, TypeEngine

from outboxq.handlers.row_writes import (
    COMPUTING,
    Statement,
    TableFacts,
    assigned_columns,
    updated_mapper,
    written_table,
)
from outboxq.statements.builtin import unnest

logger = logging.getLogger("outboxq.relay")


Row: TypeAlias = dict[str, object]
FactsOf: TypeAlias = Callable[[Table], TableFacts | None]

# With fewer rows, one statement over arrays is not faster.
_LEAST_ROWS = 4
# By column type: the Python type whose values mean the same alone and in an array, and the array's element type. Only
# exact types: a precision, a length or a user's type may turn a value into another one.
_Element: TypeAlias = tuple[type[object], Callable[[Any], TypeEngine[Any]]]
_INTEGERS = (types.SmallInteger, types.Integer, types.BigInteger, types.SMALLINT, types.INTEGER, types.BIGINT)
_TEXTS = (types.String, types.Text, types.Unicode, types.UnicodeText, types.VARCHAR, types.TEXT)
_ELEMENTS: dict[type[TypeEngine[Any]], _Element] = {
    **dict.fromkeys(_INTEGERS, (int, lambda same: same)),
    **dict.fromkeys(_TEXTS, (str, lambda _: types.String())),
    types.Boolean: (bool, lambda same: same),
    types.Date: (date, lambda same: same),
    types.DateTime: (datetime, lambda same: same),
    types.Numeric: (Decimal, lambda _: types.Numeric()),
    **dict.fromkeys((types.Uuid, types.UUID), (uuid.UUID, lambda same: same)),
}
# Functions that write a value within an array's text, for types that the server reads as the driver writes them.
_WRITTEN: dict[type[object], Callable[[Any], str]] = {
    **dict.fromkeys((int, bool, uuid.UUID), str),
    Decimal: lambda value: "NaN" if value.is_nan() else str(value),
    str: lambda value: '"' + value.replace("\\", r"\\").replace('"', r"\"") + '"',
}
# Types whose equality is the same in Python and on the server; that of texts depends on a collation.
_KEYS = (int, uuid.UUID)
_FUNCTIONS = (functions.coalesce, functions.current_timestamp, functions.now)


def executions(
    statement: Statement, rows: Sequence[Row], facts_of: FactsOf, *, in_order: bool = False
) -> Iterator[tuple[Statement, Row | Sequence[Row]]]:
    """Yield statements with their parameters, which together do the same as `statement` executed for each of `rows`.

    An UPDATE becomes one statement over arrays if that has the same result; any other statement is yielded unchanged.

    Args:
        rows: The parameters of each execution, all with the same names.
        facts_of: Returns the facts of a table.
        in_order: True to lock the rows in the order of their keys; otherwise a statement over arrays locks them in an
            order that the server chooses.
    """
    is_worth_it = type(statement) is Update and len(rows) >= _LEAST_ROWS
    set_based = _set_based(statement, frozenset(rows[0])) if is_worth_it else None
    if set_based is None or not set_based.is_allowed_by(facts_of(set_based.table)):
        yield from single_executions(statement, rows)
        return
    # A second change of a row must see the first one: second changes are executed afterwards, in their order.
    first: dict[object, Row] = {}
    again = [row for row in rows if first.setdefault(row[set_based.key], row) is not row]
    arrays = {name: [row[name] for row in first.values()] for name in set_based.values}
    fits = None not in first and all(_is_uniform(arrays[name], type_) for name, type_ in set_based.values.items())
    if len(first) < max(_LEAST_ROWS, len(again)) or not fits:
        yield from single_executions(statement, rows)
        return
    over_arrays = set_based.over_arrays_in_order if in_order else set_based.over_arrays
    yield over_arrays, {_array(name): values for name, values in arrays.items()}
    if again:
        yield from single_executions(statement, again)


def single_executions(statement: Statement, rows: Sequence[Row]) -> Iterator[tuple[Statement, Row | Sequence[Row]]]:
    """Yield the statement with all rows, for an executemany; or once for each row, if one of its parameters is a list.

    SQLAlchemy refuses an executemany of a statement that takes lists.
    """
    if len(rows) > 1 and _takes_lists(statement):
        # SQLAlchemy expands lists in the text, and refuses an executemany.
        for row in rows:
            yield statement, row
    else:
        yield statement, rows


def _array(name: str) -> str:
    return f"oq_{name}"


def _is_uniform(values: list[Any], type_: type[object]) -> bool:
    """Return True if the driver sends these values, of type `type_` or None, in an array as it sends each by itself."""
    # SQLAlchemy adds no cast to these two types: a lone None has an unknown type.
    allowed = {type_} if type_ in (bool, Decimal) else {type_, type(None)}
    if not set(map(type, values)) <= allowed:
        return False
    return type_ is not datetime or len({value.tzinfo is None for value in values if value is not None}) <= 1


@lru_cache(256)
def _takes_lists(statement: Statement) -> bool:
    mapper = updated_mapper(statement)
    if mapper is not None and mapper._single_table_criterion is not None:  # noqa: SLF001  # nothing public says that SQLAlchemy adds an IN
        return True
    binds = (element for element in visitors.iterate(statement) if isinstance(element, BindParameter))
    return any(bind.expanding or bind.literal_execute for bind in binds)


@dataclass(frozen=True)
class _SetBased:
    """An UPDATE of one table, with the names of its parameters, that may become one statement over arrays.

    `_OBSTACLES` are the reasons why it may not, in order. An attribute that one of them uses may be read only if the
    earlier ones do not apply.
    """

    statement: Update
    table: Table
    names: frozenset[str]

    @cached_property
    def elements(self) -> list[Any]:
        return [element for element in visitors.iterate(self.statement) if element is not self.statement]

    @cached_property
    def primary_key(self) -> Column[Any]:
        return self.table.primary_key.columns[0]

    @cached_property
    def assigned(self) -> dict[Any, object]:
        return assigned_columns(self.statement, self.table)

    @cached_property
    def types(self) -> dict[str, Any]:
        """The SQL type of each parameter, by name; empty if one is not given, has no single type, or fits no array."""
        if None in self.assigned:
            return {}
        binds = [element for element in self.elements if isinstance(element, BindParameter)]
        # A parameter without its own type has the type of the column whose value it is, if there is one.
        typed = [(bind, bind.type) for bind in binds if not isinstance(bind.type, NullType)]
        typed += [
            (bind, column.type)
            for column, bind in self.assigned.items()
            if isinstance(bind, BindParameter) and isinstance(bind.type, NullType)
        ]
        distinct = {(bind.key, repr(sql_type)): sql_type for bind, sql_type in typed if bind.key in self.names}
        found = {key: sql_type for (key, _), sql_type in distinct.items()}
        is_clear = len(typed) == len(binds) and len(distinct) == len(self.names) and self.names == set(found)
        is_given = all(bind.callable is None and (bind.key in self.names or not bind.required) for bind in binds)
        return found if is_clear and is_given and all(map(_fits_an_array, found.values())) else {}

    @cached_property
    def key(self) -> str:
        """The name of the parameter that the WHERE clause compares with the primary key; empty if there is none."""
        for criterion in _conjuncts(self.statement.whereclause):
            if isinstance(criterion, BinaryExpression) and criterion.operator is operators.eq:
                sides = (criterion.left, criterion.right)
                is_key = any(isinstance(side, Column) and side.name == self.primary_key.name for side in sides)
                given = [side.key for side in sides if isinstance(side, BindParameter) and side.key in self.names]
                if is_key and given:
                    return given[0]
        return ""

    @cached_property
    def values(self) -> dict[str, type[object]]:
        """The Python type of each parameter's values, by the parameter's name."""
        return {name: _ELEMENTS[type(sql_type)][0] for name, sql_type in self.types.items()}

    @cached_property
    def arrays(self) -> dict[str, BindParameter[Any]]:
        """The parameter of the new statement that takes an array, by the name of the parameter that it replaces."""
        return {name: bindparam(_array(name), type_=array_of(sql_type)) for name, sql_type in self.types.items()}

    @cached_property
    def over_arrays(self) -> Update:
        """The UPDATE as one statement, whose parameters are arrays with one value for each execution."""
        return self._over_arrays(self.arrays[self.key])

    @cached_property
    def over_arrays_in_order(self) -> Update:
        """The same UPDATE, which first locks its rows FOR NO KEY UPDATE in the order of their keys.

        A locking CTE is planned separately, and read to its end before the first row is updated. A row that changed
        while this statement waited for its lock is found again by its key, as by a single UPDATE.
        """
        key, keys = self.primary_key, self.arrays[self.key]
        ordered = select(key).where(key == any_(keys)).order_by(key).with_for_update(key_share=True)
        locked = ordered.cte("oq_locked")
        return self._over_arrays(func.array(select(*locked.c).scalar_subquery()))

    def _over_arrays(self, keys: ColumnElement[Any]) -> Update:
        elements = {name: _ELEMENTS[type(sql_type)][1](sql_type) for name, sql_type in self.types.items()}
        columns = (column(name, element) for name, element in elements.items())
        rows = unnest(*self.arrays.values()).table_valued(*columns).render_derived(name="oq_rows")

        def replace(element: Any, **_: Any) -> Any:
            return rows.c[element.key] if isinstance(element, BindParameter) and element.key in elements else None

        replaced = cast("Update", visitors.replacement_traverse(self.statement, {}, replace))
        # `= ANY(array)` restricts the server to the primary key's index, even in a plan made while the table was small.
        return replaced.where(self.primary_key == any_(keys))

    def is_allowed_by(self, facts: TableFacts | None) -> bool:
        """Return True if, by these facts of the table, the statement over arrays does the same as single executions."""
        if facts is None or not (facts.is_plain and facts.is_inert):
            return False
        by_key = facts.primary_key == {column.name for column in self.table.primary_key}
        return by_key and facts.bound_columns.isdisjoint(column.name for column in self.assigned)


# Reasons why an UPDATE is not set-based; each may assume that earlier ones do not apply.
_OBSTACLES: Mapping[str, Callable[[_SetBased], bool]] = {
    "a column has an onupdate": lambda it: any(column.onupdate is not None for column in it.table.columns),
    "the primary key is not one column": lambda it: len(it.table.primary_key.columns) != 1,
    "a part does more than compute": lambda it: not all(_only_computes(each, it.table) for each in it.elements),
    "it takes lists": lambda it: _takes_lists(it.statement),
    # SQLAlchemy takes a parameter with a column's name as the value of that column.
    "a parameter is named as a column": lambda it: (
        not it.names.union(map(_array, it.names)).isdisjoint(it.table.columns.keys())
    ),
    "a parameter has no clear type": lambda it: not it.types,
    "the primary key equals no parameter": lambda it: not it.key,
    "it assigns the primary key": lambda it: it.primary_key in it.assigned,
    "the key is of another type, or its equality is of a collation": lambda it: not _has_plain_key(it),
}


def _has_plain_key(it: _SetBased) -> bool:
    own, given = _ELEMENTS.get(type(it.primary_key.type)), _ELEMENTS[type(it.types[it.key])]
    return own is not None and own[0] is given[0] and given[0] in _KEYS


@lru_cache(256)
def _set_based(statement: Update, names: frozenset[str]) -> _SetBased | None:
    table = written_table(statement)
    if table is None:
        return None
    candidate = _SetBased(statement, table, names)
    obstacle = next((name for name, is_met in _OBSTACLES.items() if is_met(candidate)), None)
    if obstacle is not None:
        logger.debug("an UPDATE of table %s is executed row by row: %s", table.name, obstacle)
        return None
    return candidate


def _only_computes(element: Any, table: Table) -> bool:
    if isinstance(element, Table):
        return element._deannotate() is table  # noqa: SLF001  # of a mapped class it is another object
    if isinstance(element, Column):
        return element.table is not None and element.table._deannotate() is table  # noqa: SLF001  # of a mapped class it is another object
    return isinstance(element, COMPUTING) or type(element) in _FUNCTIONS


def python_type(sql_type: TypeEngine[Any]) -> type[object] | None:
    """Return the Python type of the values of an SQL type, if the driver receives them unchanged; else None."""
    return _ELEMENTS[type(sql_type)][0] if _fits_an_array(sql_type) else None


class TextArray(TypeDecorator[Any]):
    """The type of an array that is sent as one text, because the driver takes several times as long to send a list."""

    impl = ARRAY
    cache_ok = True

    def __init__(self, element: TypeEngine[Any], type_: type[object]) -> None:
        super().__init__(element)
        self.element = element
        self.type_ = type_

    def bind_processor(self, dialect: Dialect) -> Any:  # noqa: ARG002  # SQLAlchemy's own signature
        """Return a function that writes a list, whose elements may be None, in the server's text format for arrays."""
        written = _WRITTEN[self.type_]

        def process(value: Any) -> str:
            return f"{{{','.join(['NULL' if each is None else written(each) for each in value])}}}"

        return process


def array_of(sql_type: TypeEngine[Any]) -> TypeEngine[Any]:
    """Return the type of an array of values of this SQL type, which must be one that `python_type` knows."""
    type_, element = _ELEMENTS[type(sql_type)]
    return TextArray(element(sql_type), type_) if type_ in _WRITTEN else ARRAY(element(sql_type))


def key_array(sql_type: TypeEngine[Any]) -> TypeEngine[Any] | None:
    """Return the type of an array of primary keys of this SQL type.

    None if Python and the server may disagree on the equality of two such keys, as for texts with a collation.
    """
    return array_of(sql_type) if python_type(sql_type) in _KEYS else None


def _fits_an_array(sql_type: TypeEngine[Any]) -> bool:
    # A variant is another type; a collation is lost; a types.UUID may be stored as text.
    if type(sql_type) not in _ELEMENTS or sql_type._variant_mapping or getattr(sql_type, "collation", None):  # noqa: SLF001  # a variant shows nowhere else
        return False
    return not isinstance(sql_type, types.Uuid) or (sql_type.as_uuid and sql_type.native_uuid)


def _conjuncts(where: Any) -> Iterator[Any]:
    if isinstance(where, BooleanClauseList) and where.operator is operators.and_:
        for clause in where.clauses:
            yield from _conjuncts(clause)
    else:
        yield where
