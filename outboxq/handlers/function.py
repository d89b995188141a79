"""Checks of a function that becomes a handler: when it is registered, and again after all imports."""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ForwardRef, NewType, TypeVar, Union, get_args, get_origin

from outboxq.codec.signature import declared_signature, resolve_head
from outboxq.errors import ArgumentError, RegistryError
from outboxq.handlers.context import AsyncBatchContext, AsyncContext, BatchContext, Context

# Names of a first argument that is the context, if it has no annotation; `_` is one that is not used.
_CONTEXT_NAMES = frozenset({"ctx", "context", ""})
_SAYS_NOTHING = (Any, object, inspect.Parameter.empty)
_CONTEXTS = (Context, AsyncContext, BatchContext, AsyncBatchContext)


@dataclass(frozen=True, slots=True)
class Receives:
    """The parameters that a function needs to be a handler.

    `sync`, `asynchronous`: the class of its context if it is a plain function, and if it is a coroutine function.
    `items`: the text of a batch handler's second parameter, for error messages; None for other handlers.
    """

    sync: type[Any]
    asynchronous: type[Any]
    items: str | None = None

    def context_of(self, function: Callable[..., Any]) -> type[Any]:
        """Return the class of the context that this function receives."""
        return self.asynchronous if inspect.iscoroutinefunction(function) else self.sync

    def definition(self, function: Callable[..., Any], *, replaces_first: bool) -> str:
        """Return the `def` line that the function should have, for an error message.

        `replaces_first`: True to put the context in place of the first parameter, False to put it in front.
        """
        first, *others = declared_signature(function).parameters.values()
        parameters = [str(each) for each in (others if replaces_first else [first, *others])]
        if self.items is not None:
            parameters = [self.items]
        word = "async def" if inspect.iscoroutinefunction(function) else "def"
        shown = ", ".join([f"ctx: {self.context_of(function).__name__}", *parameters])
        return f"`{word} {function.__name__}({shown})`"


PLAIN = Receives(Context, AsyncContext)


def receives_batches(arguments: type[Any]) -> Receives:
    """Return the parameters that a function needs to be a batch handler of jobs with arguments of this class."""
    return Receives(BatchContext, AsyncBatchContext, f"items: Sequence[BatchItem[{arguments.__name__}]]")


def check_function(function: Callable[..., Any], receives: Receives, kind: str | None) -> None:
    """Refuse a function that cannot be a handler, as far as that is known before all modules are imported.

    Args:
        kind: The handler's kind, if one was given; None if its kind is the function's name.

    Raises:
        RegistryError: it is no function, a lambda without a kind, a generator function or a method, or its first
            parameter is not the context.
    """
    _check_sort(function, kind)
    name, parameters = function.__qualname__, list(declared_signature(function).parameters.values())
    first = parameters[0] if parameters else None
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        raise RegistryError(
            f"handler {name} takes no context: its first argument is `ctx: {receives.context_of(function).__name__}`"
        )
    if receives.items is not None and len(parameters) < 2:
        raise RegistryError(
            f"handler {name} takes no items: define it as {receives.definition(function, replaces_first=True)}"
        )
    if first.name in ("self", "cls") and first.annotation is first.empty:
        raise RegistryError(
            f"handler {name} is a method, and a job has no {first.name!r} to call it on: make it a function of the "
            "module, or a @staticmethod, written above @jobs.handler"
        )
    if not any(isinstance(each, str | ForwardRef) for each in _alternatives(first.annotation)):
        _check_context(function, receives, first, first.annotation)


def check_context(function: Callable[..., Any], receives: Receives) -> None:
    """Refuse a function whose first parameter is not the context.

    Called after all imports, because the annotation may name what a later import defines.

    Raises:
        RegistryError: the first parameter is not the context; the message shows the right `def` line.
    """
    first = next(iter(declared_signature(function).parameters.values()))
    _check_context(function, receives, first, resolve_head(function, first))


@contextmanager
def naming(function: Callable[..., Any], name: str | None = None) -> Iterator[None]:
    """Complete each `RegistryError` and `ArgumentError` of the block, so that users find the handler that it is about.

    The message gets the handler's name, if given, and the file and line of its function. Other errors pass unchanged.
    """
    try:
        yield
    except (RegistryError, ArgumentError) as error:
        place = place_of(function)
        # An error from a nested check of the same function already has its place.
        ending = f"; defined at {place}" if place and not str(error).endswith(f"; defined at {place}") else ""
        raise type(error)(f"{'' if name is None else f'handler {name!r}: '}{error}{ending}") from error.__cause__


def place_of(function: object) -> str:
    """Return `file:line` of the function that a callable wraps; an empty text if it has none, such as a builtin."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, types.CodeType) else ""


def name_of(function: object) -> str:
    """Return `module.name` of a callable's function or class; the object that a method is bound to is left out."""
    while isinstance(function, functools.partial):
        function = function.func
    named: Any = function if inspect.isroutine(function) or isinstance(function, type) else type(function)
    return ".".join(filter(None, (getattr(named, "__module__", None), named.__qualname__)))


def check_takes_one(function: Callable[..., object], role: str, argument: str) -> None:
    """Refuse a callable that does not take one argument.

    Raises:
        RegistryError: it takes none or more; `role` begins the message, in which `argument` describes the one argument.
    """
    try:
        declared_signature(function).bind(None)
    except ValueError:
        # The callable is written in C, without a readable signature.
        return
    except TypeError as error:
        raise RegistryError(f"{role} takes one argument, {argument}: {error}") from error


def _check_sort(function: Callable[..., Any], kind: str | None) -> None:
    if not inspect.isfunction(function):
        raise RegistryError(
            f"a handler is a function whose first argument is its context, got {function!r}: define one with `def`, "
            f"{_detour(function)}, and register that"
        )
    if function.__name__ == "<lambda>" and kind is None:
        raise RegistryError(
            "a handler is a function whose first argument is its context, got a lambda, which has no name to store "
            "jobs under: define a function with `def`, or give it a name with kind=..."
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise RegistryError(f"handler {function.__qualname__} yields: a handler returns when its work is done")


def _detour(thing: object) -> str:
    if inspect.ismethod(thing):
        return "which finds the object that the method needs, for example in `ctx.state`"
    if isinstance(thing, functools.partial):
        return "which passes on what the partial has bound"
    return "which calls it" if callable(thing) else "such as `def credit(ctx: Context, cents: int) -> None`"


def _check_context(
    function: Callable[..., Any], receives: Receives, first: inspect.Parameter, annotation: object
) -> None:
    name, wanted = function.__qualname__, receives.context_of(function)
    given = _alternatives(annotation)
    if any(_fits(each, wanted) for each in given):
        return
    if any(_is_context(each) for each in given):
        sort = "an `async def`" if inspect.iscoroutinefunction(function) else "a plain `def`"
        raise RegistryError(
            f"handler {name} is {sort}, which receives {_a(wanted)} first, and is annotated `{_shown(first)}`: define "
            f"it as {receives.definition(function, replaces_first=True)}{_other_way(function, receives, given)}"
        )
    if not all(map(_says_nothing, given)):
        raise RegistryError(
            f"handler {name} is annotated `{_shown(first)}`, and what it receives first is {_a(wanted)}: define it as "
            f"{receives.definition(function, replaces_first=False)}"
        )
    if first.name.strip("_") not in _CONTEXT_NAMES:
        raise RegistryError(
            f"handler {name} does not say what {first.name!r} is, and receives {_a(wanted)} there: write "
            f"`{first.name}: {wanted.__name__}` if it is that, else "
            f"{receives.definition(function, replaces_first=False)}"
        )


def _other_way(function: Callable[..., Any], receives: Receives, given: list[object]) -> str:
    """Return the advice to make the function async (or sync), if its annotated context would then fit; else ""."""
    other = receives.sync if inspect.iscoroutinefunction(function) else receives.asynchronous
    if not any(_fits(each, other) for each in given):
        return ""
    return f", or make it {'a plain `def`' if inspect.iscoroutinefunction(function) else 'an `async def`'}"


def _shown(parameter: inspect.Parameter) -> str:
    # Without outboxq's internal module of the class: users import it from `outboxq`.
    return str(parameter).replace(f"{Context.__module__}.", "")


def _a(kind: type[Any]) -> str:
    return f"{'an' if kind.__name__.startswith('A') else 'a'} {kind.__name__}"


def _fits(annotation: object, wanted: type[Any]) -> bool:
    """Return True if a `wanted` context fits this annotation: a Protocol, or a base class or subclass of `wanted`."""
    if not isinstance(annotation, type) or annotation is object:
        return False
    return (
        getattr(annotation, "_is_protocol", False) or issubclass(annotation, wanted) or issubclass(wanted, annotation)
    )


def _says_nothing(annotation: object) -> bool:
    # Not by `in`: an annotation may be any object, with any comparison.
    return isinstance(annotation, str | ForwardRef) or any(annotation is nothing for nothing in _SAYS_NOTHING)


def _is_context(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, _CONTEXTS)


def _alternatives(annotation: object) -> list[object]:
    """Return the types that an annotation allows: the members of a union, without type parameters and `Annotated`.

    A str or a ForwardRef among them is a name that cannot be resolved yet.
    """
    if isinstance(annotation, NewType):
        return _alternatives(annotation.__supertype__)
    if isinstance(annotation, TypeVar):
        bounds = annotation.__constraints__ or (annotation.__bound__ or object,)
        return [each for bound in bounds for each in _alternatives(bound)]
    try:
        # The alias of a `type` statement resolves its names at this point.
        aliased = getattr(annotation, "__value__", None)
    except NameError as error:
        return [error.name or ""]
    if aliased is not None:
        return _alternatives(aliased)
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return _alternatives(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [each for member in get_args(annotation) for each in _alternatives(member)]
    return [annotation if origin is None else origin]
