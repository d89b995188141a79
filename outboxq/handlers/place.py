"""The place in an application's code at which an object was made: a name that all its versions and processes share."""

import sys
from dataclasses import dataclass
from pathlib import Path

from outboxq.names import check_keywords


@dataclass(frozen=True, slots=True)
class Place:
    """A module, and the function in it that made an object."""

    module: str
    function: str

    def name_of(self, made: object) -> str:
        """A name such as `myapp.jobs:jobs`, by the first name that the module has for it; else by the function."""
        names = vars(sys.modules[self.module]) if self.module in sys.modules else {}
        found = next((name for name, value in names.items() if value is made), self.function)
        return f"{_importable(self.module)}:{found}"


def place_of(made: object) -> Place:
    """Name the place at which an object is made; called by its constructor, or by those of its subclasses."""
    frame = sys._getframe(1)  # noqa: SLF001  # as the standard library's own namedtuple does
    # The check that refuses unknown options may be between constructors.
    while frame.f_back is not None and (
        frame.f_globals.get("__name__") == check_keywords.__module__
        or (frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is made)
    ):
        frame = frame.f_back
    return Place(frame.f_globals.get("__name__", "__main__"), frame.f_code.co_qualname)


def _importable(module: str) -> str:
    """The name by which a module can be imported, also if it is the running program."""
    if module != "__main__":
        return module
    program = sys.modules["__main__"]
    spec = getattr(program, "__spec__", None)
    return spec.name if spec is not None else Path(getattr(program, "__file__", None) or module).stem
