"""How a batch handler is called: with one job, as every other handler, or with many."""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar, get_type_hints

from outboxq.errors import RegistryError
from outboxq.handlers.context import AsyncBatchContext, AsyncContext, BatchContext, BatchItem, Context
from outboxq.handlers.returned import Returned
from outboxq.outcomes import Outcome

P = ParamSpec("P")
T = TypeVar("T")


def called_with_one(
    function: Callable[..., Any], arguments: Callable[..., object], returned: Returned
) -> Callable[..., Any]:
    """A handler of one job, as the executor calls it, that calls `function` with a batch of one."""
    together = called_with_many(function, returned)
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def run_async(ctx: AsyncContext[Any], /, **values: object) -> Outcome:
            outcomes: Sequence[Outcome] = await together(ctx, [BatchItem(arguments(**values), ctx.job)])
            return outcomes[0]

        return run_async

    @wraps(function)
    def run(ctx: Context[Any], /, **values: object) -> Outcome:
        outcomes: Sequence[Outcome] = together(ctx, [BatchItem(arguments(**values), ctx.job)])
        return outcomes[0]

    return run


def called_with_many(function: Callable[..., Any], returned: Returned) -> Callable[..., Any]:
    """A handler that is given `items` as its only argument, and returns the outcome of each."""
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def run_async(ctx: AsyncContext[Any], /, items: Sequence[BatchItem[Any]]) -> Sequence[Outcome]:
            return returned.outcomes(await function(AsyncBatchContext(ctx.state, ctx.session), items), len(items))

        return run_async

    @wraps(function)
    def run(ctx: Context[Any], /, items: Sequence[BatchItem[Any]]) -> Sequence[Outcome]:
        return returned.outcomes(function(BatchContext(ctx.state, ctx.session), items), len(items))

    return run


class Arguments(Generic[P, T]):
    """The class of a batch handler's arguments, as if a handler took its fields: what a `Signature` is built from.

    Raises:
        RegistryError: not a class, or one whose arguments cannot be seen.
    """

    def __init__(self, arguments: Callable[P, T]) -> None:
        if not isinstance(arguments, type):
            raise RegistryError(
                f"a batch handler names the class of its arguments, such as a dataclass, got {arguments!r}"
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


def _hints(arguments: type[Any]) -> dict[str, object]:
    """The types of a class's fields, and of its `__init__` that can be found yet."""
    hints: dict[str, object] = {}
    for source in (arguments, arguments.__init__):
        try:
            hints |= get_type_hints(source, include_extras=True)
        except (NameError, AttributeError, TypeError, SyntaxError):
            continue
    return hints
