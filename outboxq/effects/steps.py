"""Steps: the actions that the effect protocol yields and a runner performs, and generators that repeat some of them.

A protocol is a generator that yields steps and receives the result of each. It does no I/O of its own, so that the same
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
    """A step: call a function in a short transaction, which is committed before the protocol receives the result.

    `settles`: the step records an outcome. So it uses another connection than claims do, and a cancellation waits for
    it.
    """

    run: Callable[[Connection], Any]
    settles: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A step: call the other side with this key."""

    provider_key: str


@dataclass(frozen=True, slots=True)
class LookUpCall:
    """A step: call the look-up, which tells if a call with this key was applied."""

    provider_key: str


@dataclass(frozen=True, slots=True)
class Pause:
    """A step: wait for `seconds`.

    `settles`: the next step tries again to record an outcome, so a cancellation waits until that is recorded.
    """

    seconds: float
    settles: bool = False


Step: TypeAlias = Transact | Call | LookUpCall | Pause
Steps: TypeAlias = Generator[Step, Any, T]


def try_twice(run: Callable[[Connection], T]) -> Steps[T]:
    """Run a transaction that claims, and run it once more if the database was unavailable: claiming twice does no harm.

    The server ends a wait for a locked row after a second. If the session's own `lock_timeout` sets no limit, the
    transaction is then run again and again, so that the caller can be cancelled in between.
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
    """Record an outcome; try for up to `seconds` while the database is unavailable. Writing it twice does no harm.

    If the database refuses the data, `instead` turns the error into the write that replaces it. An interruption
    (KeyboardInterrupt, SystemExit) is raised after the record; a second one at once.
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
    """Yield pauses, each up to twice as long as the previous one, as long as they end before the time `until`."""
    seconds = _FIRST_PAUSE_SECONDS
    while time.monotonic() + seconds <= until:
        yield Pause(seconds, settles=True)
        seconds = min(seconds * 2, _LONGEST_PAUSE_SECONDS)
