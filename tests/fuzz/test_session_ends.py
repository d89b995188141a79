"""Every way to end, reset or leave a session's transaction, in every state: together it comes to what it is alone."""

from collections.abc import Iterator

import pytest

from outboxq.postgres import Server
from tests.fuzz.explore import run_and_compare
from tests.fuzz.lanes import ALONE, SHARED, Lane, open_lanes
from tests.fuzz.program import Block, Step, batch, block, given, step, task
from tests.support.matrices import diagonal

_HOWS = ("rollback", "close", "commit")
_LEAVING = ("rollback", "commit", "close", "reset", "expunge_all", "expire_all", "prepare", "flush")

WAYS: dict[str, tuple[Step | Block, ...]] = {
    **{f"transaction-{how}": (step("end_transaction", how, "context"),) for how in _HOWS},
    **{f"transaction-of-row-{how}": (step("end_transaction", how, "row"),) for how in _HOWS},
    **{f"savepoint-{how}": (step("leave_savepoint"), step("end_savepoint", how, "row")) for how in _HOWS},
    **{
        f"transaction-{how}-in-savepoint": (step("leave_savepoint"), step("end_transaction", how, "context"))
        for how in _HOWS
    },
    **{f"session-{how}": (step("leave_session", how, "context"),) for how in _LEAVING},
    **{f"session-of-row-{how}": (step("leave_session", how, "row"),) for how in _LEAVING},
    "begin-in-vain": (step("begin_in_vain", "a", "context"),),
    "begin-behind-commit": (step("commit"), step("begin_in_vain", "a", "row")),
    "undone": (block("undone", step("note", "b")),),
}
_CHANGE, _DEFER, _TELL = step("change", 0, 5), step("defer_value", "Account", 1, 7), step("tell", 1)
# Before, and behind it.
STATES: dict[str, tuple[tuple[Step, ...], tuple[Step, ...]]] = {
    "fresh": ((), ()),
    "changed": ((_CHANGE,), ()),
    "deferred": ((_DEFER,), ()),
    "deferred-and-changed-behind": ((_DEFER,), (_CHANGE,)),
    "jobs": ((_TELL,), ()),
    "jobs-and-changed": ((_TELL, _CHANGE), (_TELL, step("put", 0, 3))),
    "new-row": ((step("note", "c"),), ()),
    "listened-to": ((step("hook_begin", 1),), (_CHANGE,)),
    "sent": ((step("anything"),), (_CHANGE,)),
    "sent-and-changed": ((_CHANGE, step("anything"), _CHANGE), ()),
    "all": ((_DEFER, _CHANGE, _TELL), (_CHANGE, step("defer_update", "Account", 1, 3), _TELL)),
}


@pytest.fixture(scope="module")
def lanes(outboxq_server: Server) -> Iterator[list[Lane]]:
    with open_lanes(outboxq_server, ALONE, SHARED) as opened:
        yield opened


@pytest.mark.first_and_last
@diagonal(
    pytest.mark.parametrize("way", WAYS),
    pytest.mark.parametrize("state", STATES),
    pytest.mark.parametrize("caught", [True, False]),
    pytest.mark.parametrize("has_row", [True, False]),
    pytest.mark.parametrize("flavour", ["sync", "async"]),
)
def test_a_session_that_is_left_leaves_what_it_leaves_alone(
    way: str, state: str, caught: bool, has_row: bool, flavour: str, lanes: list[Lane]
) -> None:
    """The job, one before it whose change waits, and one behind it that is given the same row."""
    before, behind = STATES[state]
    ways = (block("swallowed", *WAYS[way]),) if caught else WAYS[way]
    row = (given("Account", 1),) if has_row else ()
    run_and_compare(
        lanes,
        batch(
            task(given("Account", 2), step("change", 0, 1)),
            task(*row, *before, *ways, *behind),
            task(given("Account", 1), step("change", 0, 2)),
            flavour=flavour,  # type: ignore[arg-type]
        ),
    )
