"""A batch that the relay takes away from its slot while a handler runs."""

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from outboxq import Context, Jobs, OutboxSession
from outboxq.execution.batch_state import BatchState
from outboxq.execution.claim import Claimed
from outboxq.execution.errors import Abandoned
from outboxq.relay.slot import Slot
from tests.support.ledger import waiting
from tests.support.slots import relay_state, slot_connection_on


def test_no_other_job_of_a_batch_begins_once_the_batch_was_taken_away(
    engine: Engine, sessions: sessionmaker[OutboxSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their effects outside of the database would come twice, and the wrong job would be charged."""
    jobs, begun, batches = Jobs(), list[int](), list[BatchState]()
    made = BatchState.of

    @jobs.handler(queue="ledger")
    def act(ctx: Context, number: int) -> None:
        begun.append(number)
        assert batches[-1].owner.seize() == (number == 1)

    def noting(claimed: Claimed) -> BatchState:
        batches.append(made(claimed))
        return batches[-1]

    monkeypatch.setattr(BatchState, "of", noting)
    with sessions.begin() as session:
        session.add_jobs(act.job(number=number) for number in (1, 2, 3))
    state = relay_state(engine, ("ledger",), batch_size=10)
    state.registry = jobs.resolve()
    slot = Slot(state, "sync", ("ledger",), (), lambda: None)
    with engine.connect() as connection, pytest.raises(Abandoned):
        slot.work(slot_connection_on(connection))
    state.effect_runners.dispose(lambda _: None)
    assert begun == [1]
    assert waiting(engine) == 3
