"""Handlers: plain functions with a kind, a queue and a retry policy, and the decorators that make them."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Concatenate, Generic, Literal, TypeAlias, TypeVar, cast, get_args, overload

from outboxq.backoff import Backoff
from outboxq.codec.parameters import Signature, build_signature
from outboxq.codec.signature import declared_signature
from outboxq.errors import RegistryError
from outboxq.handlers.batch_handler import Arguments, called_with_many, called_with_one
from outboxq.handlers.context import AsyncBatchContext, AsyncContext, BatchContext, BatchItem, Context
from outboxq.handlers.returned import Returned
from outboxq.handlers.unlocked import UnlockedChanges
from outboxq.names import check_name
from outboxq.outbox.kinds import JobKind, P
from outboxq.outcomes import Outcome

C = TypeVar("C")
T = TypeVar("T")
R = TypeVar("R")
R_outcome = TypeVar("R_outcome", bound=Outcome | None)

Flavour: TypeAlias = Literal["sync", "async"]
ClaimMode: TypeAlias = Literal["transaction", "lease"]
Messages: TypeAlias = Literal["redacted", "withheld"]
DEFAULT_TIMEOUT_SECONDS = 300.0
MAX_TIMEOUT_SECONDS = 7 * 86_400.0
DEFAULT_GROUP_SIZE = 100
MAX_GROUP_SIZE = 10_000
Outcomes: TypeAlias = Sequence[Outcome | None] | None


class Handler(JobKind[P], Generic[P, C, R]):
    """A registered handler. Name it in `add_job`; call it like the plain function that it wraps."""

    def __init__(
        self,
        function: Callable[Concatenate[C, P], R],
        kind: str,
        queue: str,
        aliases: tuple[str, ...],
        retry: Backoff,
        *,
        claim: ClaimMode = "transaction",
        timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
        batchable: bool = False,
        messages: Messages = "redacted",
    ) -> None:
        super().__init__(kind, queue)
        self.function = function
        self.aliases = tuple(check_name("kind", alias) for alias in aliases)
        self.retry = retry
        self.claim: ClaimMode = check_claim(claim)
        self.timeout_seconds = _check_timeout(timeout_seconds)
        self.batchable = _check_batchable(batchable, claim)
        self.messages: Messages = check_messages(messages)
        self.returned = Returned(kind)
        self.unlocked_changes = UnlockedChanges(kind, function)
        self.flavour: Flavour = "async" if inspect.iscoroutinefunction(function) else "sync"
        # Without the function's own attributes, which other decorators name as we name ours: `retry`, `kind`.
        functools.update_wrapper(self, function, updated=())

    def __call__(self, ctx: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """The function itself, for a unit test or another handler."""
        return self.function(ctx, *args, **kwargs)

    @functools.cached_property
    def _signature(self) -> Signature:
        return build_signature(self.kind, self.function)

    def signature(self) -> Signature:
        """How arguments are checked, stored and read; built when first needed, after circular imports are over."""
        return self._signature

    def retry_horizon(self, max_attempts: int | None = None) -> timedelta:
        """How long after the start of its first attempt a job may still run. See `Backoff.horizon`."""
        return self.retry.horizon(max_attempts, self.timeout_seconds)


AnyHandler: TypeAlias = Handler[Any, Any, Any]


class BatchHandler(Handler[P, Any, Any], Generic[P, T]):
    """A registered batch handler. Name it in `add_job`; call it like the plain function that it wraps."""

    def __init__(
        self,
        function: Callable[[Any, Sequence[BatchItem[T]]], Any],
        arguments: Callable[P, T],
        kind: str,
        queue: str,
        aliases: tuple[str, ...],
        retry: Backoff,
        *,
        max_size: int = DEFAULT_GROUP_SIZE,
        timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
        messages: Messages = "redacted",
    ) -> None:
        made: Any = arguments
        returned = Returned(kind)
        alone = called_with_one(function, made, returned)
        super().__init__(alone, kind, queue, aliases, retry, timeout_seconds=timeout_seconds, messages=messages)
        self.arguments = arguments
        self.max_size = _check_size(max_size)
        many = called_with_many(function, returned)
        # Never registered: how many jobs are called for at once.
        self.together: AnyHandler = Handler(many, kind, queue, (), retry, timeout_seconds=timeout_seconds)
        self._called = function
        self._declared = Arguments(made)

    def __call__(self, ctx: Any, items: Sequence[BatchItem[T]], /) -> Any:  # type: ignore[override]  # a batch at a time
        """The function itself, for a unit test."""
        return self._called(ctx, items)

    @functools.cached_property
    def _signature(self) -> Signature:
        return build_signature(self.kind, self._declared)


class HandlerDecorator:
    """What `jobs.handler(...)` returns."""

    def __init__(
        self,
        add: Callable[["AnyHandler"], None],
        kind: str | None,
        queue: str,
        aliases: Iterable[str],
        retry: Backoff,
        claim: ClaimMode,
        timeout_seconds: float | None,
        batchable: bool,
        messages: Messages,
    ) -> None:
        self._add = add
        self._kind = kind
        self._queue = queue
        self._aliases = _check_aliases(aliases)
        self._retry = retry
        self._claim: ClaimMode = check_claim(claim)
        self._timeout_seconds = _check_timeout(timeout_seconds)
        self._batchable = _check_batchable(batchable, claim)
        self._messages: Messages = check_messages(messages)

    @overload
    def __call__(
        self, function: Callable[Concatenate[Context[Any], P], R_outcome], /
    ) -> Handler[P, Context[Any], R_outcome]: ...

    @overload
    def __call__(
        self, function: Callable[Concatenate[AsyncContext[Any], P], Awaitable[R_outcome]], /
    ) -> Handler[P, AsyncContext[Any], Awaitable[R_outcome]]: ...

    def __call__(self, function: Callable[..., Any], /) -> AnyHandler:
        """Register `function` and return it as a `Handler`."""
        _check_function(function)
        handler: AnyHandler = Handler(
            function,
            self._kind or function.__name__,
            self._queue,
            self._aliases,
            self._retry,
            claim=self._claim,
            timeout_seconds=self._timeout_seconds,
            batchable=self._batchable,
            messages=self._messages,
        )
        self._add(handler)
        return handler


class BatchHandlerDecorator(Generic[P, T]):
    """What `jobs.batch_handler(...)` returns."""

    def __init__(
        self,
        add: Callable[["AnyHandler"], None],
        arguments: Callable[P, T],
        kind: str | None,
        queue: str,
        aliases: Iterable[str],
        retry: Backoff,
        max_size: int,
        timeout_seconds: float | None,
        messages: Messages,
    ) -> None:
        self._add = add
        self._arguments = arguments
        # Checked now, as in the decorator of one job.
        Arguments(cast("type[Any]", arguments))
        self._kind = kind
        self._queue = queue
        self._aliases = _check_aliases(aliases)
        self._retry = retry
        self._max_size = _check_size(max_size)
        self._timeout_seconds = _check_timeout(timeout_seconds)
        self._messages: Messages = check_messages(messages)

    @overload
    def __call__(
        self, function: Callable[[BatchContext[Any], Sequence[BatchItem[T]]], Outcomes], /
    ) -> BatchHandler[P, T]: ...

    @overload
    def __call__(
        self, function: Callable[[AsyncBatchContext[Any], Sequence[BatchItem[T]]], Awaitable[Outcomes]], /
    ) -> BatchHandler[P, T]: ...

    def __call__(self, function: Callable[..., Any], /) -> BatchHandler[P, T]:
        """Register `function` and return it as a `BatchHandler`."""
        _check_function(function)
        handler = BatchHandler(
            function,
            self._arguments,
            self._kind or function.__name__,
            self._queue,
            self._aliases,
            self._retry,
            max_size=self._max_size,
            timeout_seconds=self._timeout_seconds,
            messages=self._messages,
        )
        self._add(handler)
        return handler


def check_claim(claim: ClaimMode) -> ClaimMode:
    if claim not in get_args(ClaimMode):
        raise RegistryError(f"claim takes 'transaction' or 'lease', got {claim!r}")
    return claim


def check_messages(messages: Messages) -> Messages:
    if messages not in get_args(Messages):
        raise RegistryError(f"messages takes 'redacted' or 'withheld', got {messages!r}")
    return messages


def _check_function(function: Callable[..., Any]) -> None:
    if not inspect.isfunction(function):
        raise RegistryError(f"a handler is a function whose first argument is its context, got {function!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise RegistryError(f"handler {function.__qualname__} yields: a handler returns when its work is done")
    first = next(iter(declared_signature(function).parameters.values()), None)
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        raise RegistryError(f"handler {function.__qualname__} takes no context: its first argument is `ctx: Context`")


def _check_aliases(aliases: Iterable[str]) -> tuple[str, ...]:
    if isinstance(aliases, str):
        raise RegistryError(f"aliases takes a tuple or a list of names, got the text {aliases!r}")
    return tuple(aliases)


def _check_batchable(batchable: bool, claim: ClaimMode) -> bool:
    if not isinstance(batchable, bool):
        raise RegistryError(f"batchable takes True or False, got {batchable!r}")
    if batchable and claim == "lease":
        raise RegistryError(
            'batchable=True shares the transaction that removed the jobs, and with claim="lease" each has its own: '
            "leave one of the two out"
        )
    return batchable


def _check_size(max_size: int) -> int:
    if not isinstance(max_size, int) or isinstance(max_size, bool) or not 1 <= max_size <= MAX_GROUP_SIZE:
        raise RegistryError(f"max_size takes 1 to {MAX_GROUP_SIZE:,}, got {max_size!r}")
    return max_size


def _check_timeout(seconds: float | None) -> float | None:
    if seconds is None:
        return None
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    # Not `not >`: NaN compares false either way.
    if not (is_number and 0.001 <= seconds <= MAX_TIMEOUT_SECONDS):
        raise RegistryError(
            f"timeout_seconds takes 0.001 to {MAX_TIMEOUT_SECONDS:,.0f}, or None for no deadline, got {seconds!r}"
        )
    return float(seconds)
