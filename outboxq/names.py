"""Names and keys, as PostgreSQL, a channel and the command line can carry them."""

import re
import sys

from outboxq.errors import ArgumentError, InvalidKey

MAX_NAME_BYTES = 63
MAX_KEY_BYTES = 512
MAX_SCOPE_BYTES = 255

_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def with_article(noun: str) -> str:
    """The noun behind "a" or "an", as English has it: "an actor", "a unique key", "an int"."""
    return f"{'an' if noun[:1] in 'aeioAEIO' else 'a'} {noun}"


def type_name(annotation: object) -> str:
    """The module and the name that a type is documented under; of a builtin its name alone; another annotation as is.

    Python 3.13 defines `pathlib.Path` in the private module `pathlib._local`, and `queue.Empty` is from `_queue`.
    """
    if not isinstance(annotation, type):
        return repr(annotation)
    module, name = annotation.__module__, annotation.__qualname__
    if not isinstance(module, str) or module == "builtins":
        return name
    before, _, private = f".{module}".partition("._")
    public = before[1:] or private
    is_public = private and public in sys.modules and vars(sys.modules[public]).get(name) is annotation
    return f"{public if is_public else module}.{name}"


def check_name(what: str, name: str) -> str:
    """Refuse names that PostgreSQL, a channel or the command line could not carry.

    Raises:
        ArgumentError: not 1 to 63 bytes of UTF-8, or with control characters (NUL included).
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
    """Refuse a consumer, a message id, a scope or a key that its column could not hold.

    Raises:
        InvalidKey: not a string, empty, over `max_bytes` of UTF-8, or with control characters (NUL included).
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
