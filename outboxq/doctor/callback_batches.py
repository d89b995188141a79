"""A check for callback batches (`jobs.batch`) that have no jobs left, but whose callback was not added."""

from collections.abc import Iterator

from outboxq.codec.text import several
from outboxq.doctor.findings import CheckContext, Finding
from outboxq.doctor.formatting import age
from outboxq.statements.doctor import work as statements

# A relay sweeps once a minute.
_SWEPT_SECONDS = 300.0


def find_unfinished_batches(context: CheckContext) -> Iterator[Finding]:
    """Yield a finding if the callbacks of batches are missing although all jobs of the batches have ended.

    The callback is a job that a relay adds after all others of its batch. Only batches that were opened over five
    minutes ago count.
    """
    rows = context.rows(statements.stale_batches(context.schema, _SWEPT_SECONDS))
    over = [row for row in rows if row.is_over]
    if not over:
        return
    kinds = sorted({row.kind for row in over})
    yield Finding(
        "batch-unfinished",
        "warning",
        f"{several(len(over), 'batch is', 'batches are')} over, the oldest opened {age(over[0].age_seconds)} ago, and "
        f"the callbacks ({', '.join(kinds)}) were not added",
        {"batches": len(over), "oldest": str(over[0].id), "kinds": kinds, "age_seconds": over[0].age_seconds},
        "A relay adds them within a minute: start one of this version, see whether its log says that batches could "
        "not be swept, and whether its role has the rights that `outboxq roles --sql` prints.",
    )
