"""Limits of queues: never more jobs at a time than they allow, whichever way jobs are claimed, and no vain claims."""

import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Context, Jobs, OutboxSession, Relay, RelayConfig
from outboxq.admin import kinds, queues
from outboxq.config import SlotGroup
from outboxq.database.driver import NOT_PREPARED, PreparedStatements, ServerSession, run_script
from outboxq.errors import ArgumentError, RegistryError
from outboxq.events import DatabaseLost
from outboxq.execution.claim import Claimed, ClaimRequest, claim
from outboxq.postgres import Database, Server
from outboxq.queue_limits import QueueLimits, make_limits
from outboxq.relay.admission import Admission, take_slot_again
from outboxq.relay.flow_settings import FlowSettings, Rows, Seen
from outboxq.statements.claim import ClaimScript, ClaimStatements
from outboxq.statements.group_claim import AnyScript, GroupScript
from outboxq.statements.limit import lock_claims, take_slot
from tests.conftest import StartRelay
from tests.limits.limited_run import Mode
from tests.limits.limits_under_kills import check_limit
from tests.support.urls import libpq_url
from tests.support.waiting import PATIENCE, wait_until

# In pg_locks: what pg_stat_activity says stays the same for a transaction. Other databases' locks are there too.
BLOCKED = (
    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


class Gate:
    """Jobs that run until they are let go, in the order in which they began; how many run now, and at most did."""

    def __init__(self, claim: str) -> None:
        self.jobs = Jobs()
        self.most = 0
        self.done: list[int] = []
        self._running: set[int] = set()
        self._begun = self._let_go = 0
        self._changed = threading.Condition()

        @self.jobs.handler(queue="mail", claim=claim)
        def work(ctx: Context, number: int) -> None:
            with self._changed:
                place, self._begun = self._begun, self._begun + 1
                self._running.add(number)
                self.most = max(self.most, len(self._running))
                try:
                    assert self._changed.wait_for(lambda: place < self._let_go, PATIENCE)
                finally:
                    self._running.discard(number)
                    self.done.append(number)

        self.kind = work

    @property
    def running(self) -> int:
        return len(self._running)

    def add(self, sessions: sessionmaker[OutboxSession], count: int) -> None:
        with sessions.begin() as session:
            session.add_jobs(self.kind.job(number=number) for number in range(count))

    def let_go(self, count: int) -> None:
        """Let the next jobs go; a job that begins later never goes in the place of one that runs."""
        with self._changed:
            self._let_go += count
            self._changed.notify_all()


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> Iterator[Gate]:
    made = Gate(getattr(request, "param", "transaction"))
    yield made
    made.let_go(1_000)


BOTH = pytest.mark.parametrize("gate", ["transaction", "lease"], indirect=True)


def limit(engine: Engine, **limits: object) -> None:
    with engine.begin() as connection:
        queues.set_limits(connection, ["mail"], make_limits(**limits))  # type: ignore[arg-type]  # as each test gives them


def relay_of(slots: int, **settings: object) -> RelayConfig:
    given = {"slots_per_queue": slots, "lease_seconds": 1.0, "heartbeat_seconds": 0.1} | settings
    return RelayConfig(**given)  # type: ignore[arg-type]  # as each test gives them


@contextmanager
def slot_held(engine: Engine, most: int) -> Iterator[Connection]:
    """A transaction of another process that holds a slot of the limit."""
    with engine.connect() as connection, connection.begin():
        assert run_script(connection, take_slot("outboxq", "mail", most))[0][0]
        yield connection


@pytest.mark.parametrize("name", ["ready", "due", "lease_ready", "lease_due", "lease_suspect"])
def test_claims_of_queues_without_a_limit_know_nothing_of_limits(name: str) -> None:
    """They are one statement, with no lock and no part for a limit; those with a limit take the same jobs."""
    owner = UUID(int=7)
    plain = getattr(ClaimStatements("outboxq", "mail", owner), name)
    limited = getattr(ClaimStatements("outboxq", "mail", owner, most=3), name)
    for text_of in (lambda script: script.text(5), lambda script: script.texts.definition):
        assert not any(word in text_of(plain) for word in (";", "room", "advisory", "wanted"))
        assert "pg_try_advisory_xact_lock" in text_of(limited)
    assert plain.clearing(5) == limited.clearing(5)
    assert plain.one(owner) == limited.one(owner)


@BOTH
def test_no_more_jobs_run_than_the_limit_allows(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, gate: Gate
) -> None:
    """Two relays of four slots keep to the limit together; each job that ends lets another one begin."""
    limit(engine, running=3)
    gate.add(sessions, 12)
    with start_relay(gate.jobs, relay_of(4)), start_relay(gate.jobs, relay_of(4)):
        for done in range(12):
            wait_until(lambda done=done: gate.running == min(3, 12 - done), "as many jobs as may run")
            gate.let_go(1)
            wait_until(lambda done=done: len(gate.done) > done, "a job that ends")
    assert gate.most == 3
    assert sorted(gate.done) == list(range(12))


@pytest.mark.wide
@BOTH
def test_slots_do_not_claim_in_vain_from_a_full_queue(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight slots beside a full limit send a handful of claims a second, also while producers add jobs."""
    found: list[float] = []
    found_full = Admission.found_full

    def noting(admission: Admission, queue: str) -> None:
        found.append(time.monotonic())
        found_full(admission, queue)

    monkeypatch.setattr(Admission, "found_full", noting)
    limit(engine, running=1)
    gate.add(sessions, 2)
    with start_relay(gate.jobs, relay_of(8)):
        wait_until(lambda: gate.running == 1 and found, "the limit is full")
        began = time.monotonic()
        while time.monotonic() < began + 1.5:
            gate.add(sessions, 1)
        claims = sum(at > began for at in found)
        # 20, 40, 80 and 160 ms, then four a second.
        assert claims <= 12, f"{claims} claims in 1.5 s"
        gate.let_go(1_000)
        wait_until(lambda: len(gate.done) > 2, "the rest of the jobs")


def test_the_slot_of_a_session_that_ends_is_free_at_once(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    gate: Gate,
    outboxq_database: Database,
) -> None:
    """No time has to run out: the slot goes with its backend."""
    limit(engine, running=1)
    gate.let_go(1)
    with start_relay(gate.jobs, relay_of(2)), psycopg.connect(libpq_url(outboxq_database.url)) as holder:
        holder.execute(take_slot("outboxq", "mail", 1))
        gate.add(sessions, 1)
        time.sleep(0.4)
        assert not gate.done
        with engine.begin() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": holder.info.backend_pid})
        wait_until(lambda: gate.done, "the job that waited for the slot")
        holder.close()


def end_sessions_of_relays(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = 'outboxq relay' AND datname = current_database()"
            )
        )


@pytest.mark.parametrize("gate", ["transaction"], indirect=True)
def test_in_transaction_mode_a_job_counts_to_the_end_of_its_transaction(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, gate: Gate
) -> None:
    """A handler that does not touch the database runs on when its session has ended, and another job runs beside it."""
    limit(engine, running=1)
    gate.add(sessions, 2)
    with start_relay(gate.jobs, relay_of(2)):
        wait_until(lambda: gate.running == 1, "the first job")
        end_sessions_of_relays(engine)
        wait_until(lambda: gate.running == 2, "the second job beside it")
        gate.let_go(1_000)
        wait_until(lambda: len(set(gate.done)) == 2, "both jobs")


@pytest.mark.parametrize("gate", ["lease"], indirect=True)
def test_in_lease_mode_a_job_counts_to_the_end_of_its_handler(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever becomes of sessions: the relay that comes back finds the limit full, and runs no other job beside it."""
    found: list[float] = []
    found_full = Admission.found_full

    def noting(admission: Admission, queue: str) -> None:
        found.append(time.monotonic())
        found_full(admission, queue)

    monkeypatch.setattr(Admission, "found_full", noting)
    limit(engine, running=1)
    gate.add(sessions, 2)
    with start_relay(gate.jobs, relay_of(2, lease_seconds=60.0)) as relay:
        wait_until(lambda: gate.running == 1, "the first job")
        end_sessions_of_relays(engine)
        wait_until(lambda: relay.of(DatabaseLost), "the relay to notice")
        lost = time.monotonic()
        wait_until(lambda: sum(at > lost for at in found) > 2, "claims that find the limit full")
        assert (gate.running, gate.most) == (1, 1)
        gate.let_go(1_000)
        wait_until(lambda: len(set(gate.done)) == 2, "both jobs")
    assert gate.most == 1


@pytest.mark.parametrize("gate", ["lease"], indirect=True)
def test_a_claim_under_a_lease_waits_for_the_count_of_the_one_before(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, gate: Gate
) -> None:
    """A claim that is not committed counts: the next one counts behind its COMMIT."""
    limit(engine, running=1)
    gate.add(sessions, 2)
    other = UUID(int=5)
    claims = ClaimStatements("outboxq", "mail", other, most=1, counts_leases=True)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO outboxq.relay VALUES (:id, now() + interval '1 hour')"), {"id": other})
    with engine.connect() as claiming, claiming.begin() as transaction:
        run_script(claiming, claims.lease_ready.text(1))
        with start_relay(gate.jobs, relay_of(2)):
            with engine.connect() as looking:
                wait_until(lambda: looking.scalar(text(BLOCKED)) or gate.running, "the relay's claim")
            assert gate.running == 0
            transaction.commit()
            time.sleep(0.5)
            assert gate.running == 0
            with engine.begin() as connection:
                connection.execute(text("DELETE FROM outboxq.job WHERE lease_owner = :id"), {"id": other})
            wait_until(lambda: gate.running == 1, "the other job")
            gate.let_go(1)
            wait_until(lambda: gate.done, "its end")


@pytest.mark.large
@pytest.mark.parametrize("gate", ["lease"], indirect=True)
def test_a_claim_under_a_lease_that_another_one_holds_up_gives_way(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    gate: Gate,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A relay that hangs in its claim keeps others from its queue, and not from other queues; no error is reported."""
    done: list[int] = []

    @gate.jobs.handler(queue="post", claim="lease")
    def elsewhere(ctx: Context, number: int) -> None:
        done.append(number)

    limit(engine, running=1)
    gate.let_go(1)
    with engine.connect() as hanging, hanging.begin() as transaction:
        run_script(hanging, *lock_claims("outboxq", "mail"))
        gate.add(sessions, 1)
        # The claim of the only slot waits for two seconds; each one behind it, too.
        config = relay_of(1, lease_seconds=30.0, groups=(SlotGroup(("mail", "post"), 1),))
        with start_relay(gate.jobs, config) as running:
            with engine.connect() as looking:
                wait_until(lambda: looking.scalar(text(BLOCKED)), "the relay's claim")
            with sessions.begin() as session:
                session.add_job(elsewhere, number=1)
            wait_until(lambda: done, "the job of the other queue")
            assert not gate.done
            transaction.rollback()
            wait_until(lambda: gate.done, "the job that was held up")
        assert not running.of(DatabaseLost)
    assert "statements fail" not in caplog.text


@pytest.mark.parametrize("gate", ["lease"], indirect=True)
def test_the_jobs_of_a_dead_relay_count_until_they_are_taken_back(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, gate: Gate
) -> None:
    """A lease that is alive keeps its place in the limit, and the reaper gives it back."""
    limit(engine, running=1)
    gate.add(sessions, 2)
    owner = "UPDATE outboxq.job SET state = 'leased', lease_owner = :id, lease_token = 1 WHERE args = '{\"number\": 0}'"
    other = {"id": UUID(int=5)}
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO outboxq.relay VALUES (:id, now() + interval '1 hour')"), other)
        connection.execute(text(owner), other)
    gate.let_go(2)
    with start_relay(gate.jobs, relay_of(2)):
        time.sleep(0.4)
        assert not gate.done
        with engine.begin() as connection:
            connection.execute(text("UPDATE outboxq.relay SET alive_until = now() WHERE id = :id"), other)
        wait_until(lambda: len(gate.done) == 2, "both jobs")
    assert gate.most == 1


def test_a_suspect_waits_for_a_slot_and_nothing_is_counted(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, gate: Gate
) -> None:
    """A suspect runs under a lease, and holds a slot all the same: neither crash nor attempt is counted for waiting."""
    limit(engine, running=1)
    gate.add(sessions, 1)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET state = 'suspect'"))
    with start_relay(gate.jobs, relay_of(2)):
        with slot_held(engine, 1):
            time.sleep(0.5)
            with engine.connect() as connection:
                row = connection.execute(text("SELECT state, attempt, crashes FROM outboxq.job")).one()
            assert (row.state, row.attempt, row.crashes) == ("suspect", 0, 0)
        wait_until(lambda: gate.running == 1, "the suspect runs")
        with engine.connect() as connection:
            # A claim that finds nothing has the slot too, for a moment: looked at once, it might be that.
            for _ in range(50):
                with connection.begin():
                    assert not run_script(connection, take_slot("outboxq", "mail", 1))[0][0]
        gate.let_go(1)
        wait_until(lambda: gate.done, "the suspect is done")


def test_a_suspect_that_found_no_room_is_looked_for_again_without_a_beat_or_a_poll(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the hold of its queue is over: the relay's next look at the tables is minutes away."""
    limit(engine, running=1)
    gate.add(sessions, 1)
    gate.let_go(1)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET state = 'suspect'"))
    full = threading.Event()
    found_full = Admission.found_full

    def noting(admission: Admission, queue: str) -> None:
        found_full(admission, queue)
        full.set()

    monkeypatch.setattr(Admission, "found_full", noting)
    hour = {"lease_seconds": 3_600.0, "heartbeat_seconds": 600.0, "poll_seconds": 3_600.0}
    with slot_held(engine, 1) as holder, start_relay(gate.jobs, relay_of(1, **hour)):
        assert full.wait(PATIENCE)
        holder.rollback()
        wait_until(lambda: gate.done, "the suspect is done")


def test_a_suspect_whose_slot_is_taken_behind_its_claim_goes_back(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the claim's COMMIT and the transaction of the job another claim may come: then the suspect waits on."""
    limit(engine, running=1)
    gate.add(sessions, 1)
    gate.let_go(1)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET state = 'suspect'"))
    seen: list[tuple[object, ...]] = []

    def contested(connection: Connection, claimed: Claimed, schema: str) -> bool:
        if seen:
            return take_slot_again(connection, claimed, schema)
        with slot_held(engine, 1):
            found = take_slot_again(connection, claimed, schema)
        crashes = "SELECT crashes, attempt FROM outboxq.job WHERE state = 'suspect'"
        seen.extend((found, *row) for row in run_script(connection, crashes))
        return found

    monkeypatch.setattr("outboxq.relay.slot.take_slot_again", contested)
    # One slot: another one's claim, which finds nothing, would have the queue's place for a moment.
    with start_relay(gate.jobs, relay_of(1)):
        wait_until(lambda: gate.done, "the suspect is done in the end")
    assert seen == [(False, 0, 0)]


def test_a_lowered_limit_holds_when_the_jobs_of_before_have_ended(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    gate: Gate,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Jobs that run go on; then never more than the new limit run. A raised one is used at once, by NOTIFY."""
    caplog.set_level("INFO", "outboxq.relay")
    limit(engine, running=4)
    gate.add(sessions, 20)
    with start_relay(gate.jobs, relay_of(6, lease_seconds=600.0, heartbeat_seconds=100.0)):
        wait_until(lambda: gate.running == 4, "four jobs")
        limit(engine, running=2)
        # By NOTIFY: a beat would be a minute away.
        wait_until(lambda: "queue 'mail' is limited: 2 at a time" in caplog.text, "the relay heard of it")
        gate.let_go(4)
        wait_until(lambda: len(gate.done) == 4 and gate.running == 2, "two jobs")
        gate.most = 0
        gate.let_go(4)
        wait_until(lambda: len(gate.done) == 8 and gate.running == 2, "two jobs again")
        assert gate.most == 2
        limit(engine, running=6)
        wait_until(lambda: gate.running == 6, "six jobs")
        gate.let_go(20)


def test_a_drain_waits_for_a_full_limit(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database, gate: Gate
) -> None:
    """Jobs that wait for another process's slot are not left behind."""
    limit(engine, running=1)
    gate.add(sessions, 3)
    gate.let_go(3)
    with slot_held(engine, 1) as holder:
        threading.Timer(0.5, holder.rollback).start()
        assert Relay(outboxq_database.url, gate.jobs, relay_of(2)).drain().done == 3


def test_a_look_of_a_drain_is_at_all_queues_of_its_relay(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of an idle queue, too: what they see of limits, paused kinds and groups holds for those of the others."""
    jobs, ran, seen = Jobs(), list[str](), list[tuple[bool, bool]]()
    record, looked = FlowSettings.record, threading.Event()

    def note(flow: FlowSettings, rows: Rows) -> Seen:
        found = record(flow, rows)
        seen.append(("mail" in flow.limits, ("mail", "frozen") in flow.orders.paused))
        if len(seen) > 1:
            looked.set()
        return found

    monkeypatch.setattr(FlowSettings, "record", note)

    @jobs.handler(queue="mail")
    def work(ctx: Context) -> None:
        # While it runs the slots of the other queue look.
        assert looked.wait(PATIENCE)
        ran.append("work")

    @jobs.handler(queue="mail")
    def frozen(ctx: Context) -> None:
        ran.append("frozen")

    @jobs.handler(queue="idle")
    def nothing(ctx: Context) -> None: ...

    @jobs.handler(queue="zz", group="g")
    def grouped(ctx: Context) -> None:
        ran.append("grouped")

    limit(engine, running=1)
    with engine.begin() as connection:
        kinds.pause(connection, "mail", ["frozen"])
    with sessions.begin() as session:
        for kind in (work, work, frozen, grouped):
            session.add_job(kind)
    groups = tuple(SlotGroup((name,), 1) for name in ("mail", "idle", "zz"))
    Relay(outboxq_database.url, jobs, RelayConfig(groups=groups)).drain()
    assert sorted(ran) == ["grouped", "work", "work"]
    assert set(seen) == {(True, True)}


def test_limits_are_declared_in_code_and_an_operators_come_first(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    gate: Gate,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without a setting what the application declares holds."""
    caplog.set_level("INFO", "outboxq.relay")
    gate.jobs.limit("mail", running=1)
    gate.add(sessions, 6)
    with start_relay(gate.jobs, relay_of(4)):
        wait_until(lambda: gate.running == 1, "one job")
        limit(engine, running=2)
        wait_until(lambda: gate.running == 2, "two jobs")
        with engine.begin() as connection:
            assert queues.set_limits(connection, ["mail"], QueueLimits(), ["running"]) == ("mail",)
            assert queues.set_limits(connection, ["mail"], QueueLimits(), ["running"]) == ()
        heard = re.compile(r"limited: (\d) at a time")
        wait_until(lambda: heard.findall(caplog.text)[-2:] == ["2", "1"], "the relay heard of it")
        gate.let_go(2)
        wait_until(lambda: len(gate.done) == 2 and gate.running == 1, "one job again")
        gate.let_go(6)
    assert gate.most == 2


def test_declared_limits_are_checked(gate: Gate) -> None:
    """A queue without a handler, a second declaration, and nothing at all are refused; an included registry's count."""
    with pytest.raises(ArgumentError, match="got none of them"):
        gate.jobs.limit("mail")
    outer = Jobs()
    gate.jobs.limit("mail", running=5, rate="100/min")
    outer.include(gate.jobs)
    assert outer.resolve().limits["mail"].running == 5
    with pytest.raises(RegistryError, match="declared twice: 5 at a time, 100/min with a burst of 1, and 4 at a time"):
        outer.limit("mail", running=4)
    outer.limit("mial", running=4)
    with pytest.raises(RegistryError, match=r"'mial' has a limit, and no handler .* \(known: mail\)"):
        outer.resolve()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"running": 0}, "1 to 10,000, got 0: to stop a queue, pause it"),
        ({"running": -1}, "got -1"),
        ({"running": 10_001}, "got 10001"),
        ({"running": True}, "is a whole number, got True"),
        ({"per_group": 0}, "1 to 1,000, got 0"),
        ({"rate": "0/s"}, "1 to 1,000,000 jobs, got '0/s': to stop a queue, pause it"),
        ({"rate": "-5/s"}, "such as 10/s, 100/min, 5/30s, 20/h, got '-5/s'"),
        ({"rate": "many"}, "got 'many'"),
        ({"rate": "5/0s"}, "1 second to 31 days, got '5/0s'"),
        ({"rate": "5/32day"}, "1 second to 31 days"),
        ({"rate": "5/week"}, "got '5/week'"),
        ({"rate": "٥/s"}, "a rate is a number of jobs in a time"),
        ({"rate": "5/s", "burst": 0}, "burst of a rate is 1 to 1,000,000, got 0"),
        ({"burst": 5}, "a burst needs a rate"),
    ],
)
def test_limits_that_make_no_sense_are_refused(given: dict[str, object], message: str) -> None:
    """The error says what was expected and what came."""
    with pytest.raises(ArgumentError) as raised:
        make_limits(**given)  # type: ignore[arg-type]  # that is the point
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("rate", "jobs", "seconds", "burst"),
    [("10/s", 10, 1, 1), ("500 / s", 500, 1, 50), ("100/min", 100, 60, 1), ("5/30s", 5, 30, 1), ("9/h", 9, 3600, 1)],
)
def test_rates_are_read_and_written(rate: str, jobs: int, seconds: float, burst: int) -> None:
    """A rate's text is the same again, without spaces; the burst is that of a tenth of a second, at least 1."""
    read = make_limits(rate=rate).rate
    assert read is not None
    assert (read.jobs, read.seconds, read.burst) == (jobs, seconds, burst)
    assert str(read) == rate.replace(" ", "")


@pytest.mark.large
@pytest.mark.parametrize("mode", ["transaction", "lease"])
def test_a_limit_holds_under_kills(mode: Mode, outboxq_server: Server) -> None:
    """The short form of `python -m tests.limits.limits_under_kills`."""
    with outboxq_server.create_database() as database:
        check_limit(mode, 3.0, 1, database.url)


OWNERS = UUID(int=5), UUID(int=6)
MAKE_JOBS = """\
INSERT INTO outboxq.job (id, queue, kind, args, state, group_key)
SELECT gen_random_uuid(), 'mail', 'send', '{}', CASE WHEN n % 2 = 0 THEN :even ELSE :odd END,
  CASE WHEN (CASE WHEN n % 2 = 0 THEN :even ELSE :odd END) = 'grouped' THEN 'account ' || n END
FROM generate_series(1, :count) AS n"""


def make_jobs(engine: Engine, count: int, even: str, odd: str) -> None:
    """Jobs of the queue, each one alone in its group if it is grouped, and two relays whose leases are alive."""
    with engine.begin() as connection:
        connection.execute(text(MAKE_JOBS), {"count": count, "even": even, "odd": odd})
        for owner in OWNERS:
            connection.execute(text("INSERT INTO outboxq.relay VALUES (:id, now() + interval '1 hour')"), {"id": owner})


def counting(owner: UUID, sort: str, most: int) -> AnyScript:
    """The claim under a lease of a queue whose limit counts leased jobs."""
    if sort == "grouped":
        return GroupScript("outboxq", "mail", owner, most, counts_leases=True)
    script: ClaimScript = getattr(
        ClaimStatements("outboxq", "mail", owner, most=most, counts_leases=True), f"lease_{sort}"
    )
    return script


def claim_up_to(connection: Connection, script: AnyScript, limit: int, prepared: PreparedStatements) -> Claimed:
    cursor = "" if script.takes_firsts else None
    return claim(connection, ClaimRequest(script, limit, cursor, server=ServerSession(claims=prepared)))


PREPARED = pytest.mark.parametrize("is_prepared", [False, True], ids=["as text", "prepared"])


@PREPARED
@pytest.mark.parametrize(("sort", "state"), [("ready", "ready"), ("due", "scheduled"), ("grouped", "grouped")])
def test_a_claim_under_a_lease_takes_as_many_jobs_as_there_is_room_for(
    engine: Engine, sort: str, state: str, is_prepared: bool
) -> None:
    """It says that the limit cut it short, so that the next claim of its slot goes on behind its last job."""
    make_jobs(engine, 12, state, state)
    script, prepared = counting(OWNERS[0], sort, 5), PreparedStatements() if is_prepared else NOT_PREPARED
    with engine.connect() as connection:
        found = []
        for limit in (3, 10, 10):
            with connection.begin():
                claimed = claim_up_to(connection, script, limit, prepared)
            taken = len(claimed.jobs)
            found.append((taken, claimed.is_full, claimed.may_leave_more(taken)))
        assert found == [(3, False, True), (2, False, True), (0, True, False)]
        with connection.begin():
            connection.execute(text("DELETE FROM outboxq.job WHERE lease_owner IS NOT NULL"))
            connection.execute(text("DELETE FROM outboxq.job WHERE id NOT IN (SELECT id FROM outboxq.job LIMIT 2)"))
        with connection.begin():
            claimed = claim_up_to(connection, script, 5, prepared)
        # Both of them, with room for five.
        assert (len(claimed.jobs), claimed.is_cut) == (2, False)


@pytest.mark.first_and_last
@PREPARED
@pytest.mark.parametrize("later", ["ready", "grouped"])
@pytest.mark.parametrize("earlier", ["ready", "grouped"])
def test_claims_of_two_relays_at_once_share_the_room(
    engine: Engine, earlier: str, later: str, is_prepared: bool
) -> None:
    """The second one counts when the first one is committed, and not before it waits for it."""
    make_jobs(engine, 40, "ready", "grouped")
    prepared = PreparedStatements() if is_prepared else NOT_PREPARED

    def claim_later() -> int:
        with engine.connect() as connection, connection.begin():
            return len(claim_up_to(connection, counting(OWNERS[1], later, 5), 10, prepared).jobs)

    with ThreadPoolExecutor(1) as pool, engine.connect() as first, engine.connect() as looking:
        with first.begin():
            # Its text alone, without the COMMIT that a slot sends with it.
            run_script(first, counting(OWNERS[0], earlier, 5).text(3))
            second = pool.submit(claim_later)
            wait_until(lambda: looking.scalar(text(BLOCKED)) or second.done(), "the second claim to wait")
        assert second.result(PATIENCE) == 2


@pytest.mark.wide
def test_claims_of_many_slots_at_once_never_exceed_the_limit(engine: Engine) -> None:
    """Six connections of two relays claim, and settle, jobs with groups and without; all jobs have their turn."""
    jobs, most = 400, 7
    make_jobs(engine, jobs, "ready", "grouped")
    leased = "SELECT count(*) FROM outboxq.job WHERE lease_owner IS NOT NULL"
    highest: list[int] = []

    def work(number: int) -> int:
        chance, done, prepared = random.Random(number), 0, PreparedStatements()
        scripts = [counting(OWNERS[number % 2], sort, most) for sort in ("ready", "grouped")]
        with engine.connect() as connection:
            while True:
                with connection.begin():
                    left = connection.scalar(text("SELECT count(*) FROM outboxq.job"))
                if not left:
                    return done
                with connection.begin():
                    claimed = claim_up_to(connection, chance.choice(scripts), chance.randint(1, 9), prepared)
                with connection.begin():
                    highest.append(connection.scalar(text(leased)) or 0)
                    assert max(highest) <= most
                    ids = [job.id for job in claimed.jobs]
                    connection.execute(text("DELETE FROM outboxq.job WHERE id = ANY (:ids)"), {"ids": ids})
                    done += len(ids)

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(work, range(6))) == jobs
    assert max(highest) == most
