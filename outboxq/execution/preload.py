"""Preloading: loads the rows of entity arguments of several jobs in one SELECT per class, before their handlers run.

A preloaded row must equal the row that its job would have loaded. So all preloaded rows are dropped before anything is
sent for a handler, and a single row if a change of it waits in the write buffer.

On Citus a job may be seen before the rows of the transaction that added it: Citus commits a transaction on its nodes
one after the other. If a node dies in between, the rows come only with Citus' recovery, by default within a minute.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

from sqlalchemy import Connection, Select, any_, bindparam, select, tuple_
from sqlalchemy.orm import Mapper, Session
from sqlalchemy.types import TypeEngine

from outboxq.codec.entities import EntityKey
from outboxq.database.direct import is_direct
from outboxq.database.driver import run_script
from outboxq.database.session_listeners import Listeners, is_listened_to
from outboxq.errors import EntityGone
from outboxq.execution.invoke import SESSION_OPTIONS, HandlerSession, JobSession
from outboxq.execution.job_entities import may_read, put
from outboxq.execution.read_rows import columns_of, is_readable, mapper_of, read_rows
from outboxq.execution.write_buffer import RowId
from outboxq.handlers.set_based import FactsOf, key_array
from outboxq.handlers.unlocked import UnlockedChanges
from outboxq.job import Job
from outboxq.statements.transaction import clock_seconds

# The most rows of one SELECT, unless it locks: all rows are locked in one order, and so in one statement.
_LOADED_AT_ONCE = 1_000
# Users' listeners for these events see a row enter its session, and may change it.
_AT_LOAD: Listeners = attrgetter(
    "after_attach",
    "after_begin",
    "before_attach",
    "detached_to_persistent",
    "do_orm_execute",
    "loaded_as_persistent",
)
# Citus' recovery runs every 60 seconds, and takes a while.
_YOUNG_SECONDS = 90.0
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.1, 10.0

Identity: TypeAlias = tuple[type[object], tuple[object, ...]]
Identities: TypeAlias = list[tuple[object, ...]]
# Loads entities of a class with these primary keys; the last argument is True to lock their rows.
Load: TypeAlias = Callable[[Any, Identities, bool], list[object]]


class RowsMayBeLate(Exception):
    """The row of a job's argument is missing, but the job was added so recently that the row may come, as on Citus.

    The attempt then puts the job off by `retry_after_seconds`, without counting.
    """

    def __init__(self, retry_after_seconds: float) -> None:
        super().__init__("a row of the job's arguments is not there yet")
        self.retry_after_seconds = retry_after_seconds


def wait_while_young(connection: Connection, job: Job) -> None:
    """Raise an error that puts a job off, if it was added less than `_YOUNG_SECONDS` ago by the database's clock.

    The job waits for as many seconds as it is old, but at least 0.1 and at most 10.

    Raises:
        RowsMayBeLate: the job was added that recently.
    """
    age_seconds = float(str(run_script(connection, clock_seconds())[0][0])) - job.created_at.timestamp()
    left_seconds = _YOUNG_SECONDS - age_seconds
    # A job whose created_at is far in the future, which SQL can write, does not wait until then.
    if 0 < left_seconds < 2 * _YOUNG_SECONDS:
        raise RowsMayBeLate(min(max(age_seconds, _SHORTEST_SECONDS), _LONGEST_SECONDS, left_seconds))


def load_entity(
    session: Session,
    name: str,
    key: EntityKey,
    absent: Callable[[], None],
    *,
    may_lock: bool = True,
) -> object:
    """Load the entity of an argument into the job's session, and lock its row if `key.locked`.

    Return None if the row does not exist and the argument is optional.

    Args:
        absent: Called if the row does not exist; raises an error if the row may come later.
        may_lock: False if the row is locked already.

    Raises:
        EntityGone: the row does not exist, and the argument is not optional.
    """
    lock: Any = {"key_share": True, "of": _locked_table(key.entity)} if key.locked and may_lock else None
    entity = session.get(key.entity, key.identity, with_for_update=lock)
    if entity is None:
        absent()
        if not key.optional:
            raise EntityGone(name, key.entity.__name__)
    return entity


def load_alone(
    opened: JobSession, connection: Connection, name: str, key: EntityKey, absent: Callable[[], None]
) -> object:
    """Load the entity of an argument as `load_entity` does, for a job that runs alone.

    If possible (`is_readable`), the row is read on the driver's cursor, because SQLAlchemy's own loading takes several
    times as long.
    """
    entity: Any = key.entity
    if is_readable(entity) and _has_plain_keys(entity) and is_direct(connection):
        identity = mapper_of(entity).identity_key_from_primary_key(key.identity)
        if may_read(opened, identity, _AT_LOAD):
            statement, parameters = _by_key(entity, locks=key.locked), {"outboxq_key": key.identity[0]}
            found = read_rows(connection, entity, statement, parameters)
            if len(found) == 1:
                return put(opened, found[0])
    return load_entity(opened.session(), name, key, absent)


class Watched(Protocol):
    """A session, open or not, that can check if the handler changes entities whose rows are not locked."""

    def watch(self, changes: UnlockedChanges, entities: Sequence[object]) -> None: ...


def watch_unlocked(session: Watched, changes: UnlockedChanges, loaded: Collection[tuple[EntityKey, object]]) -> None:
    """Make the session check if the handler changes loaded entities whose rows are not locked: updates may get lost.

    Args:
        changes: Logs the first such change of a kind's handler.
        loaded: The entities, each after its key.
    """
    if changes.is_said:
        return
    entities = {id(entity): entity for _, entity in loaded if entity is not None}
    for key, entity in loaded:
        if key.locked:
            # This includes an entity that is also another argument, without a lock.
            entities.pop(id(entity), None)
    session.watch(changes, tuple(entities.values()))


def entity_keys(arguments: Iterable[Mapping[str, object]]) -> list[EntityKey]:
    """Return the keys of entities among the decoded arguments of jobs."""
    return [value for values in arguments for value in values.values() if type(value) is EntityKey]


class Locks:
    """Takes the row locks that a batch needs for its jobs, and records them, so that no row is locked twice.

    Every batch takes locks in the same order, so that no two batches deadlock: tables by name, one statement each, and
    rows by primary key.
    """

    def __init__(self) -> None:
        self._taken: set[Identity] = set()

    def has(self, entity: type[object], identity: tuple[object, ...]) -> bool:
        """Return True if `take` has locked the row of this class with this primary key."""
        return (entity, identity) in self._taken

    def forget(self) -> None:
        """Forget the locks: the transaction went back to a savepoint before them."""
        self._taken.clear()

    def take(
        self, session: Session, keys: Iterable[EntityKey], can_load: Callable[[type[object]], bool], load: Load
    ) -> list[object]:
        """Lock the rows of those keys that are `locked` and not locked yet; return the entities loaded with these rows.

        Rows whose entities may not be loaded are only locked.

        Args:
            can_load: Returns True if entities of a class may be loaded.
            load: Loads entities of a class, and locks their rows.
        """
        wanted = _by_entity(key for key in keys if key.locked and not self.has(key.entity, key.identity))
        tables: dict[str, list[Any]] = {}
        for entity in wanted:
            tables.setdefault(str(_locked_table(entity)), []).append(entity)
        found: list[object] = []
        for _, entities in sorted(tables.items()):
            if len(entities) == 1 and can_load(entities[0]):
                loaded = load(entities[0], wanted[entities[0]], True)
                locked = {_identity_of(entity) for entity in loaded}
                found += loaded
            else:
                identities = [identity for entity in entities for identity in wanted[entity]]
                rows = session.execute(_lock_by_keys(entities[0]), _parameters(identities))
                locked = {tuple(row) for row in rows}
            # Only these rows: a row that is not visible now may be visible when its job loads it.
            self._taken.update((entity, key) for entity in entities for key in wanted[entity] if key in locked)
        return found


def lock_ahead(connection: Connection, keys: Iterable[EntityKey], locks: Locks) -> None:
    """Lock the rows of those keys that are `locked`, before the jobs run, without loading any entity.

    Taken together, the locks come in one order, so batches do not wait for each other.
    """
    with _session_on(connection) as session:
        locks.take(session, keys, lambda _: False, _into(session))


def load_together(session: Session, keys: Collection[EntityKey], locks: Locks) -> list[object]:
    """Load the entities of several jobs into one session, one SELECT per class, and return them.

    Rows of keys that are `locked` (arguments declared `Locked`) are locked by the same SELECT.
    """
    load = _into(session)
    found = locks.take(session, keys, lambda _: True, load)
    return found + _load_others(keys, found, load)


class PreloadedEntities:
    """Rows of entity arguments that were loaded in advance; the first job that has a row as an argument takes it out.

    Args:
        own_types: True to preload only classes whose columns all have SQLAlchemy's own types: other types run users'
            code.
    """

    def __init__(self, connection: Connection, locks: Locks, *, own_types: bool) -> None:
        self._connection = connection
        self._locks = locks
        self._own_types = own_types
        self._rows: dict[Identity, object] = {}
        self._oids: dict[type[object], int | None] = {}

    def take(self, key: EntityKey) -> object | None:
        """Remove and return the preloaded entity of a key, for its job to change; None if it was not preloaded."""
        return self._rows.pop((key.entity, key.identity), None)

    def drop(self) -> None:
        """Forget all preloaded rows; called before a handler's statement is sent, because that may change the rows."""
        self._rows.clear()

    def changed(self, row: RowId, entity: type[object]) -> None:
        """Forget the preloaded row that a job has changed through the class `entity`: the change is not sent yet.

        If rows of the table were also preloaded through other classes, forget all rows.
        """
        if any(oid == row[0] and loaded is not entity for loaded, oid in self._oids.items()):
            # Another class of the same table may have another key for the row.
            self.drop()
        else:
            self._rows.pop((entity, row[1]), None)

    def _oid(self, entity: type[object], facts_of: FactsOf) -> int | None:
        """Return the oid of a class's table if rows of the class can be preloaded, else None; remember the answer."""
        if entity not in self._oids:
            is_plain = is_readable(entity, own_types=self._own_types)
            table: Any = mapper_of(entity).local_table
            facts = facts_of(table) if is_plain else None
            self._oids[entity] = facts.oid if facts is not None and facts.is_plain else None
        return self._oids[entity]

    def load(self, keys: Iterable[EntityKey], facts_of: FactsOf) -> None:
        """Preload the rows of keys that are not preloaded yet, if their classes allow it; lock rows of `locked` keys.

        Rows of `locked` keys are locked even if their classes do not allow preloading.

        Args:
            facts_of: Returns the facts of a table.
        """
        session = _session_on(self._connection)
        is_hidden = not is_listened_to(session, _AT_LOAD)
        load = partial(self._read, _into(session)) if is_direct(self._connection) else _into(session)
        missing = [key for key in keys if (key.entity, key.identity) not in self._rows]
        found = self._locks.take(
            session, missing, lambda entity: is_hidden and self._oid(entity, facts_of) is not None, load
        )
        if is_hidden:
            found += _load_others([key for key in missing if self._oid(key.entity, facts_of) is not None], found, load)
        # The entities belong to no session now: the job's own session adds them.
        session.expunge_all()
        session.close()
        for entity in found:
            self._rows[type(entity), _identity_of(entity)] = entity

    def _read(self, load: Load, entity: Any, identities: Identities, locks: bool) -> list[object]:
        if not _has_plain_keys(entity):
            return load(entity, identities, locks)
        return read_rows(self._connection, entity, _by_keys(entity, locks, as_columns=True), _parameters(identities))


def _session_on(connection: Connection) -> Session:
    return HandlerSession(connection, **SESSION_OPTIONS)


def _identity_of(entity: Any) -> tuple[object, ...]:
    identity: tuple[object, ...] = entity._sa_instance_state.key[1]  # noqa: SLF001  # inspect() takes several times as long
    return identity


def _by_entity(keys: Iterable[EntityKey]) -> dict[Any, list[tuple[object, ...]]]:
    wanted: dict[Any, dict[tuple[object, ...], None]] = {}
    for key in keys:
        wanted.setdefault(key.entity, {})[key.identity] = None
    return {entity: list(identities) for entity, identities in wanted.items()}


def _load_others(keys: Iterable[EntityKey], loaded: list[object], load: Load) -> list[object]:
    """Load the entities of those keys that are not among the `loaded` ones, and return them."""
    here = {(type(entity), _identity_of(entity)) for entity in loaded}
    wanted = _by_entity(key for key in keys if (key.entity, key.identity) not in here)
    found: list[object] = []
    for entity, identities in wanted.items():
        for first in range(0, len(identities), _LOADED_AT_ONCE):
            found += load(entity, identities[first : first + _LOADED_AT_ONCE], False)
    return found


def _into(session: Session) -> Load:
    """Return a function that loads entities of one class by their primary keys into this session, and returns them."""
    return lambda entity, identities, locks: [
        *session.scalars(_by_keys(entity, locks), _parameters(identities)).unique()
    ]


def _parameters(identities: list[tuple[object, ...]]) -> dict[str, list[Any]]:
    is_single = len(identities[0]) == 1
    return {"outboxq_keys": [identity[0] for identity in identities] if is_single else list(identities)}


def _locked_table(entity: type[object]) -> Any:
    # With joined-table inheritance, the row of the base table is locked.
    return mapper_of(entity).base_mapper.local_table


@lru_cache(256)
def _by_key(entity: Any, *, locks: bool) -> Select[Any]:
    """Return a SELECT of the columns of the row with one key, FOR NO KEY UPDATE if it is to be locked.

    Index: the primary key.
    """
    (key,) = mapper_of(entity).primary_key
    statement = select(*columns_of(entity)).where(key == bindparam("outboxq_key", type_=key.type))
    return statement.with_for_update(key_share=True) if locks else statement


@lru_cache(256)
def _by_keys(entity: Any, locks: bool, *, as_columns: bool = False) -> Select[Any]:
    """Return a SELECT of the rows with these primary keys. Index: the primary key.

    Args:
        locks: True to lock the rows FOR NO KEY UPDATE, in the order of their keys.
        as_columns: True to select columns, and not entities.
    """
    mapper = mapper_of(entity)
    statement = _with_keys(select(*columns_of(entity)) if as_columns else select(entity), mapper)
    if not locks:
        return statement
    return statement.order_by(*mapper.primary_key).with_for_update(key_share=True, of=_locked_table(entity))


def _with_keys(statement: Select[Any], mapper: Mapper[Any]) -> Select[Any]:
    first, *others = mapper.primary_key
    array = _array_of(mapper)
    if array is not None:
        # One statement for any number of keys; a list of parameters would make one for each number.
        return statement.where(first == any_(bindparam("outboxq_keys", type_=array)))
    keys = tuple_(first, *others) if others else first
    return statement.where(keys.in_(bindparam("outboxq_keys", expanding=True)))


def _array_of(mapper: Mapper[Any]) -> TypeEngine[Any] | None:
    """Return the SQL type of an array of a class's primary keys, so that one parameter can hold many keys.

    Return None if the key has several columns, or if keys that Python considers different may be equal on the server.
    """
    first, *others = mapper.primary_key
    return None if others else key_array(first.type)


@lru_cache(256)
def _has_plain_keys(entity: Any) -> bool:
    return _array_of(mapper_of(entity)) is not None


@lru_cache(256)
def _lock_by_keys(entity: Any) -> Select[Any]:
    """Return a SELECT that locks rows of several classes of one table in the order of their keys, and loads nothing."""
    base = mapper_of(entity).base_mapper
    return _with_keys(select(*base.primary_key), base).order_by(*base.primary_key).with_for_update(key_share=True)
