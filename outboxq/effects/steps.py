"""Steps: the actions that the effect protocol has a runner perform, one at a time, and their repetition.

A protocol is a generator that yields steps and is sent the result of each. It does no I/O of its own, so that the same
code serves threads and event loops.
"""

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

from sqlalchemy import Connection

from outboxq.database.errors import LOCK_NOT_AVAILABLE, is_transient, sqlstate_of
from outboxq.statements import effects as statements

T = TypeVar("T")

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class Transact:
    """Run this in a short transaction of its own, committed before the answer.

    `settles`: it records an outcome, so its connections are not those of claims, and a cancellation waits for it.
    """

    run: Callable[[Connection], Any]
    settles: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """Call the other side with this key."""

    provider_key: str


@dataclass(frozen=True, slots=True)
class LookUpCall:
    """Ask the other side whether a call with this key was applied."""

    provider_key: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait. `settles`: an outcome is recorded after it, so a cancellation waits too."""

    seconds: float
    settles: bool = False


Step: TypeAlias = Transact | Call | LookUpCall | Pause
Steps: TypeAlias = Generator[Step, Any, T]


def try_twice(run: Callable[[Connection], T]) -> Steps[T]:
    """Run a transaction, and once more if the database was away: a claim may be repeated.

    A row that another transaction holds is waited for as long as the session would wait, in tries of a second.
    """
    was_away = False
    while True:
        try:
            answer: T = yield Transact(run)
        except Exception as error:
            if not is_transient(error):
                raise
            still_waits = sqlstate_of(error) == LOCK_NOT_AVAILABLE and (yield Transact(_waits_without_end))
            if was_away and not still_waits:
                raise
            was_away = was_away or not still_waits
        else:
            return answer
        yield Pause(_FIRST_PAUSE_SECONDS)


def _waits_without_end(connection: Connection) -> bool:
    return bool(connection.execute(statements.select_waits_without_end()).scalar_one())


def insist(
    run: Callable[[Connection], T],
    *,
    seconds: float,
    instead: Callable[[Exception], Callable[[Connection], T]] | None = None,
) -> Steps[T]:
    """Record an outcome, again and again while the database is away; writing it twice does no harm.

    If the database refuses the data, `instead` turns the error into the write that is executed in its place.
    An interruption (KeyboardInterrupt, SystemExit) is raised after the record; a second one at once.
    """
    step: Step = Transact(run, settles=True)
    write, pauses = step, _pauses(until=time.monotonic() + seconds)
    interruption: BaseException | None = None
    while True:
        try:
            answer = yield step
            if step is write:
                break
            step = write
        except Exception as error:
            if instead is not None and not is_transient(error):
                write = step = Transact(instead(error), settles=True)
                instead = None
                continue
            pause = next(pauses, None) if is_transient(error) else None
            if pause is None:
                if interruption is not None:
                    raise interruption from error
                raise
            step = pause
        except BaseException as error:
            if isinstance(error, GeneratorExit) or interruption is not None:
                raise
            interruption = error
            step = write
    if interruption is not None:
        raise interruption
    return cast("T", answer)


def _pauses(until: float) -> Iterator[Pause]:
    """Longer and longer pauses, as long as they end before `until`."""
    seconds = _FIRST_PAUSE_SECONDS
    while time.monotonic() + seconds <= until:
        yield Pause(seconds, settles=True)
        seconds = min(seconds * 2, _LONGEST_PAUSE_SECONDS)
