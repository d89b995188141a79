"""Recording what came of a call: at once, in a short transaction of its own, and again until it is written."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from outboxq.codec.entities import entity_state
from outboxq.codec.text import name_of, storable
from outboxq.codec.values import MAX_ARGS_BYTES, decode_stored, encode_value
from outboxq.database.errors import sqlstate_of
from outboxq.effects.request import ErrorClass, Request
from outboxq.effects.steps import Steps, insist
from outboxq.errors import (
    ArgumentError,
    CallNotApplied,
    CallRefused,
    EffectFailed,
    EffectLockLost,
    EffectNotRecorded,
    EffectUnknown,
    ResultNotStorable,
)
from outboxq.fault_points import fault_point
from outboxq.statements import effects as statements
from outboxq.statements.effects import EffectState, Status


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
        EffectLockLost: another caller took over.
        EffectNotRecorded: the database was away all the time, or refused that too.
    """

    def write(result: str | None, error: str | None) -> Callable[[Connection], Row[Any] | None]:
        statement = statements.record(
            request.lock, status, in_doubt=in_doubt, result=result, error=error, keep=keep, unlock=unlock
        )
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


def record_result(request: Request, value: object) -> Steps[object]:
    """Record what a call returned; the result as every later caller will read it."""
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
    return decode_result(request, recorded.result)


def decode_result(request: Request, result: str) -> object:
    """A stored result, as the type that the caller asks for."""
    return decode_stored(f"the result of effect {request.scope!r}", request.decoder, result)


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


def record_failure(request: Request, error: BaseException, state: EffectState, *, in_doubt: bool) -> Steps[None]:
    """Record a call that raised; returns if the error itself is to go on to the caller."""
    error_class = _error_class(request, error)
    if error_class == "final":
        recorded = yield from record(request, "failed", error=_refusal(error), keep=request.retention)
        raise EffectFailed(request.scope, request.key, recorded.reason) from error
    if error_class == "retryable":
        keep = None if in_doubt else request.retention
        yield from record(request, "retryable", in_doubt=in_doubt, error=name_of(error), keep=keep)
    elif request.can_look_up:
        # Its lock runs on: a call that is still on its way gets that long to arrive before the look-up.
        yield from record(request, "started", in_doubt=True, error=name_of(error), unlock=False)
    elif request.is_key_remembered(state.known_seconds):
        yield from record(request, "retryable", in_doubt=True, error=name_of(error))
    else:
        reason = f"the call raised {name_of(error)}; " + why_unknown(request, looked_up=False)
        yield from record(request, "unknown", error=reason)
        if isinstance(error, Exception):
            raise EffectUnknown(request.scope, request.key, reason) from error


def why_unknown(request: Request, *, looked_up: bool) -> str:
    """Why it cannot be found out whether a call was applied."""
    asked = "the look-up could not tell" if looked_up else "there is no look-up (already_applied)"
    known = "does not honour keys (provider_remembers)"
    if request.provider_remembers is not None:
        known = f"honoured its key for {request.provider_remembers} only (provider_remembers)"
    return f"{asked}, and the other side {known}"


def _refusal(error: BaseException) -> str:
    """Why the other side refused, in words that can be stored."""
    if not isinstance(error, CallRefused):
        return name_of(error)
    try:
        return storable(str(error.reason))
    except Exception:  # noqa: BLE001  # users' code; that it was refused must be recorded
        return "(this text cannot be read)"


def _error_class(request: Request, error: BaseException) -> ErrorClass:
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
