"""Bugs to plant into the mechanism of shared batches, which the fuzzer has to find.

A bug takes one decision out of the mechanism, or turns it round. It is planted by patching what the relay's threads
look up at each call, before the lanes' relays start, and its function's name is its own. `python -m tests.fuzz --plant
all` plants each in turn and ends with 1 if one is not found within 500 batches.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from inspect import isawaitable
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest import mock

from sqlalchemy import JSON, Update
from sqlalchemy.sql import ClauseElement

from outboxq.execution import invoke, job_entities, preload, read_rows, shared_batch, write_buffer
from outboxq.execution.invoke import HandlerSession, hand_over
from outboxq.execution.preload import PreloadedEntities
from outboxq.execution.shared_batch import _SharedRun
from outboxq.execution.surround import Surrounded
from outboxq.execution.write_buffer import WriteBuffer, _Deferred, _Writable
from outboxq.handlers import deferred, row_writes, set_based
from outboxq.handlers.row_writes import TableFacts
from outboxq.outbox.insert import insert_all
from outboxq.outcomes import Done, Outcome

Planting: TypeAlias = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Plant:
    """A bug, and what it breaks."""

    name: str
    what: str
    planted: Planting


PLANTS: dict[str, Plant] = {}


def plant(what: str) -> Callable[[Planting], Planting]:
    """Register a bug under its function's name."""

    def register(function: Planting) -> Planting:
        PLANTS[function.__name__] = Plant(function.__name__, what, function)
        return function

    return register


@plant("rows that were loaded ahead stay when a statement is sent")
def statements_keep_rows() -> AbstractContextManager[object]:
    return _without_drop_in("_catch_up")


@plant("rows that were loaded ahead stay when a statement is deferred")
def deferred_statements_keep_rows() -> AbstractContextManager[object]:
    return _without_drop_in("_add_deferred")


@plant("rows that were loaded ahead stay when they are changed through another class")
def other_classes_keep_rows() -> AbstractContextManager[object]:
    return _without_drop_in("changed")


@plant("a row that was loaded ahead stays when a job changes it that was not given it")
def changed_rows_stay() -> AbstractContextManager[object]:
    return mock.patch.object(PreloadedEntities, "changed", _always(None))


@plant("rows with something of other tables are loaded ahead")
def any_rows_are_loaded_ahead() -> AbstractContextManager[object]:
    return mock.patch.object(read_rows, "_is_plain", _always(True))


@plant("a session's listeners for loading are not known of")
@contextmanager
def loads_are_not_heard() -> Iterator[None]:
    with (
        mock.patch.object(preload, "is_listened_to", _always(False)),
        mock.patch.object(job_entities, "is_listened_to", _always(False)),
    ):
        yield


@plant("values are given as the driver reads them")
def values_are_raw() -> AbstractContextManager[object]:
    maker = read_rows._maker
    return mock.patch.object(read_rows, "_maker", lambda *named: maker(*named)._replace(convert=()))


@plant("a lone job's change of a row that is not there goes unnoticed")
def lone_rows_are_not_counted() -> AbstractContextManager[object]:
    send_update = write_buffer.send_update

    def one(*what: Any) -> int:
        send_update(*what)
        return 1

    return mock.patch.object(write_buffer, "send_update", one)


@plant("a handler's statement is sent before what waits")
def statements_overtake() -> AbstractContextManager[object]:
    return mock.patch.object(_SharedRun, "_catch_up", lambda self: self._rows.drop())


@plant("a handler's SELECT is sent before what waits")
def selects_overtake() -> AbstractContextManager[object]:
    sees = _SharedRun.sees

    def sees_no_select(self: Any, statement: str, context: Any) -> None:
        if not statement.startswith("SELECT"):
            sees(self, statement, context)

    return mock.patch.object(_SharedRun, "sees", sees_no_select)


@plant("what goes over the driver's cursor is not seen")
def cursors_are_unseen() -> AbstractContextManager[object]:
    return mock.patch.object(_SharedRun, "hands_out", _always(None))


@plant("a change joins those that wait before a deferred statement")
def changes_overtake_deferred() -> AbstractContextManager[object]:
    add_deferred = WriteBuffer.add_deferred

    def add_and_stay(self: Any, write: Any) -> None:
        waiting = self._changes
        add_deferred(self, write)
        self._changes = waiting

    return mock.patch.object(WriteBuffer, "add_deferred", add_and_stay)


@plant("a deferred statement joins an equal one before others")
def deferred_overtake_others() -> AbstractContextManager[object]:
    add_deferred = WriteBuffer.add_deferred

    def add_to_likes(self: Any, write: Any) -> None:
        alike = [run for run in self._runs if isinstance(run, _Deferred) and run.takes(write)]
        if alike:
            alike[0].rows.append(write.parameters)
        else:
            add_deferred(self, write)

    return mock.patch.object(WriteBuffer, "add_deferred", add_to_likes)


@plant("deferred statements are sent behind all changes")
def deferred_go_last() -> AbstractContextManager[object]:
    send = WriteBuffer.send

    def send_sorted(self: Any, *arguments: Any) -> None:
        self._runs.sort(key=lambda run: isinstance(run, _Deferred))
        send(self, *arguments)

    return mock.patch.object(WriteBuffer, "send", send_sorted)


@plant("a second change of a row joins its likes, before other changes of it")
def changes_of_one_row_are_regrouped() -> AbstractContextManager[object]:
    return mock.patch.object(WriteBuffer, "concerns", _always(False))


@plant("deferred statements count as equal if their texts are, whatever values are inside them")
def values_inside_are_ignored() -> AbstractContextManager[object]:

    def takes_alike(self: Any, write: Any) -> bool:
        return str(self.statement) == str(write.statement) and self.rows[0].keys() == write.parameters.keys()

    return mock.patch.object(_Deferred, "takes", takes_alike)


@plant("a document that was deferred waits, although its owner may change it")
@contextmanager
def documents_wait_deferred() -> Iterator[None]:
    try:
        with mock.patch.object(deferred, "is_constant", _always(True)):
            deferred.is_fixed.cache_clear()
            yield
    finally:
        deferred.is_fixed.cache_clear()


@plant("a document that was assigned waits, although its owner may change it")
@contextmanager
def documents_wait_assigned() -> Iterator[None]:
    elements = {**set_based._ELEMENTS, JSON: (dict, lambda same: same)}
    try:
        with mock.patch.object(set_based, "_ELEMENTS", elements):
            write_buffer._writable.cache_clear()
            yield
    finally:
        write_buffer._writable.cache_clear()


@plant("no trigger, generated column or function in a constraint is known of")
def tables_run_no_code() -> AbstractContextManager[object]:
    return _facts_with(is_inert=True)


@plant("a view or a table with rules counts as an ordinary table")
def tables_are_plain() -> AbstractContextManager[object]:
    return _facts_with(is_plain=True)


@plant("no unique or deferrable column is known of")
def columns_are_free() -> AbstractContextManager[object]:
    return _facts_with(bound_columns=frozenset())


@plant("a mapper's listeners for a flush are not known of")
def mapper_listeners_are_ignored() -> AbstractContextManager[object]:
    def is_allowed_by(_: object, facts: TableFacts | None) -> bool:
        return facts is not None and facts.is_plain and facts.is_inert

    return mock.patch.object(_Writable, "is_allowed_by", is_allowed_by)


@plant("a session's listeners for a flush are not known of")
def session_listeners_are_ignored() -> AbstractContextManager[object]:
    return mock.patch.object(write_buffer, "is_listened_to", _always(False))


@plant("an attribute that is set to an expression counts as unchanged")
def expressions_are_lost() -> AbstractContextManager[object]:
    changed_values = write_buffer._changed_values

    def values_alone(state: Any, *known: Any) -> Any:
        for name in [name for name in state.committed_state if isinstance(state.dict.get(name), ClauseElement)]:
            del state.committed_state[name]
        return changed_values(state, *known)

    return mock.patch.object(write_buffer, "_changed_values", values_alone)


@plant("a change of a row that is not there goes unnoticed")
def rows_are_not_counted() -> AbstractContextManager[object]:
    execute = write_buffer._execute

    def all_of_them(connection: Any, statement: Any, rows: list[Any], facts_of: Any, *, in_order: bool = False) -> int:
        execute(connection, statement, rows, facts_of, in_order=in_order)
        return len(rows)

    return mock.patch.object(write_buffer, "_execute", all_of_them)


@plant("one statement over arrays takes every execution, also the second of a row")
def arrays_hold_a_row_twice() -> AbstractContextManager[object]:
    executions = set_based.executions

    def last_of_each(statement: Any, rows: Any, facts_of: Any, **options: Any) -> Any:
        alike = set_based._set_based(statement, frozenset(rows[0])) if isinstance(statement, Update) else None
        rows = rows if alike is None else [*{row[alike.key]: row for row in rows}.values()]
        return executions(statement, rows, facts_of, **options)

    return mock.patch.object(write_buffer, "executions", last_of_each)


@plant("a constraint that waits for COMMIT is not checked behind each job")
def constraints_wait() -> AbstractContextManager[object]:
    return mock.patch.object(_SharedRun, "_may_fail_at_commit", _always(False))


@plant("jobs that a handler adds are lost")
def jobs_are_lost() -> AbstractContextManager[object]:
    return mock.patch.object(WriteBuffer, "add_jobs", _always(None))


@plant("jobs that handlers add are inserted in the opposite order")
def jobs_are_turned_round() -> AbstractContextManager[object]:

    def backwards(connection: Any, jobs: Mapping[str, Any], **options: Any) -> None:
        insert_all(connection, dict(reversed([*jobs.items()])), **options)

    return mock.patch.object(write_buffer, "insert_all", backwards)


@plant("a session whose rows were loaded ahead does not join the connection before it is used")
def sessions_join_late() -> AbstractContextManager[object]:
    attach = job_entities.attach

    def unjoined(session: Any, entity: object) -> object:
        session.connection = lambda: None
        try:
            return attach(session, entity)
        finally:
            del session.connection

    return mock.patch.object(job_entities, "attach", unjoined)


@plant("a session that has sent nothing may be rolled back")
@contextmanager
def rollbacks_pass() -> Iterator[None]:
    is_shared, run_one, check = ContextVar("is_shared", default=False), _SharedRun._run_one, HandlerSession.check

    def run_one_shared(self: Any, *args: Any) -> None:
        is_shared.set(True)
        run_one(self, *args)

    with (
        mock.patch.object(_SharedRun, "_run_one", run_one_shared),
        mock.patch.object(HandlerSession, "check", lambda self: None if is_shared.get() else check(self)),
    ):
        yield


@plant("what waits is taken from a session whose transaction was closed, which then sends it too")
def closed_sessions_wait() -> AbstractContextManager[object]:
    take_writes = shared_batch.take_writes

    def as_if_open(self: Any, opened: Any, run: Any) -> None:
        if opened.made is not None and not opened.made.in_transaction():
            hand_over(run.deferred, opened.made)
            self._add(write_buffer.row_changes(opened.made, self._facts_of) or (), {})
            self._add_deferred(take_writes(opened.made))
        keep(self, opened, run)

    keep = _SharedRun._keep
    return mock.patch.object(_SharedRun, "_keep", as_if_open)


@plant("what an upsert writes cannot be told, and its handler meets the error")
def upserts_are_not_understood() -> AbstractContextManager[object]:
    sees = _SharedRun.sees

    def sees_none(self: Any, statement: str, context: Any) -> None:
        if "ON CONFLICT" in statement:
            raise TypeError("Boolean value of this clause is not defined")
        sees(self, statement, context)

    return mock.patch.object(_SharedRun, "sees", sees_none)


@plant("a job's rows are taken before its arounds are entered")
def arounds_come_late() -> AbstractContextManager[object]:
    def load_first(arounds: Any, session: Any, load: Callable[[], Any]) -> Surrounded:
        given = load()
        return Surrounded.of(arounds, session, lambda: given)

    return _surrounded_by(load_first)


@plant("rows that were loaded ahead are given to a session that an around has used")
def used_sessions_take_rows() -> AbstractContextManager[object]:
    load = _SharedRun._load_entity

    def take_or_load(self: Any, opened: Any, name: str, key: Any) -> object:
        entity = None if self._is_unsure else self._rows.take(key) or self._load_ahead() or self._rows.take(key)
        return load(self, opened, name, key) if entity is None else shared_batch.put(opened, entity)

    return mock.patch.object(_SharedRun, "_load_entity", take_or_load)


@plant("an outcome that an around gives counts as done")
def outcomes_of_arounds_are_done() -> AbstractContextManager[object]:
    def done(made: object) -> object:
        return Done() if isinstance(made, Outcome) else made

    async def awaited(made: Any) -> object:
        return done(await made)

    def with_done(arounds: Any, session: Any, load: Callable[[], Any]) -> Surrounded:
        surrounded = Surrounded.of(arounds, session, load)
        made = [each.make for each in surrounded.arounds]
        makes = [lambda ctx, make=make: awaited(it) if isawaitable(it := make(ctx)) else done(it) for make in made]
        return surrounded._replace(
            arounds=[replace(each, make=make) for each, make in zip(surrounded.arounds, makes, strict=True)]
        )

    return _surrounded_by(with_done)


@plant("an error that leaves an around counts as done")
@contextmanager
def errors_are_swallowed() -> Iterator[None]:
    is_shared = ContextVar("is_shared", default=False)
    run_one, call_within, await_within = _SharedRun._run_one, invoke.call_within, invoke.await_within

    def run_one_shared(self: Any, *args: Any) -> None:
        is_shared.set(True)
        run_one(self, *args)

    def call(*args: Any) -> object:
        try:
            return call_within(*args)
        except Exception:
            if not is_shared.get():
                raise
            return None

    async def call_async(*args: Any) -> object:
        try:
            return await await_within(*args)
        except Exception:
            if not is_shared.get():
                raise
            return None

    with (
        mock.patch.object(_SharedRun, "_run_one", run_one_shared),
        mock.patch.object(invoke, "call_within", call),
        mock.patch.object(invoke, "await_within", call_async),
    ):
        yield


def _surrounded_by(of: Callable[..., Surrounded]) -> AbstractContextManager[object]:
    return mock.patch.object(shared_batch, "Surrounded", SimpleNamespace(of=of))


def _always(answer: object) -> Callable[..., Any]:
    return lambda *_: answer


def _without_drop_in(caller: str) -> AbstractContextManager[object]:
    drop = PreloadedEntities.drop

    def drop_elsewhere(self: PreloadedEntities) -> None:
        if sys._getframe(1).f_code.co_name != caller:
            drop(self)

    return mock.patch.object(PreloadedEntities, "drop", drop_elsewhere)


def _facts_with(**wrong: Any) -> AbstractContextManager[object]:
    read = row_writes._read

    def read_wrong(*named: Any) -> Any:
        facts = read(*named)
        return facts and replace(facts, **wrong)

    return mock.patch.object(row_writes, "_read", read_wrong)
