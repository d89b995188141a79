"""What the protocol of a call asks to be done, one step at a time, and how a step is tried again.

A protocol is a generator that yields steps and is sent what came of each: no I/O of its own, so that one text serves
threads and event loops.
"""

import time
from collections.abc import Callable, Generator
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
    write = _RepeatedWrite(run, seconds, instead)
    interruption: BaseException | None = None
    while not write.is_done:
        try:
            write.take((yield write.step))
        except GeneratorExit:
            raise
        except Exception as error:
            if write.goes_on_after(error):
                continue
            if interruption is not None:
                raise interruption from error
            raise
        except BaseException as error:
            if interruption is not None:
                raise
            interruption = error
            write.again()
    if interruption is not None:
        raise interruption
    return cast("T", write.answer)


class _RepeatedWrite:
    """A transaction that is repeated, with pauses, while the database is away; `step` is what to do next."""

    def __init__(
        self,
        run: Callable[[Connection], object],
        seconds: float,
        instead: Callable[[Exception], Callable[[Connection], object]] | None,
    ) -> None:
        self.is_done = False
        self.answer: Any = None
        self._write = Transact(run, settles=True)
        self.step: Step = self._write
        self._deadline = time.monotonic() + seconds
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._instead = instead

    def take(self, answer: object) -> None:
        """The step was done: a write is the end, a pause is not."""
        self.is_done = self.step is self._write
        self.answer = answer
        self.again()

    def again(self) -> None:
        """Write next."""
        self.step = self._write

    def goes_on_after(self, error: Exception) -> bool:
        """Choose the next step after an error; False if there is none."""
        if not is_transient(error):
            if self._instead is None:
                return False
            self.step = self._write = Transact(self._instead(error), settles=True)
            self._instead = None
            return True
        if time.monotonic() + self._pause_seconds > self._deadline:
            return False
        self.step = Pause(self._pause_seconds, settles=True)
        self._pause_seconds = min(self._pause_seconds * 2, _LONGEST_PAUSE_SECONDS)
        return True
