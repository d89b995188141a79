"""The session that the jobs of a shared batch write through, guarded so that none can undo another's rows.

What could is refused, and ends the shared run even where the handler swallows the refusal. What cannot be refused,
because it goes around the session, is found: changes that were pending before a handler and are not after it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NoReturn

from sqlalchemy import Connection, Engine, Select, bindparam, event, select, tuple_
from sqlalchemy.orm import InstanceState, ORMExecuteState, Session
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.sql import visitors
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.sql.functions import Function

from outboxq.codec import EntityKey, entity_mapper, entity_state, is_expression
from outboxq.enqueue import OutboxSession
from outboxq.errors import EntityGone, SharedRunEnded
from outboxq.guard import is_savepoint_verb, may_end_transaction
from outboxq.invoke import LazySession
from outboxq.tables import JobRow

# Keys in one SELECT.
_LOADED_AT_ONCE = 1_000
_NOTHING: frozenset[InstanceState[Any]] = frozenset()

# Whose turn it is: tasks and threads that a handler left behind do not know the next one's token.
_turn: ContextVar[object] = ContextVar("outboxq_shared_turn", default=None)
_NOBODYS = object()


class _Ours:
    """While it lasts, the task at work is the batch's, and every other is as before."""

    def __init__(self, session: "SharedSession") -> None:
        self._session = session

    def __enter__(self) -> None:
        session, token = self._session, object()
        self._before = _turn.get(), session.ours_token
        session.ours_token = token
        _turn.set(token)

    def __exit__(self, *_error: object) -> None:
        turn, self._session.ours_token = self._before
        _turn.set(turn)


class SharedSession(LazySession):
    """One session for the jobs of a batch.

    `opener` is called before a handler sends anything, `touched` says that it did. `stale`: rows may have changed that
    objects here were loaded from. `exposed`: a handler had the connection in its hands, and may use it unseen.
    `suspicious`: one of its statements may have ended the transaction. `has_expressions`: at the last look an SQL
    expression was pending, which the next one would replace.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.owner: object = self
        # Of the task that works for the batch while a handler has its turn.
        self.ours_token: object = self
        _turn.set(self)
        self.ended_by: str | None = None
        self.touched = self.stale = self.exposed = self.suspicious = False
        self._linked = self.has_expressions = False
        self._asking = 0
        self._met: set[InstanceState[Any]] = set()
        self._waiting: AbstractSet[InstanceState[Any]] = _NOTHING
        self._changed: set[InstanceState[Any]] = set()
        # Of each changed row what waits to be written: SQLAlchemy's own dict, and its keys at the last look.
        self._columns: list[Mapping[str, object]] = []
        self._names: list[tuple[str, ...]] = []
        super().__init__(*args, **kwargs)

    def ours(self) -> _Ours:
        """Nothing is refused: the batch itself works with the session."""
        return _Ours(self)

    def begin_turn(self, token: object) -> None:
        """A handler works with the session, and whatever it starts, up to `end_turn`."""
        self.owner, self.ours_token = token, _NOBODYS
        self.touched = self.suspicious = False
        _turn.set(token)

    def end_turn(self) -> None:
        """The batch works with the session again."""
        self.owner = self.ours_token = self
        _turn.set(self)

    @contextmanager
    def turn_of_batch(self) -> Iterator[None]:
        """The batch works with the session after its last turn."""
        _turn.set(self)
        try:
            yield
        finally:
            _turn.set(None)

    def end_turns(self) -> None:
        """Nobody's turn any more."""
        _turn.set(None)

    def end_shared(self, what: str) -> NoReturn:
        """End the shared run, even where the handler swallows this.

        Raises:
            SharedRunEnded: always.
        """
        self.ended_by = what
        raise SharedRunEnded(what)

    def touch(self) -> None:
        """Something is about to be sent for a handler."""
        if self.is_for_handler():
            self.opener()
            self.touched = True

    def sees(self, statement: str) -> None:
        """Something goes out on the connection."""
        if not self.is_for_handler():
            return
        self.suspicious = self.suspicious or may_end_transaction(statement)
        # A transaction of SQLAlchemy's sends these by itself.
        self.exposed = self.exposed or not (self._asking or is_savepoint_verb(statement))

    def hands_out(self) -> None:
        """The driver's connection is taken, by anybody, who may from now on use it unseen."""
        turn = _turn.get()
        if turn is self.ours_token:
            return
        if turn is self.owner:
            self.touch()
        self.exposed = True

    def is_for_handler(self) -> bool:
        """Whether a handler is at it, and not the batch itself.

        Raises:
            SharedRunEnded: a handler whose turn it is not.
        """
        turn = _turn.get()
        if turn is self.ours_token:
            return False
        if turn is not self.owner:
            self.end_shared("a session used by another thread, or after its handler returned,")
        return True

    @property
    def bind(self) -> Engine | Connection | None:
        """The relay's connection, which a handler may from now on use unseen."""
        self._expose()
        return self._bind

    @bind.setter
    def bind(self, bind: Engine | Connection | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._bind = bind

    def get_bind(self, *args: Any, **kwargs: Any) -> Engine | Connection:
        """SQLAlchemy's hook before every use of a connection."""
        # Of add_job, which sends nothing.
        if kwargs.get("mapper") is not JobRow and self.is_for_handler():
            self.touch()
            # Asked for by a handler, and not for a statement of the session's own.
            self.exposed = self.exposed or not self._asking
        with self.ours():
            return Session.get_bind(self, *args, **kwargs)

    def peek_bind(self, **kwargs: Any) -> Engine | Connection:
        """For add_job, which sends nothing yet."""
        self.is_for_handler()
        with self.ours():
            return Session.get_bind(self, **kwargs)

    def connection(self, *args: Any, **kwargs: Any) -> Connection:
        """The relay's connection, which a handler may from now on use unseen."""
        self._expose()
        with self.ours():
            return super().connection(*args, **kwargs)

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """See `sees`: these ask for the connection themselves."""
        return self._ask(super().execute, args, kwargs)

    def scalar(self, *args: Any, **kwargs: Any) -> Any:
        """As `execute`."""
        return self._ask(super().scalar, args, kwargs)

    def scalars(self, *args: Any, **kwargs: Any) -> Any:
        """As `execute`."""
        return self._ask(super().scalars, args, kwargs)

    def _expose(self) -> None:
        if self.is_for_handler():
            self.touch()
            self.exposed = True

    def _ask(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._asking += 1
        try:
            return method(*args, **kwargs)
        finally:
            self._asking -= 1

    def flush(self, objects: Any = None) -> None:
        """All of the batch: parts of it would hide which job's rows were sent."""
        if objects is not None:
            self._refuse("flush(objects)")
        self.touch()
        if self.pending and self._is_lost():
            self.end_shared("what takes the changes of other jobs out of the session")
        if not (self._new or self._deleted or self.identity_map._modified or self._flushing):  # noqa: SLF001  # SQLAlchemy finds that out more slowly
            return
        with self.ours():
            super().flush()
        self._forget_pending()

    def commit(self) -> None:
        """Flushes; "rollback_only" commits nothing."""
        self.touch()
        with self.ours():
            super().commit()

    def merge(self, *args: Any, **kwargs: Any) -> Any:
        """Not with load=False, which overwrites what is pending."""
        if not kwargs.get("load", True):
            self._refuse("merge(load=False)")
        return super().merge(*args, **kwargs)

    def has_lost_changes(self) -> bool:
        """Look whether something that was pending at the last look was neither sent nor is pending still."""
        if not (self.pending or self.identity_map._modified or self._new or self._deleted):  # noqa: SLF001  # as below
            # Nothing was pending and nothing is: jobs that defer all of their writes.
            self.has_expressions = False
            self._met.clear()
            return False
        if self._is_lost():
            return True
        before = self._changed
        added = self.identity_map._modified - before  # noqa: SLF001  # `dirty` builds a set of objects each time
        # Through a relationship a handler gets at rows without a look-up.
        self._linked = self._linked or any(state.mapper.relationships for state in added)
        # An expression in the place of what was to be written: `balance = 5`, then `balance = balance + 1`.
        met = before if self._linked else self._met & before
        is_replaced = any(map(_has_expression, met))
        self.has_expressions = any(map(_has_expression, added))
        self._waiting = self._all_waiting()
        columns = [state.committed_state for state in added]
        self._columns += columns
        self._names += map(tuple, columns)
        before |= added
        self._met.clear()
        return is_replaced

    def _is_lost(self) -> bool:
        # Without a loop of Python's where nothing changed: after each job all of the batch is looked at.
        if not (self._waiting <= self._all_waiting() and self._changed <= self.identity_map._modified):  # noqa: SLF001  # as above
            return True
        before, self._names = self._names, [*map(tuple, self._columns)]
        return self._names != before and not all(map(set.issuperset, map(set, self._names), before))

    def _all_waiting(self) -> AbstractSet[InstanceState[Any]]:
        # Keys and not objects, which `new` and `deleted` would list.
        return self._new.keys() | self._deleted.keys() if self._new or self._deleted else _NOTHING

    def _forget_pending(self) -> None:
        self._waiting = _NOTHING
        self._changed = set()
        self._columns = []
        self._names = []

    def meet(self, entities: Iterable[InstanceState[Any]]) -> None:
        """A handler is given these."""
        self._met.update(entities)
        # Through a relationship the handler gets at other rows without a look-up.
        self._linked = self._linked or any(state.mapper.relationships for state in self._met)

    def has_met(self) -> bool:
        """Whether the handler has rows in hand that were loaded before its turn."""
        return bool(self._met)

    def _identity_lookup(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._identity_lookup(*args, **kwargs)
        if (state := entity_state(found)) is not None:
            self._met.add(state)
        return found

    def has_deletions(self) -> bool:
        """Whether a row waits to be deleted, which the next job must not find, nor bring back by inserting it."""
        return bool(self._deleted)

    @property
    def pending(self) -> int:
        """How many rows waited to be flushed at the last look, without what was since."""
        return len(self._waiting) + len(self._changed)

    def _refuse(self, what: str) -> None:
        if self.is_for_handler():
            self.end_shared(f"session.{what}")


def _has_expression(state: InstanceState[Any]) -> bool:
    values = state.dict
    return any(is_expression(values.get(name)) for name in state.committed_state)


# Each of these throws away what may be another job's, or ends what all jobs stand on.
REFUSED = (
    "bulk_insert_mappings",
    "bulk_save_objects",
    "bulk_update_mappings",
    "close",
    "enable_relationship_loading",
    "expire",
    "expire_all",
    "expunge",
    "expunge_all",
    "invalidate",
    "prepare",
    "refresh",
    "reset",
    "rollback",
)


def _refusing(name: str) -> Callable[..., Any]:
    def method(self: SharedSession, *args: Any, **kwargs: Any) -> Any:
        self._refuse(f"{name}()")
        return getattr(OutboxSession, name)(self, *args, **kwargs)

    return method


for _name in REFUSED:
    setattr(SharedSession, _name, _refusing(_name))


@event.listens_for(SharedSession, "do_orm_execute")
def _before_execute(state: ORMExecuteState) -> None:
    session = state.session
    assert isinstance(session, SharedSession)
    if not session.is_for_handler():
        return
    if not state.is_select or _may_write(state.statement):
        session.stale = True
        return
    if state.is_column_load or state.is_relationship_load:
        return
    if state.load_options._populate_existing or state.execution_options.get("populate_existing"):  # noqa: SLF001  # Query has no other
        session.end_shared("populate_existing")
    # What was loaded for the batch may be older than the lock.
    if getattr(state.statement, "_for_update_arg", None) is not None:
        session.end_shared("SELECT FOR UPDATE")


def _may_write(statement: Any) -> bool:
    # A function of the user's own may do anything; SQLAlchemy's generic ones, such as count and now, do not.
    return any(type(element) is Function or isinstance(element, UpdateBase) for element in visitors.iterate(statement))


@event.listens_for(SharedSession, "before_attach")
def _before_attach(session: Session, _entity: object) -> None:
    assert isinstance(session, SharedSession)
    session.is_for_handler()


class Loaded:
    """The rows of a batch's entity arguments, loaded in one SELECT per class, and kept until the batch is over.

    Args:
        arguments: The decoded arguments of each job.
    """

    def __init__(self, session: LazySession, arguments: Iterable[Mapping[str, object]]) -> None:
        self._session = session
        wanted: dict[type[object], dict[object, None]] = {}
        for values in arguments:
            for value in values.values():
                if type(value) is EntityKey:
                    wanted.setdefault(value.entity, {})[_as_tuple(value.primary_key)] = None
        # Held: the session alone would forget them.
        self._kept = [row for entity, keys in wanted.items() for row in self._load(entity, list(keys))]
        self.has_entities = bool(wanted)

    def arguments(self, values: Mapping[str, object]) -> tuple[dict[str, object], list[InstanceState[Any]]]:
        """The arguments of one job, with its entities as they are now, and these by themselves.

        Raises:
            EntityGone: the row of one is not there.
        """
        given, entities = dict(values), []
        if self.has_entities:
            for name, value in values.items():
                if type(value) is EntityKey:
                    given[name] = found = self._find(name, value)
                    if found is not None:
                        entities.append(instance_state(found))
        return given, entities

    def _find(self, name: str, key: EntityKey) -> object:
        entity: Any = key.entity
        primary_key = _as_tuple(key.primary_key)
        found: object = self._session.identity_map.get(_identity_key(entity)(primary_key))
        state = None if found is None else instance_state(found)
        # A wrong guess costs a SELECT.
        if state is None or state.expired or not isinstance(found, key.entity) or state in self._session._deleted:  # noqa: SLF001  # `deleted` builds a set of objects each time
            # It may flush.
            self._session.opener()
            found = self._session.get(key.entity, primary_key)
        if found is None and not key.optional:
            raise EntityGone(name, key.entity.__name__)
        return found

    def _load(self, entity: Any, keys: list[object]) -> list[object]:
        found: list[object] = []
        for first in range(0, len(keys), _LOADED_AT_ONCE):
            some: list[Any] = keys[first : first + _LOADED_AT_ONCE]
            given = [key[0] for key in some] if len(some[0]) == 1 else some
            found += self._session.scalars(_by_keys(entity), {"outboxq_keys": given}).unique()
        return found


@lru_cache(256)
def _by_keys(entity: Any) -> Select[tuple[Any]]:
    """The rows with these primary keys. Index: the primary key. No locks."""
    mapper = entity_mapper(entity)
    assert mapper is not None
    columns = mapper.primary_key
    keys = columns[0] if len(columns) == 1 else tuple_(*columns)
    return select(entity).where(keys.in_(bindparam("outboxq_keys", expanding=True)))


@lru_cache(256)
def _identity_key(entity: Any) -> Callable[[tuple[object, ...]], Any]:
    mapper = entity_mapper(entity)
    assert mapper is not None
    return mapper.identity_key_from_primary_key


def _as_tuple(primary_key: object) -> tuple[object, ...]:
    return tuple(primary_key) if isinstance(primary_key, list | tuple) else (primary_key,)
