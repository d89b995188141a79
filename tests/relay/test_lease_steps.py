"""The lease step by step, without a relay around it: what a pause or an outage does between two steps."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import UUID, uuid4

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, RelayConfig
from outboxq.database.driver import run_script
from outboxq.events import JobCrashed
from outboxq.execution.claim import ClaimRequest, claim
from outboxq.job import Job
from outboxq.statements import lease
from outboxq.statements.claim import ClaimScript, ClaimStatements
from tests.support import app
from tests.support.slots import make_lease
from tests.support.waiting import wait_until


def enqueue(sessions: sessionmaker[OutboxSession], *names: str) -> None:
    with sessions.begin() as session:
        session.add_jobs(app.record.job(name=name) for name in names)


def execute(engine: Engine, script: str) -> None:
    with engine.begin() as connection:
        run_script(connection, script)


def extend(engine: Engine, owner: UUID, seconds: float) -> None:
    execute(engine, lease.extend("outboxq", owner, seconds, "host", 1))


def claimed(engine: Engine, script: ClaimScript, limit: int = 1) -> tuple[Job, ...]:
    with engine.begin() as connection:
        return claim(connection, ClaimRequest(script, limit)).jobs


def claimed_names(engine: Engine, script: ClaimScript) -> list[object]:
    return [json.loads(job.args)["name"] for job in claimed(engine, script)]


def claimed_by(engine: Engine, owner: UUID, limit: int = 1) -> tuple[Job, ...]:
    extend(engine, owner, 60.0)
    return claimed(engine, ClaimStatements("outboxq", "ledger", owner).lease_ready, limit)


class Beats:
    """The thread of a relay's lease, held up at its beats: each asks twice what runs, before it takes anything back."""

    def __init__(self, engine: Engine, at: Callable[["Beats"], set[tuple[str, int]]]) -> None:
        self.owner = uuid4()
        self.connections: list[psycopg.Connection] = []
        self.asked = 0
        self.taken: list[JobCrashed] = []
        self._engine = engine
        self._at = at

    @contextmanager
    def running(self) -> Iterator[None]:
        lease_of_owner = make_lease(
            RelayConfig(lease_seconds=60, heartbeat_seconds=0.05),
            connect=self._connect,
            owner=self.owner,
            queues=("ledger",),
            running=self._ask,
            on_reaped=self.taken.append,
        )
        lease_of_owner.want()
        lease_of_owner.start()
        try:
            yield
        finally:
            lease_of_owner.stop()

    def lose_connection(self) -> None:
        pid = self.connections[-1].info.backend_pid
        with self._engine.connect() as connection:
            assert connection.execute(text("SELECT pg_terminate_backend(:pid, 60000)"), {"pid": pid}).scalar_one()

    def _connect(self) -> psycopg.Connection:
        url = self._engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
        self.connections.append(psycopg.connect(url, autocommit=True))
        self.asked = 0
        return self.connections[-1]

    def _ask(self) -> set[tuple[str, int]]:
        self.asked += 1
        return self._at(self)


@pytest.mark.parametrize("sort", ["ready", "due", "suspect"])
@pytest.mark.parametrize("seconds", [None, -1.0])
def test_a_relay_whose_lease_ran_out_claims_nothing_under_it(
    engine: Engine, sessions: sessionmaker[OutboxSession], sort: str, seconds: float | None
) -> None:
    """The next sweep would take the job from under its handler, which another relay then runs once more."""
    enqueue(sessions, "job")
    state = "scheduled" if sort == "due" else sort
    execute(engine, f"UPDATE outboxq.job SET state = '{state}', run_at = now()")
    owner = uuid4()
    if seconds is not None:
        extend(engine, owner, seconds)
    script: ClaimScript = getattr(ClaimStatements("outboxq", "ledger", owner), f"lease_{sort}")
    assert claimed_names(engine, script) == []
    extend(engine, owner, 60.0)
    assert claimed_names(engine, script) == ["job"]


def test_a_suspect_that_crashed_goes_behind_the_other_suspects(
    engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """A job that kills each relay that runs it does not come before those that were suspected for its sake."""
    enqueue(sessions, "killer", "innocent")
    execute(engine, "UPDATE outboxq.job SET state = 'suspect'")
    dying, next_one = uuid4(), uuid4()
    extend(engine, dying, 60.0)
    assert claimed_names(engine, ClaimStatements("outboxq", "ledger", dying).lease_suspect) == ["killer"]
    execute(engine, lease.end("outboxq", dying))
    execute(engine, lease.reap("outboxq", 3, 100))
    extend(engine, next_one, 60.0)
    script = ClaimStatements("outboxq", "ledger", next_one).lease_suspect
    assert [claimed_names(engine, script) for _ in range(2)] == [["innocent"], ["killer"]]


def test_a_claim_whose_answer_is_late_keeps_its_job(engine: Engine, sessions: sessionmaker[OutboxSession]) -> None:
    """At the first beat that sees it nothing is taken back: its answer may be on its way, and the slot about to run."""
    enqueue(sessions, "late", "lost")
    first_beat = 2
    beats = Beats(engine, lambda beats: set() if beats.asked <= first_beat else {(str(late.id), late.lease_token)})
    late, lost = claimed_by(engine, beats.owner, limit=2)
    with beats.running():
        wait_until(lambda: beats.taken, "the job whose claim is never answered")
    assert [event.id for event in beats.taken] == [lost.id]


def test_after_an_outage_no_relay_is_reaped_before_it_could_extend_its_lease(
    engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """All leases ran out meanwhile; the first relay that is back gives the others two beats before it sweeps."""
    enqueue(sessions, "of a living relay", "of a dead relay")
    living, dead = uuid4(), uuid4()
    third_beat = 5

    def at(beats: Beats) -> set[tuple[str, int]]:
        match len(beats.connections), beats.asked:
            case 1, 1:
                extend(engine, living, -1.0)
                extend(engine, dead, -1.0)
                beats.lose_connection()
            case 2, asked if asked == third_beat:
                extend(engine, living, 60.0)
        return set()

    claimed_by(engine, living)
    (of_dead,) = claimed_by(engine, dead)
    beats = Beats(engine, at)
    with beats.running():
        wait_until(lambda: beats.taken, "the dead relay's job")
    assert [event.id for event in beats.taken] == [of_dead.id]
