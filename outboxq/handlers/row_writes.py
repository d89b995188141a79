"""Analysis of statements: one that only writes rows of one table may be sent later, or merged with others.

Triggers and constraints of that table may have further effects. These facts are read from the catalogs when first
needed, and cached for `FRESH_SECONDS`.
"""

import time
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, assert_never, cast
from weakref import WeakKeyDictionary

from sqlalchemy import ClauseElement, Column, Connection, Delete, Insert, Table, TextClause, Update
from sqlalchemy.dialects import postgresql
from sqlalchemy.sql import elements, operators, visitors
from sqlalchemy.sql.functions import Function, FunctionElement
from sqlalchemy.types import TypeEngine

from outboxq.database.driver import run_script
from outboxq.statements.catalog import DEFERRABLE, table_facts

Statement: TypeAlias = Insert | Update | Delete | TextClause

# Expressions that compute a value only from the row and the parameters.
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
# Functions, and types with a length, that compute a value: for any other one it is unknown what it reads and writes.
COMPUTING_FUNCTIONS = frozenset(
    (
        *("abs", "array_agg", "avg", "bool_and", "bool_or", "cast", "ceil", "clock_timestamp", "coalesce", "concat"),
        *("count", "date_trunc", "extract", "floor", "gen_random_uuid", "greatest", "jsonb_set", "least", "length"),
        *("lower", "max", "min", "now", "nullif", "numeric", "round", "row_number", "sum", "trim", "upper", "varchar"),
    )
)
_WRITING = (Insert, Update, Delete)
_CONFLICTS = (postgresql.dml.OnConflictDoNothing, postgresql.dml.OnConflictDoUpdate)
# Parts, by SQLAlchemy's names, of a statement that only writes rows of its table. A statement with another part, of a
# later SQLAlchemy or an extension, may do more. `_annotations`: a session adds them to each statement about a mapped
# class.
_PART_NAMES = """
    _annotations table _inline _where_criteria _values _multi_values select _select_names
    include_insert_from_select_defaults _sort_by_parameter_order _return_defaults _return_defaults_columns
    _supplemental_returning _compile_state_funcs _propagate_attrs dialect_options
"""
_PARTS = frozenset(_PART_NAMES.split())
_PARTS_OF_VALUES = _PARTS - {"_multi_values", "select"} | {"_post_values_clause"}
# After this time at the latest, relays notice the changes of a concurrent migration.
FRESH_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RowWrite:
    """The rows that a statement writes: its table, its verb, and an UPDATE's columns; triggers are not considered."""

    table: Table
    verb: Literal["INSERT", "UPDATE", "DELETE"]
    columns: frozenset[str]


@dataclass(frozen=True, slots=True)
class TableFacts:
    """Facts about a table, from the catalogs, that decide if changes of its rows may wait and be sent with others.

    `oid`: identifies the table, which may have several names. `is_plain`: an ordinary table, without row security and
    rules, and without inheritance in either direction. `is_inert`: an UPDATE runs nothing else: no triggers, no users'
    functions in its constraints, no generated columns. `bound_columns`: columns whose allowed values depend on other
    rows, of this table or another: unique columns, for example. `contains_inserts`, `contains_deletes`: True if an
    INSERT, or a DELETE, changes no other table, and no constraint waits for COMMIT to check it.
    """

    oid: int
    is_plain: bool
    is_inert: bool
    primary_key: frozenset[str]
    bound_columns: frozenset[str]
    contains_inserts: bool
    contains_deletes: bool

    def contains(self, write: RowWrite) -> bool:
        """Return True if the write has no effect outside the table, and no constraint waits for COMMIT to check it."""
        if not (self.is_plain and self.is_inert):
            return False
        match write.verb:
            case "INSERT":
                return self.contains_inserts
            case "UPDATE":
                return self.bound_columns.isdisjoint(write.columns)
            case "DELETE":
                return self.contains_deletes
        assert_never(write.verb)


# By statement and parameter names; looked up each time that a statement is sent or deferred.
_writes: WeakKeyDictionary[object, dict[frozenset[str], RowWrite | None]] = WeakKeyDictionary()


def row_write(statement: object, names: Collection[str]) -> RowWrite | None:
    """Return the table, verb and columns that a statement writes; None if it may do more than write rows of a table.

    Args:
        names: Names of its parameters; a name that is also a column's is the value of that column.
    """
    if not isinstance(statement, _WRITING):
        return None
    known, given = _writes.setdefault(statement, {}), frozenset(names)
    if given not in known:
        known[given] = _row_write(statement, given)
    return known[given]


def _row_write(statement: Insert | Update | Delete, names: frozenset[str]) -> RowWrite | None:
    table = written_table(statement)
    if table is None:
        return None
    if not isinstance(statement, Update):
        return RowWrite(table, "INSERT" if isinstance(statement, Insert) else "DELETE", frozenset())
    assigned = assigned_columns(statement, table)
    if None in assigned:
        return None
    by_name = [column for name, column in table.columns.items() if name in names or column.onupdate is not None]
    return RowWrite(table, "UPDATE", frozenset(column.name for column in (*assigned, *by_name)))


def written_table(statement: Insert | Update | Delete) -> Table | None:
    """Return the table whose rows a statement writes; None if it may do more, or writes to anything but a `Table`."""
    if not _consists_of(_PARTS, statement) or _names_others(statement) or not isinstance(statement.table, Table):
        return None
    # SQLAlchemy passes a mapped class's table as an annotated copy.
    return statement.table._deannotate()  # noqa: SLF001  # as SQLAlchemy itself compares tables


def _consists_of(parts: AbstractSet[str], statement: Insert | Update | Delete) -> bool:
    """Return True if no part of a statement (an attribute such as `_values`) is set, except for these parts.

    A part that is an SQL expression counts as set, because it has no truth value.
    """
    named = (name for name, _ in statement._traverse_internals)  # noqa: SLF001  # as SQLAlchemy's own cache does
    others = (getattr(statement, name, None) for name in named if name not in parts)
    return not any(isinstance(part, ClauseElement) or part for part in others)


def _names_others(statement: Insert | Update | Delete) -> bool:
    """Return True if the statement has its own `schema_translate_map`, and so may write to another schema's table."""
    return "schema_translate_map" in statement.get_execution_options()


def assigned_columns(statement: Update, table: Table) -> dict[Any, object]:
    """Return the value that an UPDATE assigns, by column; under the key None the value of an unknown column."""
    # A name is an attribute's, if a mapped class is updated.
    mapper = updated_mapper(statement)
    columns = table.columns if mapper is None else mapper.columns
    values: Any = statement._values or {}  # noqa: SLF001  # SQLAlchemy has no other name for it
    named = {columns.get(column) if isinstance(column, str) else column: value for column, value in values.items()}
    return {table.columns.get(getattr(column, "key", "")): value for column, value in named.items()}


def updated_mapper(statement: Statement) -> Any:
    """Return the mapper of the ORM class that a statement updates, or None if it updates a table."""
    return statement._propagate_attrs.get("plugin_subject")  # noqa: SLF001  # SQLAlchemy has no other name for it


def only_writes(statement: Insert | Update | Delete) -> bool:
    """Return True if a statement writes only plain values and values computed from them, and runs no users' code."""
    table = statement.table
    if not _consists_of(_PARTS_OF_VALUES, statement) or not isinstance(table, Table):
        return False
    if not all(map(_is_settled, table.columns)):
        return False
    return all(map(_writes_or_computes, visitors.iterate(statement)))


def _is_settled(column: Column[Any]) -> bool:
    """Return True if no Python code computes a column's values: no function as default, no type but SQLAlchemy's."""
    given: tuple[Any, ...] = (column.default, column.onupdate)
    return all(default is None or default.is_scalar for default in given) and is_sqlalchemy_type(column.type)


def is_sqlalchemy_type(sql_type: TypeEngine[Any]) -> bool:
    """Return True if a type, and its elements' type, is SQLAlchemy's own, and so runs no users' code."""
    of_values = getattr(sql_type, "item_type", None)
    is_own = type(sql_type).__module__.startswith("sqlalchemy.") and not sql_type._variant_mapping  # noqa: SLF001  # a variant shows nowhere else
    return is_own and (of_values is None or is_sqlalchemy_type(of_values))


def _writes_or_computes(element: Any) -> bool:
    if isinstance(element, FunctionElement):
        is_named = isinstance(element, Function) and not element.packagenames
        return is_named and element.name.lower() in COMPUTING_FUNCTIONS
    if isinstance(element, elements.BinaryExpression | elements.UnaryExpression):
        return not isinstance(element.operator, operators.custom_op)
    if isinstance(element, elements.BindParameter):
        return is_sqlalchemy_type(element.type)
    return isinstance(element, (*_WRITING, *COMPUTING, *_CONFLICTS, Table, Column))


class Catalog:
    """A cache of the facts about tables that were read on one connection; they are kept for `FRESH_SECONDS`."""

    def __init__(self) -> None:
        self._read_at = 0.0
        self._facts: dict[tuple[Table, str | None], TableFacts | None] = {}
        self._has_deferrable: bool | None = None

    def refresh(self) -> None:
        """Forget all facts, if `FRESH_SECONDS` have passed since the last time that they were forgotten."""
        if time.monotonic() - self._read_at > FRESH_SECONDS:
            self._facts.clear()
            self._has_deferrable = None
            self._read_at = time.monotonic()

    def facts(self, connection: Connection, table: Table) -> TableFacts | None:
        """Return the facts of a table, which are read if they are not known yet; None if there is no such table.

        Raises:
            psycopg.Error: the transaction has failed, or the connection is lost.
        """
        schemas = connection.get_execution_options().get("schema_translate_map") or {}
        named = table, schemas.get(table.schema, table.schema)
        if named not in self._facts:
            self._facts[named] = _read(connection, *named)
        return self._facts[named]

    def has_deferrable(self, connection: Connection) -> bool:
        """Return True if a constraint of the database may be checked only at COMMIT. Raises psycopg.Error."""
        if self._has_deferrable is None:
            self._has_deferrable = bool(run_script(connection, DEFERRABLE)[0][0])
        return self._has_deferrable


def _read(connection: Connection, table: Table, schema: str | None) -> TableFacts | None:
    preparer = connection.dialect.identifier_preparer
    name = preparer.quote(table.name)
    if schema is not None:
        name = f"{preparer.quote_schema(schema)}.{name}"
    rows = run_script(connection, table_facts(name))
    if not rows:
        return None
    oid, is_plain, is_inert, inserts, deletes, primary_key, bound_columns = rows[0]
    names, bound = cast("list[str]", primary_key), cast("list[str]", bound_columns)
    flags = bool(is_plain), bool(is_inert)
    return TableFacts(cast("int", oid), *flags, frozenset(names), frozenset(bound), bool(inserts), bool(deletes))
