"""Operators and relays lock a request and its job in the same order, so that neither is ended for a deadlock."""

from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text

from outboxq.admin import cancellation
from outboxq.outbox.cancel import CancelOutcome, Requested
from outboxq.statements.cancel import request, take_request
from tests.support.leases import lease
from tests.support.waiting import wait_until

JOB = "INSERT INTO outboxq.job (id, queue, kind, args) VALUES (:id, 'mail', 'send', '{}')"
BLOCKED = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()")


@pytest.mark.parametrize("outcome", ["discard", "dead"])
def test_an_operator_and_the_relay_that_ends_a_leased_job_never_wait_for_each_other(
    engine: Engine, outcome: CancelOutcome
) -> None:
    """The relay has the request, and then takes the job; the operator waits for it, and finds no job."""
    job_id = uuid4()
    with engine.begin() as connection:
        connection.execute(text(JOB), {"id": job_id})
        lease(connection, job_id, "1 hour")
        cancellation.cancel_running(connection, [job_id], outcome)

    def operate() -> object:
        with engine.begin() as connection:
            return cancellation.terminate(connection, job_id, outcome)

    with engine.connect() as relay, ThreadPoolExecutor(1) as threads:
        assert relay.execute(take_request(job_id, None)).scalar_one() == outcome
        answer = threads.submit(operate)
        wait_until(lambda: blocked(engine), "the operator to wait for the relay")
        relay.execute(text("DELETE FROM outboxq.job WHERE id = :id"), {"id": job_id})
        relay.commit()
        assert not answer.result()
    assert count(engine, "job") == count(engine, "dead_job") == 0


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("again", ["discard", "dead"])
def test_a_second_cancellation_does_not_wait_for_the_relay_that_answers_the_first(
    engine: Engine, again: CancelOutcome, commits: bool
) -> None:
    """The relay may run other jobs of its batch for long. If it is rolled back, the first request stands."""
    job_id = uuid4()
    with engine.begin() as connection:
        connection.execute(text(JOB), {"id": job_id})
        connection.execute(request([job_id], "discard"))
    with engine.connect() as relay:
        relay.execute(text("DELETE FROM outboxq.job WHERE id = :id"), {"id": job_id})
        assert relay.execute(take_request(job_id, None)).scalar_one() == "discard"
        with engine.begin() as connection:
            connection.execute(text("SET LOCAL lock_timeout = '100ms'"))
            assert cancellation.cancel_running(connection, [job_id], again) == Requested((), (job_id,), ())
        if commits:
            relay.commit()
    assert count(engine, "job") == count(engine, "cancel_request") == (0 if commits else 1)


def test_a_second_cancellation_of_a_coalesced_job_does_not_wait_either(engine: Engine) -> None:
    """Its run may have taken over the time of a job that was added after the request, which counts all the same."""
    job_id = uuid4()
    renewed = "UPDATE outboxq.job SET unique_key = 'k', created_at = created_at + interval '1 hour'"
    with engine.begin() as connection:
        connection.execute(text(JOB), {"id": job_id})
        connection.execute(request([job_id], "discard"))
        connection.execute(text(renewed))
    with engine.connect() as relay:
        relay.execute(text("DELETE FROM outboxq.job WHERE id = :id"), {"id": job_id})
        assert relay.execute(take_request(job_id, None)).scalar_one() == "discard"
        with engine.begin() as connection:
            connection.execute(text("SET LOCAL lock_timeout = '100ms'"))
            assert cancellation.cancel_running(connection, [job_id], "discard") == Requested((), (job_id,), ())
        relay.commit()
    assert count(engine, "job") == count(engine, "cancel_request") == 0


def test_another_outcome_is_asked_for_if_no_relay_answers_yet(engine: Engine) -> None:
    """The later request says what is to become of the job; a job that was not asked for is asked for with it."""
    first, second = uuid4(), uuid4()
    with engine.begin() as connection:
        connection.execute(text(JOB), [{"id": first}, {"id": second}])
        connection.execute(request([first], "discard"))
        asked = connection.execute(request([first, second, uuid4()], "dead")).scalars()
        assert set(asked) == {first, second}
        outcomes = connection.execute(text("SELECT DISTINCT outcome FROM outboxq.cancel_request")).scalars()
        assert outcomes.all() == ["dead"]


@pytest.mark.parametrize("outcome", ["discard", "dead"])
def test_only_a_job_that_was_asked_for_is_ended_when_it_waits_again(engine: Engine, outcome: CancelOutcome) -> None:
    """Not a later one of its id: the job that was asked for is over, and its request is older than this one."""
    returned, later = uuid4(), uuid4()
    with engine.begin() as connection:
        connection.execute(text(JOB), [{"id": returned}, {"id": later}])
        connection.execute(request([returned, later], outcome))
        connection.execute(text("UPDATE outboxq.job SET created_at = clock_timestamp() WHERE id = :id"), {"id": later})
    with engine.begin() as connection:
        assert cancellation.progress(connection, [returned, later]) == {returned: "waiting", later: "over"}
        assert cancellation.end_returned(connection, [returned, later], outcome) == (returned,)
        assert not cancellation.terminate(connection, later, outcome)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT id FROM outboxq.job")).scalars().all() == [later]
        assert connection.execute(text("SELECT job_id FROM outboxq.cancel_request")).scalars().all() == [later]


def blocked(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(BLOCKED).scalar_one())


def count(engine: Engine, table: str) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM outboxq.{table}")).scalar_one())
