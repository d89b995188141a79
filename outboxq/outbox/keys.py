"""Keys of jobs, which mark two jobs as the same work, or put them into one order."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from outboxq.errors import ArgumentError
from outboxq.names import check_key
from outboxq.new_job import JobKeys, UniqueKey
from outboxq.outcomes import MAX_DELAY

# A text, or a function of the handler's arguments, by their names, that returns one.
Key: TypeAlias = str | Callable[..., str]
# The same for a group; a job for which the function returns None is in none.
GroupKey: TypeAlias = str | Callable[..., str | None]

# Separates a kind and a key: no name contains a control character, so that no two kinds share a key.
_SEPARATOR = "\x1f"


@dataclass(frozen=True, slots=True)
class Unique:
    """The key of a job that is not added while another one of its kind and key waits, runs or retries.

    Args:
        key: A text of up to 512 bytes, or a function of the handler's arguments that returns one.
        for_: Refuse others for at least this long after the job was added, even if it is done sooner; None: only while
            the job waits, runs or retries.

    Raises:
        ArgumentError: the time is not above 0, or too long.
        InvalidKey: the text cannot be stored.
    """

    key: Key
    for_: timedelta | None = None

    def __post_init__(self) -> None:
        check_constant("unique", self.key)
        if self.for_ is not None:
            check_positive("Unique(for_=...)", self.for_)


def check_positive(what: str, given: object) -> None:
    """Refuse a value that is no timedelta above 0, or too long to be stored.

    Raises:
        ArgumentError: the value is invalid; `what` begins the message.
    """
    if not isinstance(given, timedelta):
        raise ArgumentError(f"{what} takes a timedelta, got {type(given).__name__}")
    if not timedelta(0) < given <= MAX_DELAY:
        raise ArgumentError(f"{what} takes more than 0 and up to {MAX_DELAY.days:,} days, got {given}")


def check_constant(what: str, key: object) -> None:
    """Refuse a key that is neither a text that can be stored nor a function.

    Raises:
        InvalidKey: the key is invalid.
    """
    if not callable(key):
        check_key(f"{what} key", key)  # type: ignore[arg-type]  # that it is a text is what is checked


class KeyFunction:
    """A user's function that makes a job's key; it receives the arguments of the job that its parameters name.

    Raises:
        ArgumentError: its parameters cannot be determined, or one cannot be passed by name.
    """

    def __init__(self, what: str, function: Callable[..., str | None]) -> None:
        self._what = what
        self._function = function
        try:
            parameters = inspect.signature(function).parameters.values()
        except (ValueError, TypeError) as error:
            raise ArgumentError(f"{what} takes a function whose parameters can be seen, got {function!r}") from error
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise ArgumentError(f"{what} takes a function that is called with the handler's arguments by their names")
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = frozenset(p.name for p in named)
        self.required = frozenset(p.name for p in named if p.default is p.empty)

    def __call__(self, kind: str, values: Mapping[str, object]) -> str | None:
        """Return the key of a job with these arguments; None for a job that is in no group.

        Raises:
            ArgumentError: the function needs an argument that was not given.
            InvalidKey: the key that the function returned cannot be stored.
        """
        if not self.required <= values.keys():
            missing = min(self.required - values.keys())
            raise ArgumentError(f"{self._what} of {kind!r} needs the argument {missing!r}, which was not given")
        taken = values if self._takes_all else {name: values[name] for name in self._names if name in values}
        key = self._function(**taken)
        if key is None and self._what == "group":
            return None
        return check_key(f"{self._what} key", key)  # type: ignore[arg-type]  # that it is a text is what is checked


class KeyRules:
    """Makes the keys of a kind's jobs, by the options `coalesce`, `group` and `unique`.

    Args:
        coalesce: A text that is the key of all jobs, a function that makes the key from a job's arguments, or None; the
            other options likewise.
    """

    def __init__(self, kind: str, coalesce: Key | None, group: GroupKey | None, unique: Key | Unique | None) -> None:
        self._kind = kind
        wanted = unique if isinstance(unique, Unique) or unique is None else Unique(unique)
        self._for = None if wanted is None else wanted.for_
        given: dict[str, GroupKey | None] = {
            "coalesce": coalesce,
            "group": group,
            "unique": None if wanted is None else wanted.key,
        }
        self._functions = {name: KeyFunction(name, key) for name, key in given.items() if callable(key)}
        self._texts = {name: key for name, key in given.items() if isinstance(key, str)}
        self.constant = None if self._functions else self._keys(self._texts)

    def needs(self) -> Mapping[str, frozenset[str]]:
        """Return the names of the arguments that the key function of each option requires, by the option's name."""
        return {name: function.required for name, function in self._functions.items()}

    def of(self, values: Mapping[str, object]) -> JobKeys:
        """The keys of a job with these arguments.

        Raises:
            ArgumentError: a function needs an argument that was not given.
            InvalidKey: a key cannot be stored.
        """
        if self.constant is not None:
            return self.constant
        return self._keys(self._texts | {name: of(self._kind, values) for name, of in self._functions.items()})

    def _keys(self, texts: Mapping[str, str | None]) -> JobKeys:
        coalesce, unique = texts.get("coalesce"), texts.get("unique")
        return JobKeys(
            coalesce=None if coalesce is None else f"{self._kind}{_SEPARATOR}{coalesce}",
            group=texts.get("group"),
            unique=None if unique is None else UniqueKey(f"{self._kind}{_SEPARATOR}{unique}", self._for),
        )
