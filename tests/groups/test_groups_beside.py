"""Groups beside limits, batches, cancellations and unknown kinds, through real slots."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import (
    Backoff,
    BatchContext,
    BatchItem,
    Context,
    Jobs,
    OutboxSession,
    RelayConfig,
    Retry,
    external,
    find_job,
)
from outboxq.events import Event, JobDone, JobsParked
from outboxq.postgres import Database
from tests.conftest import StartRelay
from tests.support.cli import call
from tests.support.doctor import only
from tests.support.ledger import of
from tests.support.waiting import wait_until

Drain = Callable[..., list[Event]]
MODES = pytest.mark.parametrize("claim", ["transaction", "lease"])
SOON = Backoff(max_attempts=5, first_seconds=0.3, jitter=0.0)


def waiting(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM outboxq.job")).scalar_one())


def rows_of_relay(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM outboxq.relay")).scalar_one())


def set_limits(engine: Engine, **limits: int) -> None:
    with engine.begin() as connection:
        names, values = ", ".join(limits), ", ".join(f":{name}" for name in limits)
        statement = f"INSERT INTO outboxq.queue (name, {names}) VALUES ('ledger', {values})"
        connection.execute(text(statement), limits)


class Gate:
    """Counts the jobs that run, until it is opened, and holds each of them."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.begun: list[tuple[str, int]] = []
        self.most = 0
        self._running = 0
        self._lock = threading.Lock()

    def run(self, key: str, number: int) -> None:
        with self._lock:
            self.begun.append((key, number))
            self._running += 1
            self.most = max(self.most, self._running)
        self.opened.wait()
        # Long enough for another slot to begin a job beside this one, if any may.
        threading.Event().wait(0.01)
        with self._lock:
            self._running -= 1


def gated(claim: Any, gate: Gate) -> tuple[Jobs, Any, Any]:
    """A kind with groups, and one without, in one queue."""
    jobs = Jobs()

    @jobs.handler(queue="ledger", claim=claim, group=lambda key: key)
    def book(ctx: Context, key: str, number: int) -> None:
        gate.run(key, number)

    @jobs.handler(queue="ledger", claim=claim)
    def look(ctx: Context, number: int) -> None:
        gate.run("", number)

    return jobs, book, look


@MODES
def test_a_limit_of_a_queue_holds_for_jobs_of_groups(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, claim: str
) -> None:
    """Together with the jobs that have no group, over all relays, and each group keeps its order."""
    gate = Gate()
    jobs, book, look = gated(claim, gate)
    set_limits(engine, max_running=2)
    with sessions.begin() as session:
        for number in range(4):
            for key in "abcd":
                session.add_job(book, key=key, number=number)
            session.add_job(look, number=number)
    config = RelayConfig(slots_per_queue=3, poll_seconds=0.05)
    with start_relay(jobs, config), start_relay(jobs, config):
        wait_until(lambda: len(gate.begun) == 2, "as many jobs as the limit lets run")
        assert not threading.Event().wait(0.4)
        assert len(gate.begun) == 2
        gate.opened.set()
        wait_until(lambda: waiting(engine) == 0, "the end of all jobs", 30)
    assert gate.most == 2
    for key in "abcd":
        assert [number for group, number in gate.begun if group == key] == [0, 1, 2, 3]
    assert len(gate.begun) == 20


@MODES
def test_the_limits_of_a_queue_and_of_each_group_hold_together(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, claim: str
) -> None:
    """Three jobs of the queue at a time, of which two at most are of one group."""
    gate = Gate()
    jobs, book, _ = gated(claim, gate)
    set_limits(engine, max_running=3, max_per_group=2)
    with sessions.begin() as session:
        for number in range(4):
            session.add_job(book, key="a", number=number)
        session.add_job(book, key="b", number=0)
        session.add_job(book, key="c", number=0)
    with start_relay(jobs, RelayConfig(slots_per_queue=6, poll_seconds=0.05)):
        wait_until(lambda: len(gate.begun) == 3, "as many jobs as the limits let run")
        assert not threading.Event().wait(0.4)
        assert len(gate.begun) == 3
        assert len([key for key, _ in gate.begun if key == "a"]) <= 2
        gate.opened.set()
        wait_until(lambda: waiting(engine) == 0, "the end of all jobs", 30)
    assert (gate.most, len(gate.begun)) == (3, 6)


@dataclass
class Entry:
    key: str
    number: int


def in_calls(jobs: Jobs, fails: Callable[[int], Retry | None], tried: list[int]) -> Any:
    """A batch handler; `tried` has the numbers whose outcome stands."""

    @jobs.batch_handler(Entry, queue="ledger", retry=SOON, max_size=10)
    def book(ctx: BatchContext, items: Sequence[BatchItem[Entry]]) -> list[Retry | None]:
        outcomes = [fails(item.args.number) for item in items]
        numbers = [{"key": item.args.key, "number": item.args.number} for item in items]
        tried.extend(item.args.number for item in items)
        ctx.session.execute(text("INSERT INTO effect_ledger (name) VALUES (:key || ' ' || :number)"), numbers)
        return outcomes

    return book


def together(jobs: Jobs, fails: Callable[[int], Retry | None], tried: list[int]) -> Any:
    """A handler whose jobs run on one savepoint."""

    @jobs.handler(queue="ledger", retry=SOON, batchable=True)
    def book(ctx: Context, key: str, number: int) -> Retry | None:
        tried.append(number)
        outcome = fails(number)
        ctx.session.execute(text("INSERT INTO effect_ledger (name) VALUES (:name)"), {"name": f"{key} {number}"})
        return outcome

    return book


@pytest.mark.first_and_last
@pytest.mark.parametrize("declare", [in_calls, together])
@pytest.mark.parametrize("raises", [True, False])
def test_a_failed_job_of_a_batch_keeps_those_behind_it_waiting(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    declare: Callable[..., Any],
    raises: bool,
) -> None:
    """Whether the jobs of a batch run in one call or on one savepoint: rows are written in the group's order."""
    jobs, tried, failures = Jobs(), list[int](), list[int]()
    alone = 1 if declare is in_calls else 2

    def fails(number: int) -> Retry | None:
        # On one savepoint the first failure undoes all; the second one is the job's own.
        if number != 2 or len(failures) >= alone:
            return None
        failures.append(number)
        if raises:
            raise RuntimeError("not yet")
        return Retry(timedelta(seconds=0.3))

    book = declare(jobs, fails, tried)
    with sessions.begin() as session:
        session.add_jobs(book.options(group="a").job(key="a", number=number) for number in range(1, 5))
        session.add_job(book.options(group="b"), key="b", number=5)
    with start_relay(jobs, RelayConfig(slots_per_queue=1, batch_size=10, poll_seconds=30)) as running:
        wait_until(lambda: waiting(engine) == 0, "the end of all jobs", 20)
    done = [event.job for event in running.of(JobDone)]
    assert [job.attempt for job in done if job.group_key == "a"] == [1, 2, 1, 1]
    with engine.connect() as connection:
        ran = (
            connection.execute(text("SELECT name FROM effect_ledger WHERE name LIKE 'a %' ORDER BY row"))
            .scalars()
            .all()
        )
    assert ran == ["a 1", "a 2", "a 3", "a 4"]
    last = {number: place for place, number in enumerate(tried)}
    assert last[1] < last[2] < last[3] < last[4]


def add(sessions: sessionmaker[OutboxSession], kind: Any, *numbers: int) -> list[UUID]:
    """Jobs of one group; their ids."""
    with sessions.begin() as session:
        return [session.add_job(kind, key="a", number=number).id for number in numbers]


def test_a_lease_that_no_slot_knows_is_taken_back_in_its_place(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """The answer to a claim was lost: the job runs as a suspect, and nothing of its group before it."""
    gate = Gate()
    gate.opened.set()
    jobs, book, _ = gated("lease", gate)
    config = RelayConfig(slots_per_queue=2, poll_seconds=0.1, lease_seconds=2, heartbeat_seconds=0.1)
    with start_relay(jobs, config) as running:
        wait_until(lambda: rows_of_relay(engine), "the lease")
        with sessions.begin() as session:
            first = session.add_job(book, key="a", number=1)
            session.add_job(book, key="a", number=2)
            session.flush()
            session.execute(
                text(
                    "UPDATE outboxq.job SET state = 'group_leased', lease_owner = relay.id, lease_token = 7, "
                    "attempt = 1 FROM outboxq.relay AS relay WHERE job.id = :id"
                ),
                {"id": first.id},
            )
        wait_until(lambda: waiting(engine) == 0, "the end of all jobs", 20)
    assert gate.begun == [("a", 1), ("a", 2)]
    (job, _) = [event.job for event in running.of(JobDone)]
    assert (job.id, job.attempt, job.lease_token is not None) == (first.id, 1, True)
    assert "outboxq.RelayDied" in job.errors


@MODES
def test_commands_know_jobs_of_groups(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    start_relay: StartRelay,
    claim: str,
) -> None:
    """One that runs is said to run, those behind it wait; a cancelled one is out of its group, which goes on."""
    gate = Gate()
    jobs, book, _ = gated(claim, gate)
    ids = add(sessions, book, 1, 2, 3)

    def states() -> list[str | None]:
        with sessions() as session:
            found = [find_job(session, id_) for id_ in ids]
        return [None if job is None else job.state for job in found]

    assert states() == ["waiting", "waiting", "waiting"]
    with start_relay(jobs, RelayConfig(slots_per_queue=2, poll_seconds=0.05)):
        wait_until(lambda: gate.begun == [("a", 1)], "the first job")
        assert states() == ["running", "waiting", "waiting"]
        outcome = call("jobs", "cancel", ids[1], "--yes", url=outboxq_database.url)
        assert outcome.exit_code == 0, outcome
        assert states() == ["running", None, "waiting"]
        gate.opened.set()
        wait_until(lambda: waiting(engine) == 0, "the end of all jobs")
    assert gate.begun == [("a", 1), ("a", 3)]


def test_a_job_that_no_relay_knows_holds_up_its_group_and_is_named(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database, drain: Drain
) -> None:
    """The doctor names the kind, and how many wait behind the job; without it the group goes on."""
    gate = Gate()
    gate.opened.set()
    jobs, book, _ = gated("transaction", gate)
    unknown = Jobs()

    @unknown.handler(queue="ledger", kind="unheard_of", group=lambda key: key)
    def unheard_of(ctx: Context, key: str, number: int) -> None: ...

    (id_,) = add(sessions, unheard_of, 1)
    add(sessions, book, 2, 3)
    drain(jobs, slots_per_queue=1, batch_size=10)
    assert gate.begun == []
    found = only(outboxq_database.url, "group-blocked")
    assert (found["detail"]["queue"], found["detail"]["groups"], found["detail"]["jobs"]) == ("ledger", 1, 2)
    assert found["detail"]["job"] == str(id_)
    assert "'unheard_of' is not known" in found["title"]
    assert call("jobs", "cancel", id_, "--yes", url=outboxq_database.url).exit_code == 0
    drain(jobs, slots_per_queue=1, batch_size=10)
    assert gate.begun == [("a", 2), ("a", 3)]


def test_a_job_without_a_handler_is_parked_behind_a_failed_one_of_its_group(
    sessions: sessionmaker[OutboxSession], engine: Engine, drain: Drain
) -> None:
    """It is decided before the run: parked once, uncounted, and not given back to be claimed again."""
    jobs = Jobs()

    @jobs.handler(queue="ledger", group=lambda key: key, retry=Backoff(max_attempts=5, first_seconds=3600.0))
    def fails(ctx: Context, key: str, number: int) -> None:
        raise ValueError("no luck")

    unknown = external("unheard_of", queue="ledger")
    with sessions.begin() as session:
        session.add_job(fails, key="a", number=1)
        session.add_job(unknown.options(group="a"), number=2)
    events = drain(jobs, batch_size=10)
    assert [(event.queue, event.kinds) for event in of(events, JobsParked)] == [("ledger", ("unheard_of",))]
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT kind, attempt, parked FROM outboxq.job ORDER BY seq")).all()
    assert rows == [("fails", 1, 0), ("unheard_of", 0, 1)]
