"""Once: the protocol of a call to the outside, without any I/O of its own.

Claim, call, record at once, replay ever after.
"""

from uuid import UUID

from outboxq.clock import clock
from outboxq.codec.text import name_of
from outboxq.effects.recording import decode_result, record, record_failure, record_result, why_unknown
from outboxq.effects.request import Applied, LookUp, NotApplied, Request, Unknown, provider_key
from outboxq.effects.steps import Call, LookUpCall, Steps, try_twice
from outboxq.errors import (
    EffectConflict,
    EffectFailed,
    EffectInProgress,
    EffectUnknown,
    HandlerError,
    ResultNotStorable,
)
from outboxq.fault_points import fault_point
from outboxq.statements import effects as statements
from outboxq.statements.effects import EffectState


class LockExpiry:
    """How long this process may believe that the lock on a call is its own."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._until = 0.0

    def renew(self, begun: float, seconds: float | None = None) -> None:
        """The lock was taken, or extended, by a statement that began then (`clock`)."""
        self._until = begun + (self.request.lease.total_seconds() if seconds is None else seconds)

    @property
    def is_ahead(self) -> bool:
        """True while our lock has not expired."""
        return clock() < self._until


def once(request: Request, expiry: LockExpiry, deployment: UUID) -> Steps[object]:
    """Call once, and record what it came to; or replay what an earlier call came to.

    Raises:
        EffectInProgress: another caller holds the lock, or died calling not long ago.
        EffectConflict: the key stands for another request.
        EffectFailed: refused for good, now or earlier.
        EffectUnknown: it cannot be found out whether it was applied.
        ResultNotStorable: done, but what it came to was not kept.
        EffectLockLost, EffectNotRecorded: it was called, and that could not be recorded.
        Whatever the call or the look-up raised: to be tried again.
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
        # A process that stood still until here for longer than its lock lasts may have been taken over: claim again.
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
    """Claim the call or take it over, else read what is stored; `expiry` says for how long it is ours."""
    wanted = provider_key(deployment, request.scope, request.key)
    statement = statements.claim(request.lock, request.fingerprint, wanted, request.lease)
    row = None
    while row is None:
        begun = clock()
        row = yield from try_twice(lambda connection: connection.execute(statement).one_or_none())
        # Measured from before the statement: what the server adds, we leave out.
        if row is not None:
            expiry.renew(begun, row.locked_seconds)
    return EffectState(*row)


def _replay(request: Request, state: EffectState) -> object:
    """What an earlier call came to, as its result or as its error."""
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
    """Find out whether an earlier call was applied; returns only if it may be called again, or need not be."""
    begun = clock()
    answer: LookUp[object] = Unknown()
    if request.can_look_up:
        try:
            answer = _check_answer((yield LookUpCall(str(state.provider_key))))
        except GeneratorExit:
            raise
        except BaseException as error:
            # Asked again by the next caller; the doubt stays, if there was any.
            keep = None if state.in_doubt else request.retention
            yield from record(request, "retryable", in_doubt=state.in_doubt, error=name_of(error), keep=keep)
            raise
    if not isinstance(answer, Unknown):
        return answer
    waited_seconds = clock() - begun
    if not state.in_doubt:
        # Asked first: of a call that we do not know of, we do not know either since when its key is remembered.
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
            f"already_applied returned a {type(answer).__name__}: return Applied(result), NotApplied() or Unknown()"
        )
    return answer
