"""Random batches as data: what each job of a batch is given, what its handler does step by step, and how it ends."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Flavour: TypeAlias = Literal["sync", "async"]
# What a handler ends with; "error" raises at each attempt, "first-error" at the first one only.
Ending: TypeAlias = Literal["done", "error", "first-error", "retry", "snooze", "dead", "discard", "exit"]

# What an around does: wraps the call, also swallowing its errors; leaves it as it is; gives an outcome in place of it;
# raises before it or behind it.
Way: TypeAlias = Literal["wrap", "swallow", "none", "done", "retry", "snooze", "dead", "discard", "error", "late error"]


@dataclass(frozen=True)
class Step:
    """One call of a function in `tests/fuzz/steps_*.py`."""

    name: str
    args: tuple[object, ...] = ()

    def __repr__(self) -> str:
        return f"step({', '.join(map(repr, (self.name, *self.args)))})"


@dataclass(frozen=True)
class Block:
    """Steps inside of a `with` block: `kept` or `undone` savepoints, `no_autoflush`, errors that are `swallowed`."""

    name: Literal["kept", "undone", "no_autoflush", "swallowed"]
    steps: tuple["Step | Block", ...]

    def __repr__(self) -> str:
        return f"block({', '.join(map(repr, (self.name, *self.steps)))})"


@dataclass(frozen=True)
class Given:
    """An entity argument: `Account`, `Account | None` if it is optional, `Locked[...]` if it is locked."""

    name: str
    key: int
    optional: bool = False
    locked: bool = False

    def __repr__(self) -> str:
        said = "".join(f", {name}=True" for name in ("optional", "locked") if getattr(self, name))
        return f"given({self.name!r}, {self.key}{said})"


@dataclass(frozen=True)
class Around:
    """What is wrapped around a job: steps before its rows are loaded, and steps behind its handler."""

    before: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()
    way: Way = "wrap"

    def __repr__(self) -> str:
        parts = [repr(each) for each in self.before]
        parts += [f"after={self.after!r}"] if self.after else []
        parts += [f"way={self.way!r}"] if self.way != "wrap" else []
        return f"around({', '.join(parts)})"


@dataclass(frozen=True)
class Task:
    """A job, and what its handler does."""

    given: tuple[Given, ...] = ()
    steps: tuple[Step | Block, ...] = ()
    ending: Ending = "done"
    around: Around | None = None

    def __repr__(self) -> str:
        parts = [] if self.around is None else [repr(self.around)]
        parts += [repr(each) for each in (*self.given, *self.steps)]
        parts += [f"ending={self.ending!r}"] if self.ending != "done" else []
        return f"task({', '.join(parts)})"


@dataclass(frozen=True)
class Batch:
    """Jobs that are claimed together."""

    tasks: tuple[Task, ...]
    flavour: Flavour = "sync"

    def __repr__(self) -> str:
        lines = [repr(task) for task in self.tasks] + ([f"flavour={self.flavour!r}"] if self.flavour != "sync" else [])
        return "batch(\n" + "".join(f"    {line},\n" for line in lines) + ")"


def step(name: str, *args: object) -> Step:
    """A step by its function's name."""
    return Step(name, args)


def block(name: Literal["kept", "undone", "no_autoflush", "swallowed"], *steps: Step | Block) -> Block:
    """Steps inside of a `with` block."""
    return Block(name, steps)


def given(name: str, key: int, *, optional: bool = False, locked: bool = False) -> Given:
    """An entity argument."""
    return Given(name, key, optional, locked)


def around(*before: Step, after: tuple[Step, ...] = (), way: Way = "wrap") -> Around:
    """What is wrapped around a job."""
    return Around(before, after, way)


def task(*parts: Around | Given | Step | Block, ending: Ending = "done") -> Task:
    """A job: what is around it, its entity arguments, then its steps."""
    arounds = [part for part in parts if isinstance(part, Around)]
    arguments = tuple(part for part in parts if isinstance(part, Given))
    steps = tuple(part for part in parts if isinstance(part, Step | Block))
    return Task(arguments, steps, ending, arounds[0] if arounds else None)


def batch(*tasks: Task, flavour: Flavour = "sync") -> Batch:
    """Jobs that are claimed together."""
    return Batch(tasks, flavour)
