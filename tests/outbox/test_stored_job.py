"""Jobs that are kept to be enqueued later: as JSON, and back."""

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from outboxq import NewJob, Unique, external
from outboxq.errors import PayloadError
from outboxq.outbox.stored_job import dump, load

report = external("report", queue="reports")


def same(one: NewJob, other: NewJob) -> bool:
    envelopes = [msgspec.structs.asdict(each.envelope) for each in (one, other)]
    return envelopes[0] == envelopes[1] and (one.args, one.entities, one.keys) == (
        other.args,
        other.entities,
        other.keys,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"priority": -3, "max_attempts": 4, "headers": {"a": "ü"}},
        {"delay": timedelta(hours=1, microseconds=5)},
        {"coalesce": "a", "every": timedelta(seconds=5)},
        {"group": "g", "expires": timedelta(minutes=1)},
        {"unique": Unique("u", for_=timedelta(hours=2))},
        {"unique": lambda tenant: f"tenant-{tenant}"},
        {"run_at": datetime(2027, 1, 2, 3, tzinfo=UTC)},
    ],
)
def test_a_stored_job_is_the_same_job_again(options):
    """Its arguments, as they were encoded, its queue, and all of its options."""
    new = report.options(**options).job(tenant=7, ratio=12345678901234567890, text="x")
    assert same(load(dump(new)), new)
    assert same(load(msgspec.json.encode(dump(new)).decode()), new)


def test_a_job_that_cannot_be_read_is_refused():
    """An option that this version does not know is not left out in silence."""
    stored = dump(report.job())
    with pytest.raises(PayloadError, match="newer version"):
        load({**stored, "weight": 3})
    with pytest.raises(PayloadError, match="cannot be read"):
        load("[]")
