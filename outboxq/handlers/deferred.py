"""Deferred writes: Core statements of a handler that are sent after its flush and before COMMIT."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from itertools import groupby
from typing import Any
from uuid import UUID

from sqlalchemy import BindParameter, Connection, Delete, Insert, TextClause, Update, event
from sqlalchemy.orm import Session, SessionTransaction

from outboxq.codec.entities import entity_state
from outboxq.codec.values import PLAIN, is_expression
from outboxq.database.sql_text import first_word, left_by, may_end_transaction
from outboxq.errors import DeferError
from outboxq.handlers.row_writes import Statement, is_sqlalchemy_type, only_writes
from outboxq.handlers.set_based import single_executions
from outboxq.names import with_article

logger = logging.getLogger("outboxq.relay")

# An attribute of a session with deferred writes, and no key of its `info`: that belongs to users, who may clear it.
DEFERRED = "_outboxq_deferred"
# An attribute of a session, or of a class of sessions, that has a listener for COMMIT.
_IS_SENT_AT_COMMIT = "_outboxq_deferred_is_sent"
_CONSTANT = PLAIN | {Decimal, UUID, date, time, datetime, timedelta}
_WRITING_VERBS = frozenset(("INSERT", "UPDATE", "DELETE", "MERGE", "WITH"))


@dataclass(frozen=True, slots=True)
class Write:
    """One statement with its parameters, as a handler passed it to `ctx.defer`."""

    statement: Statement
    parameters: dict[str, object]


@dataclass(slots=True)
class _Deferred:
    """The deferred writes of a session that have not been sent yet.

    `has_failed`: True if writes could not be sent at an earlier commit(), whose error the handler may have swallowed.
    """

    writes: list[Write] = field(default_factory=list)
    has_failed: bool = False


def is_constant(value: object) -> bool:
    """Return True if a parameter's value cannot change before its statement is sent; a list or a dict could."""
    return type(value) in _CONSTANT or isinstance(value, Enum)


def may_wait(write: Write) -> bool:
    """Return True if a write has the same effect if it is sent after its job, together with other jobs' writes."""
    return is_fixed(write.statement) and all(map(is_constant, write.parameters.values()))


@lru_cache(256)
def is_fixed(statement: Statement) -> bool:
    """Return True if a statement contains no value that may change, only writes rows, and runs no users' code.

    Such a statement may be sent later than its own job, together with those of other jobs.
    """
    key = statement._generate_cache_key()  # noqa: SLF001  # the key of SQLAlchemy's own cache of statements
    if key is None or not all(map(_is_fixed_value, key.bindparams)):
        return _not_fixed("it holds a value that may change or is not known, or a type that computes one")
    if isinstance(statement, TextClause):
        if left_by(statement.text) is None and not may_end_transaction(statement.text):
            return True
        return _not_fixed("its text may do more than write rows")
    return only_writes(statement) or _not_fixed("it does more than write plain values into one table")


def _is_fixed_value(bind: BindParameter[Any]) -> bool:
    return bind.callable is None and is_constant(bind.value) and is_sqlalchemy_type(bind.type)


def _not_fixed(reason: str) -> bool:
    logger.debug("a deferred statement does not wait for those of other jobs: %s", reason)
    return False


def checked_write(statement: object, parameters: object) -> Write:
    """Check a statement and its parameters, and return them as a deferred write.

    Raises:
        DeferError: the statement does not write, or cannot have these parameters.
    """
    if isinstance(statement, str):
        raise DeferError("ctx.defer takes a statement of SQLAlchemy's, got a str: wrap it in text(...)")
    if not isinstance(statement, Insert | Update | Delete | TextClause):
        raise DeferError(
            f"ctx.defer takes insert(), update(), delete() or text(), got {type(statement).__name__}: "
            "what reads is executed in the handler"
        )
    _check_writes(statement)
    return Write(statement, _checked_parameters(parameters))


def defer(session: Session, *writes: Write) -> None:
    """Keep writes in the session, to be sent just before its transaction is committed."""
    vars(session).setdefault(DEFERRED, _Deferred()).writes.extend(writes)
    if not getattr(session, _IS_SENT_AT_COMMIT, False):
        send_at_commit(session, send_deferred)


def send_at_commit(sessions: Session | type[Session], before_commit: Callable[[Any], None]) -> None:
    """Listen for each COMMIT of a session, or of all sessions of a class, to send deferred writes before it.

    For a class whose sessions often defer, call this once: a listener for each session costs more than its writes.

    Args:
        before_commit: Called with the session before each COMMIT; must call `send_deferred` if the session has an
            attribute `DEFERRED`.
    """
    event.listen(sessions, "before_commit", before_commit)
    event.listen(sessions, "after_soft_rollback", _after_rollback)
    setattr(sessions, _IS_SENT_AT_COMMIT, True)


def may_all_wait(session: Session) -> bool:
    """Return True if all deferred writes of the session may be sent later (`may_wait`), and no sending has failed."""
    deferred: _Deferred | None = vars(session).get(DEFERRED)
    return deferred is None or (not deferred.has_failed and all(map(may_wait, deferred.writes)))


def take_writes(session: Session) -> list[Write]:
    """Return the deferred writes of the session, and remove them from it; the caller then sends them.

    Raises:
        DeferError: some writes could not be sent at an earlier commit(), and the handler has swallowed that error.
    """
    deferred: _Deferred | None = vars(session).get(DEFERRED)
    if deferred is None:
        return []
    if deferred.has_failed:
        raise DeferError(
            "what ctx.defer had kept could not be sent at a commit(), and the handler went on: let it raise"
        )
    writes, deferred.writes = deferred.writes, []
    return writes


def send_deferred(session: Session) -> None:
    """Flush the session, and send its deferred writes; do nothing at the release of a savepoint.

    The release of a savepoint is no COMMIT: a later rollback may still undo the handler's rows, so the writes wait.
    """
    deferred: _Deferred | None = vars(session).get(DEFERRED)
    if deferred is None or not (deferred.writes or deferred.has_failed) or session.in_nested_transaction():
        return
    session.flush()
    writes = take_writes(session)
    # Stays set if sending fails: a handler that commits may swallow the error.
    deferred.has_failed = True
    _send(session.connection(), writes)
    deferred.has_failed = False


def _send(connection: Connection, writes: list[Write]) -> None:
    # Each row by its own execution, because after a failure no execution with fewer rows is tried.
    for _, some in groupby(writes, lambda write: (id(write.statement), write.parameters.keys())):
        alike = list(some)
        for statement, rows in single_executions(alike[0].statement, [write.parameters for write in alike]):
            connection.execute(statement, rows)


def _after_rollback(session: Session, previous: SessionTransaction) -> None:
    # A test's own session goes on after a rollback; a handler that rolls back its session has failed in any case.
    deferred: _Deferred | None = vars(session).get(DEFERRED)
    if deferred is not None and not previous.nested:
        deferred.has_failed = False


# Cached, because the same statement object recurs.
@lru_cache(256)
def _check_writes(statement: Statement) -> None:
    if isinstance(statement, TextClause):
        if first_word(statement.text) not in _WRITING_VERBS:
            raise DeferError(
                "ctx.defer takes a text() that begins with INSERT, UPDATE, DELETE, MERGE or WITH: what "
                "another one returns would not be read, so execute it in the handler"
            )
    elif statement.exported_columns:
        raise DeferError("ctx.defer takes no statement with RETURNING: its rows would not be read")


def _checked_parameters(parameters: object) -> dict[str, object]:
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise DeferError(
            f"ctx.defer takes the parameters of one execution as a dict, got {type(parameters).__name__}: "
            "call it once for each"
        )
    for name, value in parameters.items():
        if not isinstance(name, str):
            raise DeferError(f"ctx.defer takes parameters by name, got {with_article(type(name).__name__)} for a name")
        if type(value) in PLAIN:
            continue
        if entity_state(value) is not None:
            raise DeferError(
                f"parameter {name!r} is {with_article(type(value).__name__)} object: pass its key, or a column of it"
            )
        if is_expression(value):
            raise DeferError(f"parameter {name!r} is an SQL expression: put it into the statement")
    return dict(parameters)
