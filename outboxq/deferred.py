"""Deferred writes: Core statements that handlers leave behind, sent together after the flush and before COMMIT.

Equal ones go together, as one statement over arrays or as one executemany, which psycopg pipelines: many jobs of one
UPDATE each cost about one round trip.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache

from sqlalchemy import Connection, Delete, Insert, TextClause, Update, event
from sqlalchemy.orm import Session, SessionTransaction

from outboxq.codec import PLAIN, entity_state, is_expression
from outboxq.enqueue import OutboxSession
from outboxq.errors import DeferError
from outboxq.set_based import Statement, executions, single_executions
from outboxq.sql_words import first_word

_WAITING = "outboxq.deferred"
_FAILED = "outboxq.deferred.failed"
_WRITING_VERBS = frozenset(("INSERT", "UPDATE", "DELETE", "MERGE", "WITH"))


@dataclass(frozen=True, slots=True)
class Write:
    """One statement with its parameters, as a handler deferred it."""

    statement: Statement
    parameters: dict[str, object]


@dataclass(slots=True)
class _Run:
    """Equal statements, sent as one."""

    statement: Statement
    parameters: list[dict[str, object]] = field(default_factory=list)


class Deferred:
    """The writes of a batch's jobs, equal ones together, in the order in which they were first deferred.

    The writes of one job keep their order; those of two jobs keep it per statement.
    """

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._places: dict[object, list[int]] = {}
        # The same object comes again and again: what it is equal to is found out once.
        self._keys: dict[int, tuple[Statement, int]] = {}
        self._numbers: dict[object, int] = {}

    def __bool__(self) -> bool:
        return bool(self._runs)

    def add_job(self, writes: Iterable[Write]) -> None:
        """Add the writes of one job."""
        reached = 0
        for write in writes:
            # Without their order: sorting takes longer than finding them equal.
            key = (self._key(write.statement), frozenset(write.parameters))
            places = self._places.setdefault(key, [])
            # Not before what the same job deferred earlier.
            place = next((place for place in places if place >= reached), None)
            if place is None:
                place = len(self._runs)
                places.append(place)
                self._runs.append(_Run(write.statement))
            self._runs[place].parameters.append(write.parameters)
            reached = place

    def send(self, connection: Connection, *, one_by_one: bool = False) -> None:
        """Send and forget what was added.

        Args:
            one_by_one: Each row by its own execution: where nobody tries again with fewer.
        """
        runs, self._runs, self._places = self._runs, [], {}
        for run in runs:
            execute_all = single_executions if one_by_one else executions
            for statement, parameters in execute_all(run.statement, run.parameters):
                connection.execute(statement, parameters)

    def _key(self, statement: Statement) -> int:
        known = self._keys.get(id(statement))
        if known is None:
            number = self._numbers.setdefault(_key_of(statement), len(self._numbers))
            known = self._keys[id(statement)] = (statement, number)
        return known[1]


def _key_of(statement: Statement) -> object:
    """Equal for statements that differ in their parameters alone; values inside a statement count as part of it."""
    key = statement._generate_cache_key()  # noqa: SLF001  # what SQLAlchemy's own cache of statements goes by
    if key is None:
        return id(statement)
    # Where it leads to is no part of SQLAlchemy's key: schema_translate_map.
    options = tuple(sorted(statement.get_execution_options().items()))
    values = (options, *map(_literal, (bind.effective_value for bind in key.bindparams)))
    try:
        hash(values)
    except TypeError:
        return id(statement)
    return key.key, values


def _literal(value: object) -> tuple[type[object], object]:
    # 0.0 and -0.0, or 1.0 and 1.00, are equal, and not the same.
    return type(value), repr(value) if isinstance(value, float | Decimal) else value


def defer(session: Session, statement: object, parameters: object) -> None:
    """Keep a write until the session's transaction is about to be committed.

    Raises:
        DeferError: not a statement that writes, or parameters that it cannot be given.
    """
    write = Write(_checked(statement), _checked_parameters(parameters))
    session.info.setdefault(_WAITING, []).append(write)
    if not (isinstance(session, OutboxSession) or event.contains(session, "before_commit", _before_commit)):
        event.listen(session, "before_commit", _before_commit)
        event.listen(session, "after_soft_rollback", _after_rollback)


def take_writes(session: Session) -> list[Write]:
    """What was deferred in this session, which forgets it.

    Raises:
        DeferError: some of it was to be sent before, and could not be.
    """
    if session.info.get(_FAILED):
        raise DeferError(
            "what ctx.defer had kept could not be sent at a commit(), and the handler went on: let it raise"
        )
    writes: list[Write] = session.info.pop(_WAITING, [])
    return writes


def _before_commit(session: Session) -> None:
    # A savepoint that is released may lie in another one that will be undone.
    if session.in_nested_transaction() or not (_WAITING in session.info or _FAILED in session.info):
        return
    session.flush()
    deferred = Deferred()
    deferred.add_job(take_writes(session))
    # Until it is sent: a handler that commits may swallow the error.
    session.info[_FAILED] = True
    deferred.send(session.connection(), one_by_one=True)
    del session.info[_FAILED]


def _after_rollback(session: Session, previous: SessionTransaction) -> None:
    # A test's own session goes on after it; a handler that rolls its session back has failed in any case.
    if not previous.nested:
        session.info.pop(_FAILED, None)


# For all sessions of the class at once: listening to each costs more than its writes.
event.listen(OutboxSession, "before_commit", _before_commit)
event.listen(OutboxSession, "after_soft_rollback", _after_rollback)


def _checked(statement: object) -> Statement:
    if isinstance(statement, str):
        raise DeferError("ctx.defer takes a statement of SQLAlchemy's, got a str: wrap it in text(...)")
    if not isinstance(statement, Insert | Update | Delete | TextClause):
        raise DeferError(
            f"ctx.defer takes insert(), update(), delete() or text(), got {type(statement).__name__}: "
            "what reads is executed in the handler"
        )
    _check_writes(statement)
    return statement


# The same object comes again and again.
@lru_cache(256)
def _check_writes(statement: Statement) -> None:
    if isinstance(statement, TextClause):
        if first_word(statement.text) not in _WRITING_VERBS:
            raise DeferError(
                "ctx.defer takes a text() that begins with INSERT, UPDATE, DELETE, MERGE or WITH: nobody would read "
                "what another one returns, so execute it in the handler"
            )
    elif statement.exported_columns:
        raise DeferError("ctx.defer takes no statement with RETURNING: nobody would read its rows")


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
            raise DeferError(f"ctx.defer takes parameters by name, got a {type(name).__name__} for a name")
        if type(value) in PLAIN:
            continue
        if entity_state(value) is not None:
            raise DeferError(f"parameter {name!r} is a {type(value).__name__} object: pass its key, or a column of it")
        if is_expression(value):
            raise DeferError(f"parameter {name!r} is an SQL expression: put it into the statement")
    return dict(parameters)
