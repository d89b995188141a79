"""Handlers: plain functions with a kind and options, and the decorators that make them."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Concatenate, Generic, Literal, TypeAlias, TypeVar, get_type_hints, overload

from outboxq.codec.parameters import Signature, build_signature
from outboxq.errors import RegistryError
from outboxq.handlers.context import NO_SESSION, AsyncBatchContext, AsyncContext, BatchContext, BatchItem, Context
from outboxq.handlers.function import PLAIN, check_context, check_function, naming, receives_batches
from outboxq.handlers.options import ClaimMode, HandlerOptions, Messages, check_text
from outboxq.handlers.returned import Returned
from outboxq.handlers.unlocked import UnlockedChanges
from outboxq.job import Job
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
    """A registered handler. Pass it to `add_job`; call it like the plain function that it wraps."""

    def __init__(self, function: Callable[Concatenate[C, P], R], kind: str, options: HandlerOptions) -> None:
        super().__init__(kind, options.queue, options.enqueued)
        self.function = function
        self.aliases = tuple(check_name("kind", alias) for alias in options.aliases)
        self.retry = options.retry
        self.claim: ClaimMode = options.claim
        self.timeout_seconds = options.timeout_seconds
        self.batchable = options.batchable
        self.on_failure = options.on_failure
        self.messages: Messages = options.messages
        self.keeping = options.keeping
        self.keeps_result = options.keep_result
        self.returned = Returned(kind, function if options.keep_result else None)
        self.unlocked_changes = UnlockedChanges(kind, function)
        self.flavour: Flavour = "async" if inspect.iscoroutinefunction(function) else "sync"
        # Without the function's own attributes: other decorators set attributes named like the handler's, `retry` and
        # `kind`.
        functools.update_wrapper(self, function, updated=())

    def __call__(self, ctx: C, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself, for a unit test or another handler."""
        return self.function(ctx, *args, **kwargs)

    @functools.cached_property
    def _signature(self) -> Signature:
        with naming(self.function):
            return build_signature(self.kind, self.function)

    def signature(self) -> Signature:
        """The rules for checking, storing and reading arguments; built when first needed, after circular imports."""
        return self._signature

    def check(self) -> None:
        """Check the context and the types of the arguments, which can be resolved only after all imports.

        Raises:
            RegistryError: a type does not fit; the message ends with the file and the line of the function.
        """
        with naming(self.function):
            check_context(self.function, PLAIN)
            self.check_keys()
            self.returned.declared  # noqa: B018  # refuses a name that cannot be found

    def check_keys(self) -> None:
        """Refuse a function given as `unique`, `group` or `coalesce` that requires an argument the handler lacks.

        Raises:
            RegistryError: the function needs such an argument; the message names it.
        """
        rules, arguments = self._key_rules, self._signature.parameters
        for name, needed in ({} if rules is None else rules.needs()).items():
            for missing in sorted(needed - arguments.keys()):
                raise RegistryError(
                    f"{name}= of handler {self.kind!r} takes an argument {missing!r}, which the handler does not have: "
                    f"it has {', '.join(arguments) or 'none'}"
                )

    def retry_horizon(self, max_attempts: int | None = None) -> timedelta:
        """Return the longest time after the start of a job's first attempt at which one of its retries may still run.

        `max_attempts`: the job's own number of attempts, in place of the handler's.
        """
        return self.retry.horizon(max_attempts, self.timeout_seconds)


AnyHandler: TypeAlias = Handler[Any, Any, Any]


class Arguments(Generic[P, T]):
    """Gives the class of a batch handler's arguments the signature of a function: a context, then the class's fields.

    The rules for a kind's arguments (`Signature`) are built from the signature of a function; so they can be built from
    the class too.

    Raises:
        RegistryError: it is no class, or its arguments cannot be determined.
    """

    def __init__(self, arguments: Callable[P, T]) -> None:
        if not isinstance(arguments, type):
            with naming(arguments):
                raise RegistryError(
                    "a batch handler names the class of its arguments, such as a dataclass: "
                    f"@jobs.batch_handler(Credit), got {arguments!r}"
                )
        hints = _hints(arguments)
        try:
            declared = inspect.signature(arguments)
        except (ValueError, TypeError) as error:
            raise RegistryError(f"the arguments of {arguments.__qualname__} cannot be seen: use a dataclass") from error
        typed = [
            parameter.replace(annotation=hints.get(name, parameter.annotation))
            for name, parameter in declared.parameters.items()
        ]
        context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_ONLY)
        keyword_only = [parameter for parameter in typed if parameter.kind is parameter.KEYWORD_ONLY]
        others = [parameter for parameter in typed if parameter.kind is not parameter.KEYWORD_ONLY]
        self.type = arguments
        self.__signature__ = inspect.Signature([context, *others, *keyword_only])
        self.__module__ = arguments.__module__
        self.__qualname__ = arguments.__qualname__

    def __call__(self, *_args: object, **_kwargs: object) -> object:
        raise AssertionError("named for its signature, and never called")


class BatchHandler(Handler[P, Any, Any], Generic[P, T]):
    """A registered batch handler. Pass it to `add_job`; call it like the plain function that it wraps."""

    def __init__(
        self,
        function: Callable[[Any, Sequence[BatchItem[T]]], Any],
        arguments: Arguments[P, T],
        kind: str,
        options: HandlerOptions,
    ) -> None:
        outcomes = Returned(kind).outcomes
        has_session = options.claim == "transaction"
        one = _called_as(
            function,
            has_session,
            lambda job, values: [BatchItem(arguments.type(**values), job)],
            lambda returned, count: outcomes(returned, count)[0],
        )
        super().__init__(one, kind, options)
        self.arguments = arguments.type
        self.max_size = options.max_size
        # Called with the jobs of a batch together, as `items`; never registered.
        together = _called_as(function, has_session, lambda _job, values: values["items"], outcomes)
        self.together: AnyHandler = Handler(together, kind, options)
        self._called = function
        self._declared = arguments

    def __call__(self, ctx: Any, items: Sequence[BatchItem[T]], /) -> Any:  # type: ignore[override]  # a batch at a time
        """Call the function itself, for a unit test."""
        return self._called(ctx, items)

    @functools.cached_property
    def _signature(self) -> Signature:
        with naming(self._called):
            return build_signature(self.kind, self._declared)

    def check(self) -> None:
        """Check the context and the key functions, which can be resolved only after all imports.

        Raises:
            RegistryError: one does not fit; the message ends with the file and the line of the function.
        """
        with naming(self._called):
            check_context(self._called, receives_batches(self.arguments))
            self.check_keys()
            if self.claim == "lease" and self.signature().takes_entities:
                raise RegistryError(
                    f'{self.kind!r} takes mapped objects, and a batch handler with claim="lease" has no session to '
                    'load them: take their keys, or leave out claim="lease"'
                )


@dataclass(frozen=True)
class HandlerDecorator:
    """The decorator that `jobs.handler(...)` returns: it makes a handler of a function, and registers it.

    `add` registers the handler. `kind` is None if the function's name is the kind. `options` makes the handler's
    options; it is called only when the function is known, so that errors can name the function.
    """

    add: Callable[[AnyHandler], None]
    kind: str | None
    options: Callable[[], HandlerOptions]

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
        return self.register(function)

    def register(self, function: Callable[..., Any]) -> AnyHandler:
        """Check `function`, and pass it to `add` as a `Handler`."""
        with naming(function):
            check_function(function, PLAIN, self.kind)
        with naming(function, function.__name__):
            handler: AnyHandler = Handler(function, _kind_of(function, self.kind), self.options())
        self.add(handler)
        return handler


@dataclass(frozen=True)
class ResultHandlerDecorator:
    """The decorator that `jobs.handler(keep_result=True, ...)` returns: its functions may return any value.

    It has a class of its own for type checkers: a `HandlerDecorator` accepts only functions that return outcomes.
    """

    make: HandlerDecorator

    @overload
    def __call__(
        self, function: Callable[Concatenate[AsyncContext[Any], P], Awaitable[R]], /
    ) -> Handler[P, AsyncContext[Any], Awaitable[R]]: ...

    @overload
    def __call__(self, function: Callable[Concatenate[Context[Any], P], R], /) -> Handler[P, Context[Any], R]: ...

    def __call__(self, function: Callable[..., Any], /) -> AnyHandler:
        """Register `function` and return it as a `Handler`."""
        return self.make.register(function)


@dataclass(frozen=True)
class BatchHandlerDecorator(Generic[P, T]):
    """The decorator that `jobs.batch_handler(...)` returns: it registers a function as a batch handler."""

    add: Callable[[AnyHandler], None]
    kind: str | None
    options: Callable[[], HandlerOptions]
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
        with naming(function):
            check_function(function, receives_batches(self.arguments.type), self.kind)
        with naming(function, function.__name__):
            handler = BatchHandler(function, self.arguments, _kind_of(function, self.kind), self.options())
        self.add(handler)
        return handler


def _called_as(
    function: Callable[..., Any],
    has_session: bool,
    items_of: Callable[[Job, dict[str, Any]], Sequence[BatchItem[Any]]],
    outcome_of: Callable[[object, int], object],
) -> Callable[..., Any]:
    """Wrap a batch handler's function so that the relay can call it like any handler: with a context and arguments.

    `items_of` makes the function's items from the claimed job and its decoded arguments, and `outcome_of` makes the
    outcome from the returned value and the number of items.
    """
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_async(ctx: AsyncContext[Any], /, **values: Any) -> object:
            items = items_of(ctx.job, values)
            session = ctx.session if has_session else NO_SESSION
            given = AsyncBatchContext(ctx.state, session, tuple(item.job for item in items), ctx.call)
            return outcome_of(await function(given, items), len(items))

        return run_async

    @functools.wraps(function)
    def run(ctx: Context[Any], /, **values: Any) -> object:
        items = items_of(ctx.job, values)
        session = ctx.session if has_session else NO_SESSION
        given = BatchContext(ctx.state, session, tuple(item.job for item in items), ctx.call)
        return outcome_of(function(given, items), len(items))

    return run


def _kind_of(function: Callable[..., Any], given: str | None) -> str:
    if given is None:
        return function.__name__
    check_text("kind", given, function.__name__)
    return given


def _hints(arguments: type[Any]) -> dict[str, object]:
    """Return the types of a class's fields and of its `__init__`'s parameters, as far as they can be resolved yet."""
    hints: dict[str, object] = {}
    for source in (arguments, arguments.__init__):
        try:
            hints |= get_type_hints(source, include_extras=True)
        except (NameError, AttributeError, TypeError, SyntaxError):
            continue
    return hints
