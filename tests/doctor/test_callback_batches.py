"""The doctor looks at batches that are over, and whose callbacks were not added."""

import pytest

from outboxq.postgres import Database
from tests.support.doctor import execute, named, only

OPEN = (
    "INSERT INTO outboxq.batch (id, callback, created_at) VALUES ('01980f3e-71c4-7000-8000-00000000000{n}', "
    "jsonb_build_object('kind', 'report', 'queue', 'reports'), now() - interval '{age}')"
)


@pytest.mark.wide
def test_a_batch_that_no_relay_has_swept_is_named(outboxq_database: Database) -> None:
    """Five minutes after it was opened, if no member is left; not one that has members, nor a young one."""
    url = outboxq_database.url
    execute(
        url,
        OPEN.format(n=1, age="10 minutes"),
        OPEN.format(n=2, age="1 minute"),
        "SELECT outboxq.add_job('credit', '{}', 'ledger')",
        "UPDATE outboxq.job SET batch_id = '01980f3e-71c4-7000-8000-000000000001'",
    )
    assert named(url, "batch-unfinished") == []
    execute(url, "DELETE FROM outboxq.job")
    found = only(url, "batch-unfinished")
    assert (found["severity"], found["detail"]["batches"], found["detail"]["kinds"]) == ("warning", 1, ["report"])
    assert found["detail"]["oldest"] == "01980f3e-71c4-7000-8000-000000000001"
    assert "start one of this version" in found["advice"]
