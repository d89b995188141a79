"""The write buffer: unsent writes of several handlers, sent together, as if each handler had sent its own.

Consecutive writes of one shape become one statement. Writes are only moved past others if their order cannot matter:
changes of different rows of tables that run no code, and new jobs.

Changes in a session may wait if they concern plain columns of plain rows, so that a flush would send only UPDATEs.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import Column, Connection, Table, TextClause, Update, bindparam, update
from sqlalchemy.engine.interfaces import ExecutionContext
from sqlalchemy.orm import InstanceState, Mapper, Session
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.orm.identity import IdentityMap
from sqlalchemy.util import safe_reraise

from outboxq.database.direct import is_direct, send_update
from outboxq.database.guard import is_same
from outboxq.database.session_listeners import Listeners, is_listened_to
from outboxq.database.sessions import binds_of
from outboxq.handlers.deferred import Write
from outboxq.handlers.row_writes import COMPUTING_FUNCTIONS, RowWrite, Statement, TableFacts, row_write
from outboxq.handlers.set_based import FactsOf, Row, executions, python_type
from outboxq.new_job import NewJob
from outboxq.outbox.insert import QUEUES_ANNOUNCED, insert_all, queues_of
from outboxq.outbox.pending import holds_only_jobs, write_plain_jobs

# The oid of a table, and a primary key.
RowId: TypeAlias = tuple[int, tuple[object, ...]]
IsLocked: TypeAlias = Callable[[type[object], tuple[object, ...]], bool]

# Users' listeners for these events see a session begin, flush or commit, or fail to, and may change what it writes.
FLUSH_EVENTS = (
    *("after_begin", "before_flush", "after_flush", "after_flush_postexec", "before_commit", "after_commit"),
    *("after_transaction_create", "after_transaction_end", "after_rollback", "after_soft_rollback"),
    # New jobs are kept as objects until they are sent.
    "pending_to_transient",
)
_AT_FLUSH: Listeners = attrgetter(*FLUSH_EVENTS)
_MISSING = object()
# The most changed rows of a lone job that are sent by separate statements.
_SENT_ONE_BY_ONE = 3
_CALLED = re.compile(r"""([\w".]++)\(""")
_READS_OR_MARKS = frozenset(("SELECT", "SAVEPOINT", "RELEASE", "ROLLBACK"))
_WRITES = frozenset(("INSERT", "UPDATE", "DELETE"))


class RowChange(NamedTuple):
    """The changed columns of one row, as a flush would send them.

    Attributes:
        row: The oid of the table, and the primary key.
        entity: The mapped class through which the row was changed.
        statement: The UPDATE; changes of the same columns of the same class share one object.
        parameters: The values of the UPDATE's parameters.
    """

    row: RowId
    entity: type[object]
    statement: Update
    parameters: Row


@dataclass(slots=True)
class _Deferred:
    """One statement that handlers have passed to `ctx.defer`, with the parameters of its consecutive executions."""

    statement: Statement
    rows: list[Row]

    def takes(self, write: Write) -> bool:
        """Return True if `write` may be executed with these rows: same statement object and same parameter names."""
        return self.statement is write.statement and self.rows[0].keys() == write.parameters.keys()


class WriteBuffer:
    """The writes of handlers that wait to be sent together.

    Args:
        is_locked: Returns True if the batch has locked the row of a class with this primary key. Updates of rows that
            are all locked may be sent in any order.
    """

    def __init__(self, is_locked: IsLocked) -> None:
        self._is_locked = is_locked
        # Changes of different rows by one UPDATE, new jobs by their ids, and executions of one deferred statement.
        self._runs: list[list[RowChange] | dict[str, NewJob] | _Deferred] = []
        # The groups since the last deferred statement, to which more changes and jobs may be added.
        self._changes: dict[int, list[RowChange]] = {}
        self._jobs: dict[str, NewJob] | None = None
        self._rows: set[RowId] = set()
        self._entities: dict[int, type[object]] = {}

    def __bool__(self) -> bool:
        return bool(self._runs)

    def concerns(self, row: RowId, entity: type[object]) -> bool:
        """Return True if the buffer must be sent before this row is read or changed through the class `entity`.

        That is so if a change of the row waits, or if a change of any row of its table waits that was made through
        another class.
        """
        return row in self._rows or self._entities.get(row[0], entity) is not entity

    def add_change(self, change: RowChange) -> None:
        """Add the change of a row. The caller sends the buffer first if `concerns` returns True for that row."""
        run = self._changes.get(id(change.statement))
        if run is None:
            run = self._changes[id(change.statement)] = []
            self._runs.append(run)
        run.append(change)
        self._rows.add(change.row)
        self._entities[change.row[0]] = change.entity

    def add_jobs(self, jobs: Mapping[str, NewJob]) -> None:
        """Add new jobs by their ids."""
        if self._jobs is None:
            self._jobs = {}
            self._runs.append(self._jobs)
        self._jobs.update(jobs)

    def add_deferred(self, write: Write) -> None:
        """Add a statement passed to `ctx.defer`, as the last of all waiting writes: it may read and write anything."""
        last = self._runs[-1] if self._runs else None
        if isinstance(last, _Deferred) and last.takes(write):
            last.rows.append(write.parameters)
        else:
            self._runs.append(_Deferred(write.statement, [write.parameters]))
            self._changes, self._jobs = {}, None

    def send(self, connection: Connection, facts_of: FactsOf) -> None:
        """Send everything, and empty the buffer.

        Args:
            facts_of: Returns the facts of a table.

        Raises:
            StaleDataError: a changed row does not exist any more.
            psycopg.Error, SQLAlchemyError: a statement failed.
        """
        runs, self._runs = self._runs, []
        self._changes, self._jobs = {}, None
        self._rows.clear()
        self._entities.clear()
        for run in runs:
            if isinstance(run, _Deferred):
                _execute(connection, run.statement, run.rows, facts_of)
            elif isinstance(run, dict):
                are_few = len(queues_of(run)) <= QUEUES_ANNOUNCED
                insert_all(connection, run, wakes="by queue" if are_few else "all")
            else:
                # Rows are locked in the order of their keys, as in a flush, so that two batches cannot wait for each
                # other.
                in_order = not all(self._is_locked(change.entity, change.row[1]) for change in run)
                rows = [change.parameters for change in sorted(run, key=attrgetter("row"))]
                changed = _execute(connection, run[0].statement, rows, facts_of, in_order=in_order)
                if changed != len(rows):
                    raise StaleDataError(f"UPDATE of {len(rows)} rows by primary key matched {changed}")


def _execute(
    connection: Connection, statement: Statement, rows: list[Row], facts_of: FactsOf, *, in_order: bool = False
) -> int:
    """Execute the statement with each of these rows of parameters, in one statement over arrays if possible.

    Return the number of changed rows.

    Args:
        facts_of: Returns the facts of a table.
        in_order: True if the rows must be locked in this order.
    """
    changed = 0
    for one, parameters in executions(statement, rows, facts_of, in_order=in_order):
        # A deferred UPDATE of a single table is sent over arrays.
        if one is not statement and isinstance(one, Update) and isinstance(parameters, dict) and is_direct(connection):
            changed += send_update(connection, one, parameters)
        else:
            changed += connection.execute(one, parameters).rowcount
    return changed


@dataclass(frozen=True, slots=True)
class _Writable:
    """A mapped class whose plain columns outboxq's own UPDATEs can write with the same effect as a flush.

    Attributes:
        primary_key: The names of the table's key columns.
        keys: The key's attributes and their Python types.
        columns: The plain columns and their Python types, by attribute.
    """

    mapper: Mapper[Any]
    table: Table
    primary_key: frozenset[str]
    keys: tuple[tuple[str, type[object]], ...]
    columns: Mapping[str, tuple[Column[Any], type[object]]]

    def is_allowed_by(self, facts: TableFacts | None) -> bool:
        """Return True if an UPDATE by primary key changes that row and nothing else, by these facts of the table."""
        if facts is None or not (facts.is_plain and facts.is_inert):
            return False
        hooks = self.mapper.dispatch
        is_listened_to = bool(hooks.before_update) or bool(hooks.after_update)
        return not is_listened_to and facts.primary_key == self.primary_key


def row_changes(session: Session, facts_of: FactsOf) -> list[RowChange] | None:
    """Return the UPDATEs that a flush of the session's changed rows would send; None if a flush would do more.

    New objects are ignored: the caller handles them.
    """
    if session._deleted or is_listened_to(session, _AT_FLUSH):  # noqa: SLF001  # `deleted` builds a set of objects each time
        return None
    return changes_of(session.identity_map._modified, facts_of)  # noqa: SLF001  # `dirty` builds a set of the objects


def changes_of(states: Iterable[InstanceState[Any]], facts_of: FactsOf) -> list[RowChange] | None:
    """Return the UPDATEs that a flush of these changed entities would send; None if a flush would do more."""
    changes: list[RowChange] = []
    for state in states:
        mapper = state.manager.mapper
        # Relationships may be added later, also relationships of other classes to this one.
        writable = _writable(mapper, len(mapper.attrs) + len(mapper._dependency_processors))  # noqa: SLF001  # nothing public counts them
        facts = None if writable is None else facts_of(writable.table)
        if writable is None or facts is None or not writable.is_allowed_by(facts):
            return None
        values = _changed_values(state, writable, facts)
        if values is None or not _has_its_key(state, writable):
            return None
        if values:
            assert state.key is not None
            key = state.key[1]
            statement, names = _update(writable.mapper, tuple(values))
            parameters = dict(zip(names, (*key, *values.values()), strict=True))
            changes.append(RowChange((facts.oid, key), writable.mapper.class_, statement, parameters))
    # The row was changed through two classes: only a flush knows which change comes last.
    return changes if len(changes) < 2 or len({change.row for change in changes}) == len(changes) else None


def send_changes(session: Session, connection: Connection) -> None:
    """Send a session's changed rows now, ahead of its flush, if the flush would send only these changes and new jobs.

    SQLAlchemy's flush takes several times as long. Nothing is sent if more than `_SENT_ONE_BY_ONE` rows have changed.
    New jobs are inserted first; if one of them refers to entities, all new jobs are left to the flush, after the
    changes. A failure has the same effect as in a flush.

    Raises:
        StaleDataError: a row does not exist any more.
        sqlalchemy.exc.DBAPIError: as SQLAlchemy would raise it.
    """
    changes = _few_changes(session, connection)
    # New jobs come before changes, which may refer to them.
    if changes and write_plain_jobs(session, connection):
        # The flush may have run users' code.
        changes = _few_changes(session, connection)
    if not changes:
        return
    try:
        send_each(connection, changes)
    except BaseException:  # noqa: BLE001  # `safe_reraise` raises it again
        with safe_reraise():
            session.rollback()
    commit_states(session.identity_map._modified, session.identity_map)  # noqa: SLF001  # `dirty` builds a set of the objects


def _few_changes(session: Session, connection: Connection) -> list[RowChange]:
    """Return the changes that `send_changes` sends; none if it leaves all to the session's flush."""
    if not (holds_only_jobs(session) and uses_only(session, connection) and is_direct(connection)):
        return []
    changes = row_changes(session, as_flushed) or []
    return changes if are_few(changes) else []


def are_few(changes: Sequence[RowChange]) -> bool:
    """Return True if sending these changes without a flush pays: at most `_SENT_ONE_BY_ONE`, all with one UPDATE.

    Each change is then sent by itself, while a flush sends many in one round trip. Changes with different UPDATEs are
    left to a flush, because only SQLAlchemy knows the order of tables.
    """
    return len({id(change.statement) for change in changes}) <= 1 and len(changes) <= _SENT_ONE_BY_ONE


def send_each(connection: Connection, changes: Iterable[RowChange]) -> None:
    """Send changes of rows, each by its own UPDATE, in the order of the rows' keys, in which the rows are thus locked.

    Raises:
        StaleDataError: a row does not exist any more.
        sqlalchemy.exc.DBAPIError: as SQLAlchemy would raise it.
    """
    found, ordered = 0, sorted(changes, key=attrgetter("row"))
    for change in ordered:
        found += send_update(connection, change.statement, change.parameters)
    if found != len(ordered):
        # The words of SQLAlchemy's own error.
        raise StaleDataError(
            f"UPDATE statement on table '{ordered[0].statement.table.description}' expected to update {len(ordered)} "
            f"row(s); {found} were matched."
        )


def commit_states(states: Iterable[InstanceState[Any]], held_by: IdentityMap | None = None) -> None:
    """Mark entities as unchanged in SQLAlchemy, because their changes were written, as the end of a flush does.

    Args:
        states: SQLAlchemy's states of the entities.
        held_by: The identity map of their session; None if they are in no session yet.
    """
    InstanceState._commit_all_states([(state, state.dict) for state in states], held_by)  # noqa: SLF001  # nothing public does it


@lru_cache(256)
def as_flushed(table: Table) -> TableFacts:
    """Return facts of a table, not read from the server, that allow outboxq to send any change of plain columns itself.

    Use these facts only for changes that are sent at once, as a flush would send them: triggers and constraints then
    have the same effect.
    """
    return TableFacts(
        oid=id(table),
        is_plain=True,
        is_inert=True,
        primary_key=frozenset(column.name for column in table.primary_key),
        bound_columns=frozenset(),
        contains_inserts=True,
        contains_deletes=True,
    )


def row_writes(verb: str, context: ExecutionContext | None) -> tuple[RowWrite, ...] | None:
    """Return the rows that a statement is about to write: an empty tuple if it only reads, None if they are not known.

    By these rows a shared batch decides if deferred constraints must be checked.

    Args:
        verb: The first word of the statement.
    """
    compiled: Any = getattr(context, "compiled", None)
    if context is None or compiled is None or isinstance(compiled.statement, TextClause) or _is_translated(context):
        return None
    if _calls_others(compiled.string):
        return None
    if verb in _READS_OR_MARKS:
        return ()
    # Not WITH, because a CTE may write too.
    write = row_write(compiled.statement, compiled.column_keys or ()) if verb in _WRITES else None
    return None if write is None else (write,)


@lru_cache(1024)
def _calls_others(sql: str) -> bool:
    """Return True if a compiled statement calls a function that may write."""
    # SQLAlchemy puts no blank between a function's name and the parenthesis, but one after other words.
    return not COMPUTING_FUNCTIONS.issuperset(map(str.lower, _CALLED.findall(sql)))


def _is_translated(context: ExecutionContext) -> bool:
    """Return True if a statement changes the connection's `schema_translate_map`, so that its tables are not known."""
    name = "schema_translate_map"
    return context.execution_options.get(name) != context.root_connection.get_execution_options().get(name)


def uses_only(session: Session, connection: Connection) -> bool:
    """Return True if the session sends to no other connection than this one."""
    bind = session.bind
    if binds_of(session) or not (isinstance(bind, Connection) and is_same(connection, bind)):
        return False
    transaction = session.get_transaction()
    used: Any = () if transaction is None else transaction._connections.values()  # noqa: SLF001  # no public name shows its connections
    return all(is_same(connection, entry[0]) for entry in used)


def _has_its_key(state: InstanceState[Any], writable: _Writable) -> bool:
    """Return True if an entity's key attributes still have the values of its identity key.

    Only then does an UPDATE by that key change the row that a flush would change, and no other.
    """
    assert state.key is not None
    for (name, type_), key in zip(writable.keys, state.key[1], strict=True):
        value = state.dict.get(name, _MISSING)
        if type(value) is not type_ or value != key:
            return False
    return True


def _changed_values(state: InstanceState[Any], writable: _Writable, facts: TableFacts) -> dict[str, object] | None:
    """Return the new values of an entity by attribute name, sorted; None if one of them must be left to a flush."""
    values: dict[str, object] = {}
    for name in sorted(state.committed_state):
        column, type_ = writable.columns.get(name, (None, None))
        value = state.dict.get(name, _MISSING)
        # An expression, a mutable value, or a value that the type converts is left to a flush.
        if column is None or not (type(value) is type_ or value is None) or column.name in facts.bound_columns:
            return None
        # Compared as a flush does it.
        if column.type.compare_values(value, state.committed_state[name]) is not True:
            values[name] = value
    return values


@lru_cache(256)
def _writable(mapper: Mapper[Any], _relations: int) -> _Writable | None:
    table = mapper.local_table
    is_plain = (
        isinstance(table, Table)
        and mapper.persist_selectable is table
        and mapper.inherits is None
        and mapper.polymorphic_on is None
        and mapper.version_id_col is None
        # A changed row may prove to be an orphan, or have attributes that a flush expires.
        and not (mapper._delete_orphans or mapper._readonly_props)  # noqa: SLF001  # SQLAlchemy has no other names for them
    )
    if not (is_plain and isinstance(table, Table)) or set(mapper.primary_key) != set(table.primary_key):
        return None
    if any(column.onupdate is not None or column.server_onupdate is not None for column in table.columns):
        return None
    types = [(mapper.get_property_by_column(column).key, python_type(column.type)) for column in mapper.primary_key]
    keys = tuple((name, type_) for name, type_ in types if type_ is not None)
    if len(keys) < len(types):
        return None
    primary_key = frozenset(column.name for column in table.primary_key)
    return _Writable(mapper, table, primary_key, keys, _plain_columns(mapper, table))


def _plain_columns(mapper: Mapper[Any], table: Table) -> dict[str, tuple[Column[Any], type[object]]]:
    # A flush that changes one of these columns also changes it in the rows that refer to it.
    relations = {*mapper.relationships, *(each.prop for each in mapper._dependency_processors)}  # noqa: SLF001  # relationships that lead here
    referred = {pair[0] for relation in relations for pair in relation.synchronize_pairs or ()}
    found = {}
    for attribute in mapper.column_attrs:
        column = attribute.columns[0]
        if len(attribute.columns) == 1 and isinstance(column, Column) and column.table is table:
            type_ = python_type(column.type)
            if type_ is not None and not column.primary_key and column not in referred:
                found[attribute.key] = column, type_
    return found


@lru_cache(1024)
def _update(mapper: Mapper[Any], attributes: tuple[str, ...]) -> tuple[Update, tuple[str, ...]]:
    """Return an UPDATE by primary key, and the names of its parameters: the key's first, then the values'."""
    table: Any = mapper.local_table
    columns = [mapper.column_attrs[name].columns[0] for name in attributes]
    keys = [bindparam(f"oq_key_{n}", type_=column.type) for n, column in enumerate(mapper.primary_key)]
    values = [bindparam(f"oq_value_{n}", type_=column.type) for n, column in enumerate(columns)]
    by_key = (column == key for column, key in zip(mapper.primary_key, keys, strict=True))
    statement = update(table).where(*by_key).values(dict(zip(columns, values, strict=True)))
    return statement, tuple(bind.key for bind in (*keys, *values))
