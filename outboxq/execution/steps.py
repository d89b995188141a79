"""The steps that ride on a COMMIT, each with its own file: only this one names them."""

from collections.abc import Mapping, Sequence
from uuid import UUID

from sqlalchemy import Connection

from outboxq.events import Event
from outboxq.execution.batch_state import BatchState
from outboxq.execution.callback_batches import FinishBatches, batch_ids
from outboxq.execution.runtime import Runtime
from outboxq.execution.step import Step
from outboxq.execution.unique_keys import TakeKeys
from outboxq.outbox.unique import unique_adds


def steps_of(
    connection: Connection,
    batch: BatchState,
    events: Sequence[Event],
    runtime: Runtime,
    stands_for: Mapping[UUID, tuple[UUID, ...]] | None = None,
) -> list[Step]:
    """Make the steps of a transaction in which jobs of a batch end by these events; none for plain jobs.

    Args:
        stands_for: Jobs that others run for; by default the batch's.
    """
    found: list[Step] = []
    if runtime.keeper.kinds:
        stands_for = batch.stands_for if stands_for is None else stands_for
        found += runtime.keeper.steps(runtime.schema, events, stands_for, runtime.prepared_rows)
    if adds := unique_adds(connection):
        found.append(TakeKeys(runtime.schema, adds))
    if not batch.claimed.is_plain and (ids := batch_ids(batch.jobs)):
        found.append(FinishBatches(runtime.schema, ids))
    return found
