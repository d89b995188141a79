"""A batch handler: one UPDATE for all jobs of the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import text

from benchmarks.apps.counting import COUNTER
from outboxq import BatchContext, BatchItem, Jobs

jobs = Jobs()

ADD_ALL = text(
    "UPDATE account SET balance = balance + paid.cents FROM "
    "(SELECT id, sum(cents) AS cents FROM unnest(CAST(:accounts AS int[]), CAST(:cents AS int[])) AS job (id, cents) "
    "GROUP BY id) AS paid WHERE account.id = paid.id"
)


@dataclass(frozen=True, slots=True)
class Payment:
    """The arguments of one job."""

    account: int
    cents: int
    reference: str


@jobs.batch_handler(Payment, queue="bench", kind="job", max_size=100)
def add_all(ctx: BatchContext, items: Sequence[BatchItem[Payment]]) -> None:
    """Change all accounts."""
    paid = [item.args for item in items]
    values = {"accounts": [each.account for each in paid], "cents": [each.cents for each in paid]}
    ctx.session.execute(ADD_ALL, values)
    COUNTER[0] += len(items)
