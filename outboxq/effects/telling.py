"""Events that report the outcome of each call of `once` to hooks."""

from collections.abc import Callable
from typing import TypeVar

from outboxq.effects.steps import Call, Steps
from outboxq.errors import EffectConflict, EffectFailed, EffectInProgress, EffectUnknown
from outboxq.events import EffectCalled, EffectOutcome

T = TypeVar("T")

_OUTCOMES: dict[type[BaseException], EffectOutcome] = {
    EffectInProgress: "in_progress",
    EffectConflict: "conflict",
    EffectFailed: "refused",
    EffectUnknown: "unknown",
}


def telling(steps: Steps[T], scope: str, tell: Callable[[EffectCalled], None]) -> Steps[T]:
    """Yield the steps of a call of `once`, and at its end call `tell` with an event of its outcome."""
    is_called = False
    try:
        step = next(steps)
        while True:
            is_called = is_called or isinstance(step, Call)
            try:
                answer = yield step
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as error:  # noqa: BLE001  # the protocol decides, and raises it again
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        tell(EffectCalled(scope, "called" if is_called else "replayed"))
        return end.value  # type: ignore[no-any-return]  # a generator's value is in an untyped attribute
    except GeneratorExit:
        raise
    except BaseException as error:
        tell(EffectCalled(scope, _OUTCOMES.get(type(error), "failed")))
        raise
