"""The protocol of `once`: lock the call, make it, record its outcome at once, and replay the outcome to later callers.

Its functions are generators without I/O: they yield steps, such as a transaction, which an `EffectRunner` performs.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from outboxq.clock import clock
from outboxq.codec.entities import entity_state
from outboxq.codec.sameness import change_of_result, refusal_of
from outboxq.codec.text import name_of, storable
from outboxq.codec.values import MAX_ARGS_BYTES, decode_stored, encode_value
from outboxq.database.errors import sqlstate_of
from outboxq.effects.request import Applied, ErrorClass, LookUp, NotApplied, Request, Unknown, provider_key
from outboxq.effects.steps import Call, LookUpCall, Steps, insist, try_twice
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
from outboxq.names import with_article
from outboxq.statements import effects as statements
from outboxq.statements.effects import EffectState, Status


class LockExpiry:
    """The time until which this process may assume that it holds the lock on a call."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._until = 0.0

    def renew(self, begun: float, seconds: float | None = None) -> None:
        """Record that a statement, begun at `begun` by `clock`, has taken or extended the lock.

        `seconds`: how long the lock lasts from then on; None for the request's lease.
        """
        self._until = begun + (self.request.lease.total_seconds() if seconds is None else seconds)

    @property
    def is_ahead(self) -> bool:
        """Return True if the lock has not expired yet."""
        return clock() < self._until


def once(request: Request, expiry: LockExpiry, deployment: UUID) -> Steps[object]:
    """Make the call and record its outcome, or replay the outcome of an earlier call.

    Raises:
        EffectInProgress: another caller's call is under way, or its process ended during the call and its lock has not
            expired yet.
        EffectConflict: the key was used for another request.
        EffectFailed: refused for good, now or earlier.
        EffectUnknown: it cannot be determined if the call was applied.
        ResultNotStorable: the call was applied, but its result could not be stored.
        EffectLockLost, EffectNotRecorded: the call was made, but its outcome could not be recorded.
        Any error of the call or of the look-up: `once` may be called again.
    """
    while True:
        state = yield from claim(request, expiry, deployment)
        if not state.claimed:
            return _replay(request, state)
        in_doubt = state.in_doubt
        if in_doubt or request.looks_up_first:
            answer = yield from _look_up(request, state)
            if isinstance(answer, Applied):
                return (yield from record_result(request, answer.result))
            in_doubt = not isinstance(answer, NotApplied)
        fault_point("before-call")
        # If this process was suspended for longer than its lock lasts, another may have taken over: claim again.
        if expiry.is_ahead:
            break
    try:
        value = yield Call(str(state.provider_key))
    except GeneratorExit:
        raise
    except BaseException as error:
        fault_point("after-call")
        yield from record_failure(request, error, state, in_doubt=in_doubt)
        raise
    fault_point("after-call")
    return (yield from record_result(request, value))


def claim(request: Request, expiry: LockExpiry, deployment: UUID) -> Steps[EffectState]:
    """Take the lock on the call, unless the call has ended or another caller holds the lock; return the stored state.

    `expiry` is set to the end of the lock.
    """
    wanted = provider_key(deployment, request.scope, request.key)
    statement = statements.claim(request.lock, request.fingerprint, wanted, request.lease)
    row = None
    while row is None:
        begun = clock()
        row = yield from try_twice(lambda connection: connection.execute(statement).one_or_none())
        # Counted from before the statement, so that the lock ends here before it does on the server.
        if row is not None:
            expiry.renew(begun, row.locked_seconds)
    return EffectState(*row)


def _replay(request: Request, state: EffectState) -> object:
    """Replay the recorded outcome of an earlier call: return its result, or raise its error."""
    scope, key, reason = request.scope, request.key, state.error or "no reason was stored"
    if not state.same_request:
        raise EffectConflict(scope, key)
    if state.status == "done" and state.result is not None:
        return decode_result(request, state.result)
    if state.status == "done":
        raise ResultNotStorable(scope, key, reason)
    if state.status == "failed":
        raise EffectFailed(scope, key, reason)
    if state.status == "unknown":
        raise EffectUnknown(scope, key, reason)
    raise EffectInProgress(scope, key, max(state.locked_seconds, 0.0))


def _look_up(request: Request, state: EffectState) -> Steps[LookUp[object]]:
    """Look up if an earlier call was applied, and return the answer of the look-up.

    Raises:
        EffectUnknown: the look-up could not tell, and calling again is not safe.
        Any error of the look-up.
    """
    begun = clock()
    answer: LookUp[object] = Unknown()
    if request.can_look_up:
        try:
            answer = _check_answer((yield LookUpCall(str(state.provider_key))))
        except GeneratorExit:
            raise
        except BaseException as error:
            # The next caller looks it up again; a call that was in doubt stays in doubt.
            keep = None if state.in_doubt else request.retention
            yield from record(request, "retryable", in_doubt=state.in_doubt, error=request.describe(error), keep=keep)
            raise
    if not isinstance(answer, Unknown):
        return answer
    waited_seconds = clock() - begun
    if not state.in_doubt:
        # With ask_first: if the record of a call is lost, the time since which its key is remembered is lost too.
        reason = "there may have been a call that this database does not know of; the look-up could not tell"
    elif request.is_key_remembered(state.known_seconds + waited_seconds):
        return answer
    else:
        reason = "an earlier call did not come back; " + why_unknown(request, looked_up=request.can_look_up)
    yield from record(request, "unknown", error=reason)
    raise EffectUnknown(request.scope, request.key, reason)


def _check_answer(answer: object) -> LookUp[object]:
    if not isinstance(answer, Applied | NotApplied | Unknown):
        raise HandlerError(
            f"already_applied returned {with_article(type(answer).__name__)}: return Applied(result), NotApplied() or "
            "Unknown()"
        )
    return answer


class Recorded(NamedTuple):
    """The stored outcome of a call, read back: its `result` as JSON text, or None and the `reason` for that."""

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
    """Record the outcome of a call; if the database is unavailable, retry for as long as the call's lock would last.

    If the database refuses the data, the result is left out, or the error is written in ASCII.

    Raises:
        EffectLockLost: another caller took over.
        EffectNotRecorded: the database was unavailable all the time, or refused the reduced record too.
    """

    def write(result: str | None, error: str | None) -> Callable[[Connection], Row[Any] | None]:
        statement = statements.record(
            request.lock, status, in_doubt=in_doubt, result=result, error=error, keep=keep, unlock=unlock
        )
        return lambda connection: connection.execute(statement).one_or_none()

    def write_less(refused: Exception) -> Callable[[Connection], Row[Any] | None]:
        if result is not None:
            return write(None, _refused_as(refused))
        return write(None, None if error is None else error.encode("ascii", "backslashreplace").decode())

    try:
        recorded = yield from insist(write(result, error), seconds=request.lease.total_seconds(), instead=write_less)
    except Exception as lost:
        raise EffectNotRecorded(request.scope, request.key) from lost
    if recorded is None:
        raise EffectLockLost(request.scope, request.key)
    return Recorded(recorded.result, recorded.error or "")


def _refused_as(error: Exception) -> str:
    """Return the reason why the database refused a result, without the error's text, which quotes the result."""
    sqlstate = sqlstate_of(error) if isinstance(error, DBAPIError) else None
    return f"the database refused it: {f'SQLSTATE {sqlstate}' if sqlstate else name_of(error)}"


def record_result(request: Request, value: object) -> Steps[object]:
    """Record a call's return value; return the result as every later caller will read it."""
    stored, reason, interruption = _encode(request, value)
    recorded = yield from record(
        request, "done", result=stored, error=None if stored else reason, keep=request.retention
    )
    fault_point("after-record")
    if interruption is not None:
        raise interruption
    if recorded.result is None:
        raise ResultNotStorable(request.scope, request.key, recorded.reason)
    # Read back from jsonb, which normalizes numbers: the first caller gets exactly what a replay returns.
    return decode_result(request, recorded.result)


def decode_result(request: Request, result: str) -> object:
    """Decode a stored result by the type that the caller requests."""
    return decode_stored(f"the result of effect {request.scope!r}", request.decoder, result)


def _encode(request: Request, value: object) -> tuple[str | None, str, BaseException | None]:
    """Return the result as JSON text, or None and the reason why it cannot be stored.

    The third item is an interruption, such as a KeyboardInterrupt, that encoding it raised, or None.
    """
    if entity_state(value) is not None:
        return None, "it is an entity: return its key, or what you need of it", None
    try:
        data = encode_value("result", value)
        text = data.decode()
        change = change_of_result(value, data, request.decoder)
    except ArgumentError as error:
        return None, storable(str(error)), None
    except BaseException as error:  # noqa: BLE001  # users' serializers raise what they like, and the call was made
        return None, f"encoding it raised {name_of(error)}", None if isinstance(error, Exception) else error
    if len(data) > MAX_ARGS_BYTES:
        return None, f"it takes {len(data):,} bytes as JSON, over the cap of {MAX_ARGS_BYTES:,}", None
    if change is not None:
        return None, f"it {refusal_of(change)}", None
    return text, "", None


def record_failure(request: Request, error: BaseException, state: EffectState, *, in_doubt: bool) -> Steps[None]:
    """Record a call that raised; return normally if the caller is to receive that error itself.

    Raises:
        EffectFailed, EffectUnknown: what the caller receives instead of the error.
    """
    error_class = _error_class(request, error)
    if error_class == "final":
        recorded = yield from record(request, "failed", error=_refusal(request, error), keep=request.retention)
        raise EffectFailed(request.scope, request.key, recorded.reason) from error
    if error_class == "retryable":
        keep = None if in_doubt else request.retention
        yield from record(request, "retryable", in_doubt=in_doubt, error=request.describe(error), keep=keep)
    elif request.can_look_up:
        # The lock stays until it expires: a request that is still on its way has that long to arrive.
        yield from record(request, "started", in_doubt=True, error=request.describe(error), unlock=False)
    elif request.is_key_remembered(state.known_seconds):
        yield from record(request, "retryable", in_doubt=True, error=request.describe(error))
    else:
        reason = f"the call raised {request.describe(error)}; " + why_unknown(request, looked_up=False)
        yield from record(request, "unknown", error=reason)
        if isinstance(error, Exception):
            raise EffectUnknown(request.scope, request.key, reason) from error


def why_unknown(request: Request, *, looked_up: bool) -> str:
    """Return the reason, for errors and operators, why it cannot be determined if a call was applied."""
    asked = "the look-up could not tell" if looked_up else "there is no look-up (already_applied)"
    known = "does not honour keys (provider_remembers)"
    if request.provider_remembers is not None:
        known = f"honoured its key for {request.provider_remembers} only (provider_remembers)"
    return f"{asked}, and the other side {known}"


def _refusal(request: Request, error: BaseException) -> str:
    """The other side's reason for refusing, as a text that can be stored."""
    if not isinstance(error, CallRefused):
        return request.describe(error)
    try:
        return storable(str(error.reason))
    except Exception:  # noqa: BLE001  # users' code; that it was refused must be recorded
        return "(this text cannot be read)"


def _error_class(request: Request, error: BaseException) -> ErrorClass:
    if not isinstance(error, Exception):
        return "ambiguous"
    if isinstance(error, CallRefused):
        return "final"
    # __cause__ is not searched: if a client retries, its last try may be refused while the first was applied.
    if isinstance(error, CallNotApplied | ConnectionRefusedError):
        return "retryable"
    if request.classify is None:
        return "ambiguous"
    try:
        return request.classify(error)
    except Exception as broken:  # noqa: BLE001  # users' code; the call was made, and its outcome must be recorded
        error.add_note(f"classify raised {type(broken).__name__}, so it is not known if the call was applied")
        return "ambiguous"
