"""The doctor looks at cancellations that no relay answers."""

import pytest

from outboxq.postgres import Database
from tests.support.doctor import execute, named, only, open_session

OLD = "UPDATE outboxq.cancel_request SET requested_at = requested_at - interval '2 minutes'"


@pytest.mark.wide
def test_a_cancellation_that_no_relay_answers_is_named(outboxq_database: Database) -> None:
    """A minute after it was asked for, while the job runs on; not for a job that waits, or is gone."""
    url = outboxq_database.url
    execute(
        url,
        "SELECT outboxq.add_job('runs', '{}', 'q')",
        "SELECT outboxq.add_job('waits', '{}', 'q')",
        "UPDATE outboxq.job SET created_at = created_at - interval '1 hour'",
        "INSERT INTO outboxq.cancel_request (job_id) SELECT id FROM outboxq.job",
        "INSERT INTO outboxq.cancel_request (job_id) VALUES (gen_random_uuid())",
    )
    with open_session(url, "DELETE FROM outboxq.job WHERE kind = 'runs'"):
        assert named(url, "cancellation-unanswered") == []
        execute(url, OLD)
        found = only(url, "cancellation-unanswered")
        assert (found["detail"]["kind"], found["severity"]) == ("runs", "warning")
        assert "--running --force" in found["advice"]
    assert named(url, "cancellation-unanswered") == []
