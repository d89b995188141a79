"""What the protocol of a call asks to be done, one step at a time, and how a step is tried again.

A protocol is a generator that yields steps and is sent what came of each: no I/O of its own, so that one text serves
threads and event loops.
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

    `settles`: it writes what is known, so no claims may use up its connections, and nothing may break it off.
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
    """Wait. `settles`: before what is known is written, so nothing may break it off."""

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
    """Write what is known, again and again while the database is away; a record may be repeated.

    What the database refuses for its data is written once more, as `instead` makes it of the error.
    An interruption (KeyboardInterrupt, SystemExit) goes on only when all that is done; a second one at once.
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
    """Longer and longer ones, as long as they end in time."""
    seconds = _FIRST_PAUSE_SECONDS
    while time.monotonic() + seconds <= until:
        yield Pause(seconds, settles=True)
        seconds = min(seconds * 2, _LONGEST_PAUSE_SECONDS)
