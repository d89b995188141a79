"""Functions that read, change and write JSON documents without changing their numbers."""

import json
import re
from collections.abc import Callable
from typing import Self, TypeAlias

Tree: TypeAlias = "dict[str, Tree] | list[Tree] | str | int | float | bool | None"

_SURROGATE = re.compile("[\ud800-\udfff]")
# Deeper documents are not shown: they are crafted to break their readers.
MAX_DEPTH = 200


class ExactFloat(float):
    """A float read from JSON that keeps its original text (`text`), so that writing it again loses no digits."""

    text: str

    def __new__(cls, text: str) -> Self:
        made = super().__new__(cls, text)
        made.text = text
        return made


class ExactInt(int):
    """An int read from JSON that keeps its original text (`text`), so that writing it again loses no digits.

    If Python may refuse to convert the text (more than 4,000 digits), the value as an int is 0.
    """

    text: str

    def __new__(cls, text: str) -> Self:
        made = super().__new__(cls, 0 if len(text) > 4_000 else int(text))
        made.text = text
        return made


class TooDeep(ValueError):
    """Raised for a JSON document that is nested too deeply to be shown."""


def read_tree(text: str) -> Tree:
    """Return a JSON text as dicts, lists and values; numbers keep their digits (see `ExactFloat`).

    Raises:
        TooDeep: the text is nested too deeply for Python's parser.
        ValueError: the text is not JSON.
    """
    try:
        tree: Tree = json.loads(text, parse_float=ExactFloat, parse_int=ExactInt)
    except RecursionError:
        raise TooDeep("nested too deeply to be shown") from None
    return tree


def change_strings(tree: Tree, change: Callable[[str], str], depth: int = 0) -> Tree:
    """Return a copy of a document in which `change` has been applied to every string value. Keys are not changed.

    Raises:
        TooDeep: the document is nested more than 200 levels deep.
    """
    check_depth(depth)
    if isinstance(tree, dict):
        return {key: change_strings(value, change, depth + 1) for key, value in tree.items()}
    if isinstance(tree, list):
        return [change_strings(value, change, depth + 1) for value in tree]
    return change(tree) if isinstance(tree, str) else tree


def check_depth(depth: int) -> None:
    """Raise `TooDeep` if `depth`, the nesting at which a recursive function reads a document, is more than 200."""
    if depth > MAX_DEPTH:
        raise TooDeep("nested too deeply to be shown")


def write_tree(tree: object, indent: int | None = None) -> str:
    """Return a document as JSON text; its numbers keep their digits. With `indent` the text has several lines.

    Raises:
        TooDeep: the document is nested more than 200 levels deep.
        TypeError: the document holds a value that JSON cannot.
    """
    return _write(tree, indent, 0)


def _write(tree: object, indent: int | None, depth: int) -> str:
    check_depth(depth)
    if isinstance(tree, ExactFloat | ExactInt):
        return tree.text
    if isinstance(tree, dict):
        parts = [f"{_text(str(key))}: {_write(value, indent, depth + 1)}" for key, value in tree.items()]
        return _joined("{", parts, "}", indent, depth)
    if isinstance(tree, list | tuple):
        return _joined("[", [_write(each, indent, depth + 1) for each in tree], "]", indent, depth)
    return _text(tree)


def _joined(start: str, parts: list[str], end: str, indent: int | None, depth: int) -> str:
    if not parts or indent is None:
        return f"{start}{', '.join(parts)}{end}"
    inner, outer = "\n" + " " * (indent * (depth + 1)), "\n" + " " * (indent * depth)
    return f"{start}{inner}{f',{inner}'.join(parts)}{outer}{end}"


def _text(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # A lone surrogate can only be sent as a JSON escape: UTF-8 cannot encode it.
    return text if text.isascii() else _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)
