"""Groups: one job at a time of each, in order, through real slots, whatever commits late, fails or dies."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, DeadLetter, Jobs, OutboxSession, RelayConfig, Retry, Snooze
from outboxq.error_record import ErrorRecord
from outboxq.events import Event, JobDied, JobDone
from outboxq.execution import settle
from outboxq.execution.claim import ClaimRequest, claim
from outboxq.relay.connections import connection_options
from outboxq.statements.group_claim import GroupScript
from outboxq.statements.settle import PutBack
from tests.conftest import StartRelay
from tests.support.waiting import PATIENCE, wait_until

Drain = Callable[..., list[Event]]


class Book:
    """A queue with groups whose handlers wait for the test, or do what it has put under a job's number."""

    def __init__(self, claim: Any = "transaction", **options: Any) -> None:
        self.jobs = Jobs()
        self.begun: list[int] = []
        self.gates: dict[int, threading.Event] = {}
        self.tasks: dict[int, Callable[[Context], Any]] = {}
        retry = Backoff(max_attempts=5, first_seconds=3600)

        @self.jobs.handler(queue="ledger", claim=claim, retry=retry, group=lambda key, **_: key, **options)
        def book(ctx: Context, key: str, number: int) -> Any:
            self.begun.append(number)
            if number in self.gates:
                assert self.gates[number].wait(PATIENCE)
            task = self.tasks.get(number)
            return None if task is None else task(ctx)

        self.book = book

    def hold(self, number: int) -> threading.Event:
        self.gates[number] = threading.Event()
        return self.gates[number]

    def enqueue(self, session: OutboxSession, key: str, *numbers: int) -> None:
        for number in numbers:
            session.add_job(self.book, key=key, number=number)


def numbers(events: list[Event]) -> list[int]:
    return [int(event.job.args.split('"number": ')[1].rstrip("}")) for event in events if isinstance(event, JobDone)]


def waiting(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM outboxq.job")).scalar_one())


@pytest.mark.first_and_last
@pytest.mark.parametrize("claim", ["transaction", "lease"])
@pytest.mark.parametrize("batch_size", [1, 10])
def test_the_jobs_of_each_group_run_in_their_order(
    sessions: sessionmaker[OutboxSession], drain: Drain, claim: str, batch_size: int
) -> None:
    """FIFO per group, whatever the batches are."""
    book = Book(claim)
    with sessions.begin() as session:
        for number in range(30):
            book.enqueue(session, f"group {number % 3}", number)
    events = drain(book.jobs, slots_per_queue=1, batch_size=batch_size)
    assert sorted(book.begun) == list(range(30))
    for group in range(3):
        assert [number for number in book.begun if number % 3 == group] == list(range(group, 30, 3))
    assert len([event for event in events if isinstance(event, JobDone)]) == 30


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_job_that_commits_late_does_not_run_beside_its_successor(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, claim: str
) -> None:
    """The group's lock keeps the group closed, under a lease the leased row: a new first job waits."""
    book = Book(claim)
    gate = book.hold(2)
    config = RelayConfig(slots_per_queue=3, poll_seconds=0.05)
    with start_relay(book.jobs, config), start_relay(book.jobs, config):
        late, early = sessions(), sessions()
        book.enqueue(late, "a", 1)
        late.flush()
        book.enqueue(early, "a", 2)
        early.commit()
        wait_until(lambda: book.begun == [2], "the first job that was committed")
        late.commit()
        with sessions.begin() as session:
            book.enqueue(session, "b", 3)
        # Everything free has run: job 1 was seen many times.
        wait_until(lambda: 3 in book.begun, "the other group")
        assert threading.Event().wait(0.5) is False
        assert book.begun == [2, 3]
        gate.set()
        wait_until(lambda: book.begun == [2, 3, 1], "the late job")
        late.close()
        early.close()
        wait_until(lambda: waiting(engine) == 0, "the end of all jobs")


GATE = 70_001


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each claim of a group wait for an advisory lock before it looks."""
    ungated, gate = GroupScript.parts, f"DO 'BEGIN PERFORM pg_advisory_xact_lock({GATE}); END'"

    def after_gate(script: GroupScript, limit: int, after: str | None, _: object) -> list[tuple[str, str]]:
        found = ungated(script, limit, after)
        place = [owner for owner, _ in found].index("groups")
        return [*found[:place], ("settings", gate), *found[place:]]

    monkeypatch.setattr(GroupScript, "parts", after_gate)


@pytest.mark.usefixtures("gated")
def test_a_lease_that_is_committed_while_a_claim_begins_is_seen(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """The jobs are picked by a snapshot that is taken when the group's lock is held."""
    book = Book("lease")
    gate = book.hold(2)
    config = RelayConfig(slots_per_queue=1, poll_seconds=0.05)
    with sessions() as late, engine.connect() as operator, start_relay(book.jobs, config):
        book.enqueue(late, "a", 1)
        late.flush()
        with sessions.begin() as session:
            book.enqueue(session, "a", 2)
        wait_until(lambda: book.begun == [2], "the lease of job 2")
        # The other relay's claim has begun, and waits; meanwhile job 2 goes back, job 1 comes, job 2 is leased again.
        operator.execute(text("UPDATE outboxq.job SET state = 'group_waiting' WHERE state = 'group_leased'"))
        operator.execute(text(f"SELECT pg_advisory_lock({GATE})"))
        operator.commit()
        late.commit()
        other = Book("lease")
        with start_relay(other.jobs, config):
            waits = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory' AND query LIKE '%DO%'")
            wait_until(lambda: (operator.commit(), operator.execute(waits).scalar_one())[1], "the claim at its gate")
            operator.execute(text("UPDATE outboxq.job SET state = 'group_leased' WHERE state = 'group_waiting'"))
            operator.commit()
            operator.execute(text(f"SELECT pg_advisory_unlock({GATE})"))
            with sessions.begin() as session:
                other.enqueue(session, "b", 3)
            wait_until(lambda: other.begun, "a claim behind the gate")
            assert other.begun == [3]
            gate.set()
            wait_until(lambda: waiting(engine) == 0, "the end of all jobs")


def test_a_lock_on_the_first_job_holds_up_its_group(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """What an operator's transaction holds is not passed over: its group waits, other groups run."""
    book = Book()
    with sessions.begin() as session:
        book.enqueue(session, "a", 1, 2, 3)
        book.enqueue(session, "b", 4)
    with engine.connect() as operator:
        operator.execute(text("SELECT FROM outboxq.job ORDER BY seq LIMIT 1 FOR UPDATE"))
        drain(book.jobs, slots_per_queue=1, batch_size=10)
        assert book.begun == [4]
    drain(book.jobs, slots_per_queue=1, batch_size=10)
    assert book.begun == [4, 1, 2, 3]


@pytest.mark.each_value
@pytest.mark.parametrize("claim", ["transaction", "lease"])
@pytest.mark.parametrize("batch_size", [1, 10])
@pytest.mark.parametrize("outcome", [Retry(timedelta(seconds=0.7)), Snooze(timedelta(seconds=0.7))])
def test_a_failed_job_holds_up_its_group_until_its_retry_is_due(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    claim: str,
    outcome: Retry | Snooze,
    batch_size: int,
) -> None:
    """It keeps its place, the jobs behind it in its batch are given back uncounted, and the due time wakes a slot."""
    book = Book(claim)
    book.tasks[1] = lambda _: None if book.begun.count(1) > 1 else outcome
    config = RelayConfig(slots_per_queue=1, batch_size=batch_size, poll_seconds=30)
    with start_relay(book.jobs, config) as running:
        with sessions.begin() as session:
            book.enqueue(session, "a", 1, 2, 3)
            book.enqueue(session, "b", 4, 5)
        wait_until(lambda: waiting(engine) == 0, "the end of all jobs", 10)
    assert [number for number in book.begun if number < 4] == [1, 1, 2, 3]
    assert [number for number in book.begun if number > 3] == [4, 5]
    done = [event.job for event in running.of(JobDone)]
    assert [job.attempt for job in done if job.group_key == "a"] == [2 if isinstance(outcome, Retry) else 1, 1, 1]


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_failed_job_that_may_be_passed_comes_back_at_the_end_of_its_group(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, claim: str
) -> None:
    """With on_failure="pass" the jobs behind it go on."""
    book = Book(claim, on_failure="pass")
    book.tasks[1] = lambda _: None if book.begun.count(1) > 1 else Retry(timedelta(seconds=0.5))
    with sessions.begin() as session:
        book.enqueue(session, "a", 1, 2, 3)
    with start_relay(book.jobs, RelayConfig(slots_per_queue=1, batch_size=10, poll_seconds=30)):
        wait_until(lambda: waiting(engine) == 0, "the end of all jobs", 10)
    assert book.begun == [1, 2, 3, 1]


def test_a_dead_letter_lets_its_group_go_on(sessions: sessionmaker[OutboxSession], drain: Drain) -> None:
    """A job that has died is out of its group."""
    book = Book()
    book.tasks[1] = lambda _: DeadLetter("no such account")
    with sessions.begin() as session:
        book.enqueue(session, "a", 1, 2)
    events = drain(book.jobs, slots_per_queue=1, batch_size=10)
    assert book.begun == [1, 2]
    assert [type(event) for event in events if isinstance(event, JobDied | JobDone)] == [JobDied, JobDone]


def test_a_batch_that_dies_runs_alone_and_in_order(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Suspects keep their places: each runs under a lease, first in its group, and nothing behind it before."""
    book = Book()
    with sessions.begin() as session:
        book.enqueue(session, "a", 1, 2, 3, 4)
    with engine.connect() as connection:
        connection.execute(text("DELETE FROM outboxq.job WHERE seq <= (SELECT min(seq) + 1 FROM outboxq.job)"))
        connection.rollback()
    events = drain(book.jobs, slots_per_queue=1, batch_size=10)
    assert book.begun == [1, 2, 3, 4]
    leased = [event.job.lease_token is not None for event in events if isinstance(event, JobDone)]
    assert leased == [True, True, False, False]


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_the_group_of_a_dead_relays_job_waits_for_it(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, claim: str
) -> None:
    """The reaper takes it back with its place, and it runs before the jobs behind it."""
    book = Book(claim)
    with sessions.begin() as session:
        book.enqueue(session, "a", 1, 2)
    with engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE outboxq.job SET state = 'group_leased', lease_owner = gen_random_uuid(), lease_token = 1, "
                "attempt = 1 WHERE seq = (SELECT min(seq) FROM outboxq.job)"
            )
        )
    config = RelayConfig(slots_per_queue=2, poll_seconds=0.2, lease_seconds=1, heartbeat_seconds=0.1)
    with start_relay(book.jobs, config):
        wait_until(lambda: waiting(engine) == 0, "the end of all jobs", 20)
    assert book.begun == [1, 2]


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_queue_may_run_several_jobs_of_a_group_at_a_time(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, claim: str
) -> None:
    """Never more than `max_per_group`, and other groups are not held up."""
    book = Book(claim)
    gates = [book.hold(number) for number in range(6)]
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO outboxq.queue (name, max_per_group) VALUES ('ledger', 2)"))
    with sessions.begin() as session:
        book.enqueue(session, "a", *range(6))
        book.enqueue(session, "b", 7)
    config = RelayConfig(slots_per_queue=4, poll_seconds=0.05)
    with start_relay(book.jobs, config):
        wait_until(lambda: len(book.begun) == 3, "two jobs of a group and one of another")
        assert threading.Event().wait(0.3) is False
        assert 7 in book.begun
        assert len(book.begun) == 3
        for gate in gates:
            gate.set()
        wait_until(lambda: waiting(engine) == 0, "the end of all jobs")


@pytest.mark.parametrize("way", ["retry", "snooze", "release", "park"])
def test_a_job_that_came_back_is_told_from_one_that_was_never_taken(
    engine: Engine, sessions: sessionmaker[OutboxSession], way: str
) -> None:
    """It keeps its place; when it was due is another time, so a lost answer to COMMIT can still be found out."""
    book = Book()
    with sessions.begin() as session:
        book.enqueue(session, "a", 1)
    with engine.connect().execution_options(**connection_options(engine, "outboxq")) as connection:
        with connection.begin() as undone:
            (job,) = claim(connection, ClaimRequest(GroupScript("outboxq", "ledger"), 1)).jobs
            undone.rollback()
        with connection.begin():
            assert settle.is_unchanged(connection, job)
            connection.execute(text("UPDATE outboxq.job SET state = 'grouped'"))
        with connection.begin():
            (job,) = claim(connection, ClaimRequest(GroupScript("outboxq", "ledger"), 1)).jobs
            later, record = timedelta(0), ErrorRecord(1, "E", "m").as_json()
            {
                "retry": lambda: settle.write(connection, PutBack(job=job, attempt=1, record=record, delay=later)),
                "snooze": lambda: settle.write(connection, PutBack(job=job, attempt=0, delay=later)),
                "release": lambda: settle.release(connection, job),
                "park": lambda: settle.park(connection, job),
            }[way]()
        with connection.begin():
            assert not settle.is_unchanged(connection, job)
            assert connection.execute(text("SELECT seq FROM outboxq.job")).scalar_one() == job.seq


GROUP_LOCK = """
SELECT pg_advisory_xact_lock(hashtext('outboxq_outboxq group'), hashtext(concat_ws(chr(31), 'ledger', 'a', 1)))
"""


def test_adding_to_a_group_does_not_wait_for_its_handler(
    sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """A hundred jobs of a group whose job runs are added, and no statement waits 50 ms for a lock of anybody's."""
    book = Book()
    gate = book.hold(0)
    with start_relay(book.jobs, RelayConfig(slots_per_queue=1)):
        with sessions.begin() as session:
            book.enqueue(session, "a", 0)
        wait_until(lambda: book.begun, "the job that runs")
        for number in range(1, 101):
            with sessions.begin() as session:
                # The time of waits for locks, not of the statements: those may be slow on a busy machine.
                session.execute(text("SET LOCAL lock_timeout = '50ms'"))
                book.enqueue(session, "a", number)
        assert book.begun == [0]
        with sessions() as session:
            # What the job that runs does hold.
            session.execute(text("SET LOCAL lock_timeout = '50ms'"))
            with pytest.raises(OperationalError, match="lock timeout"):
                session.execute(text(GROUP_LOCK))
        gate.set()
        wait_until(lambda: len(book.begun) == 101, "all jobs")
    assert book.begun == list(range(101))
