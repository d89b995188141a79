"""Fault points: named steps of a job, of `ctx.once` or of a wait, at which a test may kill the process, for example.

They cost nothing when unused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

JobFaultPoint: TypeAlias = Literal[
    "before-claim",
    "after-claim",
    "before-handler",
    "after-handler",
    "before-commit",
    "after-commit",
]
EffectFaultPoint: TypeAlias = Literal["before-call", "after-call", "after-record"]
ResultFaultPoint: TypeAlias = Literal["before-look", "after-look"]
# In the order in which a job passes them. In lease mode the claim is committed at "after-claim".
FAULT_POINTS: tuple[JobFaultPoint, ...] = get_args(JobFaultPoint)
# The steps of a call of `ctx.once`: its claim is committed before the first one, its result between the last two.
EFFECT_FAULT_POINTS: tuple[EffectFaultPoint, ...] = get_args(EffectFaultPoint)
# Before and after each poll of a wait for results, while its flag is set.
RESULT_FAULT_POINTS: tuple[ResultFaultPoint, ...] = get_args(ResultFaultPoint)

FaultPoint: TypeAlias = JobFaultPoint | EffectFaultPoint | ResultFaultPoint

_action: Callable[[FaultPoint], None] | None = None


def fault_point(name: FaultPoint) -> None:
    """Mark that this process passes the step `name`: call the action that a test has set by `fault_action`, if any."""
    if _action is not None:
        _action(name)


@contextmanager
def fault_action(action: Callable[[FaultPoint], None]) -> Iterator[None]:
    """Make every slot of this process call `action` within the block, with the name of each step that it passes."""
    global _action
    previous, _action = _action, action
    try:
        yield
    finally:
        _action = previous
