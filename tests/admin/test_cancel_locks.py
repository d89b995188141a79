"""Operators and relays lock a request and its job in the same order, so that neither is ended for a deadlock."""

from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text

from outboxq.admin import cancellation
from outboxq.outbox.cancel import CancelOutcome
from outboxq.statements.cancel import take_request
from tests.support.leases import lease
from tests.support.waiting import wait_until

JOB = "INSERT INTO outboxq.job (id, queue, kind, args) VALUES (:id, 'mail', 'send', '{}')"
BLOCKED = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()")


@pytest.mark.parametrize("outcome", ["discard", "dead"])
@pytest.mark.parametrize("again", ["terminate", "cancel_running"])
def test_an_operator_and_the_relay_that_ends_a_leased_job_never_wait_for_each_other(
    engine: Engine, again: str, outcome: CancelOutcome
) -> None:
    """The relay has the request, and then takes the job; the operator waits for it, and finds no job."""
    job_id = uuid4()
    with engine.begin() as connection:
        connection.execute(text(JOB), {"id": job_id})
        lease(connection, job_id, "1 hour")
        cancellation.cancel_running(connection, [job_id], outcome)

    def operate() -> object:
        with engine.begin() as connection:
            if again == "terminate":
                return cancellation.terminate(connection, job_id, outcome)
            return cancellation.cancel_running(connection, [job_id], outcome).cancelled

    with engine.connect() as relay, ThreadPoolExecutor(1) as threads:
        assert relay.execute(take_request(job_id)).scalar_one() == outcome
        answer = threads.submit(operate)
        wait_until(lambda: blocked(engine), "the operator to wait for the relay")
        relay.execute(text("DELETE FROM outboxq.job WHERE id = :id"), {"id": job_id})
        relay.commit()
        assert not answer.result()
    assert count(engine, "job") == count(engine, "dead_job") == 0


def blocked(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(BLOCKED).scalar_one())


def count(engine: Engine, table: str) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM outboxq.{table}")).scalar_one())
