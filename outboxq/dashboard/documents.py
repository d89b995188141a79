"""JSON as PostgreSQL has stored it, read in a form that is written again without changing a number."""

import json
import re
from collections.abc import Callable
from typing import Self, TypeAlias

Tree: TypeAlias = "dict[str, Tree] | list[Tree] | str | int | float | bool | None"

_SURROGATE = re.compile("[\ud800-\udfff]")
# Deeper documents are not shown: they are made to break what reads them.
MAX_DEPTH = 200


class ExactFloat(float):
    """A number with the digits that it is stored with, which a float may not hold."""

    text: str

    def __new__(cls, text: str) -> Self:
        made = super().__new__(cls, text)
        made.text = text
        return made


class ExactInt(int):
    """An integer of more digits than Python converts at once."""

    text: str

    def __new__(cls, text: str) -> Self:
        made = super().__new__(cls, 0 if len(text) > 4_000 else int(text))
        made.text = text
        return made


class TooDeep(ValueError):
    """A document is nested too deeply."""


def read_tree(text: str) -> Tree:
    """A document as dicts, lists and values.

    Raises:
        TooDeep: it is nested more than 200 levels deep.
        ValueError: it is no JSON.
    """
    try:
        tree: Tree = json.loads(text, parse_float=ExactFloat, parse_int=ExactInt)
    except RecursionError:
        raise TooDeep("nested too deeply to be shown") from None
    return tree


def change_strings(tree: Tree, change: Callable[[str], str], depth: int = 0) -> Tree:
    """The same document, with every string changed; keys stay."""
    check_depth(depth)
    if isinstance(tree, dict):
        return {key: change_strings(value, change, depth + 1) for key, value in tree.items()}
    if isinstance(tree, list):
        return [change_strings(value, change, depth + 1) for value in tree]
    return change(tree) if isinstance(tree, str) else tree


def check_depth(depth: int) -> None:
    """Raise `TooDeep` if this is too deep."""
    if depth > MAX_DEPTH:
        raise TooDeep("nested too deeply to be shown")


def write_tree(tree: object, indent: int | None = None) -> str:
    """A document as JSON text, with the digits of its numbers; with `indent`, over several lines.

    Raises:
        TooDeep: it is nested too deeply.
        TypeError: it holds what JSON does not know.
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
    # Half of a pair is an escape in JSON, and cannot be sent as UTF-8 otherwise.
    return text if text.isascii() else _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)
