"""An endpoint's access to the idempotency of its request.

The endpoint gets the key, and can record the response in its own transaction.
"""

import logging
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import overload

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session

from outboxq.database.sessions import AnAsyncSession, SyncSession, outbox_connection, plain_session
from outboxq.effects.request import Request
from outboxq.errors import ArgumentError, ConfigError, EffectLockLost
from outboxq.http.asgi import Scope
from outboxq.http.responses import Answer, ResponseLike, encode_answer
from outboxq.statements import effects as statements
from outboxq.tables import SCHEMA

logger = logging.getLogger("outboxq.http")

IN_SCOPE = "outboxq.idempotency"


@dataclass(frozen=True, slots=True)
class Claimed:
    """The middleware's claim on the key of a request, from which the endpoint's response can be stored.

    Attributes:
        request: The request's row in table `effect`, and the lease on that row.
        schema: The schema of that table.
        max_response_bytes: The longest body that is stored.
        in_transaction: True if the endpoint records its response in its own transaction.
    """

    request: Request
    schema: str
    max_response_bytes: int
    in_transaction: bool


@dataclass(slots=True)
class Recorded:
    """A response that the endpoint wrote in its transaction, and the known state of that transaction.

    Attributes:
        is_committed: True if the transaction was committed.
        is_certain: False once anything was rolled back, even only a savepoint: that might have undone the response.
    """

    answer: Answer
    session: Session
    connection: Connection
    is_committed: bool = False
    is_certain: bool = True

    def watch(self) -> None:
        """Listen for the end of the session's transaction, to set `is_committed` and `is_certain`."""
        event.listen(self.session, "after_commit", self._after_commit)
        event.listen(self.session, "after_soft_rollback", self._after_rollback)

    def forget(self) -> None:
        """Stop listening to the session: remove the two listeners."""
        event.remove(self.session, "after_commit", self._after_commit)
        event.remove(self.session, "after_soft_rollback", self._after_rollback)

    def _after_commit(self, session: Session) -> None:
        # This is also called at the release of a savepoint, and at the commit() of a session in another session's
        # transaction.
        if not session.in_nested_transaction() and not self.connection.in_transaction():
            self.is_committed = True

    def _after_rollback(self, _session: Session, _transaction: object) -> None:
        self.is_certain = False


@dataclass(slots=True)
class Idempotency:
    """The idempotency of one request, for its endpoint, which can record the response with its own rows.

    Its `key` is the key as the client sent it, or None if the request is not guarded; then `record` does nothing.
    """

    key: str | None = None
    claimed: Claimed | None = field(default=None, repr=False)
    recorded: Recorded | None = field(default=None, repr=False)

    @overload
    def record(self, session: SyncSession, response: ResponseLike) -> None: ...

    @overload
    def record(self, session: AnAsyncSession, response: ResponseLike) -> Awaitable[None]: ...

    def record(self, session: SyncSession | AnAsyncSession, response: ResponseLike) -> Awaitable[None] | None:
        """Record the endpoint's response in the session's transaction; with an async session, await the result.

        The endpoint has to return the same response.

        Call it last before the commit. From then on the request's lease (the time for which its key is reserved) is not
        extended, and once the lease has ended, a retry waits for the end of this transaction.

        Raises:
            EffectLockLost: the request took longer than its lease, and a retry took it over: let this error roll
                back.
            ArgumentError: the response has no whole body.
            ConfigError: `in_transaction` of the middleware does not include this endpoint.
            EnqueueError: the session cannot hold the record.
        """
        answer = _answer_of(response)
        if isinstance(session, async_scoped_session):
            session = session()
        if isinstance(session, AsyncSession):
            return session.run_sync(lambda plain: self._record(plain, answer))
        self._record(plain_session(session, "record"), answer)
        return None

    def _record(self, session: Session, answer: Answer) -> None:
        if self.claimed is None:
            return
        if not self.claimed.in_transaction:
            raise ConfigError(
                "this endpoint records its response in its own transaction, and IdempotencyMiddleware was not told: "
                "give it in_transaction=True, or a function of the ASGI scope that is true for this path"
            )
        request = self.claimed.request
        result, error = encode_answer(answer, self.claimed.max_response_bytes)
        statement = statements.record_with_rows(request.lock, result=result, error=error, keep=request.retention)
        options = {"schema_translate_map": {SCHEMA: self.claimed.schema}}
        connection = outbox_connection(session, "record")
        if connection.execute(statement, execution_options=options).first() is None:
            raise EffectLockLost(request.scope, request.key)
        self.forget()
        self.recorded = Recorded(answer, session, connection)
        self.recorded.watch()

    def forget(self) -> None:
        """Drop the recorded response from this object, and stop listening to the endpoint's session.

        The record in the database stays.
        """
        if self.recorded is not None:
            self.recorded.forget()
            self.recorded = None


def is_guarded(scope: Scope) -> bool:
    """Return True if an outer outboxq middleware has this request already, so that an inner one must leave it alone."""
    found = scope.get(IN_SCOPE)
    return isinstance(found, Idempotency) and found.claimed is not None


def idempotency_of(scope: Scope) -> Idempotency:
    """Return the idempotency of the request with this ASGI scope: its key, and a way to record its response.

    Raises:
        ConfigError: the request did not pass through IdempotencyMiddleware.
    """
    found = scope.get(IN_SCOPE)
    if not isinstance(found, Idempotency):
        raise ConfigError(
            "this request did not pass through IdempotencyMiddleware: app.add_middleware(IdempotencyMiddleware, ...) "
            "on this application, or on the one that it is mounted in"
        )
    return found


def _answer_of(response: ResponseLike) -> Answer:
    body = getattr(response, "body", None)
    if not isinstance(body, bytes | memoryview):
        raise ArgumentError(
            "record takes a response with its whole body, such as Starlette's JSONResponse, "
            f"got {type(response).__name__}: build the response that the endpoint returns, and record that"
        )
    return Answer(response.status_code, tuple(response.raw_headers), bytes(body))
