"""What statements write: to the rows of one table, or to more; and whether they run nothing of the user's."""

from collections.abc import Collection, Iterable
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from sqlalchemy import Column, Delete, Insert, Table, TextClause, Update
from sqlalchemy.dialects import postgresql
from sqlalchemy.sql import elements, operators, visitors
from sqlalchemy.sql.functions import Function, FunctionElement
from sqlalchemy.types import TypeEngine

from outboxq.database.known_functions import HARMLESS
from outboxq.handlers.table_facts import RowWrite

Statement: TypeAlias = Insert | Update | Delete | TextClause

# These compute a value from the row and the parameters.
COMPUTING = (
    elements.BinaryExpression,
    elements.BindParameter,
    elements.Case,
    elements.Cast,
    elements.ClauseList,
    elements.ExpressionClauseList,
    elements.Grouping,
    elements.Null,
    elements.TypeClause,
    elements.UnaryExpression,
)
_WRITING = (Insert, Update, Delete)
# What is known of statements, by the names of their parameters: asked each time that one is sent or deferred.
_writes: WeakKeyDictionary[object, dict[frozenset[str], RowWrite | None]] = WeakKeyDictionary()
_CONFLICTS = (postgresql.dml.OnConflictDoNothing, postgresql.dml.OnConflictDoUpdate)
# What an UPDATE may say besides which rows become what.
MORE_PARTS = ("_independent_ctes", "_prefixes", "_hints", "_with_options", "_returning", "_ordered_values")


def row_write(statement: object, names: Collection[str]) -> RowWrite | None:
    """What a statement writes; None if it may write to more than the rows of its table.

    Args:
        names: Of its parameters: those that a column has are the values of the column.
    """
    if not isinstance(statement, _WRITING):
        return None
    known, given = _writes.setdefault(statement, {}), frozenset(names)
    if given not in known:
        known[given] = _row_write(statement, given)
    return known[given]


def _row_write(statement: Insert | Update | Delete, names: frozenset[str]) -> RowWrite | None:
    table = written_table(statement, (*MORE_PARTS, "_post_values_clause"))
    if table is None:
        return None
    if not isinstance(statement, Update):
        return RowWrite(table, "INSERT" if isinstance(statement, Insert) else "DELETE", frozenset())
    assigned = assigned_columns(statement, table)
    if None in assigned:
        return None
    by_name = [column for name, column in table.columns.items() if name in names or column.onupdate is not None]
    return RowWrite(table, "UPDATE", frozenset(column.name for column in (*assigned, *by_name)))


def written_table(statement: Insert | Update | Delete, more: Iterable[str]) -> Table | None:
    """The table that a statement writes to; None if it has more parts, or does not write to a plain table."""
    is_more = any(getattr(statement, part, None) for part in more)
    if is_more or _names_others(statement) or not isinstance(statement.table, Table):
        return None
    # Of a mapped class it is another object.
    return statement.table._deannotate()  # noqa: SLF001  # as SQLAlchemy itself compares tables


def _names_others(statement: Insert | Update | Delete) -> bool:
    """Whether the statement says itself which schema a table is in."""
    return "schema_translate_map" in statement.get_execution_options()


def assigned_columns(statement: Update, table: Table) -> dict[Any, object]:
    """What is assigned to each column; to None if the column is not known."""
    # By name it is an attribute, if a mapped class is updated.
    mapper = updated_mapper(statement)
    columns = table.columns if mapper is None else mapper.columns
    values: Any = statement._values or {}  # noqa: SLF001  # SQLAlchemy has no other name for it
    named = {columns.get(column) if isinstance(column, str) else column: value for column, value in values.items()}
    return {table.columns.get(getattr(column, "key", "")): value for column, value in named.items()}


def updated_mapper(statement: Statement) -> Any:
    """Of the class that is updated, if it is one."""
    return statement._propagate_attrs.get("plugin_subject")  # noqa: SLF001  # SQLAlchemy has no other name for it


def only_writes(statement: Insert | Update | Delete) -> bool:
    """Whether a statement writes plain values and what is computed of them: it runs nothing of the user's."""
    table = statement.table
    if any(getattr(statement, part, None) for part in (*MORE_PARTS, "_multi_values", "select")) or not isinstance(
        table, Table
    ):
        return False
    if not all(map(_is_settled, table.columns)):
        return False
    return all(map(_writes_or_computes, visitors.iterate(statement)))


def _is_settled(column: Column[Any]) -> bool:
    """Whether the process computes no value of a column: by a default, or by a type that is not SQLAlchemy's own."""
    given: tuple[Any, ...] = (column.default, column.onupdate)
    return all(default is None or default.is_scalar for default in given) and _is_sqlalchemy_type(column.type)


def _is_sqlalchemy_type(sql_type: TypeEngine[Any]) -> bool:
    of_values = getattr(sql_type, "item_type", None)
    is_own = type(sql_type).__module__.startswith("sqlalchemy.") and not sql_type._variant_mapping  # noqa: SLF001  # a variant shows nowhere else
    return is_own and (of_values is None or _is_sqlalchemy_type(of_values))


def _writes_or_computes(element: Any) -> bool:
    if isinstance(element, FunctionElement):
        return isinstance(element, Function) and not element.packagenames and element.name.lower() in HARMLESS
    if isinstance(element, elements.BinaryExpression | elements.UnaryExpression):
        return not isinstance(element.operator, operators.custom_op)
    if isinstance(element, elements.BindParameter):
        return _is_sqlalchemy_type(element.type)
    return isinstance(element, (*_WRITING, *COMPUTING, *_CONFLICTS, Table, Column))
