"""The write buffer: what handlers leave to be written, sent together, to the effect of each having sent its own.

Neighbours of one shape go out as one statement. Beside its likes across others is put only what no order can tell
apart: changes of different rows of tables that run no code, and new jobs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias

from sqlalchemy import Connection, Update
from sqlalchemy.orm.exc import StaleDataError

from outboxq.deferred import Write, is_constant, statement_key
from outboxq.enqueue import QUEUES_ANNOUNCED, insert_all, queues_of
from outboxq.kinds import NewJob
from outboxq.set_based import FactsOf, Row, Statement, executions, single_executions

# The oid of a table, and a primary key.
RowId: TypeAlias = tuple[int, tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class RowChange:
    """The changed columns of one row, as a flush would send them.

    Attributes:
        entity: The mapped class that it was changed through.
        statement: The UPDATE: the same object for the same columns of the same class.
        locked: Whether this transaction has locked the row before.
    """

    row: RowId
    entity: type[object]
    statement: Update
    parameters: Row
    locked: bool


@dataclass(slots=True)
class _Changes:
    """Changes of different rows by one UPDATE."""

    statement: Update
    changes: list[RowChange] = field(default_factory=list)

    def send(self, connection: Connection, facts_of: FactsOf | None) -> None:
        # One statement locks rows in the server's order, which must not matter; single ones in the order of their keys,
        # as two flushes would.
        is_locked = all(change.locked for change in self.changes)
        rows = [change.parameters for change in sorted(self.changes, key=attrgetter("row"))]
        changed = _execute(connection, self.statement, rows, facts_of if is_locked else None)
        if changed != len(rows):
            raise StaleDataError(f"UPDATE of {len(rows)} rows by primary key matched {changed}")


@dataclass(slots=True)
class _Jobs:
    """New jobs by their ids."""

    jobs: dict[str, NewJob] = field(default_factory=dict)

    def send(self, connection: Connection, _facts_of: FactsOf | None) -> None:
        insert_all(connection, self.jobs, announced=len(queues_of(self.jobs)) <= QUEUES_ANNOUNCED)


@dataclass(slots=True)
class _Deferred:
    """Executions of equal deferred statements, one behind the other."""

    shape: object
    statement: Statement
    rows: list[Row] = field(default_factory=list)

    def send(self, connection: Connection, facts_of: FactsOf | None) -> None:
        _execute(connection, self.statement, self.rows, facts_of)


class WriteBuffer:
    """What waits to be sent.

    Args:
        facts_of: What is known of tables. Without it each row is sent by its own execution: for a job whose failure
            nobody repeats with less.
    """

    def __init__(self, facts_of: FactsOf | None = None) -> None:
        self._facts_of = facts_of
        self._runs: list[_Changes | _Jobs | _Deferred] = []
        # Where more of a kind may be put: what came behind the last deferred statement.
        self._changes: dict[int, _Changes] = {}
        self._jobs: _Jobs | None = None
        self._numbers: dict[object, int] = {}
        # The same object comes again and again: what it is equal to is found out once.
        self._statements: dict[int, tuple[Statement, int, bool]] = {}
        # Whether a value waits that the process can change until it is sent.
        self.can_change = False
        self._rows: set[RowId] = set()
        self._entities: dict[int, type[object]] = {}

    def __bool__(self) -> bool:
        return bool(self._runs)

    def concerns(self, row: RowId, entity: type[object]) -> bool:
        """Whether a change waits that a reader of this row, by this class, may have to see."""
        return row in self._rows or self._entities.get(row[0], entity) is not entity

    def add_change(self, change: RowChange) -> None:
        """Add a changed row that nothing in the buffer concerns."""
        run = self._changes.get(id(change.statement))
        if run is None:
            run = self._changes[id(change.statement)] = _Changes(change.statement)
            self._runs.append(run)
        run.changes.append(change)
        self._rows.add(change.row)
        self._entities[change.row[0]] = change.entity

    def add_jobs(self, jobs: Mapping[str, NewJob]) -> None:
        """Add new jobs by their ids."""
        if self._jobs is None:
            self._jobs = _Jobs()
            self._runs.append(self._jobs)
        self._jobs.jobs.update(jobs)

    def add_deferred(self, write: Write) -> None:
        """Add a deferred statement behind all that waits: it may read and write anything."""
        number, constant = self._number(write.statement)
        self.can_change |= not (constant and all(map(is_constant, write.parameters.values())))
        shape = number, frozenset(write.parameters)
        last = self._runs[-1] if self._runs else None
        if not (isinstance(last, _Deferred) and last.shape == shape):
            last = _Deferred(shape, write.statement)
            self._runs.append(last)
            self._changes, self._jobs = {}, None
        last.rows.append(write.parameters)

    def send(self, connection: Connection) -> None:
        """Send everything, and forget it.

        Raises:
            StaleDataError: a changed row is not there any more.
            psycopg.Error, SQLAlchemyError: a statement failed.
        """
        runs, self._runs = self._runs, []
        self._changes, self._jobs = {}, None
        self.can_change = False
        self._rows.clear()
        self._entities.clear()
        for run in runs:
            run.send(connection, self._facts_of)

    def _number(self, statement: Statement) -> tuple[int, bool]:
        """Of statements that are equal; and whether the values inside it are constant."""
        known = self._statements.get(id(statement))
        if known is None:
            key, constant = statement_key(statement)
            number = self._numbers.setdefault(key, len(self._numbers))
            known = self._statements[id(statement)] = (statement, number, constant)
        return known[1:]


def _execute(connection: Connection, statement: Statement, rows: list[Row], facts_of: FactsOf | None) -> int:
    """Execute with each of these; how many rows that changed."""
    each = single_executions(statement, rows) if facts_of is None else executions(statement, rows, facts_of)
    return sum(connection.execute(one, parameters).rowcount for one, parameters in each)
