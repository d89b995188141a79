"""Handlers: plain functions with a kind and options, and the decorators that make them."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Concatenate, Generic, Literal, TypeAlias, TypeVar, overload

from outboxq.codec.parameters import Signature, build_signature
from outboxq.codec.signature import declared_signature
from outboxq.errors import RegistryError
from outboxq.handlers.batch_handler import Arguments, called_with_many, called_with_one
from outboxq.handlers.context import AsyncBatchContext, AsyncContext, BatchContext, BatchItem, Context
from outboxq.handlers.options import ClaimMode, HandlerOptions, Messages
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
Outcomes: TypeAlias = Sequence[Outcome | None] | None


class Handler(JobKind[P], Generic[P, C, R]):
    """A registered handler. Name it in `add_job`; call it like the plain function that it wraps."""

    def __init__(self, function: Callable[Concatenate[C, P], R], kind: str, options: HandlerOptions) -> None:
        super().__init__(kind, options.queue)
        self.function = function
        self.aliases = tuple(check_name("kind", alias) for alias in options.aliases)
        self.retry = options.retry
        self.claim: ClaimMode = options.claim
        self.timeout_seconds = options.timeout_seconds
        self.batchable = options.batchable
        self.messages: Messages = options.messages
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
        """How long after the start of its first attempt a job may still run, at most."""
        return self.retry.horizon(max_attempts, self.timeout_seconds)


AnyHandler: TypeAlias = Handler[Any, Any, Any]


class BatchHandler(Handler[P, Any, Any], Generic[P, T]):
    """A registered batch handler. Name it in `add_job`; call it like the plain function that it wraps."""

    def __init__(
        self,
        function: Callable[[Any, Sequence[BatchItem[T]]], Any],
        arguments: Arguments[P, T],
        kind: str,
        options: HandlerOptions,
    ) -> None:
        returned = Returned(kind)
        super().__init__(called_with_one(function, arguments.type, returned), kind, options)
        self.arguments = arguments.type
        self.max_size = options.max_size
        # Called with the jobs of a batch together; never registered.
        self.together: AnyHandler = Handler(called_with_many(function, returned), kind, options)
        self._called = function
        self._declared = arguments

    def __call__(self, ctx: Any, items: Sequence[BatchItem[T]], /) -> Any:  # type: ignore[override]  # a batch at a time
        """The function itself, for a unit test."""
        return self._called(ctx, items)

    @functools.cached_property
    def _signature(self) -> Signature:
        return build_signature(self.kind, self._declared)


@dataclass(frozen=True)
class HandlerDecorator:
    """What `jobs.handler(...)` returns: it makes a handler of a function, and hands it to `add`."""

    add: Callable[[AnyHandler], None]
    kind: str | None
    options: HandlerOptions

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
        handler: AnyHandler = Handler(function, self.kind or function.__name__, self.options)
        self.add(handler)
        return handler


@dataclass(frozen=True)
class BatchHandlerDecorator(Generic[P, T]):
    """What `jobs.batch_handler(...)` returns: it makes a batch handler of a function, and hands it to `add`."""

    add: Callable[[AnyHandler], None]
    kind: str | None
    options: HandlerOptions
    arguments: Arguments[P, T]

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
        handler = BatchHandler(function, self.arguments, self.kind or function.__name__, self.options)
        self.add(handler)
        return handler


def _check_function(function: Callable[..., Any]) -> None:
    if not inspect.isfunction(function):
        raise RegistryError(f"a handler is a function whose first argument is its context, got {function!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise RegistryError(f"handler {function.__qualname__} yields: a handler returns when its work is done")
    first = next(iter(declared_signature(function).parameters.values()), None)
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        raise RegistryError(f"handler {function.__qualname__} takes no context: its first argument is `ctx: Context`")
