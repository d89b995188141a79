"""Shared batches: jobs of batchable kinds run one after the other on one savepoint, and load and write rows together.

Each job has its own session. Rows of entity arguments are preloaded, and a job's writes wait to be sent with those of
the next jobs, as long as no statement could see the difference: before anything is sent for a handler, waiting writes
are sent and preloaded rows are dropped.

If a job fails, or has another outcome than done, all jobs are undone to the savepoint; then each runs alone, and only
the faulty one fails.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from sqlalchemy import Connection, Table
from sqlalchemy.engine.interfaces import ExecutionContext

from outboxq.codec.entities import EntityKey
from outboxq.database.defects import contain, is_defect, report
from outboxq.database.sql_text import first_word, may_end_transaction, readings
from outboxq.emitter import drop_tracebacks
from outboxq.errors import HandlerError, TransactionEndedByHandler
from outboxq.events import JobDone
from outboxq.execution.attempt import SharedSavepoint, check_rest
from outboxq.execution.batch_state import BatchState
from outboxq.execution.chain import follower_of, has_follower
from outboxq.execution.errors import SharingEnded, TransactionEscaped
from outboxq.execution.invoke import JobSession, Run, hand_over
from outboxq.execution.job_entities import changes_before, put
from outboxq.execution.plan import Segment
from outboxq.execution.preload import Locks, PreloadedEntities, entity_keys, load_entity, watch_unlocked
from outboxq.execution.runtime import Runtime
from outboxq.execution.settle import check_shared
from outboxq.execution.surround import Surrounded
from outboxq.execution.write_buffer import RowChange, WriteBuffer, row_changes, row_writes, uses_only
from outboxq.fault_points import fault_point
from outboxq.handlers.deferred import Write, may_all_wait, may_wait, take_writes
from outboxq.handlers.handler import AnyHandler
from outboxq.handlers.returned import DoneWithResult
from outboxq.handlers.row_writes import RowWrite, TableFacts, row_write
from outboxq.job import Job
from outboxq.names import with_article
from outboxq.new_job import NewJob
from outboxq.outbox.pending import holds_only_jobs, take_jobs
from outboxq.outcomes import Done


def run_shared(connection: Connection, batch: BatchState, runtime: Runtime, segment: Segment, locks: Locks) -> bool:
    """Run consecutive jobs of the batch, of batchable kinds, on one savepoint; return False if all are undone.

    The caller then runs each job alone.

    Raises:
        ConnectionLost: the transaction is gone with its connection.
        TransactionEscaped: a handler ended the transaction.
    """
    events = len(batch.events)
    run = _SharedRun(connection, batch, runtime, segment, locks)
    try:
        run.run()
    except BaseException as error:
        if not runtime.is_failure(error):
            raise
        # The error will recur when each job runs alone; a defect of outboxq need not.
        failed = error
        if is_defect(error):
            report(error)
    else:
        return True
    finally:
        batch.running.end_call()
        runtime.guard.let_go()
    run.undo(failed)
    # No hook receives this error.
    drop_tracebacks(failed)
    del batch.events[events:]
    return False


class _SharedRun:
    """Runs jobs one after the other on one savepoint, and watches everything that their handlers send.

    Before a job sends anything, the waiting writes of earlier jobs are sent, and the events of those jobs are added to
    the batch. So if a job ends the transaction, only its own rows and those of jobs with an event may be committed.
    """

    def __init__(
        self, connection: Connection, batch: BatchState, runtime: Runtime, segment: Segment, locks: Locks
    ) -> None:
        self._connection = connection
        self._batch = batch
        self._runtime = runtime
        self._places = segment.places
        self._arguments = segment.arguments
        self._locks = locks
        # The events of jobs with unsent writes.
        self._ended: list[JobDone] = []
        self._is_over = False
        # These two belong to the job that runs.
        self._is_suspicious = False
        self._written: set[RowWrite | None] = set()
        # True if a handler took the driver's connection: its statements are not seen, nor those of later jobs.
        self._is_unseen = False
        self._failed: BaseException | None = None
        self._is_closed = True
        self._ahead = len(segment.places)
        self._facts: dict[Table, TableFacts | None] = {}
        self._buffer = WriteBuffer(locks.has)
        kinds = [job.kind for job in batch.jobs[segment.places.start : segment.places.stop]]
        registry = runtime.registry
        # Rows are preloaded outside the arounds of their jobs.
        own_types = any(kind in registry.arounds for kind in kinds)
        self._rows = PreloadedEntities(connection, locks, own_types=own_types)
        self._loaded_ahead = [
            {} if registry.loads_late(kind) else given for kind, given in zip(kinds, segment.arguments, strict=True)
        ]
        self._savepoint = SharedSavepoint(connection, runtime.guard, batch, segment.places.start)

    def run(self) -> None:
        """Run all jobs, send their waiting writes, and release their savepoint."""
        self._batch.running.position = self._places.start
        jobs = self._batch.jobs[self._places.start : self._places.stop]
        self._call = self._batch.running.begin_call(jobs, self._runtime.notes)
        self._runtime.catalog.refresh()
        self._runtime.guard.watcher = self
        if any(key.locked for key in entity_keys(self._loaded_ahead)):
            # All rows are locked in one order, before a handler can lock any of them.
            self._load_ahead()
        for position, arguments in zip(self._places, self._arguments, strict=True):
            self._batch.running.position = position
            self._runtime.invoker.apart()(self._run_one, self._batch.jobs[position], arguments)
        self._send()
        self._batch.running.end_handler()
        # Last: after the savepoint is released, the jobs must not run again.
        self._is_over = True
        self._savepoint.keep_all()

    def sees(self, statement: str, context: ExecutionContext | None) -> None:
        """Send the waiting writes of earlier jobs, and record the rows that a handler's statement writes.

        Called by the connection's `Guard` before each statement of a handler.
        """
        try:
            known = readings.get(statement)
            may_end = may_end_transaction(statement) if known is None else known.may_end_transaction
            self._is_suspicious = self._is_suspicious or may_end
            writes = row_writes(first_word(statement) if known is None else known.first_word, context)
        except Exception as error:  # noqa: BLE001  # raised again, unless it is a defect
            # The handler goes on, and may have written anything; then each job runs alone.
            contain(error)
            self._failed, self._is_suspicious, writes = error, True, None
        self._written.update((None,) if writes is None else writes)
        self._catch_up()

    def hands_out(self) -> None:
        """Send the waiting writes of earlier jobs, because a handler takes the driver's connection.

        Called by the connection's `Guard`, which does not see the statements that handlers send from now on.
        """
        self._is_suspicious = self._is_unseen = True
        self._written.add(None)
        self._catch_up()

    def undo(self, error: BaseException) -> None:
        """Undo the rows of all jobs, because of `error`.

        Raises:
            ConnectionLost: the transaction is gone with its connection.
            TransactionEscaped: a handler ended the transaction.
        """
        self._locks.forget()
        try:
            self._savepoint.undo_all(error, closed=self._is_closed)
        except TransactionEscaped:
            if self._is_over:
                # It is not known whose handler ended the transaction, nor whose rows are committed.
                self._batch.blame_all(self._places)
            else:
                self._set_aside_unsent()
            raise

    def _set_aside_unsent(self) -> None:
        """Move jobs with unsent writes, in `batch.jobs`, to the places after the job that ended the transaction.

        The recovery puts back all jobs after that one. Nothing of the moved jobs can be committed.
        """
        batch, first = self._batch, len(self._batch.events)
        jobs, position = batch.jobs, batch.running.position
        if first > position:
            # All was sent: the job that ended the transaction has an event, and is not done.
            del batch.events[position:]
            return
        batch.jobs = (*jobs[:first], jobs[position], *jobs[first:position], *jobs[position + 1 :])
        batch.running.position = first

    def _run_one(self, job: Job, arguments: Mapping[str, object]) -> None:
        runtime = self._runtime
        self._batch.running.begin()
        handler = runtime.registry.find(job.kind)
        self._is_suspicious = self._is_unseen
        self._written.clear()
        opened = JobSession(runtime)
        run = Run(job, runtime.state, partial(runtime.effect_access, handler, job), [], self._call)
        arounds, load = runtime.registry.arounds.get(job.kind), partial(self._given, opened, handler, arguments)
        try:
            given = load() if arounds is None else Surrounded.of(arounds, opened, load)
            fault_point("before-handler")
            seconds = handler.timeout_seconds
            self._batch.running.deadline = None if seconds is None else time.monotonic() + seconds
            try:
                returned = runtime.invoker.call(handler, opened.session, run, given)
            except BaseException as error:
                check_rest(runtime, job, error)
                raise
            check_rest(runtime, job)
            self._batch.running.deadline = None
            if self._call.is_cancelled:
                raise HandlerError("a job of the batch was cancelled: each runs by itself")
            outcome = handler.returned.outcome(returned)
            if not isinstance(outcome, Done):
                raise HandlerError(f"the handler returned {with_article(type(outcome).__name__)}")
            self._keep(opened, run)
        finally:
            try:
                self._is_closed = opened.close()
            finally:
                # A task or thread that the job left behind must not reach the next job's rows.
                runtime.guard.take_back()
        self._check()
        if has_follower(job) and (follower := follower_of(job)):
            self._buffer.add_jobs(follower)
        seconds = self._batch.running.end()
        self._ended.append(JobDone(job, seconds, outcome.result if isinstance(outcome, DoneWithResult) else None))
        if not self._buffer:
            self._mark_sent()
        fault_point("after-handler")

    def _given(self, opened: JobSession, handler: AnyHandler, arguments: Mapping[str, object]) -> dict[str, object]:
        """Return the decoded arguments of one job, with its entities, preloaded or loaded now, in the job's session."""
        given, found = dict(arguments), dict[object, object]()
        loaded: list[tuple[EntityKey, object]] = []
        # Preloaded rows are not used in a session that the job's arounds have used: they may have loaded the same rows,
        # put listeners on the session, or set which rows are visible.
        find = self._entity if opened.made is None else self._load_entity
        for name, key in arguments.items():
            if type(key) is EntityKey:
                identity = key.entity, key.identity
                if identity not in found:
                    found[identity] = find(opened, name, key)
                elif found[identity] is None and not key.optional:
                    # The previous job may accept a missing row, while this one does not. The row may have been
                    # committed since.
                    found[identity] = self._load_entity(opened, name, key)
                given[name] = found[identity]
                loaded.append((key, given[name]))
        if loaded:
            watch_unlocked(opened, handler.unlocked_changes, loaded)
        return given

    def _entity(self, opened: JobSession, name: str, key: EntityKey) -> object:
        entity = self._rows.take(key)
        if entity is None and not self._is_unsure:
            self._load_ahead()
            entity = self._rows.take(key)
        if entity is None:
            # The class cannot be preloaded, or the row does not exist.
            return self._load_entity(opened, name, key)
        return put(opened, entity)

    def _load_entity(self, opened: JobSession, name: str, key: EntityKey) -> object:
        return load_entity(
            opened.session(), name, key, partial(self._runtime.absent, self._connection, self._batch.job)
        )

    def _load_ahead(self) -> None:
        """Send the waiting writes, then preload the rows of the next jobs' entities.

        At first, the rows of all jobs are loaded. After a handler has sent something, which drops all preloaded rows,
        this begins again with the rows of one job, and then loads those of twice as many jobs each time: the next
        handler may send something too.
        """
        self._send()
        first = self._batch.running.position - self._places.start
        with self._runtime.guard.aside():
            self._rows.load(entity_keys(self._loaded_ahead[first : first + self._ahead]), self._facts_of)
        self._ahead *= 2

    def _keep(self, opened: JobSession, run: Run) -> None:
        """Put the job's unsent writes into the buffer, or send them now if they may not wait for later jobs' writes."""
        self._check()
        if self._is_suspicious and not self._savepoint.is_same_transaction():
            # Before more is sent, because that would be in another transaction.
            raise TransactionEndedByHandler
        changes = changes_before(opened, self._facts_of) if all(map(may_wait, run.deferred)) else None
        if changes is not None:
            self._add(changes, {})
            self._add_deferred(run.deferred)
        else:
            session = opened.session()
            session.check()
            session.look()
            hand_over(run.deferred, session)
            is_usable = session.is_active and not session.in_nested_transaction() and not self._is_unsure
            is_own = uses_only(session, self._connection)
            may_all = is_usable and is_own and holds_only_jobs(session) and may_all_wait(session)
            changes = row_changes(session, self._facts_of) if may_all else None
            if changes is not None and session.in_transaction():
                self._add(changes, take_jobs(session))
                self._add_deferred(take_writes(session))
            else:
                writes = [] if changes is None else take_writes(session)
                # commit() also ends the handler's savepoints, flushes until all is sent, and raises an error if the
                # session was closed.
                session.commit()
                self._add_deferred(writes)
        if self._may_fail_at_commit():
            self._send()
            check_shared(self._connection, self._savepoint.xid)

    def _may_fail_at_commit(self) -> bool:
        """Return True if the job may have violated a deferred constraint.

        The caller then checks the constraints at once. A later job might satisfy the constraint again, but each job
        must succeed by itself.
        """
        for write in self._written:
            facts = None if write is None else self._facts_of(write.table)
            if write is None or facts is None or not facts.contains(write):
                # If unsure, the known constraints may have changed.
                return self._is_unsure or self._runtime.catalog.has_deferrable(self._connection)
        return False

    def _add(self, changes: Sequence[RowChange], jobs: Mapping[str, NewJob]) -> None:
        for change in changes:
            if self._buffer.concerns(change.row, change.entity):
                self._send()
            self._buffer.add_change(change)
            self._rows.changed(change.row, change.entity)
        if jobs:
            self._buffer.add_jobs(jobs)

    def _add_deferred(self, writes: Iterable[Write]) -> None:
        for write in writes:
            self._buffer.add_deferred(write)
            self._written.add(row_write(write.statement, write.parameters))
            self._rows.drop()

    def _facts_of(self, table: Table) -> TableFacts | None:
        if self._is_unsure:
            return None
        if table not in self._facts:
            self._facts[table] = self._runtime.catalog.facts(self._connection, table)
        return self._facts[table]

    @property
    def _is_unsure(self) -> bool:
        """Return True if facts of tables are unreliable: handlers' statements were not seen, or settings changed."""
        guard = self._runtime.guard
        return self._is_unseen or guard.is_altered or guard.left is not None or not guard.has_own_options

    def _check(self) -> None:
        """Check, without a statement, that the transaction is as before the handler, and that no error was swallowed.

        Raises:
            HandlerError: the transaction is not as before.
        """
        if self._failed is not None:
            # The handler received this error when it sent something, and may have swallowed it.
            raise self._failed
        self._savepoint.check(closed=self._is_closed)

    def _catch_up(self) -> None:
        self._rows.drop()
        self._ahead = 1
        try:
            self._send()
        except BaseException as error:
            self._failed = error
            if is_defect(error):
                report(error)
                raise SharingEnded("what other jobs of the batch wrote could not be sent") from error
            raise

    def _send(self) -> None:
        if self._buffer:
            with self._runtime.guard.aside():
                self._buffer.send(self._connection, self._facts_of)
        self._mark_sent()

    def _mark_sent(self) -> None:
        self._batch.events.extend(self._ended)
        self._ended.clear()
