"""A stable name for an object, such as `myapp.jobs:jobs`: its module, and its variable or the function that made it.

A registry uses it as its default name, because all versions and processes of an application share it.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from outboxq.names import check_keywords


@dataclass(frozen=True, slots=True)
class Place:
    """The module and the function whose code made an object: the parts of the object's stable name."""

    module: str
    function: str

    def name_of(self, made: object) -> str:
        """Return a name such as `myapp.jobs:jobs`: the module, and the first variable in it that holds the object.

        If no variable of the module holds it, the name of the function that made it is used instead.
        """
        names = vars(sys.modules[self.module]) if self.module in sys.modules else {}
        found = next((name for name, value in names.items() if value is made), self.function)
        return f"{_importable(self.module)}:{found}"


def place_of(made: object) -> Place:
    """Return the module and function that are constructing `made`; to be called in its `__init__` only."""
    frame = sys._getframe(1)  # noqa: SLF001  # as the standard library's own namedtuple does
    # The check that refuses unknown options may be in between the constructors.
    while frame.f_back is not None and (
        frame.f_globals.get("__name__") == check_keywords.__module__
        or (frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is made)
    ):
        frame = frame.f_back
    return Place(frame.f_globals.get("__name__", "__main__"), frame.f_code.co_qualname)


def _importable(module: str) -> str:
    """Return the name by which a module can be imported; for `__main__`, the name of the program that runs."""
    if module != "__main__":
        return module
    program = sys.modules["__main__"]
    spec = getattr(program, "__spec__", None)
    return spec.name if spec is not None else Path(getattr(program, "__file__", None) or module).stem
