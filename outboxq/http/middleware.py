"""The Idempotency-Key header for any ASGI application: a request is executed once, and retries get its stored response.

A guarded request has a row in table `effect`. Its scope is the request's method and path, and its key is the client's
key with the key's owner, the principal. A short transaction before the application claims the row, and a second one
records the response, unless the endpoint records it in its own transaction.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import partial
from typing import TypeAlias

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from outboxq.config import check_retention
from outboxq.database.errors import explain_missing_tables, is_transient
from outboxq.effects.protocol import LockExpiry, claim
from outboxq.effects.request import Request
from outboxq.effects.runners import DEFAULT_LEASE_SECONDS, AsyncEffectRunner
from outboxq.effects.shielding import UncancelledWrites
from outboxq.effects.transactions import AsyncEngineTransactions
from outboxq.errors import ConfigError, EffectLockLost, InvalidKey
from outboxq.http import problems
from outboxq.http.asgi import AsgiApp, Message, MutableScope, Receive, Scope, Send, header_values, was_not_routed
from outboxq.http.bodies import TooLarge, Whole, given_back, given_whole, read_body
from outboxq.http.endpoint import IN_SCOPE, Claimed, Idempotency, is_guarded
from outboxq.http.keys import Principal, effect_key, effect_scope, read_key, request_fingerprint
from outboxq.http.problems import ProblemAnswers
from outboxq.http.response_recorder import ResponseRecorder
from outboxq.http.responses import KEY_IGNORED, Answer
from outboxq.http.settlement import RequestSettlement, TransactionSettlement, standing_answer
from outboxq.statements.effects import EffectState

Predicate: TypeAlias = Callable[[Scope], bool]

logger = logging.getLogger("outboxq.http")

DEFAULT_HTTP_RETENTION = timedelta(hours=24)
MAX_REQUEST_BYTES, MAX_RESPONSE_BYTES = 1024 * 1024, 128 * 1024
_LARGEST_BYTES = 64 * 1024 * 1024
# Statuses which say that the request was not processed, and may be sent again: RFC 9110, RFC 8470 (425), RFC 6585
# (429).
NOT_PROCESSED = frozenset((401, 403, 408, 409, 425, 429))
# The characters of RFC 3986: any other might end the URL in a Link header.
_URL = re.compile(r"[!#-;=?-~]+")
# ASGI extensions that answer without the messages that the middleware records.
_BYPASSES = ("http.response.pathsend", "http.response.zerocopysend", "http.response.trailers")


class IdempotencyMiddleware:
    """Executes a request once for each Idempotency-Key, and replays its response to every retry.

    Args:
        app: The ASGI application.
        engine: An async engine, or a sync one, whose transactions then run in threads. Connections come from
            separate pools, which are closed at the end of the application's lifespan, and never from the engine's own.
        principal: Returns the owner of a request's key: `by_authorization`, `nobody`, or a function of the ASGI
            scope.
        methods: The methods of guarded requests; those of other methods pass through.
        required: True to refuse requests without the header; or a function of the ASGI scope that returns this.
        in_transaction: True if the endpoint records its response in its own transaction, by `Idempotency.record`;
            or a function of the ASGI scope that returns this.
        retention: How long a response is replayed, from 1 second to 10 years.
        lease_seconds: How long a request keeps its key after its process has died, 0.5 to 3600.
        max_request_bytes: The longest request body; a request with a longer one is not guarded, and refused if the
            key is required.
        max_response_bytes: The longest response body that is stored. With a longer one, or a stream, the request is
            executed once too, but retries do not get its response.
        released_statuses: Statuses of responses that say that nothing was done: a retry is executed.
        documentation: The URL of your API's documentation of idempotency keys, for the middleware's error
            responses.
        schema: The PostgreSQL schema of outboxq's tables; by default the one in the engine's
            `schema_translate_map`.

    Raises:
        ConfigError: an argument cannot be used as given.
    """

    def __init__(
        self,
        app: AsgiApp,
        engine: AsyncEngine | Engine,
        *,
        principal: Principal,
        methods: Collection[str] = ("POST", "PATCH"),
        required: bool | Predicate = False,
        in_transaction: bool | Predicate = False,
        retention: timedelta = DEFAULT_HTTP_RETENTION,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        released_statuses: Collection[int] = NOT_PROCESSED,
        documentation: str | None = None,
        schema: str | None = None,
    ) -> None:
        if not callable(principal):
            raise ConfigError(f"principal takes a function of the ASGI scope, got {type(principal).__name__}")
        self._app = app
        self._principal = principal
        self._methods = _check_methods(methods)
        self._is_required = _predicate(required)
        self._is_in_transaction = _predicate(in_transaction)
        self._retention = check_retention(retention)
        self._max_request_bytes = _check_bytes("max_request_bytes", max_request_bytes)
        self._max_response_bytes = _check_bytes("max_response_bytes", max_response_bytes)
        self._released = frozenset(released_statuses)
        self._answers = ProblemAnswers(_check_documentation(documentation))
        self._transactions = AsyncEngineTransactions(engine, schema)
        self._runner = AsyncEffectRunner(self._transactions, lease_seconds)
        self._writes = UncancelledWrites()

    async def __call__(self, scope: MutableScope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection; only HTTP requests are guarded."""
        if scope["type"] == "http":
            await self._take(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, self._disposing(send))
        else:
            await self._app(scope, receive, send)

    def _disposing(self, send: Send) -> Send:
        async def send_disposing(message: Message) -> None:
            # Before the message is sent: afterwards the server may end the event loop at once.
            if message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                await self._transactions.dispose()
            await send(message)

        return send_disposing

    async def _take(self, scope: MutableScope, receive: Receive, send: Send) -> None:
        if is_guarded(scope):
            # An outer middleware of the same sort guards the request already: two would wait for each other.
            return await self._app(scope, receive, send)
        # Into the server's own dict, because outer middleware reads the router's entries there.
        idempotency = scope[IN_SCOPE] = Idempotency()
        if scope["method"] not in self._methods:
            return await self._app(scope, receive, send)
        is_required = self._is_required(scope)
        given = header_values(scope["headers"], b"idempotency-key")
        if not given:
            if is_required:
                return await self._answers.answer(problems.MISSING).send_to(send)
            return await self._app(scope, receive, send)
        try:
            idempotency.key = read_key(given)
        except InvalidKey as error:
            why = str(error)
            malformed = self._answers.answer(problems.MALFORMED, why=f"{why[:1].upper()}{why[1:]}")
            return await malformed.send_to(send)
        body = await read_body(scope, receive, self._max_request_bytes)
        if isinstance(body, Whole):
            return await self._guarded(scope, idempotency, body, receive, send)
        if isinstance(body, TooLarge):
            if is_required:
                too_large = self._answers.answer(problems.TOO_LARGE, max_bytes=self._max_request_bytes)
                return await too_large.send_to(send)
            idempotency.key = None
            return await self._app(scope, given_back(body, receive), _marking(send))
        return None

    async def _guarded(
        self, scope: MutableScope, idempotency: Idempotency, body: Whole, receive: Receive, send: Send
    ) -> None:
        request = self._request(scope, str(idempotency.key), body)
        in_transaction = self._is_in_transaction(scope)
        idempotency.claimed = Claimed(request, self._transactions.schema, self._max_response_bytes, in_transaction)
        settlement = self._settlement(request, idempotency, partial(was_not_routed, scope))
        expiry = LockExpiry(request)
        with self._runner.keeping(expiry):
            try:
                state = await self._claim(request, expiry, settlement)
            except (SQLAlchemyError, OSError) as error:
                return await self._unavailable(error, settlement).send_to(send)
            if not state.claimed:
                return await standing_answer(state, self._answers).send_to(send)
            if state.in_doubt and not in_transaction:
                refusal = await self._writes.run(settlement.refuse_takeover())
                return await refusal.send_to(send)
            try:
                async with given_whole(body, receive) as receive_again:
                    await self._execute(scope, receive_again, send, settlement)
            finally:
                idempotency.forget()

    def _unavailable(self, error: SQLAlchemyError | OSError, settlement: RequestSettlement) -> Answer:
        """Return the answer to send if the error says that the database cannot be reached; raise any other error.

        The claim may have been committed all the same, so it is released in the background: a retry is then executed.
        """
        missing = explain_missing_tables(error)
        if missing is not None:
            raise missing from error
        if not is_transient(error):
            raise error
        # The claim may have been committed although the database did not answer.
        self._writes.start(settlement.release())
        logger.warning("idempotency keys cannot be checked", extra={"error_type": type(error).__name__})
        return self._answers.answer(problems.UNAVAILABLE)

    async def _claim(self, request: Request, expiry: LockExpiry, settlement: RequestSettlement) -> EffectState:
        claiming = self._writes.start(self._claim_in_time(request, expiry))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            self._writes.start(_release(claiming, settlement))
            raise

    async def _claim_in_time(self, request: Request, expiry: LockExpiry) -> EffectState:
        deployment = await self._runner.deployment()
        while True:
            state = await self._runner.drive(claim(request, expiry, deployment))
            # If this process was suspended for longer than its lease, another may have taken over: claim again.
            if not state.claimed or expiry.is_ahead:
                return state

    async def _execute(self, scope: MutableScope, receive: Receive, send: Send, settlement: RequestSettlement) -> None:
        recorder = ResponseRecorder(settlement, send, self._writes)
        _close_bypasses(scope)
        try:
            await self._app(scope, receive, recorder.send)
        except BaseException as error:
            was_answered = await self._writes.run(recorder.fail(error))
            if not (was_answered and isinstance(error, EffectLockLost)):
                raise
        else:
            await self._writes.run(recorder.finish())

    def _request(self, scope: Scope, key: str, body: Whole) -> Request:
        return Request(
            scope=effect_scope(scope),
            key=effect_key(_check_principal(self._principal(scope)), key),
            fingerprint=request_fingerprint(scope, body.data),
            lease=self._runner.lease,
            retention=self._retention,
        )

    def _settlement(
        self, request: Request, idempotency: Idempotency, is_refused: Callable[[int], bool]
    ) -> RequestSettlement:
        assert idempotency.claimed is not None
        make: Callable[..., RequestSettlement] = partial(RequestSettlement, released=self._released)
        if idempotency.claimed.in_transaction:
            make = partial(TransactionSettlement, idempotency=idempotency)
        return make(
            request=request,
            runner=self._runner,
            answers=self._answers,
            max_response_bytes=self._max_response_bytes,
            is_refused=is_refused,
        )


async def _release(claiming: "asyncio.Task[EffectState]", settlement: RequestSettlement) -> None:
    """Wait for the claim of a request that was cancelled before its execution, then release the claim for a retry."""
    if (await claiming).claimed:
        await settlement.release()


def _marking(send: Send) -> Send:
    async def send_marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), KEY_IGNORED]}
        await send(message)

    return send_marked


def _close_bypasses(scope: MutableScope) -> None:
    extensions = scope.get("extensions")
    if extensions and any(name in extensions for name in _BYPASSES):
        scope["extensions"] = {name: value for name, value in extensions.items() if name not in _BYPASSES}


def _check_principal(given: object) -> str | None:
    if given is None or isinstance(given, str):
        return given
    raise ConfigError(f"principal returns a str, or None for no principal, got {type(given).__name__}")


def _check_documentation(given: str | None) -> str | None:
    if given is None or _URL.fullmatch(given):
        return given
    raise ConfigError(f"documentation takes a URL, with what is not ASCII percent-encoded (%20), got {given!r}")


def _predicate(given: bool | Predicate) -> Predicate:
    if callable(given):
        return given
    return lambda _scope: given


def _check_methods(methods: Collection[str]) -> frozenset[str]:
    if isinstance(methods, str) or not all(isinstance(method, str) and method == method.upper() for method in methods):
        raise ConfigError(f"methods takes a collection of methods in upper case, such as ('POST',), got {methods!r}")
    return frozenset(methods)


def _check_bytes(name: str, given: int) -> int:
    if not 0 <= given <= _LARGEST_BYTES:
        raise ConfigError(f"{name} takes 0 to {_LARGEST_BYTES:,} bytes, got {given!r}")
    return given
