"""What a check gives back, and the limits from which on it does."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from sqlalchemy import Connection, Row

from outboxq.admin.roles import Part
from outboxq.handlers.registry import Registry

Severity: TypeAlias = Literal["problem", "warning", "info"]
Value: TypeAlias = str | int | float | bool | list[str] | None
Connect: TypeAlias = Callable[[], AbstractContextManager[Connection]]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found.

    Args:
        code: Its name, for programs; stays.
        severity: `problem`: jobs do not run, or a promise is broken. `warning`: they will not, or may not. `info`: good
            to know.
        title: What was found, in a line.
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
        """Whether somebody should act."""
        return self.severity != "info"


def detail_of(row: Row[Any]) -> dict[str, Value]:
    """A row as the detail of a finding, by the names of its columns."""
    return dict(row._mapping)  # noqa: SLF001  # public, but for its name


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From when on something is worth a finding.

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
    """What every check works on, inside a transaction that is its own.

    Args:
        tables: Those of outboxq that exist.
        is_current: The tables are at the step that this version of the code knows best.
    """

    connection: Connection
    schema: str
    limits: Limits
    use: Part
    registry: Registry | None
    tables: frozenset[str] = frozenset()
    is_current: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """One look.

    Args:
        subject: What it finds out, as the end of "could not look at ...".
        find: Yields findings.
        tables: What it reads of outboxq; skipped where one is not there.
        needs_current: Skipped where the tables are of another step than the code's.
        grant: What a role needs that may not make it.
    """

    subject: str
    find: Callable[[CheckContext], Iterable[Finding]]
    tables: frozenset[str] = field(default=frozenset())
    needs_current: bool = False
    grant: str = "pg_monitor"
