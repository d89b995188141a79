"""One attempt: a handler runs inside the relay's transaction, contained by a session and a savepoint of its own.

Whatever a handler does, its rows are either all in the transaction or none of them, and the claim stands.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TypeAlias

from psycopg.pq import TransactionStatus
from sqlalchemy import Connection

from outboxq.codec.entities import EntityKey
from outboxq.database.errors import QUERY_CANCELED, sqlstate_of
from outboxq.errors import EffectInProgress, HandlerTimedOut, TransactionEndedByHandler
from outboxq.execution.chain import check_follower
from outboxq.execution.containment import AttemptSavepoint
from outboxq.execution.errors import TransactionEscaped
from outboxq.execution.failure import Failed
from outboxq.execution.handler_session import AttemptSession, HandlerSession, hand_over
from outboxq.execution.invoke import Run
from outboxq.execution.late_rows import RowsMayBeLate
from outboxq.execution.preload import load_entity, watch_unlocked
from outboxq.execution.runtime import CancelledResult, Runtime
from outboxq.execution.settle import current_xid
from outboxq.execution.surround import Surrounded
from outboxq.fault_points import fault_point
from outboxq.handlers.around import Arounds
from outboxq.handlers.call import HandlerCall
from outboxq.handlers.handler import AnyHandler, BatchHandler
from outboxq.job import Job
from outboxq.outcomes import Done, Outcome, Snooze

_SHORTEST_SNOOZE_SECONDS = 0.05
_CANCELLED = CancelledResult()

AttemptResult: TypeAlias = Outcome | Failed | CancelledResult


class Attempt:
    """One run of a job's handler.

    Args:
        shared_xid: The claim's transaction, if other jobs share it. Then the deferred constraints are checked after
            this job, so that a violation fails it alone; for a lone job COMMIT checks them.
        begin: Begins the relay's transaction if need be; names the savepoint that stands for the attempt's, or None.
        call: The call of the handler, which an operator may cancel.
    """

    def __init__(
        self,
        connection: Connection,
        handler: AnyHandler,
        job: Job,
        runtime: Runtime,
        shared_xid: str | None,
        begin: Callable[[], str | None],
        call: HandlerCall,
    ) -> None:
        # Without a lease the attempt is in the claim's own transaction.
        in_transaction = job.lease_token is None or runtime.guard.transaction_status == TransactionStatus.INTRANS
        self._connection = connection
        self._handler = handler
        self._job = job
        self._runtime = runtime
        self._shared_xid = shared_xid
        self._call = call
        self._containment = AttemptSavepoint(connection, runtime.guard, begin, in_transaction=in_transaction)
        self._session = AttemptSession(self._open_session)
        self._arounds = runtime.registry.arounds.get(job.kind)
        self._began = time.monotonic()

    def run(self) -> AttemptResult:
        """Run the handler; afterwards the transaction holds all of its rows if it is done, and else none.

        Raises:
            ConnectionLost: the transaction is gone with its connection.
            TransactionEscaped: the handler ended the transaction.
        """
        runtime, job = self._runtime, self._job
        result: AttemptResult
        if runtime.invoker.flavour == "async" and self._containment.in_transaction:
            self._open_for_coroutine()
        try:
            check_follower(job)
            arguments = self._arguments() if self._arounds is None else self._surrounded(self._arounds)
            run = Run(job, runtime.state, partial(runtime.effect_access, self._handler, job), [], self._call)
            fault_point("before-handler")
            try:
                returned = runtime.invoker.call(self._handler, self._session.session, run, arguments)
            except BaseException as error:
                runtime.check_rest(self._connection, job, error)
                raise
            runtime.check_rest(self._connection, job)
            # Told to end before it did: however it ended, perhaps half done, nothing of it stands.
            result = _CANCELLED if self._call.is_cancelled else self._handler.returned.outcome(returned)
            if isinstance(result, Done):
                self._keep(run)
                # Last: an error after the rows were kept would be a failure whose rows stand.
                fault_point("after-handler")
        except BaseException as error:
            if not runtime.is_failure(error):
                raise
            result = _CANCELLED if self._call.is_cancelled else self._result_of(error)
        finally:
            self._call.end()
            runtime.guard.let_go()
        return self._closed(result)

    def _open_for_coroutine(self) -> None:
        """Begin the savepoint now: a coroutine can send nothing when it first names its session."""
        try:
            self._containment.open()
        except BaseException:
            self._runtime.guard.let_go()
            raise

    def _open_session(self) -> HandlerSession:
        session = self._runtime.invoker.open_session(self._connection, self._containment.open)
        if self._containment.in_transaction:
            # Now: statements that bypass the session, on the driver's cursor, have to lie behind the savepoint too.
            self._containment.open()
        return session

    def _surrounded(self, arounds: Arounds) -> Surrounded:
        """The arguments as they are loaded within the arounds."""
        batch = (self._job,) if isinstance(self._handler, BatchHandler) else None
        return Surrounded.of(arounds, self._session, self._arguments, batch)

    def _arguments(self) -> dict[str, object]:
        """The job's arguments, with its entities loaded."""
        signature = self._handler.signature()
        arguments = signature.decode(self._job.args)
        if not signature.takes_entities:
            return arguments
        keys = {name: value for name, value in arguments.items() if isinstance(value, EntityKey)}
        if keys:
            session = self._session.session()
            absent = partial(self._runtime.absent, self._connection, self._job)
            arguments |= {name: load_entity(session, name, key, absent) for name, key in keys.items()}
            loaded = [(key, arguments[name]) for name, key in keys.items()]
            watch_unlocked(session, self._handler.unlocked_changes, loaded)
        return arguments

    def _keep(self, run: Run) -> None:
        """Send the writes that the handler deferred, and keep its rows."""
        if run.deferred:
            hand_over(run.deferred, self._session.session())
        session = self._session.made
        if session is not None:
            session.check()
        if session is None and self._containment.savepoint is None:
            # The handler never used the database.
            return
        self._containment.check()
        if session is not None:
            # commit() and not flush(): it also ends the handler's open savepoints and flushes until nothing is left.
            # A session joined by "rollback_only" commits nothing.
            session.commit()
            self._containment.keep(self._shared_xid)

    def _result_of(self, error: BaseException) -> Outcome | Failed:
        if type(error) is EffectInProgress or type(error) is RowsMayBeLate:
            # Not counted: attempts that wait for a killed predecessor's lock could use up the job's attempts.
            return Snooze(timedelta(seconds=max(error.retry_after_seconds, _SHORTEST_SNOOZE_SECONDS)))
        limit, seconds = self._handler.timeout_seconds, time.monotonic() - self._began
        if limit is not None and sqlstate_of(error) == QUERY_CANCELED and seconds >= limit * 0.99:
            # The server cancelled a statement because of the handler's deadline.
            error = HandlerTimedOut(limit).with_traceback(error.__traceback__)
        return self._runtime.describe(error, self._job)

    def _closed(self, result: AttemptResult) -> AttemptResult:
        """Close the attempt's session, and undo its rows unless the job is done."""
        closed = True
        try:
            closed = self._session.close()
        except BaseException as error:
            if not self._runtime.is_failure(error):
                raise
            # A listener of the user's raised this. What the handler itself raised says more.
            result = result if isinstance(result, Failed) else self._runtime.describe(error, self._job)
        self._runtime.guard.take_back()
        if closed and isinstance(result, Done):
            return result
        intact = closed and self._containment.is_intact
        if not (self._containment.undo(intact=intact) and self._is_same_transaction()):
            # If SQLAlchemy noticed the end of the transaction, its own error says more than ours.
            if intact or not isinstance(result, Failed):
                result = self._runtime.describe(TransactionEndedByHandler(), self._job)
            raise TransactionEscaped(self._job, result)
        return result

    def _is_same_transaction(self) -> bool:
        return self._shared_xid is None or current_xid(self._connection) == self._shared_xid
