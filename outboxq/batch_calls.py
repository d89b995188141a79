"""How a batch handler is called: with one job, by the way of every handler, or with many."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any, get_type_hints

from outboxq.context import AsyncBatchContext, AsyncContext, BatchContext, BatchItem, Context
from outboxq.errors import HandlerError, RegistryError
from outboxq.retry import DeadLetter, Discard, Done, Outcome, Retry, Snooze


def called_with_one(function: Callable[..., Any], arguments: type[Any]) -> Callable[..., Any]:
    """A handler of one job, as the executor calls it, that calls `function` with a batch of one."""
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def run_async(ctx: AsyncContext[Any], /, **values: object) -> Outcome:
            items = [BatchItem(arguments(**values), ctx.job)]
            return outcomes(await function(AsyncBatchContext(ctx.state, ctx.session), items), 1)[0]

        return run_async

    @wraps(function)
    def run(ctx: Context[Any], /, **values: object) -> Outcome:
        items = [BatchItem(arguments(**values), ctx.job)]
        return outcomes(function(BatchContext(ctx.state, ctx.session), items), 1)[0]

    return run


def called_with_many(function: Callable[..., Any]) -> Callable[..., Any]:
    """A handler that is given `items` as its only argument, and returns the outcome of each."""
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def run_async(ctx: AsyncContext[Any], /, items: Sequence[BatchItem[Any]]) -> Sequence[Outcome]:
            returned: Awaitable[object] = function(AsyncBatchContext(ctx.state, ctx.session), items)
            return outcomes(await returned, len(items))

        return run_async

    @wraps(function)
    def run(ctx: Context[Any], /, items: Sequence[BatchItem[Any]]) -> Sequence[Outcome]:
        return outcomes(function(BatchContext(ctx.state, ctx.session), items), len(items))

    return run


def outcomes(returned: object, count: int) -> list[Outcome]:
    """What a batch handler returned for `count` jobs, one outcome for each.

    Raises:
        HandlerError: neither None nor as many outcomes as jobs.
    """
    if returned is None:
        return [Done()] * count
    if inspect.iscoroutine(returned):
        # Never awaited: close it, or Python warns.
        returned.close()
        raise HandlerError("the batch handler returned a coroutine, but is not an async function")
    if not isinstance(returned, Sequence) or isinstance(returned, str | bytes):
        raise HandlerError(
            f"the batch handler returned a {type(returned).__name__}: return None where all jobs are done, or a list "
            "with the outcome of each, in their order"
        )
    if len(returned) != count:
        raise HandlerError(
            f"the batch handler returned {len(returned)} outcomes for {count} jobs: return one for each, in their order"
        )
    return [_outcome(place, each) for place, each in enumerate(returned)]


def _outcome(place: int, returned: object) -> Outcome:
    if returned is None:
        return Done()
    if isinstance(returned, Done | Retry | Snooze | DeadLetter | Discard):
        return returned
    raise HandlerError(
        f"the batch handler returned a {type(returned).__name__} as outcome {place}: "
        "None when that job is done, else an outcome such as Retry(delay)"
    )


class Arguments:
    """The arguments of a class, as if a handler took them after its context: what a `Signature` is built from."""

    def __init__(self, arguments: type[Any]) -> None:
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
        self.__signature__ = inspect.Signature([context, *others, *keyword_only])
        self.__module__ = arguments.__module__
        self.__qualname__ = arguments.__qualname__

    def __call__(self, *_args: object, **_kwargs: object) -> object:
        raise AssertionError("named for its signature, and never called")


def _hints(arguments: type[Any]) -> dict[str, object]:
    """The types of a class's fields, and of its `__init__`; nothing where a name cannot be found yet."""
    hints: dict[str, object] = {}
    for source in (arguments, arguments.__init__):
        try:
            hints |= get_type_hints(source, include_extras=True)
        except (NameError, AttributeError, TypeError, SyntaxError):
            continue
    return hints
