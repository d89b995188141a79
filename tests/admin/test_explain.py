"""`explain_job` and `explain_queue`: each reason, brought about by producers, relays, sessions and operators."""

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, insert, text, update
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, Jobs, OutboxSession, RelayConfig, Snooze
from outboxq.admin import kinds, queues
from outboxq.admin.cancellation import cancel_running
from outboxq.admin.explain import CODES, Explanation, explain_job, explain_queue
from outboxq.admin.reasons.absent import made_at_of
from outboxq.admin.reasons.looks import Looks
from outboxq.errors import ArgumentError
from outboxq.events import JobDied, JobDone, JobRetried, JobSnoozed, JobsParked
from outboxq.migrations.runner import migrate
from outboxq.new_job import NewJob
from outboxq.postgres import Database
from outboxq.queue_limits import make_limits
from outboxq.statements.claim import ClaimStatements
from outboxq.statements.render import quote_identifier, quote_literal
from outboxq.tables import job as job_table
from outboxq.testing.relay_process import RelayProcess
from tests.admin.test_roles import Cast
from tests.admin.test_roles import roles as roles
from tests.conftest import StartRelay
from tests.doctor.test_sessions import gid as gid
from tests.support import app
from tests.support.doctor import execute, open_session
from tests.support.leases import lease
from tests.support.ledger import rows
from tests.support.urls import libpq_url
from tests.support.waiting import PATIENCE, wait_until

RELAY = "outboxq relay"
LATER = Backoff(max_attempts=5, first_seconds=3_600.0, cap_seconds=3_600.0, jitter=0.0)
TIRED = Backoff(max_attempts=1)

jobs = Jobs()


class Gate:
    """A handler that waits: whether it has begun, and that it may go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self.begun.set()
        assert self.go_on.wait(PATIENCE)


gates: dict[str, Gate] = {}


@pytest.fixture
def gate() -> Iterator[Gate]:
    """The gate of the handlers `wait` and `wait_leased`; open at the end of the test."""
    gates["here"] = Gate()
    yield gates["here"]
    gates.pop("here").go_on.set()


@jobs.handler(queue="mail", retry=LATER)
def send(ctx: Context, name: str = "") -> None: ...


@jobs.handler(queue="mail", retry=LATER, group=lambda key: key)
def send_in_order(ctx: Context, key: str) -> None: ...


@jobs.handler(queue="mail", retry=LATER, group=lambda key: key)
def fail_in_order(ctx: Context, key: str) -> None:
    raise ValueError("no luck")


@jobs.handler(queue="mail", retry=LATER, coalesce="index")
def rebuild(ctx: Context, version: int) -> None: ...


@jobs.handler(queue="mail", retry=LATER)
def fail(ctx: Context) -> None:
    raise ValueError("no luck")


@jobs.handler(queue="mail", retry=TIRED)
def die(ctx: Context) -> None:
    raise ValueError("no luck at all")


@jobs.handler(queue="mail")
def put_off(ctx: Context) -> Snooze:
    return Snooze(timedelta(hours=1))


@jobs.handler(queue="mail")
def wait(ctx: Context) -> None:
    gates["here"].pass_through()


@jobs.handler(queue="mail")
def wait_for_row(ctx: Context) -> None:
    gates["here"].begun.set()
    ctx.session.execute(text("UPDATE account SET balance = 1"))


@jobs.handler(queue="held", claim="lease")
def wait_leased(ctx: Context) -> None:
    gates["here"].pass_through()


# A registry that serves the queue of the others, and knows none of their kinds.
strangers = Jobs()


@strangers.handler(queue="mail")
def unheard_of(ctx: Context) -> None: ...


def add(sessions: sessionmaker[OutboxSession], *new: NewJob) -> list[UUID]:
    with sessions.begin() as session:
        return [handle.id for handle in session.add_jobs(new)]


def of_job(engine: Engine, job_id: UUID) -> Explanation:
    with engine.connect() as connection:
        return explain_job(connection, job_id)


def of_queue(engine: Engine, queue: str = "mail") -> Explanation:
    with engine.connect() as connection:
        return explain_queue(connection, queue)


def codes(found: Explanation) -> list[str]:
    return [reason.code for reason in found.reasons]


@pytest.fixture
def served(outboxq_database: Database) -> Iterator[None]:
    """A connection of a relay that does nothing."""
    with open_session(outboxq_database.url, "SELECT 1", name=RELAY):
        yield


def test_a_job_that_is_not_there_is_done_or_was_never_committed(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Both are said, for nothing tells them apart; and when its id was made."""
    (job_id,) = add(sessions, send.job())
    with start_relay(jobs) as running:
        wait_until(lambda: running.of(JobDone), "the job to be done")
    found = of_job(engine, job_id)
    assert codes(found) == ["not-found"]
    assert (found.queue, found.kind) == (None, None)
    assert "done" in found.verdict.text
    assert "never committed" in found.verdict.text
    made_at = made_at_of(job_id)
    assert made_at is not None
    assert abs(datetime.now(UTC) - made_at) < timedelta(minutes=10)
    assert f"{made_at:%H:%M:%S}" in found.verdict.text
    never = of_job(engine, uuid4())
    assert (codes(never), never.verdict.details["made_at"]) == (["not-found"], None)


def test_a_finished_job_that_is_kept_says_how_it_ended(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Of a kind with `keep=`: where it went, and where the rest of it is to be seen."""
    keeping = Jobs()

    @keeping.handler(queue="mail", keep=timedelta(days=7))
    def deliver(ctx: Context) -> None: ...

    (job_id,) = add(sessions, deliver.job())
    with start_relay(keeping) as running:
        wait_until(lambda: running.of(JobDone), "the job to be done")
    found = of_job(engine, job_id)
    assert codes(found) == ["kept-done"]
    assert (found.verdict.details["outcome"], found.verdict.details["kind"]) == ("done", "deliver")
    assert f"outboxq done show {job_id}" in found.verdict.advice


def test_a_producer_that_has_not_committed_is_named(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """Its session has flushed the job, and nothing more; another one that has only locked a job is not named."""
    add(sessions, wait_leased.job())
    with open_session(outboxq_database.url, "SELECT FROM outboxq.job FOR UPDATE"), sessions() as session:
        job_id = session.add_job(send).id
        assert codes(of_job(engine, job_id)) == ["not-found"]
        session.flush()
        pid = session.scalar(text("SELECT pg_backend_pid()"))
        found = of_job(engine, job_id)
        assert codes(found) == ["not-committed", "not-found"]
        assert found.verdict.details["pid"] == pid
        assert codes(of_queue(engine))[:2] == ["not-committed", "queue-empty"]
        # A job of an hour ago is not of a transaction that began now.
        old = UUID(int=job_id.int - (3_600_000 << 80))
        assert codes(of_job(engine, old)) == ["not-found"]
        session.commit()
    assert codes(of_job(engine, job_id)) == ["no-relay"]


def test_a_producer_that_is_prepared_is_named(outboxq_database: Database, engine: Engine, gid: str) -> None:
    """It has no session, and may wait for its coordinator for days."""
    with psycopg.connect(libpq_url(outboxq_database.url), autocommit=True) as connection:
        connection.execute("BEGIN")
        row = connection.execute("SELECT outboxq.add_job('send', '{}', 'mail')").fetchone()
        assert row is not None
        connection.execute(f"PREPARE TRANSACTION {quote_literal(gid)}")
        try:
            found = of_job(engine, row[0])
            assert codes(found) == ["not-committed", "not-found"]
            assert found.verdict.details["gid"] == gid
        finally:
            connection.execute(f"ROLLBACK PREPARED {quote_literal(gid)}")
    assert codes(of_job(engine, row[0])) == ["not-found"]


@pytest.mark.wide
def test_a_dead_letter_is_named_with_its_reason(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """With what it died of."""
    (job_id,) = add(sessions, die.job())
    with start_relay(jobs) as running:
        wait_until(lambda: running.of(JobDied), "the job to die")
    found = of_job(engine, job_id)
    assert codes(found) == ["dead"]
    assert "gave up after 1 of 1 attempts: ValueError" in found.verdict.text
    assert found.verdict.details["queue"] == "mail"


def test_the_callback_of_an_open_batch_waits_for_its_jobs(
    engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """It is no job yet; its id is that of the batch, and its queue is empty."""
    with sessions.begin() as session, jobs.batch(session, on_done=wait_leased.job()) as batch:
        session.add_jobs(batch.of(send.job() for _ in range(3)))
    found = of_job(engine, batch.id)
    assert codes(found) == ["waits-for-batch"]
    assert (found.verdict.details["members"], found.verdict.details["queue"]) == (3, "held")
    waiting = of_queue(engine, "held")
    assert codes(waiting)[:2] == ["waits-for-batch", "queue-empty"]


def test_an_empty_queue_is_named(engine: Engine) -> None:
    """With what would keep its jobs waiting."""
    found = of_queue(engine, "nothing")
    assert codes(found) == ["queue-empty", "no-relay"]
    assert (found.job_id, found.queue) == (None, "nothing")
    with engine.connect() as connection, pytest.raises(ArgumentError):
        explain_queue(connection, "")


def test_a_job_that_runs_is_named_with_its_session(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, gate: Gate
) -> None:
    """And nothing else: what else holds for its queue does not hold it up."""
    (job_id,) = add(sessions, wait.job())
    with start_relay(jobs):
        assert gate.begun.wait(PATIENCE)
        with engine.begin() as connection:
            queues.pause(connection, ["mail"])
        found = of_job(engine, job_id)
        assert codes(found) == ["running"]
        assert found.verdict.details["application_name"] == RELAY
        assert found.verdict.details["attempt"] == 1
        # The queue's next job is the one that runs: there is no other.
        whole = of_queue(engine)
        assert (codes(whole), whole.job_id) == (["queue-paused", "running"], job_id)
        gate.go_on.set()


def test_a_job_that_waits_for_a_lock_is_named_with_what_blocks_it(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay,
    gate: Gate,
) -> None:  # fmt: skip
    """By pg_blocking_pids, which finds the session that holds the lock."""
    url = outboxq_database.url
    execute(url, "INSERT INTO account (id, balance) VALUES (1, 0)")
    with psycopg.connect(libpq_url(url)) as blocker, start_relay(jobs) as running:
        blocker.execute("UPDATE account SET balance = 2")
        (job_id,) = add(sessions, wait_for_row.job())
        assert gate.begun.wait(PATIENCE)
        found = wait_until(
            lambda: (one := of_job(engine, job_id)).verdict.code == "running-blocked" and one, "the handler to wait"
        )
        assert found.verdict.details["blocked_by"] == [str(blocker.info.backend_pid)]
        blocker.rollback()
        wait_until(lambda: running.of(JobDone), "the job to be done")


@pytest.mark.wide
def test_a_cancellation_that_is_not_answered_yet_is_named(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """The process of the relay is stopped, so that it cannot answer."""
    (job_id,) = add(sessions, app.record_slowly.job(name="slow", seconds=300.0))
    with RelayProcess("tests.support.app:jobs", outboxq_database.url, name=RELAY) as relay:
        wait_until(lambda: codes(of_job(engine, job_id)) == ["running"], "the job to run")
        relay.pause()
        with engine.begin() as connection:
            cancel_running(connection, [job_id])
        assert codes(of_job(engine, job_id)) == ["cancelling", "running"]
        relay.kill()


def test_a_session_that_has_locked_the_row_is_named(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], served: None
) -> None:
    """Also if it did so behind a savepoint, whose transaction id is another one."""
    (job_id,) = add(sessions, send.job())
    for statement in ("SELECT FROM outboxq.job FOR UPDATE", "SAVEPOINT a; SELECT FROM outboxq.job FOR UPDATE"):
        with open_session(outboxq_database.url, *statement.split("; "), name="psql") as pid:
            found = of_job(engine, job_id)
            assert codes(found) == ["held-by-session"], statement
            assert (found.verdict.details["pid"], found.verdict.details["application_name"]) == (pid, "psql")
    assert codes(of_job(engine, job_id)) == ["due-now"]


def test_a_prepared_transaction_that_holds_the_row_is_named(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], gid: str
) -> None:
    """By the name with which it can be ended."""
    (job_id,) = add(sessions, send.job())
    execute(outboxq_database.url, f"BEGIN; DELETE FROM outboxq.job; PREPARE TRANSACTION {quote_literal(gid)}")
    try:
        found = of_job(engine, job_id)
        assert codes(found) == ["held-by-prepared-transaction"]
        assert found.verdict.details["gid"] == gid
    finally:
        execute(outboxq_database.url, f"ROLLBACK PREPARED {quote_literal(gid)}")


def test_a_leased_job_is_named_with_its_relay(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, gate: Gate
) -> None:
    """No transaction is open while it runs."""
    (job_id,) = add(sessions, wait_leased.job())
    with start_relay(jobs):
        assert gate.begun.wait(PATIENCE)
        found = of_job(engine, job_id)
        assert codes(found) == ["leased"]
        assert found.verdict.details["attempt"] == 1
        assert found.verdict.details["pid"] is not None
        gate.go_on.set()


def test_a_lease_of_a_dead_relay_is_named(engine: Engine, sessions: sessionmaker[OutboxSession]) -> None:
    """Together with the want of a relay that would take it back."""
    (job_id,) = add(sessions, send.job())
    with engine.begin() as connection:
        lease(connection, job_id, "-1 hour")
    found = of_job(engine, job_id)
    assert codes(found) == ["lease-orphaned", "no-relay"]
    assert -3_700 < float(str(found.verdict.details["lease_seconds"])) < -3_500


def test_an_expired_job_is_named(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], served: None
) -> None:
    """And one whose time comes only after it has expired."""
    expired, late = add(sessions, *(send.options(expires=timedelta(hours=1)).job() for _ in range(2)))
    assert codes(of_job(engine, expired)) == ["due-now"]
    execute(
        outboxq_database.url,
        f"UPDATE outboxq.job SET expires_at = now() - interval '5 minutes' WHERE id = '{expired}'",
        f"UPDATE outboxq.job SET state = 'scheduled', run_at = now() + interval '2 hours' WHERE id = '{late}'",
    )
    assert of_job(engine, expired).verdict.code == "expired"
    assert codes(of_job(engine, late)) == ["expires-first", "scheduled"]


def test_suspects_are_named_with_those_before_them(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """They run alone, since their relay was killed with them."""
    ids = add(sessions, *(app.record_slowly.job(name="slow", seconds=300.0) for _ in range(2)))
    with RelayProcess(
        "tests.support.app:jobs", outboxq_database.url, RelayConfig(slots_per_queue=2, batch_size=1), name=RELAY
    ) as relay:
        for job_id in ids:
            wait_until(lambda job_id=job_id: codes(of_job(engine, job_id)) == ["running"], "the job to run")
        relay.kill()
    for job_id in ids:
        wait_until(lambda job_id=job_id: codes(of_job(engine, job_id)) != ["running"], "the server to end the session")
    # The next claim finds the marks of the one that died.
    execute(outboxq_database.url, ClaimStatements("outboxq", "ledger").ready.text(10))
    found = [of_job(engine, job_id) for job_id in ids]
    assert [each.verdict.code for each in found] == ["suspect", "suspect"]
    assert [each.verdict.details["ahead"] for each in found] == [0, 1]


def test_a_job_of_a_later_time_is_scheduled(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """By its producer, or by its handler."""
    (delayed,) = add(sessions, send.options(delay=timedelta(hours=1)).job())
    (snoozed,) = add(sessions, put_off.job())
    with start_relay(jobs) as running:
        wait_until(lambda: running.of(JobSnoozed), "the job to be put off")
        for job_id in (delayed, snoozed):
            found = of_job(engine, job_id)
            assert codes(found) == ["scheduled"]
            assert 3_500 < float(str(found.verdict.details["due_in_seconds"])) <= 3_600
        assert codes(of_queue(engine)) == ["scheduled"]


def test_a_job_that_failed_is_named_with_its_error(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Which attempt comes next, and why the last one failed."""
    (job_id,) = add(sessions, fail.job())
    with start_relay(jobs) as running:
        wait_until(lambda: running.of(JobRetried), "the job to fail")
        found = of_job(engine, job_id)
    assert codes(found) == ["retrying"]
    assert "attempt 2" in found.verdict.text
    assert "ValueError: no luck" in found.verdict.text


def test_a_kind_that_no_relay_knows_is_named(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Once a relay has looked."""
    (job_id,) = add(sessions, send.job())
    with start_relay(strangers) as running:
        wait_until(lambda: running.of(JobsParked), "the job to be parked")
        found = of_job(engine, job_id)
    assert codes(found) == ["kind-unknown"]
    assert found.verdict.details["kind"] == "send"


def test_a_paused_kind_is_named(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, served: None
) -> None:
    """Before a relay has put the job off, and after that."""
    with engine.begin() as connection:
        kinds.pause(connection, "mail", ["send"])
    (job_id,) = add(sessions, send.job())
    assert codes(of_job(engine, job_id)) == ["kind-paused"]
    with start_relay(jobs):
        wait_until(
            lambda: "looked at again" in of_job(engine, job_id).verdict.text, "the job to be put off"
        )  # fmt: skip
        assert codes(of_job(engine, job_id)) == ["kind-paused"]


def test_the_first_job_of_a_group_is_named_with_its_own_reason(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, served: None
) -> None:
    """That one failed, and holds up the others; a job of another group is not held up."""
    first, second, third = add(sessions, fail_in_order.job(key="a"), *(send_in_order.job(key="a") for _ in range(2)))
    found = of_job(engine, second)
    assert (codes(found), found.verdict.details["head_code"]) == (["behind-in-group"], None)
    with start_relay(jobs) as running:
        wait_until(lambda: running.of(JobRetried), "the first job to fail")
    assert codes(of_job(engine, first)) == ["retrying"]
    found = of_job(engine, third)
    assert codes(found) == ["behind-in-group"]
    details = found.verdict.details
    assert (details["head"], details["head_code"], details["ahead"], details["group"]) == (
        str(first), "retrying", 2, "a",
    )  # fmt: skip
    assert "ValueError: no luck" in found.verdict.text
    (other,) = add(sessions, send_in_order.job(key="b"))
    assert codes(of_job(engine, other)) == ["due-now"]
    with engine.begin() as connection:
        queues.set_limits(connection, ["mail"], make_limits(per_group=2))
    assert codes(of_job(engine, second)) == ["due-now"]
    assert codes(of_job(engine, third)) == ["behind-in-group"]


def test_a_locked_table_is_named_and_not_waited_for(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], served: None
) -> None:
    """With a lock that lets readers in, and with one that does not."""
    (job_id,) = add(sessions, send.job())
    url = outboxq_database.url
    with open_session(url, "LOCK TABLE outboxq.job IN SHARE MODE") as pid:
        found = of_job(engine, job_id)
        assert (codes(found), found.verdict.details["pid"]) == (["table-locked"], pid)
    with open_session(url, "LOCK TABLE outboxq.job IN ACCESS EXCLUSIVE MODE") as pid:
        for found in (of_job(engine, job_id), of_queue(engine)):
            assert codes(found) == ["table-locked", "not-known"]
            assert found.verdict.details["pid"] == pid
            assert "a table is locked by another session" in found.reasons[1].text


def test_a_paused_queue_is_named(
    engine: Engine, sessions: sessionmaker[OutboxSession], served: None
) -> None:  # fmt: skip
    """Of a queue, and of a job in it; another queue goes on."""
    (job_id,) = add(sessions, send.job())
    with engine.begin() as connection:
        queues.pause(connection, ["mail"])
    assert codes(of_job(engine, job_id)) == ["queue-paused"]
    found = of_queue(engine)
    assert (codes(found), found.job_id) == (["queue-paused"], job_id)
    with engine.begin() as connection:
        queues.resume(connection, ["mail"])
        queues.pause(connection, ["held"])
    assert codes(of_job(engine, job_id)) == ["due-now"]


def test_the_want_of_a_relay_is_named(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """A relay is seen by the name of its connections, or by its lease."""
    (job_id,) = add(sessions, send.job())
    assert codes(of_job(engine, job_id)) == codes(of_queue(engine)) == ["no-relay"]
    with open_session(outboxq_database.url, "SELECT 1", name=RELAY):
        assert codes(of_job(engine, job_id)) == ["due-now"]
    execute(outboxq_database.url, f"INSERT INTO outboxq.relay VALUES ('{uuid4()}', now() + interval '1 hour')")
    assert codes(of_job(engine, job_id)) == ["due-now"]


@pytest.fixture(params=["operators", "application"])
def limited(request: pytest.FixtureRequest, engine: Engine) -> Callable[..., Jobs]:
    """Limits the queue `mail`, by a command or in the application's code; the handlers for a relay."""

    def limit(**limits: Any) -> Jobs:
        if request.param == "operators":
            with engine.begin() as connection:
                queues.set_limits(connection, ["mail"], make_limits(**limits))
            return jobs
        declaring = Jobs()
        declaring.include(jobs)
        declaring.limit("mail", **limits)
        return declaring

    return limit


@pytest.mark.wide
def test_a_full_limit_is_named(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    gate: Gate,
    limited: Callable[..., Jobs],
) -> None:
    """One job runs, and one may."""
    registry = limited(running=1)
    first, second = add(sessions, wait.job(), wait.job())
    with start_relay(registry):
        wait_until(lambda: rows(engine, "SELECT FROM outboxq.relay_status"), "the relay to be listed")
        assert gate.begun.wait(PATIENCE)
        assert codes(of_job(engine, first)) == ["running"]
        found = of_job(engine, second)
        # The one that runs is not among those that come first.
        assert codes(found) == ["queue-limited"]
        assert (found.verdict.details["running"], found.verdict.details["limit"]) == (1, 1)
        assert codes(of_queue(engine))[0] == "queue-limited"
        gate.go_on.set()


@pytest.mark.wide
def test_a_session_that_holds_the_limit_is_named(
    outboxq_database: Database,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    limited: Callable[..., Jobs],
) -> None:
    """Any login may take the advisory locks of relays: nothing runs, and something is in the way."""
    registry = limited(running=1)
    taken = "SELECT pg_advisory_lock(hashtext('outboxq_outboxq limit'), hashtext('mail' || chr(31) || 0))"
    with start_relay(registry):
        wait_until(lambda: rows(engine, "SELECT FROM outboxq.relay_status"), "the relay to be listed")
        with open_session(outboxq_database.url, taken, name="intruder") as pid:
            (job_id,) = add(sessions, send.job())
            found = of_job(engine, job_id)
            assert codes(found)[0] == codes(of_queue(engine))[0] == "turn-held"
            assert (found.verdict.details["pid"], found.verdict.details["application_name"]) == (pid, "intruder")
        wait_until(lambda: codes(of_job(engine, job_id)) == ["not-found"], "the job to be done")
    # Claims of leases count one at a time, under a lock of the queue's name.
    (job_id,) = add(sessions, send.job())
    execute(
        outboxq_database.url,
        "INSERT INTO outboxq.queue (name, max_running) VALUES ('mail', 2) "
        "ON CONFLICT (name) DO UPDATE SET max_running = 2",
    )
    with open_session(outboxq_database.url, taken.replace("'mail' || chr(31) || 0", "'mail'")):
        assert "turn-held" in codes(of_job(engine, job_id))


@pytest.mark.wide
def test_a_session_that_holds_a_group_is_named(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Its pid, login and application, and since when; of other groups nothing is said."""
    taken = (
        "SELECT pg_advisory_lock(hashtext('outboxq_outboxq group'), hashtext('mail' || chr(31) || 'g' || chr(31) || 1))"
    )
    with start_relay(jobs):
        wait_until(lambda: rows(engine, "SELECT FROM outboxq.relay_status"), "the relay to be listed")
        with open_session(outboxq_database.url, taken, name="intruder") as pid:
            (job_id,) = add(sessions, send_in_order.job(key="g"))
            found = of_job(engine, job_id)
            assert codes(found)[0] == "turn-held"
            assert (found.verdict.details["pid"], found.verdict.details["login"]) == (pid, engine.url.username)
            (other,) = add(sessions, send_in_order.job(key="h"))
            wait_until(lambda: codes(of_job(engine, other)) == ["not-found"], "the other group's job to be done")
        wait_until(lambda: codes(of_job(engine, job_id)) == ["not-found"], "the job to be done")


@pytest.mark.wide
def test_a_rate_is_named_with_the_time_of_the_next_job(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, limited: Callable[..., Jobs]
) -> None:
    """Of two jobs an hour the second one is half an hour away."""
    registry = limited(rate="2/h")
    first, second = add(sessions, send.job(), send.job())
    with start_relay(registry) as running:
        wait_until(lambda: running.of(JobDone), "the first job to be done")
        assert codes(of_job(engine, first)) == ["not-found"]
        found = wait_until(
            lambda: (one := of_job(engine, second)).verdict.code == "rate-limited" and one, "the second one to wait"
        )
    assert 1_700 < float(str(found.verdict.details["wait_seconds"])) <= 1_800
    assert found.verdict.details["rate"] == "2/h"


def test_a_newer_job_of_the_same_key_stands_for_it(
    engine: Engine, sessions: sessionmaker[OutboxSession], served: None
) -> None:
    """One run with the newest arguments is for both; the newest one itself only waits for its turn."""
    older, newer = add(sessions, rebuild.job(version=1), rebuild.job(version=2))
    found = of_job(engine, older)
    assert codes(found) == ["coalesced", "due-now"]
    assert (found.verdict.details["newest"], found.verdict.details["jobs"]) == (str(newer), 2)
    assert codes(of_job(engine, newer)) == ["behind-others"]


def test_a_newer_job_of_the_same_key_that_is_to_run_later_stands_for_none(
    engine: Engine, sessions: sessionmaker[OutboxSession], served: None
) -> None:
    """A run takes along what may run by then: its producer has set the other one's time."""
    later = timedelta(hours=1)
    older, newer = add(sessions, rebuild.job(version=1), rebuild.options(delay=later).job(version=2))
    assert codes(of_job(engine, older)) == ["due-now"]
    assert codes(of_job(engine, newer)) == ["scheduled"]


def test_a_suspect_that_runs_counts_once(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """In transaction mode it has a lease besides its place in the limit: one job runs, and two may."""
    with engine.begin() as connection:
        queues.set_limits(connection, ["mail"], make_limits(running=2))
    suspect, other = add(sessions, send.job(), send.job())
    owner = "INSERT INTO outboxq.relay (id, alive_until) VALUES (gen_random_uuid(), clock_timestamp() + interval '1 h')"
    execute(
        outboxq_database.url,
        owner,
        "UPDATE outboxq.job SET state = 'leased', crashes = 1, lease_owner = (SELECT id FROM outboxq.relay) "
        f"WHERE id = '{suspect}'",
    )
    place = "SELECT pg_advisory_xact_lock(hashtext('outboxq_outboxq limit'), hashtext('mail' || chr(31) || 0))"
    with open_session(outboxq_database.url, place, name=RELAY):
        assert codes(of_job(engine, other)) == ["due-now"]


def test_jobs_that_come_before_it_are_counted(
    engine: Engine, sessions: sessionmaker[OutboxSession], served: None
) -> None:
    """In the order of the claims: the higher priority first, then the older one."""
    ids = add(sessions, *(send.job() for _ in range(4)), send.options(priority=5).job())
    found = of_job(engine, ids[3])
    assert (codes(found), found.verdict.details["ahead"]) == (["behind-others"], 4)
    assert codes(of_job(engine, ids[4])) == ["due-now"]
    assert of_queue(engine).job_id == ids[4]


def test_a_job_that_could_have_run_for_long_is_overdue(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], served: None
) -> None:
    """Of the relay that is connected nothing is known but its name."""
    (job_id,) = add(sessions, send.job())
    assert codes(of_job(engine, job_id)) == ["due-now"]
    execute(outboxq_database.url, "UPDATE outboxq.job SET run_at = run_at - interval '1 hour'")
    found = of_job(engine, job_id)
    assert codes(found) == codes(of_queue(engine)) == ["overdue"]
    assert "no connected relay serves queue 'mail'" in found.verdict.text


def test_a_pinned_snapshot_is_named(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], served: None
) -> None:
    """Behind one, relays come to the job within half a minute and not within a second."""
    (job_id,) = add(sessions, send.job())
    assert "within a second" in of_job(engine, job_id).verdict.text
    snapshot = ("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", "SELECT 1")
    with open_session(outboxq_database.url, *snapshot, name="report") as pid:
        wait_until(
            lambda: of_job(engine, job_id).verdict.details.get("snapshot_pid") == pid, "the snapshot to be a second old"
        )
        assert "within 30 s" in of_job(engine, job_id).verdict.text


def test_the_reasons_come_in_one_order(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """Everything that holds up a job of a group at once is told, what to look at first in front."""
    url = outboxq_database.url
    first, job_id = add(sessions, *(send_in_order.job(key="a") for _ in range(2)))
    with engine.begin() as connection:
        queues.pause(connection, ["mail"])
        kinds.pause(connection, "mail", ["send_in_order"])
        queues.set_limits(connection, ["mail"], make_limits(running=1, rate="1/h"))
        lease(connection, add(sessions, send.job())[0], "1 hour")
    execute(
        url,
        "INSERT INTO outboxq.rate VALUES ('mail', now() + interval '1 hour')",
        "DELETE FROM outboxq.relay",
        f"UPDATE outboxq.job SET expires_at = now() - interval '1 minute', run_at = now() + interval '1 hour', "
        f"state = 'grouped' WHERE id = '{job_id}'",
    )
    with open_session(url, "LOCK TABLE outboxq.job IN SHARE MODE"):
        found = of_job(engine, job_id)
    expected = [
        "expired", "scheduled", "kind-paused", "behind-in-group", "table-locked", "queue-paused", "no-relay",
        "queue-limited", "rate-limited",
    ]  # fmt: skip
    assert codes(found) == expected
    assert sorted(expected, key=list(CODES).index) == expected
    # Of a queue: first what holds up all of it.
    assert codes(of_queue(engine))[:4] == ["queue-paused", "no-relay", "queue-limited", "rate-limited"]
    assert of_queue(engine).job_id == first
    with open_session(url, f"SELECT FROM outboxq.job WHERE id = '{job_id}' FOR UPDATE"):
        assert codes(of_job(engine, job_id)) == ["held-by-session"]


@pytest.mark.wide
def test_what_takes_too_long_is_not_known(outboxq_database: Database, engine: Engine, roles: Cast) -> None:
    """A policy makes each look at a job take three seconds: the answer says so, and is no error."""
    execute(
        outboxq_database.url,
        "SELECT outboxq.add_job('send', '{}', 'mail')",
        "ALTER TABLE outboxq.job ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY slow ON outboxq.job USING ((SELECT pg_sleep(3)) IS NOT NULL)",
        f"GRANT pg_monitor TO {quote_identifier(roles.groups['reader'])}",
    )
    reader = create_engine(roles.url("reader"), use_native_hstore=False)
    with engine.connect() as connection:
        job_id = connection.execute(text("SELECT id FROM outboxq.job")).scalar_one()
    with open_session(outboxq_database.url, "SELECT outboxq.add_job('send', '{}', 'mail')") as pid:
        found = of_job(reader, job_id)
    reader.dispose()
    assert codes(found) == ["not-known"]
    assert "the job: not known in 2 s" in found.verdict.text
    assert found.verdict.details["snapshot_pid"] == pid
    assert "snapshot-pinned-by-session" in found.verdict.advice


@pytest.mark.wide
def test_a_reader_learns_all_that_the_owner_does(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], roles: Cast
) -> None:
    """Its rights suffice for every look; only the ages of other roles' transactions are hidden."""
    held, waits = add(sessions, send.job(), rebuild.job(version=1))
    (grouped,) = add(sessions, send_in_order.job(key="a"))
    with sessions.begin() as session, jobs.batch(session, on_done=send.job()) as batch:
        batch.add_job(send)
    reader = create_engine(roles.url("reader"), use_native_hstore=False)
    with open_session(outboxq_database.url, f"SELECT FROM outboxq.job WHERE id = '{held}' FOR UPDATE"):
        for job_id in (held, waits, grouped, batch.id, uuid4()):
            assert codes(of_job(reader, job_id)) == codes(of_job(engine, job_id))
        for queue in ("mail", "held"):
            assert codes(of_queue(reader, queue)) == codes(of_queue(engine, queue))
    reader.dispose()


def test_what_a_role_may_not_see_is_not_known(outboxq_database: Database, roles: Cast) -> None:
    """A producer's role may not read the table of jobs."""
    producer = create_engine(roles.url("producer"), use_native_hstore=False)
    found = of_job(producer, uuid4())
    producer.dispose()
    assert codes(found) == ["not-known"]
    assert "this role may not look" in found.verdict.text
    assert "reader" in found.verdict.advice


def test_nothing_is_written_or_locked(engine: Engine, sessions: sessionmaker[OutboxSession]) -> None:
    """Every look is READ ONLY, and the caller's transaction goes on as it was."""
    (job_id,) = add(sessions, send_in_order.job(key="a"))
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL statement_timeout = '7s'"))
        before = connection.execute(text("SELECT xmax::text FROM outboxq.job")).scalar_one()
        assert explain_job(connection, job_id).reasons
        assert explain_queue(connection, "mail").reasons
        looks = Looks(connection)
        assert looks.rows("a change", update(job_table).values(priority=1)) == ()
        assert looks.is_refused("a change")
        assert connection.execute(text("SELECT pg_current_xact_id_if_assigned()")).scalar() is None
        assert connection.execute(text("SHOW statement_timeout")).scalar_one() == "7s"
        assert connection.execute(text("SHOW transaction_read_only")).scalar_one() == "off"
        assert connection.execute(text("SHOW enable_seqscan")).scalar_one() == "on"
        modes = connection.execute(text("SELECT DISTINCT mode FROM pg_locks WHERE pid = pg_backend_pid()")).scalars()
        assert set(modes) <= {"AccessShareLock", "ExclusiveLock"}
        assert connection.execute(text("SELECT xmax::text FROM outboxq.job")).scalar_one() == before
        assert connection.execute(text("UPDATE outboxq.job SET priority = 3")).rowcount == 1


def test_it_works_in_a_schema_of_another_name(engine: Engine) -> None:
    """`schema_translate_map` leads to the caller's schema, whatever its name."""
    schema = 'jobs\'s "odd"; 50% :place'
    with engine.begin() as connection:
        migrate(connection, to=0)
        migrate(connection, schema=schema)
    odd = engine.execution_options(schema_translate_map={"outboxq": schema})
    with odd.begin() as connection:
        new = insert(job_table).values(id=uuid4(), queue="mail", kind="send", args="{}").returning(job_table.c.id)
        job_id = connection.execute(new).scalar_one()
    assert codes(of_job(odd, job_id)) == ["no-relay"]
    assert of_queue(odd).job_id == job_id
    assert codes(of_job(odd, uuid4())) == ["not-found"]
