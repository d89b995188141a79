"""Set-based updates: many executions of an UPDATE by primary key, sent as one statement over arrays.

Only where PostgreSQL does the same for both: each execution changes at most one row, no row is changed twice, what a
row becomes depends on nothing but itself and the parameters, and the table runs no code and compares no rows. Whatever
else is deferred stays an executemany.
"""

import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary

from sqlalchemy import (
    ARRAY,
    BIGINT,
    INTEGER,
    SMALLINT,
    TEXT,
    UUID,
    VARCHAR,
    BigInteger,
    BinaryExpression,
    BindParameter,
    Boolean,
    Case,
    Cast,
    Column,
    Date,
    DateTime,
    Delete,
    Insert,
    Integer,
    Null,
    Numeric,
    Select,
    SmallInteger,
    String,
    Table,
    Text,
    TextClause,
    UnaryExpression,
    Unicode,
    UnicodeText,
    Update,
    Uuid,
    any_,
    bindparam,
    column,
    select,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.sql import functions, operators, visitors
from sqlalchemy.sql.elements import BooleanClauseList, ClauseList, ExpressionClauseList, Grouping, TypeClause
from sqlalchemy.sql.functions import Function, FunctionElement
from sqlalchemy.types import NullType, TypeEngine

from outboxq.database.known_functions import HARMLESS
from outboxq.handlers.table_facts import RowWrite, TableFacts
from outboxq.statements.builtin import unnest

_WRITING = (Insert, Update, Delete)
# What is known of statements, by the names of their parameters: asked each time that one is sent or deferred.
_writes: WeakKeyDictionary[object, dict[frozenset[str], RowWrite | None]] = WeakKeyDictionary()

Statement: TypeAlias = Insert | Update | Delete | TextClause
Row: TypeAlias = dict[str, object]
FactsOf: TypeAlias = Callable[[Table], TableFacts | None]

# With fewer rows there is nothing to win.
_LEAST_ROWS = 4
# What SQLAlchemy and psycopg make of a value of the second type by itself, they make of each in an array of the third.
# Exactly these: a precision, a length or a type of the user's may make something else of it.
_Element: TypeAlias = tuple[type[object], Callable[[Any], TypeEngine[Any]]]
_ELEMENTS: dict[type[TypeEngine[Any]], _Element] = {
    **dict.fromkeys((SmallInteger, Integer, BigInteger, SMALLINT, INTEGER, BIGINT), (int, lambda same: same)),
    **dict.fromkeys((String, Text, Unicode, UnicodeText, VARCHAR, TEXT), (str, lambda _: String())),
    Boolean: (bool, lambda same: same),
    Date: (date, lambda same: same),
    DateTime: (datetime, lambda same: same),
    Numeric: (Decimal, lambda _: Numeric()),
    **dict.fromkeys((Uuid, UUID), (uuid.UUID, lambda same: same)),
}
# Their equality is the same in Python and on the server; that of texts depends on a collation.
_KEYS = (int, uuid.UUID)
# These compute a value from the row and the parameters.
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
_FUNCTIONS = (functions.coalesce, functions.current_timestamp, functions.now)
_CONFLICTS = (postgresql.dml.OnConflictDoNothing, postgresql.dml.OnConflictDoUpdate)
# What an UPDATE may say besides which rows become what.
_MORE = ("_independent_ctes", "_prefixes", "_hints", "_with_options", "_returning", "_ordered_values")


@dataclass(frozen=True, slots=True)
class _SetBased:
    """An UPDATE over an array for each parameter, by name with the type of its values; those of `key` are keys."""

    statement: Update
    lock: Select[Any]
    key: str
    values: Mapping[str, type[object]]
    table: Table
    assigned: frozenset[str]

    def is_allowed_by(self, facts: TableFacts | None) -> bool:
        """Whether each row becomes what single executions would make of it, and nothing else happens."""
        if facts is None or not (facts.is_plain and facts.is_inert):
            return False
        by_key = facts.primary_key == {column.name for column in self.table.primary_key}
        return by_key and facts.bound_columns.isdisjoint(self.assigned)


def executions(
    statement: Statement, rows: Sequence[Row], facts_of: FactsOf, *, in_order: bool = False
) -> Iterator[tuple[Statement | Select[Any], Row | Sequence[Row]]]:
    """What to execute, one after the other, to the effect of `statement` with each of `rows`, which name the same.

    Args:
        in_order: Whether rows have to be locked in the order of their keys: one statement over arrays would lock them
            in the server's, so a SELECT that does comes before it.
    """
    is_worth_it = type(statement) is Update and len(rows) >= _LEAST_ROWS
    set_based = _set_based(statement, frozenset(rows[0])) if is_worth_it else None
    if set_based is None or not set_based.is_allowed_by(facts_of(set_based.table)):
        yield from single_executions(statement, rows)
        return
    # Who changes a row again finds what the first one made of it: these come behind, in their order.
    first: dict[object, Row] = {}
    again = [row for row in rows if first.setdefault(row[set_based.key], row) is not row]
    arrays = {name: [row[name] for row in first.values()] for name in set_based.values}
    fits = None not in first and all(_is_uniform(arrays[name], type_) for name, type_ in set_based.values.items())
    if len(first) < max(_LEAST_ROWS, len(again)) or not fits:
        yield from single_executions(statement, rows)
        return
    if in_order:
        yield set_based.lock, {_array(set_based.key): arrays[set_based.key]}
    yield set_based.statement, {_array(name): values for name, values in arrays.items()}
    if again:
        yield from single_executions(statement, again)


def single_executions(statement: Statement, rows: Sequence[Row]) -> Iterator[tuple[Statement, Row | Sequence[Row]]]:
    """The same with an execution for each row, one after the other."""
    if len(rows) > 1 and _takes_lists(statement):
        # SQLAlchemy writes them out, and refuses an executemany.
        for row in rows:
            yield statement, row
    else:
        yield statement, rows


def row_write(statement: object, names: Collection[str]) -> RowWrite | None:
    """What a statement writes; None if it writes to more than the rows of its table, or nobody here can say.

    Args:
        names: Of its parameters: those that a column has are the values of the column.
    """
    if not isinstance(statement, _WRITING):
        return None
    known, given = _writes.setdefault(statement, {}), frozenset(names)
    if given not in known:
        known[given] = _row_write(statement, given)
    return known[given]


def only_writes(statement: Insert | Update | Delete) -> bool:
    """Whether a statement writes plain values and what is computed of them: it runs nothing of the user's."""
    table = statement.table
    if any(getattr(statement, part, None) for part in (*_MORE, "_multi_values", "select")) or not isinstance(
        table, Table
    ):
        return False
    if not all(map(_is_settled, table.columns)):
        return False
    return all(map(_writes_or_computes, visitors.iterate(statement)))


def _is_settled(column: Column[Any]) -> bool:
    """Whether the process computes no value of a column: by a default, or by a type that is not SQLAlchemy's own."""
    given: tuple[Any, ...] = (column.default, column.onupdate)
    return all(default is None or default.is_scalar for default in given) and _is_sqlalchemys(column.type)


def _is_sqlalchemys(sql_type: TypeEngine[Any]) -> bool:
    of_values = getattr(sql_type, "item_type", None)
    is_own = type(sql_type).__module__.startswith("sqlalchemy.") and not sql_type._variant_mapping  # noqa: SLF001  # a variant shows nowhere else
    return is_own and (of_values is None or _is_sqlalchemys(of_values))


def _writes_or_computes(element: Any) -> bool:
    if isinstance(element, FunctionElement):
        return isinstance(element, Function) and not element.packagenames and element.name.lower() in HARMLESS
    if isinstance(element, BinaryExpression | UnaryExpression) and isinstance(element.operator, operators.custom_op):
        return False
    if isinstance(element, BindParameter):
        return _is_sqlalchemys(element.type)
    return isinstance(element, (*_WRITING, *_COMPUTING, *_CONFLICTS, Table, Column))


def _row_write(statement: Insert | Update | Delete, names: frozenset[str]) -> RowWrite | None:
    is_more = any(getattr(statement, part, None) for part in (*_MORE, "_post_values_clause"))
    if is_more or _names_others(statement) or not isinstance(statement.table, Table):
        return None
    table = statement.table._deannotate()  # noqa: SLF001  # of a mapped class it is another object
    if not isinstance(statement, Update):
        return RowWrite(table, "INSERT" if isinstance(statement, Insert) else "DELETE", frozenset())
    assigned = _assigned(statement, table)
    if None in assigned:
        return None
    by_name = [column for name, column in table.columns.items() if name in names or column.onupdate is not None]
    return RowWrite(table, "UPDATE", frozenset(column.name for column in (*assigned, *by_name)))


def _names_others(statement: Insert | Update | Delete) -> bool:
    """Whether the statement says itself which schema a table is in."""
    return "schema_translate_map" in statement.get_execution_options()


def _array(name: str) -> str:
    return f"oq_{name}"


def _is_uniform(values: list[Any], type_: type[object]) -> bool:
    """Whether the driver makes of each in an array what it makes of it alone."""
    # Of these two SQLAlchemy does not say what they are: by itself, None is of an unknown type.
    allowed = {type_} if type_ in (bool, Decimal) else {type_, type(None)}
    if not set(map(type, values)) <= allowed:
        return False
    return type_ is not datetime or len({value.tzinfo is None for value in values if value is not None}) <= 1


@lru_cache(256)
def _takes_lists(statement: Statement) -> bool:
    mapper = _mapper(statement)
    if mapper is not None and mapper._single_table_criterion is not None:  # noqa: SLF001  # nothing public says that SQLAlchemy adds an IN
        return True
    binds = (element for element in visitors.iterate(statement) if isinstance(element, BindParameter))
    return any(bind.expanding or bind.literal_execute for bind in binds)


def _mapper(statement: Statement) -> Any:
    """Of the class that is updated, if it is one."""
    return statement._propagate_attrs.get("plugin_subject")  # noqa: SLF001  # SQLAlchemy has no other name for it


@lru_cache(256)
def _set_based(statement: Update, names: frozenset[str]) -> _SetBased | None:
    is_more = any(getattr(statement, part, None) for part in _MORE)
    if is_more or _names_others(statement) or not isinstance(statement.table, Table):
        return None
    table = statement.table._deannotate()  # noqa: SLF001  # of a mapped class it is another object
    elements = [element for element in visitors.iterate(statement) if element is not statement]
    if any(column.onupdate is not None for column in table.columns):
        return None
    if len(table.primary_key.columns) != 1 or not all(_only_computes(element, table) for element in elements):
        return None
    if _takes_lists(statement) or not names.union(map(_array, names)).isdisjoint(table.columns.keys()):
        # SQLAlchemy takes a parameter that is named as a column for the value of that column.
        return None
    primary_key = table.primary_key.columns[0]
    assigned, key = _assigned(statement, table), _key(statement, primary_key, names)
    types = _types(assigned, elements, names)
    if types is None or key is None or primary_key in assigned:
        return None
    values = {name: _ELEMENTS[type(sql_type)][0] for name, sql_type in types.items()}
    own = _ELEMENTS.get(type(primary_key.type))
    if own is None or own[0] is not values[key] or values[key] not in _KEYS:
        return None
    names_assigned = frozenset(column.name for column in assigned)
    over_arrays, lock = _over_arrays(statement, primary_key, key, types), _lock(primary_key, key, types[key])
    return _SetBased(over_arrays, lock, key, values, table, names_assigned)


def _only_computes(element: Any, table: Table) -> bool:
    if isinstance(element, Table):
        return element._deannotate() is table  # noqa: SLF001  # of a mapped class it is another object
    if isinstance(element, Column):
        return element.table is not None and element.table._deannotate() is table  # noqa: SLF001  # of a mapped class it is another object
    return isinstance(element, _COMPUTING) or type(element) in _FUNCTIONS


def _assigned(statement: Update, table: Table) -> dict[Any, object]:
    """What is assigned to each column; to None where the column is not known."""
    # By name it is an attribute, where a mapped class is updated.
    mapper = _mapper(statement)
    columns = table.columns if mapper is None else mapper.columns
    values: Any = statement._values or {}  # noqa: SLF001  # SQLAlchemy has no other name for it
    named = {columns.get(column) if isinstance(column, str) else column: value for column, value in values.items()}
    return {table.columns.get(getattr(column, "key", "")): value for column, value in named.items()}


def _types(assigned: Mapping[Any, object], elements: list[Any], names: frozenset[str]) -> dict[str, Any] | None:
    """The type of each parameter; None where one has none or several, cannot be in an array, or is not given."""
    if None in assigned:
        return None
    binds = [element for element in elements if isinstance(element, BindParameter)]
    # Without a type of its own a parameter has its column's, where it is the value of one, and nowhere else.
    typed = [(bind, bind.type) for bind in binds if not isinstance(bind.type, NullType)]
    typed += [
        (bind, column.type)
        for column, bind in assigned.items()
        if isinstance(bind, BindParameter) and isinstance(bind.type, NullType)
    ]
    types = {(bind.key, repr(sql_type)): sql_type for bind, sql_type in typed if bind.key in names}
    found = {key: sql_type for (key, _), sql_type in types.items()}
    is_clear = len(typed) == len(binds) and len(types) == len(names) and names == set(found)
    is_given = all(bind.callable is None and (bind.key in names or not bind.required) for bind in binds)
    return found if is_clear and is_given and all(map(_fits_an_array, found.values())) else None


def python_type(sql_type: TypeEngine[Any]) -> type[object] | None:
    """The type of a plain column's values, which the driver is given as they are; None for any other column."""
    return _ELEMENTS[type(sql_type)][0] if _fits_an_array(sql_type) else None


def key_array(sql_type: TypeEngine[Any]) -> ARRAY[Any] | None:
    """The type of an array of primary keys of this type; None where they may be equal here and not on the server."""
    type_ = python_type(sql_type)
    return ARRAY(_ELEMENTS[type(sql_type)][1](sql_type)) if type_ in _KEYS else None


def _fits_an_array(sql_type: TypeEngine[Any]) -> bool:
    # A variant is another type; a collation is no longer explicit; a UUID may be kept as text.
    if type(sql_type) not in _ELEMENTS or sql_type._variant_mapping or getattr(sql_type, "collation", None):  # noqa: SLF001  # a variant shows nowhere else
        return False
    return not isinstance(sql_type, Uuid) or (sql_type.as_uuid and sql_type.native_uuid)


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
    elements = {name: _ELEMENTS[type(sql_type)][1](sql_type) for name, sql_type in types.items()}
    arrays = {name: bindparam(_array(name), type_=ARRAY(element)) for name, element in elements.items()}
    columns = (column(name, element) for name, element in elements.items())
    rows = unnest(*arrays.values()).table_valued(*columns).render_derived(name="oq_rows")

    def replace(element: Any, **_: Any) -> Any:
        return rows.c[element.key] if isinstance(element, BindParameter) and element.key in types else None

    # The array by itself keeps the server to the primary key, also by a plan made while the table was small.
    return cast("Update", visitors.replacement_traverse(statement, {}, replace)).where(primary_key == any_(arrays[key]))


def _lock(primary_key: Column[Any], key: str, sql_type: Any) -> Select[Any]:
    """The same rows, FOR NO KEY UPDATE in the order of their keys."""
    keys = bindparam(_array(key), type_=ARRAY(_ELEMENTS[type(sql_type)][1](sql_type)))
    return select(primary_key).where(primary_key == any_(keys)).order_by(primary_key).with_for_update(key_share=True)
