"""Arounds: what an application wraps around the calls of its handlers, such as a span, a log context or a tenant."""

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
    """A registered around: a function that makes, for each call of a handler, what is wrapped around the call.

    Attributes:
        make: Takes the call's context; returns a context manager, an outcome, or None.
        flavour: Wraps handlers of this flavour alone, if it is not None.
    """

    make: Callable[[Any], object]
    name: str
    flavour: Flavour | None
    is_async: bool

    def wraps(self, handler: AnyHandler) -> bool:
        """Return True if this around wraps the calls of a handler.

        Raises:
            RegistryError: it is async, and the handler is not.
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
        """Check and return the value of `make`, awaited if `make` is async.

        Raises:
            HandlerError: it is no context manager, outcome or None.
        """
        if made is None or isinstance(made, Outcome | AbstractContextManager | AbstractAsyncContextManager):
            return made
        if inspect.iscoroutine(made):
            # Close it, or Python warns.
            made.close()
        shown = f"the class {made.__name__}" if isinstance(made, type) else f"{with_article(type(made).__name__)}"
        raise HandlerError(f"around {self.name} returned {shown}: return a context manager, an outcome or None")


class Arounds:
    """The arounds of one handler, the outermost first.

    Attributes:
        use_sessions: One of them used `ctx.session` before its handler's rows were loaded. Until then rows of several
            jobs are locked together; from then on each job's rows are locked within its arounds, which may decide
            what is visible.
    """

    def __init__(self, arounds: tuple[Around, ...]) -> None:
        self.all = arounds
        self.use_sessions = False


def checked_around(function: object, flavour: Flavour | None) -> Around:
    """An around that can be called with a context.

    Raises:
        RegistryError: it cannot.
    """
    # One that was made already, by a call of a function that makes them, can be callable too.
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
    """Return True if only a coroutine can use what `make` returns, as far as that is known before a call."""
    if isinstance(make, type):
        return hasattr(make, "__aenter__") and not hasattr(make, "__enter__")
    plain: Any = make.func if isinstance(make, partial) else make
    if not (inspect.isroutine(plain) or isinstance(plain, type)):
        plain = type(plain).__call__
    # An @asynccontextmanager is a plain function around an async generator function.
    return inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(inspect.unwrap(plain))
