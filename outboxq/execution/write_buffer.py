"""The write buffer: unsent writes of several handlers, sent together, as if each handler had sent its own.

Consecutive writes of one shape are one statement. Only writes whose order cannot matter are moved past others to join
their like: changes of different rows of tables that run no code, and new jobs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from sqlalchemy import Connection, Update
from sqlalchemy.orm.exc import StaleDataError

from outboxq.handlers.deferred import Write
from outboxq.handlers.row_writes import Statement
from outboxq.handlers.set_based import FactsOf, Row, executions
from outboxq.new_job import NewJob
from outboxq.outbox.insert import QUEUES_ANNOUNCED, insert_all, queues_of

# The oid of a table, and a primary key.
RowId: TypeAlias = tuple[int, tuple[object, ...]]
IsLocked: TypeAlias = Callable[[type[object], tuple[object, ...]], bool]


class RowChange(NamedTuple):
    """The changed columns of one row, as a flush would send them.

    Attributes:
        entity: The mapped class through which the row was changed.
        statement: The UPDATE: the same object for the same columns of the same class.
    """

    row: RowId
    entity: type[object]
    statement: Update
    parameters: Row


@dataclass(slots=True)
class _Deferred:
    """Consecutive executions of one deferred statement."""

    statement: Statement
    rows: list[Row]

    def takes(self, write: Write) -> bool:
        """Return True if `write` may join: the same statement object and names of parameters."""
        return self.statement is write.statement and self.rows[0].keys() == write.parameters.keys()


class WriteBuffer:
    """The writes that wait to be sent.

    Args:
        facts_of: The facts of a table.
        is_locked: Returns True if the batch has locked the row of a class with this primary key.
    """

    def __init__(self, facts_of: FactsOf, is_locked: IsLocked) -> None:
        self._facts_of = facts_of
        self._is_locked = is_locked
        # Changes of different rows by one UPDATE, new jobs by their ids, and executions of one deferred statement.
        self._runs: list[list[RowChange] | dict[str, NewJob] | _Deferred] = []
        # The runs after the last deferred statement, which more changes and jobs may join.
        self._changes: dict[int, list[RowChange]] = {}
        self._jobs: dict[str, NewJob] | None = None
        self._rows: set[RowId] = set()
        self._entities: dict[int, type[object]] = {}

    def __bool__(self) -> bool:
        return bool(self._runs)

    def concerns(self, row: RowId, entity: type[object]) -> bool:
        """Return True if a change waits that a reader of this row by this class may have to see."""
        return row in self._rows or self._entities.get(row[0], entity) is not entity

    def add_change(self, change: RowChange) -> None:
        """Add a changed row that nothing in the buffer concerns."""
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
        """Add a deferred statement after all waiting writes: it may read and write anything."""
        last = self._runs[-1] if self._runs else None
        if isinstance(last, _Deferred) and last.takes(write):
            last.rows.append(write.parameters)
        else:
            self._runs.append(_Deferred(write.statement, [write.parameters]))
            self._changes, self._jobs = {}, None

    def send(self, connection: Connection) -> None:
        """Send everything, and forget it.

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
                _execute(connection, run.statement, run.rows, self._facts_of)
            elif isinstance(run, dict):
                are_few = len(queues_of(run)) <= QUEUES_ANNOUNCED
                insert_all(connection, run, wakes="by queue" if are_few else "all")
            else:
                # Rows are locked in the order of their keys, as by a flush: two batches must not wait for each other.
                in_order = not all(self._is_locked(change.entity, change.row[1]) for change in run)
                rows = [change.parameters for change in sorted(run, key=attrgetter("row"))]
                changed = _execute(connection, run[0].statement, rows, self._facts_of, in_order=in_order)
                if changed != len(rows):
                    raise StaleDataError(f"UPDATE of {len(rows)} rows by primary key matched {changed}")


def _execute(
    connection: Connection, statement: Statement, rows: list[Row], facts_of: FactsOf, *, in_order: bool = False
) -> int:
    """Execute the statement with each of these rows of parameters; return the number of changed rows."""
    each = executions(statement, rows, facts_of, in_order=in_order)
    results = (connection.execute(one, parameters) for one, parameters in each)
    return sum(result.rowcount for result in results if not result.returns_rows)
