"""What differs between two observations of one batch, in words."""

import json
import re
from collections.abc import Mapping

from tests.fuzz.lanes import Observed

_KEPT = 12
_HANDLERS = "/tests/fuzz/"
_ADDRESS = re.compile(r"0x[0-9a-f]+")


class Differs(AssertionError):
    """A batch came to something else than its jobs alone."""


def differences(alone: Observed, other: Observed) -> list[str]:
    """Each difference in a line; empty if there is none."""
    lines: list[str] = []
    for what in ("rows", "outcomes", "seen"):
        lines += _between(what, getattr(alone, what), getattr(other, what))
    if alone.surprises != other.surprises:
        lines.append(f"events: {alone.surprises} | {other.surprises}")
    return lines


def check(alone: Observed, other: Observed, how: str) -> None:
    """Raises: Differs."""
    lines = differences(alone, other)
    if lines:
        rest = [f"... and {len(lines) - _KEPT} more"] if len(lines) > _KEPT else []
        raise Differs("\n".join([f"alone | {how}", *lines[:_KEPT], *rest]))


def _between(path: str, one: object, two: object) -> list[str]:
    if path.endswith((".frames", ".where")):
        one, two = _of_handlers(one), _of_handlers(two)
    if _plain(one) == _plain(two):
        return []
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        names = [*one, *(name for name in two if name not in one)]
        return [line for name in names for line in _between(f"{path}.{name}", one.get(name), two.get(name))]
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        return [
            line
            for place, (left, right) in enumerate(zip(one, two, strict=True))
            for line in _between(f"{path}[{place}]", left, right)
        ]
    return [f"{path}: {_text(one)} | {_text(two)}"]


def _of_handlers(frames: object) -> object:
    """Those of the handlers' own code: below them another statement may have failed, or sent in another way."""
    return [frame for frame in frames if _HANDLERS in f"/{frame}"] or None if isinstance(frames, list) else frames


def _text(value: object) -> str:
    return json.dumps(value, default=repr, sort_keys=True)[:400]


def _plain(value: object) -> object:
    """Without the addresses of objects, which errors quote."""
    return _ADDRESS.sub("0x", value) if isinstance(value, str) else value
