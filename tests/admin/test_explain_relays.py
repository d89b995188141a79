"""`explain` and the rows that relays keep of themselves: whom they serve, what they know, and whether they live."""

import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Context, Jobs, OutboxSession, RelayConfig
from outboxq.admin import kinds, queues
from outboxq.events import JobDone, JobsParked, JobsSuspected
from outboxq.migrations.runner import migrate
from outboxq.postgres import Database
from outboxq.relay.limits import HistoryLimits, RelayLimits
from outboxq.statements.render import quote_identifier
from outboxq.testing.relay_process import RelayProcess
from tests.admin.test_explain import RELAY, codes, of_job, of_queue
from tests.admin.test_roles import Cast
from tests.admin.test_roles import roles as roles
from tests.conftest import StartRelay
from tests.support import app, leased_app
from tests.support.doctor import execute, open_session
from tests.support.urls import libpq_url
from tests.support.waiting import PATIENCE, wait_until

# Relays say how they are at once, and then all the time.
TALKATIVE = RelayLimits(history=HistoryLimits(first_seconds=0.1, flush_seconds=0.1))
pytestmark = pytest.mark.relay_limits(TALKATIVE)

LISTED = "SELECT count(*) FROM outboxq.relay_status"
UNSEEN = "UPDATE outboxq.relay_status SET seen_at = seen_at - interval '{}'"


class Gate:
    """What the handlers `wait` are held up by."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Semaphore(0), threading.Event()

    def pass_through(self) -> None:
        self.begun.release()
        assert self.go_on.wait(PATIENCE)


gates: dict[str, Gate] = {}


@pytest.fixture
def gate() -> Iterator[Gate]:
    gates["here"] = Gate()
    yield gates["here"]
    gates.pop("here").go_on.set()


jobs = Jobs()


@jobs.handler(queue="mail")
def send(ctx: Context) -> None: ...


@jobs.handler(queue="mail")
def wait(ctx: Context) -> None:
    gates["here"].pass_through()


# A registry that serves the same queue, and knows other kinds.
strangers = Jobs()


@strangers.handler(queue="mail")
def wait_as_a_stranger(ctx: Context) -> None:
    gates["here"].pass_through()


# One that serves another queue, and knows the kind `send`.
elsewhere = Jobs()


@elsewhere.handler(queue="elsewhere", kind="send")
def send_elsewhere(ctx: Context) -> None: ...


def add(sessions: sessionmaker[OutboxSession], kind: object, number: int = 1) -> list[UUID]:
    with sessions.begin() as session:
        return [session.add_job(kind).id for _ in range(number)]  # type: ignore[arg-type]


def one(engine: Engine, statement: str) -> object:
    with engine.connect() as connection:
        return connection.execute(text(statement)).scalar_one()


def test_a_queue_that_no_relay_serves_is_named_with_those_that_are_served(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Relays are connected and live, and serve others: who serves what is told, for a job and for the queue."""
    (job_id,) = add(sessions, send)
    with start_relay(elsewhere):
        found = wait_until(
            lambda: (one := of_job(engine, job_id)).verdict.code == "queue-not-served" and one, "the relay to be listed"
        )
        assert codes(found) == codes(of_queue(engine)) == ["queue-not-served"]
        assert found.verdict.details["served"] == ["elsewhere"]
        assert "'elsewhere'" in found.verdict.text
        assert codes(of_queue(engine, "elsewhere")) == ["queue-empty"]
    # The server may see the end of its sessions a moment later.
    wait_until(lambda: codes(of_job(engine, job_id)) == ["no-relay"], "no relay")


def test_a_kind_that_no_serving_relay_knows_is_named_before_it_is_parked(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, gate: Gate
) -> None:
    """The only slot is busy, so that no relay has looked at the job yet; one that serves another queue knows it."""
    add(sessions, wait_as_a_stranger)
    with start_relay(strangers, RelayConfig(slots_per_queue=1)), start_relay(elsewhere):
        assert gate.begun.acquire(timeout=PATIENCE)
        (job_id,) = add(sessions, send)
        wait_until(lambda: one(engine, LISTED) == 2, "both relays to be listed")
        found = of_job(engine, job_id)
        assert codes(found) == ["kind-not-served"]
        assert "it is known to" in found.verdict.text
        assert found.verdict.details == {"queue": "mail", "kind": "send", "relays": 1}
        gate.go_on.set()
        # When the slot has looked at it, the job is parked, and those that know it are still told.
        found = wait_until(
            lambda: (one := of_job(engine, job_id)).verdict.code == "kind-unknown" and one, "the job to be parked"
        )
        assert "it is known to" in found.verdict.text
        assert len(list(found.verdict.details["known_by"] or ())) == 1  # type: ignore[call-overload]


def test_slots_that_are_all_busy_are_named_with_what_runs_longest(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, gate: Gate
) -> None:
    """Two slots, two jobs that run; the third waits for a slot, until one is free."""
    running = {str(job_id) for job_id in add(sessions, wait, 2)}
    with start_relay(jobs, RelayConfig(slots_per_queue=2, batch_size=1)) as relay:
        for _ in running:
            assert gate.begun.acquire(timeout=PATIENCE)
        waiting = add(sessions, send, 2)
        found = wait_until(
            lambda: (one := of_job(engine, waiting[0])).verdict.details.get("longest") and one,
            "the relay to say that a job runs for more than a second",
        )
        assert codes(found) == ["slots-busy"]
        assert found.verdict.details["longest"] in running
        assert found.verdict.details["longest_kind"] == "wait"
        assert codes(of_job(engine, waiting[1])) == ["slots-busy", "behind-others"]
        gate.go_on.set()
        wait_until(lambda: len(relay.of(JobDone)) == 4, "all jobs to be done")


outside = Jobs()


@outside.handler(queue="outside", claim="lease")
def write(ctx: Context) -> None:
    ctx.session.execute(text("SELECT 1"))
    gates["here"].pass_through()


@pytest.mark.wide
def test_a_job_whose_handler_waits_for_a_connection_is_said_to(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, gate: Gate
) -> None:
    """Two slots share a connection: one handler has it, one waits for it, and a third job waits for a slot."""
    running = add(sessions, write, 2)
    with start_relay(outside, RelayConfig(slots_per_queue=2, call_connections=1)) as relay:
        assert gate.begun.acquire(timeout=PATIENCE)
        waits = lambda job_id: "waiting_calls" in of_job(engine, job_id).verdict.details  # noqa: E731
        (one_waits,) = wait_until(
            lambda: [each for each in running if waits(each)], "the relay to say that a job waits"
        )
        assert [codes(of_job(engine, job_id)) for job_id in running] == [["leased"], ["leased"]]
        waiting = of_job(engine, one_waits).verdict
        assert (waiting.details["waiting_calls"], waiting.details["call_connections"]) == (1, 1)
        assert "its handler waited for a connection" in waiting.text
        assert "--call-connections" in waiting.advice
        (third,) = add(sessions, write)
        found_third = wait_until(
            lambda: codes(one := of_job(engine, third)) == ["slots-busy"] and one, "the relay to be seen again"
        )
        assert found_third.verdict.details["waiting_calls"] == 1
        assert "1 job there had begun and waited for a connection" in found_third.verdict.text
        gate.go_on.set()
        wait_until(lambda: len(relay.of(JobDone)) == 3, "all jobs to be done")


def test_a_free_slot_keeps_a_job_from_being_called_stuck(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, gate: Gate
) -> None:
    """One of two slots works; what another session has locked is not taken, and that is what is told."""
    add(sessions, wait)
    with start_relay(jobs, RelayConfig(slots_per_queue=2)):
        assert gate.begun.acquire(timeout=PATIENCE)
        seen = "SELECT EXISTS (SELECT FROM outboxq.relay_status WHERE busy = 1 AND free = '{mail}')"
        wait_until(lambda: one(engine, seen), "the relay to be seen")
        gate.go_on.set()


@pytest.mark.wide
def test_a_relay_that_stands_still_is_told_as_the_last_that_served_the_queue(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """SIGSTOP: its connections are open, and it does not answer; when it goes on, it serves again."""
    with RelayProcess("tests.support.app:jobs", outboxq_database.url, name=RELAY) as relay:
        wait_until(lambda: one(engine, f"{LISTED} WHERE state = 'serving'") == 1, "the relay to be listed")
        relay.pause()
        with sessions.begin() as session:
            job_id = session.add_job(app.record, name="a").id
        assert of_job(engine, job_id).verdict.code in ("due-now", "slots-busy")
        execute(outboxq_database.url, UNSEEN.format("5 minutes"))
        found = of_job(engine, job_id)
        assert codes(found) == ["queue-not-served"]
        assert found.verdict.details["last_pid"] == relay.pid
        assert "was seen 5 min ago" in found.verdict.text
        relay.resume()
        wait_until(lambda: of_job(engine, job_id).verdict.code == "not-found", "the job to be done")


@pytest.mark.wide
def test_a_killed_relay_is_told_as_the_last_that_served_the_queue(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """No relay is connected any more."""
    with RelayProcess("tests.support.app:jobs", outboxq_database.url, name=RELAY) as relay:
        wait_until(lambda: one(engine, f"{LISTED} WHERE state = 'serving'") == 1, "the relay to be listed")
        relay.kill()
        pid = relay.pid
    with sessions.begin() as session:
        job_id = session.add_job(app.record, name="a").id
    execute(outboxq_database.url, UNSEEN.format("5 minutes"))
    own = f"application_name = '{RELAY}' AND datname = current_database()"
    gone = f"SELECT count(*) = 0 FROM pg_stat_activity WHERE {own}"
    wait_until(lambda: one(engine, gone), "its connections to end")
    found = of_job(engine, job_id)
    assert codes(found) == ["no-relay"]
    assert found.verdict.details["last_pid"] == pid
    # Others may have served the queue since, and ended in order: they keep no row.
    assert "and has not ended in order" in found.verdict.text
    assert "the last one" not in found.verdict.text


@pytest.mark.wide
def test_a_long_lease_of_a_relay_that_died_is_not_called_a_run(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], tmp_path: Path
) -> None:
    """The lease holds for an hour, and its relay was not seen for five minutes."""
    config = RelayConfig(lease_seconds=3_600.0)
    with RelayProcess("tests.support.leased_app:jobs", outboxq_database.url, config, name=RELAY) as relay:
        with sessions.begin() as session:
            job_id = session.add_job(leased_app.call, name="a", directory=str(tmp_path), fault="wait").id
        wait_until(lambda: codes(of_job(engine, job_id)) == ["leased"], "the job to run")
        wait_until(lambda: one(engine, LISTED) == 1, "the relay to be listed")
        assert of_job(engine, job_id).verdict.details["seen_seconds"] is not None
        relay.kill()
    execute(outboxq_database.url, UNSEEN.format("5 minutes"))
    found = of_job(engine, job_id)
    assert found.verdict.code == "lease-orphaned"
    assert float(str(found.verdict.details["lease_seconds"])) > 1_000
    assert "was last seen 5 min ago" in found.verdict.text


def test_what_it_looks_at_is_disturbed_by_no_look(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """A paused queue and kind, a job that psql has locked, an open producer, a parked kind: then all of them run.

    A look that locked a row, or a transaction that ended in an error with a row in its hands, would leave suspects.
    """
    url = outboxq_database.url
    (held, waits, stranger) = (*add(sessions, send, 2), *add(sessions, wait_as_a_stranger))
    with engine.begin() as connection:
        queues.pause(connection, ["mail"])
        kinds.pause(connection, "mail", ["send"])
    with psycopg.connect(libpq_url(url), application_name="psql") as psql, sessions() as producer:
        # It commits: rows that a transaction locked and rolled back look like those of a relay that died.
        psql.execute("SELECT FROM outboxq.job WHERE id = %s FOR UPDATE", [held])
        unborn = producer.add_job(send).id
        producer.flush()
        assert of_job(engine, held).verdict.code == "held-by-session"
        assert of_job(engine, waits).verdict.code == "kind-paused"
        assert of_job(engine, unborn).verdict.code == "not-committed"
        assert of_queue(engine).verdict.code == "queue-paused"
        producer.commit()
    with engine.begin() as connection:
        queues.resume(connection, ["mail"])
        kinds.resume(connection, "mail", ["send"])
    with start_relay(jobs) as relay:
        wait_until(lambda: relay.of(JobsParked), "the stranger to be parked")
        assert of_job(engine, stranger).verdict.code == "kind-unknown"
        wait_until(lambda: len(relay.of(JobDone)) == 3, "the jobs to be done")
        assert relay.of(JobsSuspected) == []


def test_without_the_table_connections_are_looked_at(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """On the tables of the step before there is no such row, and nothing is called unknown for that."""
    (job_id,) = add(sessions, send)
    with engine.begin() as connection:
        migrate(connection, to=10)
    assert codes(of_job(engine, job_id)) == codes(of_queue(engine)) == ["no-relay"]
    with open_session(outboxq_database.url, "SELECT 1", name=RELAY):
        assert codes(of_job(engine, job_id)) == ["due-now"]


def test_without_the_right_connections_are_looked_at(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession], roles: Cast
) -> None:
    """A reader from before the last migration may not read the table of relays."""
    (job_id,) = add(sessions, send)
    reader_role = quote_identifier(roles.groups["reader"])
    execute(outboxq_database.url, f"REVOKE SELECT ON outboxq.relay_status FROM {reader_role}")
    reader = create_engine(roles.url("reader"), use_native_hstore=False)
    assert codes(of_job(reader, job_id)) == ["no-relay"]
    reader.dispose()


def test_a_relay_that_names_a_thousand_kinds_may_know_more(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """So it is not said that it does not know one."""
    (job_id,) = add(sessions, send)
    insert = (
        "INSERT INTO outboxq.relay_status (id, host, pid, version, schema_step, state, queues, kinds, slots, busy, "
        "free, listens, running, flush) SELECT gen_random_uuid(), 'alpha', 7, '1', 11, 'serving', '{{mail}}', "
        "array_agg('kind ' || n), 1, 0, '{{mail}}', true, '[]', 1 FROM generate_series(1, {}) AS n"
    )
    execute(outboxq_database.url, insert.format(1_000))
    assert codes(of_job(engine, job_id)) == ["due-now"]
    execute(outboxq_database.url, "DELETE FROM outboxq.relay_status", insert.format(999))
    assert codes(of_job(engine, job_id)) == ["kind-not-served"]
