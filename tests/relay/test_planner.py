"""What a slot claims next, as its planner decides it: no claim is sent."""

from collections.abc import Callable

import pytest

from outboxq.database.driver import ANY_SERVER
from outboxq.execution.claim import Claimed, ClaimRequest
from outboxq.queue_limits import QueueLimits
from outboxq.relay.lease import RelayLease
from outboxq.relay.planner import Planner
from outboxq.relay.poller import Order
from outboxq.relay.state import RelayState
from outboxq.statements.claim import Sort
from outboxq.testing.transaction import unit_test_job

MakeState = Callable[..., RelayState]


def a_round(planner: Planner, tokens: tuple[int, bool, int, float | None], *, takes: Sort | None = None) -> list[Sort]:
    """The sorts that a round claims; each reservation is answered with `tokens`, and claims of `takes` take a job."""
    sorts = []
    for asked in planner.first(ANY_SERVER):
        if not isinstance(asked, ClaimRequest):
            asked.rows = [tokens]
            continue
        sorts.append(asked.sort)
        took = asked.sort is takes
        planner.record_claim(Claimed(asked, (unit_test_job(),) if took else ()), is_called=False)
        if took:
            break
    return sorts


def rated(make_state: MakeState) -> RelayState:
    state = make_state("ledger")
    state.flow.limits = {"ledger": QueueLimits(rate_jobs=10, rate_seconds=1.0, rate_burst=1)}
    state.flow.restricts = True
    return state


def test_due_jobs_have_their_turn_at_a_queue_that_is_held_for_its_rate(make_state: MakeState) -> None:
    """A hold ends a round, and is no sign that nothing waits: else each token went to a ready job."""
    state = rated(make_state)
    planner, firsts = Planner(state, Order(("ledger",))), []
    for _ in range(4):
        a_round(planner, (5, True, 0, 0.05))
        state.poller.release("ledger")
        firsts.append(a_round(planner, (5, True, 1, 0.0), takes=Sort.READY)[0])
        state.poller.release("ledger")
    assert firsts == [Sort.DUE] * 4


def test_suspects_that_have_gone_from_a_queue_with_a_rate_are_forgotten(
    make_state: MakeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no job waits there is no token either, and no claim that would show it."""
    state = rated(make_state)
    monkeypatch.setattr(RelayLease, "want", lambda _: True)
    state.quarantine.queues.add("ledger")
    assert a_round(Planner(state, Order(("ledger",))), (0, True, 0, None)) == []
    assert not state.quarantine.wait_in(("ledger",))
