"""The input of a check, and its findings."""

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
    """Something that was found.

    Args:
        code: Its name, for programs; later versions keep it.
        severity: `problem`: jobs do not run, or a promise is broken. `warning`: they will not, or may not. `info`: good
            to know.
        title: The finding, in a line.
        detail: The same for programs: pids, ages, names.
        advice: What to do.
    """

    code: str
    severity: Severity
    title: str
    detail: Mapping[str, Value]
    advice: str

    @property
    def needs_attention(self) -> bool:
        """Return True if an operator should act."""
        return self.severity != "info"


def detail_of(row: Row[Any]) -> dict[str, Value]:
    """A row as the detail of a finding, by the names of its columns."""
    return dict(row._mapping)  # noqa: SLF001  # public, but for its name


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits from which on something is reported.

    Args:
        older_than_seconds: Transactions that are open, and jobs that wait, for this long.
        older_than_transactions: Slots and standbys that hold a snapshot back by this many transactions.
        dead_tuples: Dead rows that vacuum should have removed.
        short_timeout_seconds: Time-outs of the server below this.
    """

    older_than_seconds: float = 300.0
    older_than_transactions: int = 1_000_000
    dead_tuples: int = 100_000
    short_timeout_seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckContext:
    """The input of every check, inside a transaction of its own.

    Args:
        use: The role's purpose, which decides the rights that it needs.
        tables: Those of outboxq that exist and can be read.
        is_current: The tables are at the latest step that this version of the code knows.
        kept: Rows that one check has found and others read too, by a name.
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
        """Rows of an expensive query, which the first check that needs them executes."""
        if name not in self.kept:
            self.kept[name] = find()
        return self.kept[name]

    def rows(self, statement: Executable) -> Sequence[Row[Any]]:
        """All rows of a query."""
        return self.connection.execute(statement).all()

    def scalars(self, statement: Executable) -> Sequence[Any]:
        """The first column of all rows of a query."""
        return self.connection.execute(statement).scalars().all()

    def scalar(self, statement: Executable) -> Any:
        """The one value of a query."""
        return self.connection.execute(statement).scalar_one()


@dataclass(frozen=True, slots=True)
class Check:
    """A check of one subject.

    Args:
        subject: What it reads, as the end of "could not look at ...".
        find: Yields findings.
        tables: The tables of outboxq that it reads; it is skipped if one of them does not exist.
        needs_current: It is skipped if the tables are not at the latest step.
        grant: The right to give to a role that may not make the check.
    """

    subject: str
    find: Callable[[CheckContext], Iterable[Finding]]
    tables: frozenset[str] = field(default=frozenset())
    needs_current: bool = False
    grant: str = "pg_monitor"

    def fits(self, context: CheckContext) -> bool:
        """Return True if everything that it reads exists."""
        return self.tables <= context.tables and (context.is_current or not self.needs_current)
