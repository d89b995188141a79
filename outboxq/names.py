"""Checks of names and keys, which PostgreSQL must accept, and of the names of options that users pass."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from outboxq.errors import ArgumentError, InvalidKey

P = ParamSpec("P")
T = TypeVar("T")

MAX_NAME_BYTES = 63
MAX_KEY_BYTES = 512
MAX_SCOPE_BYTES = 255

_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def with_article(noun: str) -> str:
    """Return the noun with its article: "an actor", "a unique key", "an int"."""
    return f"{'an' if noun[:1] in 'aeioAEIO' else 'a'} {noun}"


def check_keywords(
    function: str,
    given: Iterable[str],
    known: Collection[str],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Refuse an unknown keyword argument as Python does, in a message that lists the known ones.

    Args:
        elsewhere: By name, advice for options that users expect here and that belong to another function.

    Raises:
        TypeError: one of `given` is not in `known`.
    """
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = elsewhere.get(name) or (f"did you mean {near[0]}=?" if near else "")
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}{f': {hint}' if hint else ''} "
                f"(it takes {', '.join(sorted(known)) or 'none'})"
            )


def named_options(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that it refuses an unknown option as `check_keywords` does."""
    positional_only = inspect.Parameter.POSITIONAL_ONLY
    parameters = inspect.signature(function).parameters.values()
    known = frozenset(each.name for each in parameters if each.kind is not positional_only) - {"self"}
    name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        check_keywords(name, kwargs, known)
        return function(*args, **kwargs)

    return checked


def named_fields(cls: type[T]) -> type[T]:
    """Decorate a class so that it refuses an unknown field as `check_keywords` does; written above `@dataclass`."""
    construct: Any = cls.__init__
    cls.__init__ = named_options(construct)  # type: ignore[method-assign]  # the dataclass made it
    return cls


def check_name(what: str, name: str) -> str:
    """Return a name, after a check that PostgreSQL, a NOTIFY channel and the command line accept it.

    Raises:
        ArgumentError: the name is not 1 to 63 bytes of UTF-8, or has control characters (NUL included).
    """
    if not isinstance(name, str):
        raise ArgumentError(f"{with_article(what)} name is a string, got {type(name).__name__}")
    try:
        size_bytes = len(name.encode())
    except UnicodeEncodeError as error:
        raise ArgumentError(f"the {what} name {name!r} holds a lone surrogate") from error
    if not 1 <= size_bytes <= MAX_NAME_BYTES:
        raise ArgumentError(
            f"{with_article(what)} name takes 1 to {MAX_NAME_BYTES} bytes, got {size_bytes}: {name[:80]!r}"
        )
    if _has_control_character(name):
        raise ArgumentError(f"the {what} name {name!r} holds a control character")
    if what == "queue" and (set(name) & set(",=*") or name != name.strip()):
        raise ArgumentError(f"the queue name {name!r} may not hold ',', '=' or '*', nor begin or end with a space")
    return name


def check_key(what: str, key: str, max_bytes: int = MAX_KEY_BYTES) -> str:
    """Return a consumer, a message id, a scope or a key, after a check that its column can hold it.

    Raises:
        InvalidKey: the key is no string, empty, over `max_bytes` of UTF-8, or has control characters (NUL included).
    """
    if not isinstance(key, str):
        raise InvalidKey(f"{with_article(what)} is a string, got {type(key).__name__}: give str(...) of it")
    try:
        size_bytes = len(key.encode())
    except UnicodeEncodeError:
        raise InvalidKey(f"the {what} holds a lone surrogate, which UTF-8 cannot encode") from None
    if not 1 <= size_bytes <= max_bytes:
        raise InvalidKey(
            f"{with_article(what)} takes 1 to {max_bytes} bytes, got {size_bytes}: "
            + ("a hash of it, such as hashlib.sha256(...).hexdigest(), is as good" if size_bytes else "it is empty")
        )
    if _has_control_character(key):
        raise InvalidKey(f"the {what} {key[:80]!r} holds a control character")
    return key


def _has_control_character(text: str) -> bool:
    return _CONTROL_CHARACTER.search(text) is not None
