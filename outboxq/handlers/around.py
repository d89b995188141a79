"""Arounds: context managers that an application wraps around each call of its handlers, such as a span or a tenant."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from outboxq.errors import HandlerError, RegistryError
from outboxq.handlers.function import check_takes_one, name_of
from outboxq.handlers.handler import AnyHandler, Flavour
from outboxq.names import with_article
from outboxq.outcomes import Outcome

Wrapping: TypeAlias = AbstractContextManager[object] | AbstractAsyncContextManager[object] | Outcome | None
AroundFunction: TypeAlias = Callable[[Any], Wrapping | Awaitable[Wrapping] | Iterator[object] | AsyncIterator[object]]
F = TypeVar("F", bound=AroundFunction)


@dataclass(frozen=True, slots=True, eq=False)
class Around:
    """A registered around: a function that makes, for each call of a handler, the context manager around it.

    Attributes:
        make: Called with the handler's context before each call; returns a context manager to wrap around the call, an
            outcome to use in place of the call, or None to wrap nothing.
        name: The module and name of the function, for error messages.
        flavour: "sync" or "async": only handlers of this flavour are wrapped; None: handlers of both.
    """

    make: Callable[[Any], object]
    name: str
    flavour: Flavour | None
    is_async: bool

    def wraps(self, handler: AnyHandler) -> bool:
        """Return True if this around wraps the calls of a handler.

        Raises:
            RegistryError: the around is async, and the handler is not.
        """
        if self.flavour is not None and self.flavour != handler.flavour:
            return False
        if self.is_async and handler.flavour == "sync":
            raise RegistryError(
                f"around {self.name} is async, and cannot wrap handler {handler.kind!r}, which is sync: register it "
                'with @jobs.around(flavour="async"), or write a sync one'
            )
        return True

    def checked(self, made: object) -> Wrapping:
        """Return `made`, the value that `make` has returned (or its awaited value), after a check of its type.

        Raises:
            HandlerError: the value is no context manager, outcome or None.
        """
        if made is None or isinstance(made, Outcome | AbstractContextManager | AbstractAsyncContextManager):
            return made
        if inspect.iscoroutine(made):
            # It is closed, else Python warns.
            made.close()
        shown = f"the class {made.__name__}" if isinstance(made, type) else f"{with_article(type(made).__name__)}"
        raise HandlerError(f"around {self.name} returned {shown}: return a context manager, an outcome or None")


class Arounds:
    """The arounds of one handler, the outermost first.

    Attributes:
        use_sessions: False at first: the relay locks the rows of several jobs together, before it enters their arounds.
            True once an around has used `ctx.session` before the handler's rows were loaded. Such an around may decide
            which rows are visible, so from then on each job's rows are locked inside its arounds.
    """

    def __init__(self, arounds: tuple[Around, ...]) -> None:
        self.all = arounds
        self.use_sessions = False


def checked_around(function: object, flavour: Flavour | None) -> Around:
    """Make an around of a function, after a check that the function can be called with a context.

    Raises:
        RegistryError: the function cannot be called with one argument.
    """
    # A context manager that a function has already made may be callable too.
    if not callable(function) or isinstance(function, AbstractContextManager | AbstractAsyncContextManager):
        raise RegistryError(
            "jobs.around takes a function of the handler's context that returns a context manager, an outcome or None, "
            f"got {function!r}"
        )
    name = name_of(function)
    check_takes_one(function, f"around {name}", "the handler's context")
    make: Callable[[Any], object] = function
    if inspect.isgeneratorfunction(function):
        make = contextmanager(function)
    elif inspect.isasyncgenfunction(function):
        make = asynccontextmanager(function)
    return Around(make, name, flavour, _is_async(make))


def _is_async(make: Callable[..., object]) -> bool:
    """Return True if `make` is async or makes async context managers, as far as that is known before a call."""
    if isinstance(make, type):
        return hasattr(make, "__aenter__") and not hasattr(make, "__enter__")
    plain: Any = make.func if isinstance(make, partial) else make
    if not (inspect.isroutine(plain) or isinstance(plain, type)):
        plain = type(plain).__call__
    # An @asynccontextmanager is a plain function around an async generator function.
    return inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(inspect.unwrap(plain))
