"""Once: the protocol of a call to the outside, without any I/O of its own.

Claim, call, record at once, replay ever after. `once` is a generator that yields what is to be done next (a
transaction, the call, a look-up, a pause) and is sent what came of it, so that one text serves threads and event loops.
"""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast
from uuid import UUID

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DataError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from outboxq.clock import clock
from outboxq.codec.entities import entity_state
from outboxq.codec.text import name_of, storable
from outboxq.codec.values import MAX_ARGS_BYTES, decode_stored, encode_value
from outboxq.database.errors import sqlstate_of
from outboxq.effects.request import ErrorClass, Request, provider_key
from outboxq.errors import (
    ArgumentError,
    CallNotApplied,
    CallRefused,
    EffectConflict,
    EffectFailed,
    EffectInProgress,
    EffectLockLost,
    EffectNotRecorded,
    EffectUnknown,
    HandlerError,
    ResultNotStorable,
)
from outboxq.fault_points import fault_point
from outboxq.statements import effects as statements
from outboxq.statements.effects import EffectState, Status

T = TypeVar("T")

# Of the role, or of a claim.
_LOCK_TIMEOUT = "55P03"
# A standby that is being promoted, a lock_timeout, and what the server ended for the sake of others.
_PASSING = ("25006", _LOCK_TIMEOUT, "40001", "40P01")
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class Applied(Generic[T]):
    """A look-up's answer: the call was applied, and this is what it came to."""

    result: T


@dataclass(frozen=True, slots=True)
class NotApplied:
    """A look-up's answer: the call was not applied, and never will be."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A look-up's answer: the other side cannot tell."""


LookUp: TypeAlias = Applied[T] | NotApplied | Unknown


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


class LockExpiry:
    """How long this process may believe that the lock on a call is its own."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._until = 0.0

    def renew(self, begun: float, seconds: float | None = None) -> None:
        """The lock was taken, or extended, by a statement that began then (`clock`)."""
        self._until = begun + (self.request.lease.total_seconds() if seconds is None else seconds)

    @property
    def lasts(self) -> bool:
        """Whether nobody can have taken over."""
        return clock() < self._until


def once(request: Request, hold: LockExpiry, deployment: UUID) -> Steps[object]:
    """Call once, and record what it came to; or replay what an earlier call came to.

    Raises:
        EffectInProgress: somebody else calls, or died calling not long ago.
        EffectConflict: the key stands for another request.
        EffectFailed: refused for good, now or earlier.
        EffectUnknown: nobody can know.
        ResultNotStorable: done, but what it came to was not kept.
        EffectLockLost, EffectNotRecorded: it was called, and that could not be recorded.
        Whatever the call or the look-up raised: to be tried again.
    """
    while True:
        seen = yield from claim(request, hold, deployment)
        if not seen.claimed:
            return _replay(request, seen)
        in_doubt = seen.in_doubt
        if in_doubt or request.asks_first:
            asked = clock()
            answer = yield from _look_up(request, seen, asked)
            if isinstance(answer, Applied):
                return (yield from _record_result(request, answer.result))
            in_doubt = not isinstance(answer, NotApplied)
        fault_point("before-call")
        # A process that stood still until here for longer than its lock lasts may have been taken over: claim again.
        if hold.lasts:
            break
    try:
        value = yield Call(str(seen.provider_key))
    except GeneratorExit:
        raise
    except BaseException as error:
        fault_point("after-call")
        yield from _record_failure(request, error, seen, in_doubt=in_doubt)
        raise
    fault_point("after-call")
    return (yield from _record_result(request, value))


def claim(request: Request, hold: LockExpiry, deployment: UUID) -> Steps[EffectState]:
    """Claim the call or take it over, else see what stands; `hold` says for how long it is ours."""
    wanted = provider_key(deployment, request.scope, request.key)
    statement = statements.claim(request.scope, request.key, request.fingerprint, wanted, request.token, request.lease)
    row = None
    while row is None:
        begun = clock()
        row = yield from _try_twice(lambda connection: connection.execute(statement).one_or_none())
        # Measured from before the statement: what the server adds, we leave out.
        if row is not None:
            hold.renew(begun, row.locked_seconds)
    return EffectState(*row)


def _replay(request: Request, seen: EffectState) -> object:
    """What an earlier call came to, as its result or as its error."""
    scope, key = request.scope, request.key
    if not seen.same_request:
        raise EffectConflict(scope, key)
    if seen.status == "done" and seen.result is not None:
        return decode_stored(f"the result of effect {scope!r}", request.decoder, seen.result)
    if seen.status == "done":
        raise ResultNotStorable(scope, key, seen.error or "no reason was stored")
    if seen.status == "failed":
        raise EffectFailed(scope, key, seen.error or "no reason was stored")
    if seen.status == "unknown":
        raise EffectUnknown(scope, key, seen.error or "no reason was stored")
    raise EffectInProgress(scope, key, max(seen.locked_seconds, 0.0))


def _look_up(request: Request, seen: EffectState, begun: float) -> Steps[LookUp[object]]:
    """Find out whether an earlier call was applied; returns only where it may be called again, or need not be."""
    answer: LookUp[object] = Unknown()
    if request.asks:
        try:
            answer = _check_answer((yield LookUpCall(str(seen.provider_key))))
        except GeneratorExit:
            raise
        except BaseException as error:
            # Asked again by the next caller; the doubt stays, if there was any.
            keep = None if seen.in_doubt else request.retention
            yield from record(request, "retryable", in_doubt=seen.in_doubt, error=name_of(error), keep=keep)
            raise
    if isinstance(answer, Unknown):
        waited = clock() - begun
        if not seen.in_doubt:
            # Asked first: of a call that we do not know of, we do not know either since when its key is remembered.
            reason = "there may have been a call that this database does not know of; the look-up could not tell"
        elif _still_remembered(request, seen, waited):
            return answer
        else:
            reason = "an earlier call did not come back; " + _why_unknown(request, asked=request.asks)
        yield from record(request, "unknown", error=reason)
        raise EffectUnknown(request.scope, request.key, reason)
    return answer


def _check_answer(answer: object) -> LookUp[object]:
    if not isinstance(answer, Applied | NotApplied | Unknown):
        raise HandlerError(
            f"already_applied returned a {type(answer).__name__}: return Applied(result), NotApplied() or Unknown()"
        )
    return answer


def _still_remembered(request: Request, seen: EffectState, waited_seconds: float = 0.0) -> bool:
    """Whether the other side still knows the key, so that a second call with it is no second effect."""
    remembers = request.provider_remembers
    return remembers is not None and seen.known_seconds + waited_seconds < remembers.total_seconds()


def _why_unknown(request: Request, *, asked: bool) -> str:
    asked_text = "the look-up could not tell" if asked else "there is no look-up (already_applied)"
    known = "does not honour keys (provider_remembers)"
    if request.provider_remembers is not None:
        known = f"honoured its key for {request.provider_remembers} only (provider_remembers)"
    return f"{asked_text}, and the other side {known}"


def _record_failure(request: Request, error: BaseException, seen: EffectState, *, in_doubt: bool) -> Steps[None]:
    """Record a call that raised; returns where the error itself is to go on to the caller."""
    doubt = _doubt_of(request, error)
    if doubt == "final":
        recorded = yield from record(request, "failed", error=_refusal(error), keep=request.retention)
        raise EffectFailed(request.scope, request.key, recorded.reason) from error
    if doubt == "retryable":
        keep = None if in_doubt else request.retention
        yield from record(request, "retryable", in_doubt=in_doubt, error=name_of(error), keep=keep)
    elif request.asks:
        # Its lock runs on: a call that is still on its way gets that long to arrive before anybody asks for it.
        yield from record(request, "started", in_doubt=True, error=name_of(error), unlock=False)
    elif _still_remembered(request, seen):
        yield from record(request, "retryable", in_doubt=True, error=name_of(error))
    else:
        reason = f"the call raised {name_of(error)}; " + _why_unknown(request, asked=False)
        yield from record(request, "unknown", error=reason)
        if isinstance(error, Exception):
            raise EffectUnknown(request.scope, request.key, reason) from error


def _refusal(error: BaseException) -> str:
    """Why the other side refused, in words that can be stored."""
    if not isinstance(error, CallRefused):
        return name_of(error)
    try:
        return storable(str(error.reason))
    except Exception:  # noqa: BLE001  # users' code; that it was refused must be recorded
        return "(this text cannot be read)"


def _doubt_of(request: Request, error: BaseException) -> ErrorClass:
    if not isinstance(error, Exception):
        return "ambiguous"
    if isinstance(error, CallRefused):
        return "final"
    # Not found by way of __cause__: behind a retrying client the last try was refused, and the first one applied.
    if isinstance(error, CallNotApplied | ConnectionRefusedError):
        return "retryable"
    if request.classify is None:
        return "ambiguous"
    try:
        return request.classify(error)
    except Exception as broken:  # noqa: BLE001  # users' code; the call was made, and what it came to must be recorded
        error.add_note(f"classify raised {type(broken).__name__}, so nobody knows whether the call was applied")
        return "ambiguous"


def _record_result(request: Request, value: object) -> Steps[object]:
    stored, reason, interruption = _encode(value)
    recorded = yield from record(
        request, "done", result=stored, error=None if stored else reason, keep=request.retention
    )
    fault_point("after-record")
    if interruption is not None:
        raise interruption
    if recorded.result is None:
        raise ResultNotStorable(request.scope, request.key, recorded.reason)
    # As jsonb writes it, with its own idea of numbers: the first caller gets exactly what a replay will give.
    return decode_stored(f"the result of effect {request.scope!r}", request.decoder, recorded.result)


def _encode(value: object) -> tuple[str | None, str, BaseException | None]:
    """The result as JSON text, or None and why not; and what interrupted us meanwhile."""
    if entity_state(value) is not None:
        return None, "it is an entity: return its key, or what you need of it", None
    try:
        data = encode_value("result", value)
        text = data.decode()
    except ArgumentError as error:
        return None, storable(str(error)), None
    except BaseException as error:  # noqa: BLE001  # users' serializers raise what they like, and the call was made
        return None, f"encoding it raised {name_of(error)}", None if isinstance(error, Exception) else error
    if len(data) > MAX_ARGS_BYTES:
        return None, f"it takes {len(data):,} bytes as JSON, over the cap of {MAX_ARGS_BYTES:,}", None
    return text, "", None


class Recorded(NamedTuple):
    """What was written of a call: its result as jsonb has it, or the reason why there is none."""

    result: str | None
    reason: str


def record(
    request: Request,
    status: Status,
    *,
    in_doubt: bool = False,
    result: str | None = None,
    error: str | None = None,
    keep: timedelta | None = None,
    unlock: bool = True,
) -> Steps[Recorded]:
    """Write what the call came to, for as long as its lock would last.

    What the database refuses for its data is written without a result, and with an error in ASCII.

    Raises:
        EffectLockLost: somebody took over.
        EffectNotRecorded: the database was away all the time, or refused that too.
    """

    def write(result: str | None, error: str | None) -> Callable[[Connection], Row[Any] | None]:
        statement = statements.record(
            request.scope, request.key, request.token, status,
            in_doubt=in_doubt, result=result, error=error, keep=keep, unlock=unlock,
        )  # fmt: skip
        return lambda connection: connection.execute(statement).one_or_none()

    def write_less(refused: Exception) -> Callable[[Connection], Row[Any] | None]:
        return write(None, _refused_as(refused) if result is not None else _in_ascii(error))

    try:
        recorded = yield from insist(write(result, error), seconds=request.lease.total_seconds(), instead=write_less)
    except Exception as lost:
        raise EffectNotRecorded(request.scope, request.key) from lost
    if recorded is None:
        raise EffectLockLost(request.scope, request.key)
    return Recorded(recorded.result, recorded.error or "")


def _refused_as(error: Exception) -> str:
    """Why the database did not take a result; without the error's text, which quotes it."""
    sqlstate = sqlstate_of(error) if isinstance(error, DBAPIError) else None
    return f"the database refused it: {f'SQLSTATE {sqlstate}' if sqlstate else name_of(error)}"


def _in_ascii(text: str | None) -> str | None:
    return None if text is None else text.encode("ascii", "backslashreplace").decode()


def _try_twice(run: Callable[[Connection], T]) -> Steps[T]:
    """Run a transaction, and once more where the database was away: a claim may be repeated.

    A row that another transaction holds is waited for as long as the session would wait, in tries of a second.
    """
    was_away = False
    while True:
        try:
            answer: T = yield Transact(run)
        except Exception as error:
            if not is_database_unavailable(error):
                raise
            still_waits = _is_lock_timeout(error) and (yield Transact(_waits_without_end))
            if was_away and not still_waits:
                raise
            was_away = was_away or not still_waits
        else:
            return answer
        yield Pause(_FIRST_PAUSE_SECONDS)


def _is_lock_timeout(error: Exception) -> bool:
    return isinstance(error, DBAPIError) and sqlstate_of(error) == _LOCK_TIMEOUT


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
    deadline = time.monotonic() + seconds
    pause_seconds = _FIRST_PAUSE_SECONDS
    write = Transact(run, settles=True)
    step: Step = write
    interruption: BaseException | None = None
    while True:
        try:
            answer: Any = yield step
        except GeneratorExit:
            raise
        except Exception as error:
            if instead is not None and not is_database_unavailable(error):
                step = write = Transact(instead(error), settles=True)
                instead = None
            elif is_database_unavailable(error) and time.monotonic() + pause_seconds <= deadline:
                step = Pause(pause_seconds, settles=True)
                pause_seconds = min(pause_seconds * 2, _LONGEST_PAUSE_SECONDS)
            elif interruption is not None:
                raise interruption from error
            else:
                raise
        except BaseException as error:
            if interruption is not None:
                raise
            interruption, step = error, write
        else:
            if step is write:
                break
            step = write
    if interruption is not None:
        raise interruption
    return cast("T", answer)


def is_database_unavailable(error: Exception) -> bool:
    """Whether the server is gone, going, starting or full, its pool is, or it took us for another's deadlock.

    By any driver.
    """
    if not isinstance(error, DBAPIError):
        return isinstance(error, OSError | PoolTimeout)
    sqlstate = sqlstate_of(error)
    if sqlstate is None:
        # What a driver refuses for its data, it refuses before it sends it.
        return error.connection_invalidated or not isinstance(error, DataError)
    return error.connection_invalidated or sqlstate[:2] in ("08", "53", "57") or sqlstate in _PASSING
