"""The Idempotency-Key header for any ASGI application: claim, run, record, answer; or replay.

A guarded request is an effect whose scope is its route, and whose key is its principal with the client's key. Two short
transactions surround the application; where the endpoint records in its own transaction, the second one is its own.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from outboxq.config import check_retention
from outboxq.database.errors import explain_missing_tables
from outboxq.effects.api import DEFAULT_LEASE_SECONDS
from outboxq.effects.protocol import LockExpiry
from outboxq.effects.protocol import claim as claim
from outboxq.effects.protocol import is_database_unavailable as is_database_unavailable
from outboxq.effects.request import Request
from outboxq.effects.runners import AsyncEffectRunner
from outboxq.effects.transactions import async_transactions, schema_of
from outboxq.errors import ConfigError, EffectLockLost, InvalidKey
from outboxq.http.bodies import Gone, Receive, TooLarge, Whole, given_back, given_whole, read_body
from outboxq.http.endpoint import Claimed, Idempotency, is_guarded, put_idempotency
from outboxq.http.keys import (
    Principal,
    Scope,
    effect_key,
    effect_scope,
    header_values,
    read_key,
    request_fingerprint,
)
from outboxq.http.response_recorder import ResponseRecorder, Send
from outboxq.http.responses import KEY_IGNORED, Answer, Problems
from outboxq.http.routing import was_not_routed
from outboxq.http.settlement import RecordingGuard, RequestSettlement, standing_answer
from outboxq.http.shielding import UncancelledWrites
from outboxq.statements.effects import EffectState

AsgiApp: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]
Predicate: TypeAlias = Callable[[Scope], bool]

logger = logging.getLogger("outboxq.http")

DEFAULT_HTTP_RETENTION = timedelta(hours=24)
MAX_REQUEST_BYTES, MAX_RESPONSE_BYTES = 1024 * 1024, 128 * 1024
_LARGEST_BYTES = 64 * 1024 * 1024
# These say that the request was not processed, and may come again: RFC 9110, RFC 8470 (425), RFC 6585 (429).
NOT_PROCESSED = frozenset((401, 403, 408, 409, 425, 429))
# As RFC 3986 has it, as far as the Link header that it goes into must be sure of it.
_URL = re.compile(r"[!#-;=?-~]+")
# Ways to answer past `send`, which is where we record.
_BYPASSES = ("http.response.pathsend", "http.response.zerocopysend", "http.response.trailers")


@dataclass(frozen=True, slots=True)
class _Settings:
    principal: Principal
    methods: frozenset[str]
    required: Predicate
    in_transaction: Predicate
    retention: timedelta
    max_request_bytes: int
    max_response_bytes: int
    released: frozenset[int]
    schema: str


class IdempotencyMiddleware:
    """Executes a request once for each Idempotency-Key, and replays its response to every retry.

    Args:
        app: The ASGI application.
        engine: An async engine, or a sync one, whose transactions then run in threads. Connections come from a pool of
            our own beside its pool, which is closed at the end of the application's lifespan.
        principal: Whose key it is: `by_authorization`, `nobody`, or a function of the ASGI scope.
        methods: Requests of other methods pass through.
        required: Whether a request without the header is refused.
        in_transaction: Whether the endpoint records its response in its own transaction: see `Idempotency.record`.
        retention: How long a response is replayed, from 1 second to 10 years.
        lease_seconds: How long a key stays a request's own after its process has died, 0.5 to 3600.
        max_request_bytes: A larger body is not guarded, and refused where the key is required.
        max_response_bytes: A larger response, or a stream, passes through; it is executed once, and not replayed.
        released_statuses: Responses after which a retry is executed, because they say that nothing was done.
        documentation: The URL of what your API's documentation says of idempotency keys, for our error responses.
        schema: The PostgreSQL schema of outboxq's tables; by default as the engine's `schema_translate_map` has it.

    Raises:
        ConfigError: something cannot be used as given.
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
        self._transactions = async_transactions(engine, schema)
        self._settings = _Settings(
            principal=principal,
            methods=_check_methods(methods),
            required=_predicate(required),
            in_transaction=_predicate(in_transaction),
            retention=check_retention(retention),
            max_request_bytes=_check_bytes("max_request_bytes", max_request_bytes),
            max_response_bytes=_check_bytes("max_response_bytes", max_response_bytes),
            released=frozenset(released_statuses),
            schema=schema_of(engine.sync_engine if isinstance(engine, AsyncEngine) else engine, schema),
        )
        self._app = app
        self._caller = AsyncEffectRunner(self._transactions, lease_seconds)
        self._problems = Problems(_check_documentation(documentation))
        self._undisturbed = UncancelledWrites()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http":
            await self._take(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, self._disposing(send))
        else:
            await self._app(scope, receive, send)

    def _disposing(self, send: Send) -> Send:
        async def send_disposing(message: MutableMapping[str, Any]) -> None:
            # Before it is sent: the server may end the event loop at once.
            if message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                await self._transactions.dispose()
            await send(message)

        return send_disposing

    async def _take(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if is_guarded(scope):
            # By another one of us, further out: two would wait for each other.
            return await self._app(scope, receive, send)
        idempotency = put_idempotency(scope, Idempotency())
        if scope["method"] not in self._settings.methods:
            return await self._app(scope, receive, send)
        is_required = self._settings.required(scope)
        given = header_values(scope, b"idempotency-key")
        if not given:
            if is_required:
                return await _answer(self._problems.missing(), send)
            return await self._app(scope, receive, send)
        try:
            idempotency.key = read_key(given)
        except InvalidKey as error:
            return await _answer(self._problems.malformed(str(error)), send)
        body = await read_body(scope, receive, self._settings.max_request_bytes)
        if isinstance(body, Whole):
            return await self._guarded(scope, idempotency, body, receive, send)
        if isinstance(body, TooLarge):
            return await self._too_large(scope, idempotency, body, receive, send, is_required=is_required)
        assert isinstance(body, Gone)
        return None

    async def _too_large(
        self,
        scope: MutableMapping[str, Any],
        idempotency: Idempotency,
        body: TooLarge,
        receive: Receive,
        send: Send,
        *,
        is_required: bool,
    ) -> None:
        if is_required:
            return await _answer(self._problems.too_large(self._settings.max_request_bytes), send)
        idempotency.key = None
        return await self._app(scope, given_back(body, receive), _marking(send))

    async def _guarded(
        self, scope: MutableMapping[str, Any], idempotency: Idempotency, body: Whole, receive: Receive, send: Send
    ) -> None:
        request = self._request(scope, str(idempotency.key), body)
        idempotency.claimed = Claimed(
            request, self._settings.schema, self._settings.max_response_bytes, self._settings.in_transaction(scope)
        )
        guard = self._guard(request, idempotency, partial(was_not_routed, scope))
        hold = LockExpiry(request)
        with self._caller.keeping(hold):
            try:
                seen = await self._claim(request, hold, guard)
            except (SQLAlchemyError, OSError) as error:
                return await _answer(self._unavailable(error, guard), send)
            if not seen.claimed:
                return await _answer(standing_answer(seen, self._problems), send)
            if seen.in_doubt and not idempotency.claimed.in_transaction:
                return await _answer(await self._undisturbed.run(guard.refuse_takeover()), send)
            try:
                async with given_whole(body, receive) as receive_again:
                    await self._execute(scope, receive_again, send, guard)
            finally:
                idempotency.forget()

    def _unavailable(self, error: SQLAlchemyError | OSError, guard: RequestSettlement) -> Answer:
        """The answer where the database cannot be reached; any other error is raised."""
        missing = explain_missing_tables(error)
        if missing is not None:
            raise missing from error
        if not is_database_unavailable(error):
            raise error
        # The claim may have been committed all the same.
        self._undisturbed.start(guard.give_back())
        logger.warning("idempotency keys cannot be checked", extra={"error_type": type(error).__name__})
        return self._problems.unavailable()

    async def _claim(self, request: Request, hold: LockExpiry, guard: RequestSettlement) -> EffectState:
        claiming = self._undisturbed.start(self._claim_in_time(request, hold))
        try:
            return await self._undisturbed.wait(claiming)
        except asyncio.CancelledError:
            self._undisturbed.start(_give_back(claiming, guard))
            raise

    async def _claim_in_time(self, request: Request, hold: LockExpiry) -> EffectState:
        deployment = await self._caller.deployment()
        while True:
            seen = await self._caller.drive(claim(request, hold, deployment))
            # A process that stood still until here for longer than its lease may have been taken over: claim again.
            if not seen.claimed or hold.lasts:
                return seen

    async def _execute(
        self, scope: MutableMapping[str, Any], receive: Receive, send: Send, guard: RequestSettlement
    ) -> None:
        exchange = ResponseRecorder(guard, send, self._settings.max_response_bytes, self._undisturbed)
        _close_bypasses(scope)
        try:
            await self._app(scope, receive, exchange.send)
        except BaseException as error:
            was_answered = await self._undisturbed.run(exchange.fail(error))
            if not (was_answered and isinstance(error, EffectLockLost)):
                raise
        else:
            await self._undisturbed.run(exchange.finish())

    def _request(self, scope: Scope, key: str, body: Whole) -> Request:
        return Request(
            scope=effect_scope(scope),
            key=effect_key(_check_principal(self._settings.principal(scope)), key),
            fingerprint=request_fingerprint(scope, body.data),
            lease=self._caller.lease,
            retention=self._settings.retention,
        )

    def _guard(
        self, request: Request, idempotency: Idempotency, is_refused: Callable[[int], bool]
    ) -> RequestSettlement:
        assert idempotency.claimed is not None
        settings = self._settings
        if idempotency.claimed.in_transaction:
            return RecordingGuard(
                request, self._caller, self._problems, settings.max_response_bytes, is_refused, idempotency
            )
        return RequestSettlement(
            request, self._caller, self._problems, settings.max_response_bytes, is_refused, settings.released
        )


async def _give_back(claiming: "asyncio.Task[EffectState]", guard: RequestSettlement) -> None:
    """The client, or the server, went away before anything was executed."""
    if (await claiming).claimed:
        await guard.give_back()


async def _answer(answer: Answer, send: Send) -> None:
    for message in answer.messages():
        await send(message)


def _marking(send: Send) -> Send:
    async def send_marked(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), KEY_IGNORED]}
        await send(message)

    return send_marked


def _close_bypasses(scope: MutableMapping[str, Any]) -> None:
    extensions = scope.get("extensions")
    if extensions and any(name in extensions for name in _BYPASSES):
        scope["extensions"] = {name: value for name, value in extensions.items() if name not in _BYPASSES}


def _check_principal(given: object) -> str | None:
    if given is None or isinstance(given, str):
        return given
    raise ConfigError(f"principal returns a str, or None for nobody, got {type(given).__name__}")


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
