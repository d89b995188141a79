"""The frames of a failure: the user's own code is kept, the rest is folded."""

import functools
import importlib.metadata
import re
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from os import path
from pathlib import PurePath
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import NamedTuple

from outboxq.codec.text import storable
from outboxq.error_record import StoredFrame

_FOLDED = ("outboxq", "the standard library")

_OURS = str(PurePath(__file__).parent.parent) + path.sep
_STANDARD = tuple({sysconfig.get_path(name) + path.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = frozenset({"site-packages", "dist-packages"})
# The number of frames that `where` names.
_NAMED_FRAMES = 5
# The number of frames that are read at the outer and the inner end of an endless recursion's stack.
_OUTER_FRAMES, _INNER_FRAMES = 50, 100
_PATH_CHARACTERS = 200


class Frame(NamedTuple):
    """A frame of a call stack: file, line and function name; without a path, `line` is the number of those left out.

    `is_made`: its code is not that of a module's file; its names may be made from values.
    """

    path: str
    line: int
    name: str
    is_made: bool = False


def frames_of(error: BaseException) -> list[Frame]:
    """The frames of an exception's traceback, the innermost last."""
    # Read as Python does: users' classes can redefine the attribute.
    return _ends([*walk_tb(vars(BaseException)["__traceback__"].__get__(error))])


def frames_of_stack(innermost: FrameType) -> list[Frame]:
    """The frames of a call stack, read from outside, the innermost last."""
    return _ends([*walk_stack(innermost)][::-1])


def _ends(steps: list[tuple[FrameType, int]]) -> list[Frame]:
    """Both ends of a stack; between them, if it is too long, the number of frames left out."""
    left_out = len(steps) - _OUTER_FRAMES - _INNER_FRAMES
    found: list[Frame] = []
    for frame, line in steps if left_out <= 0 else (*steps[:_OUTER_FRAMES], *steps[-_INNER_FRAMES:]):
        code, file, module = frame.f_code, frame.f_globals.get("__file__"), frame.f_globals.get("__name__")
        is_of_module = type(file) is type(module) is str and file == code.co_filename and module in sys.modules
        found.append(Frame(code.co_filename or "?", line or 0, code.co_name, not is_of_module))
    if left_out > 0:
        found.insert(_OUTER_FRAMES, Frame("", left_out, ""))
    return found


def where(frames: Sequence[Frame], homes: tuple[str, ...]) -> tuple[str, ...]:
    """The innermost frames of users' code, as `app/jobs.py:12 in credit`; of libraries if there are none."""
    own = [frame for frame in frames if _owner(frame.path, homes) == "user"]
    named = own or [frame for frame in frames if _owner(frame.path, homes) not in ("outboxq", "")]
    found: list[str] = []
    for frame in named[-_NAMED_FRAMES:]:
        file = "/".join(PurePath(frame.path).parts[-3:])
        found.append(storable(f"{file}:{frame.line} in {frame.name}"))
    return tuple(found)


def stored_frames(frames: Sequence[Frame], homes: tuple[str, ...], most: int) -> tuple[StoredFrame, ...]:
    """The frames of a handler's failure, from the handler's on; all but users' are folded.

    Frames before the handler's start a thread, are the relay's, or drive a coroutine. Of a library, the frames at
    which it was called and failed are kept.

    Args:
        most: The most frames that are kept, two thirds of them at the inner end.
    """
    owners = [_owner(frame.path, homes) for frame in frames]
    start = owners.index("user") if "user" in owners else 0
    while start < len(owners) and owners[start] in _FOLDED:
        start += 1
    found: list[StoredFrame] = []
    for owner, of_owner in groupby(zip(owners[start:], frames[start:], strict=True), key=itemgetter(0)):
        some = [frame for _, frame in of_owner]
        ends = some if owner in ("user", "") or len(some) <= 2 else [some[0], some[-1]]
        kept = [
            StoredFrame(storable(frame.path[-_PATH_CHARACTERS:]), frame.line, storable(frame.name)[:_PATH_CHARACTERS])
            for frame in (() if owner in _FOLDED else ends)
        ]
        if len(kept) < len(some):
            kept.insert(1, StoredFrame("", len(some) - len(kept), owner))
        found += kept
    return shortened(tuple(found), most)


def shortened(frames: tuple[StoredFrame, ...], most: int) -> tuple[StoredFrame, ...]:
    """At most `most` frames, two thirds of them from the inner end."""
    if len(frames) <= most:
        return frames
    outer = most // 3
    gap = frames[outer : outer - most]
    left_out = StoredFrame("", sum(1 if frame.path else frame.line for frame in gap), "")
    return (*frames[:outer], left_out, *frames[outer - most :])


@functools.lru_cache(maxsize=1_000)
def _owner(file: str, homes: tuple[str, ...]) -> str:
    """The owner of a file: "user", one of `_FOLDED`, or an installed package; "" if there is no file."""
    if not file:
        return ""
    if file.startswith(_OURS):
        return "outboxq"
    if file.startswith(homes):
        return "user"
    parts = PurePath(file).parts
    if not _INSTALLED.isdisjoint(parts):
        below = max(number for number, part in enumerate(parts) if part in _INSTALLED) + 1
        return parts[below].removesuffix(".py") if below < len(parts) else "a library"
    # Generated code has names such as `<string>`, `<frozen importlib._bootstrap>` or `<attrs generated init Order>`.
    return "the standard library" if file.startswith((*_STANDARD, "<")) else "user"


def homes_of(module: str | None) -> tuple[str, ...]:
    """The paths of a handler's application: its top-level package, and its distribution's others.

    Read when a relay starts, because reading what is installed takes a while.

    Args:
        module: The name of the handler's module; None if it is in none.
    """
    if module is None:
        return ()
    named = module
    if module == "__main__":
        # `python -m shop.relay`: the spec has the module's own name.
        named = getattr(getattr(sys.modules[module], "__spec__", None), "name", module)
    return _homes_of_top(named.partition(".")[0])


@functools.cache
def _homes_of_top(top: str) -> tuple[str, ...]:
    found = sys.modules.get(top)
    own = [str(folder) + path.sep for folder in getattr(found, "__path__", ())]
    file = getattr(found, "__file__", None)
    if isinstance(file, str) and not hasattr(found, "__path__"):
        own.append(file)
    folders = {path.dirname(each.rstrip(path.sep)) for each in own}
    beside: list[str] = []
    # Importers and packages' metadata may raise anything: the top-level package is known.
    with suppress(Exception):
        for folder in sorted(each for each in folders if not _INSTALLED.isdisjoint(PurePath(each).parts)):
            for name in sorted(_names_beside(top, folder)):
                beside += path.join(folder, name) + path.sep, path.join(folder, f"{name}.py")
    return (*own, *beside)


def _names_beside(top: str, folder: str) -> set[str]:
    """The other top-level packages and modules of the distributions in this folder that have the package `top`."""
    beside: set[str] = set()
    for distribution in importlib.metadata.distributions(path=[folder]):
        # The list of files as text: parsing them all would take a second. Debian's packages have top_level.txt alone.
        written = distribution.read_text("RECORD") or distribution.read_text("top_level.txt") or ""
        if re.search(rf"^{re.escape(top)}(/|\.py,|$)", written, re.MULTILINE):
            names = {re.split(r"[/,]", line)[0].removesuffix(".py") for line in written.splitlines()}
            beside |= {name for name in names - {top} if name.isidentifier() and not name.startswith("__")}
    return beside
