"""The types of the doctor: findings, checks, and the input of a check."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from sqlalchemy import Connection, Executable, Row

from outboxq.admin.roles import Part
from outboxq.handlers.resolved import Registry

Severity: TypeAlias = Literal["problem", "warning", "info"]
Value: TypeAlias = str | int | float | bool | list[str] | None
Connect: TypeAlias = Callable[[], AbstractContextManager[Connection]]


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition that a check has found in the database.

    Args:
        code: The finding's name, for programs; later versions do not rename it.
        severity: `problem`: jobs do not run, or a guarantee is broken. `warning`: that may happen, or will. `info`:
            good to know.
        title: The finding, in a line.
        detail: The values in it, for programs: pids, ages, names.
        advice: The steps that an operator can take, in words.
    """

    code: str
    severity: Severity
    title: str
    detail: Mapping[str, Value]
    advice: str

    @property
    def needs_attention(self) -> bool:
        """True if an operator should act: the finding is a problem or a warning."""
        return self.severity != "info"


def detail_of(row: Row[Any]) -> dict[str, Value]:
    """Return a row as a dict by its columns' names, for `Finding.detail`."""
    return dict(row._mapping)  # noqa: SLF001  # public, but for its name


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The thresholds of the doctor's checks.

    Args:
        older_than_seconds: Report transactions that have been open, and jobs that have waited, for this long.
        older_than_transactions: Report replication slots and standbys that keep vacuum from removing rows that died
            this many transactions ago, or more.
        dead_tuples: Report tables with this many dead rows or more.
        short_timeout_seconds: Report the server's time-outs that are shorter than this.
    """

    older_than_seconds: float = 300.0
    older_than_transactions: int = 1_000_000
    dead_tuples: int = 100_000
    short_timeout_seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckContext:
    """The input of every check: the connection, in a transaction for this check, and facts about the database.

    Args:
        use: The purpose of this database role, which decides the rights that it needs.
        tables: The tables of outboxq that exist and can be read.
        is_current: True if the tables are at the latest step that this version of the code knows.
        kept: The rows that `once` keeps, by name.
    """

    connection: Connection
    schema: str
    limits: Limits
    use: Part
    registry: Registry | None
    tables: frozenset[str] = frozenset()
    is_current: bool = False
    kept: dict[str, Sequence[Row[Any]]] = field(default_factory=dict)

    def once(self, name: str, find: Callable[[], Sequence[Row[Any]]]) -> Sequence[Row[Any]]:
        """Return the rows of `find`, an expensive query for several checks: it is executed once for each `name`."""
        if name not in self.kept:
            self.kept[name] = find()
        return self.kept[name]

    def rows(self, statement: Executable) -> Sequence[Row[Any]]:
        """Execute a query; return all rows."""
        return self.connection.execute(statement).all()

    def scalars(self, statement: Executable) -> Sequence[Any]:
        """Execute a query; return the first column of all rows."""
        return self.connection.execute(statement).scalars().all()

    def scalar(self, statement: Executable) -> Any:
        """Execute a query that returns one row with one column; return the value."""
        return self.connection.execute(statement).scalar_one()


@dataclass(frozen=True, slots=True)
class Check:
    """A check of one subject, with the conditions under which it can be made.

    Args:
        subject: The name of the data that the check reads, as the end of "could not look at ...".
        find: Makes the check; yields findings.
        tables: The tables of outboxq that the check reads; it is skipped if one of them does not exist.
        needs_current: True to skip the check unless the tables are at the latest migration step.
        grant: The right that a role needs for the check, for the advice if it is missing.
    """

    subject: str
    find: Callable[[CheckContext], Iterable[Finding]]
    tables: frozenset[str] = field(default=frozenset())
    needs_current: bool = False
    grant: str = "pg_monitor"

    def fits(self, context: CheckContext) -> bool:
        """Return True if the check can be made: its tables exist, at the latest migration step if it needs that."""
        return self.tables <= context.tables and (context.is_current or not self.needs_current)
