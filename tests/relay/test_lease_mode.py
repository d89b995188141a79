"""Lease mode in batches: each handler by itself, what wrote nothing is removed together, a slow one holds up none."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.orm import Session, sessionmaker

import outboxq.execution.lease_mode as lease_mode
from outboxq import AsyncContext, Backoff, Context, DeadLetter, Discard, Jobs, OutboxSession, Relay, RelayConfig, Snooze
from outboxq.database.driver import Answer, Script, run_script
from outboxq.events import (
    Event,
    JobCrashed,
    JobDied,
    JobDiscarded,
    JobDone,
    JobInterrupted,
    JobLeaseLost,
    JobRetried,
    JobSnoozed,
    JobsParked,
)
from outboxq.execution.batch_state import BatchReport
from outboxq.execution.claim import Claimed
from outboxq.execution.lease_mode import LeasedBatch, Unsettled
from outboxq.job import Job
from outboxq.relay.lease import RelayLease
from outboxq.relay.limits import RelayLimits
from outboxq.relay.planner import Planner
from tests.conftest import StartRelay
from tests.support.app import Child, Effect
from tests.support.driver_waits import driver_waits
from tests.support.ledger import effects
from tests.support.limits import FOLLOW_ON, GROWING, HELD, with_limits
from tests.support.matrices import sampled
from tests.support.scripts import change_scripts, text_of
from tests.support.waiting import PATIENCE, wait_until

# A slot's claims take 1, 2 and 4 jobs before they may take 8.
BEFORE_EIGHT = 7


# Claims grow however slow the machine is, and slots go on with one sort of jobs for as long as there are any.
pytestmark = pytest.mark.relay_limits(replace(FOLLOW_ON, lease_mode=GROWING))
# Nor is anything released.
PATIENT_LIMITS = replace(FOLLOW_ON, lease_mode=HELD)
PATIENT = pytest.mark.relay_limits(PATIENT_LIMITS)


class Work:
    """A leased queue whose jobs do what the test has put under their name."""

    def __init__(self, engine: Engine, limits: RelayLimits) -> None:
        self._limits = limits
        self.ran: list[str] = []
        self.tasks: dict[str, Any] = {}
        self.jobs = Jobs(lifespan=self._lifespan)
        self._engine = engine

        @self.jobs.handler(queue="held", claim="lease", retry=Backoff(max_attempts=3, first_seconds=3600))
        def work(ctx: Context, name: str) -> Any:
            self.ran.append(name)
            task = self.tasks.get(name)
            return None if task is None else task(ctx)

        self.work = work

    @contextmanager
    def _lifespan(self) -> Iterator[Engine]:
        yield self._engine

    def enqueue(self, *names: str) -> None:
        """After as many quick ones as bring a slot's claims to eight."""
        quick = [f"quick {number}" for number in range(BEFORE_EIGHT)]
        with Session(self._engine) as plain, OutboxSession(plain.get_bind()) as session, session.begin():
            session.add_jobs(self.work.job(name=name) for name in [*quick, *names])

    def drain(self, **settings: Any) -> list[Event]:
        events: list[Event] = []
        config = RelayConfig(slots_per_queue=1, batch_size=8, **settings)
        with_limits(Relay(self._engine, self.jobs, config, hooks=[events.append]), self._limits).drain()
        return [each for each in events if "quick" not in getattr(getattr(each, "job", None), "args", "")]


@pytest.fixture
def work(engine: Engine, relay_limits: RelayLimits) -> Work:
    return Work(engine, relay_limits)


def rows(engine: Engine, what: str = "args->>'name', state, attempt, crashes") -> list[tuple[object, ...]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(f"SELECT {what} FROM outboxq.job ORDER BY seq"))]


def of(events: list[Event], kind: type[Any]) -> list[str]:
    return [event.job.args for event in events if isinstance(event, kind)]


def write(name: str) -> Any:
    return lambda ctx: ctx.session.add(Effect(name=name))


def hold(entered: threading.Event, leave: threading.Event) -> Any:
    def held(_ctx: Context) -> None:
        entered.set()
        leave.wait(PATIENCE)

    return held


@PATIENT
def test_a_batch_of_leased_jobs_that_write_nothing_costs_one_round_trip(
    sessions: sessionmaker[OutboxSession], drain: Callable[..., list[Event]]
) -> None:
    """BEGIN, the removal of all, the next claim and COMMIT in one string."""
    jobs, seen = Jobs(), []

    @jobs.handler(queue="held", claim="lease")
    def do_nothing(ctx: Context) -> None:
        seen.append(waits.count(threading.current_thread()))

    with sessions.begin() as session:
        session.add_jobs(do_nothing.job() for _ in range(50 * 14))
    with driver_waits() as waits:
        drain(jobs, slots_per_queue=1, batch_size=50)
    trips = sorted(set(seen))
    assert trips == list(range(trips[0], trips[0] + len(trips)))
    # The first claims are smaller.
    assert len(trips) <= 14 + 6


def test_a_leased_job_that_writes_costs_its_own_statements_and_three_round_trips(
    sessions: sessionmaker[OutboxSession], drain: Callable[..., list[Event]]
) -> None:
    """BEGIN with the savepoints; the removal by token; COMMIT, and with it the next claim and its COMMIT."""
    jobs = Jobs()

    @jobs.handler(queue="held", claim="lease")
    def insert(ctx: Context) -> None:
        ctx.session.execute(text("INSERT INTO effect_ledger (name) VALUES ('x')"))

    counts = []
    for count in (5, 25):
        with sessions.begin() as session:
            session.add_jobs(insert.job() for _ in range(count))
        with driver_waits() as waits:
            drain(jobs, slots_per_queue=1)
        counts.append(len(waits))
    # How often the driver waits until it is connected is chance.
    assert round((counts[1] - counts[0]) / 20) == 4


@PATIENT
def test_each_job_of_a_batch_has_an_outcome_of_its_own(engine: Engine, work: Work) -> None:
    """Rows, a failure, an outcome, a refused COMMIT: in transactions of their own, between those that wrote nothing."""
    work.tasks = {
        "writes": write("written"),
        "fails": lambda ctx: [ctx.session.add(Effect(name="undone")), ctx.session.flush(), 1 / 0],
        "snoozes": lambda _: Snooze(timedelta(hours=1)),
        "discards": lambda _: Discard("no"),
        "dies": lambda _: DeadLetter("no"),
        "orphans": lambda ctx: ctx.session.add(Child(parent_id=-1)),
    }
    work.enqueue("first", *work.tasks, "last")
    events = work.drain()
    assert [len(of(events, kind)) for kind in (JobDone, JobRetried, JobSnoozed, JobDiscarded, JobDied)] == [
        3,
        2,
        1,
        1,
        1,
    ]
    assert effects(engine) == ["written"]
    assert sorted(rows(engine)) == [
        ("fails", "scheduled", 1, 0),
        ("orphans", "scheduled", 1, 0),
        ("snoozes", "scheduled", 0, 0),
    ]
    assert not [event for event in events if isinstance(event, JobLeaseLost | JobCrashed)]


@PATIENT
def test_what_goes_around_the_session_is_committed_with_its_own_job(engine: Engine, work: Work) -> None:
    """A handler that writes on the driver's own connection has written: what the next one loses is its own."""

    def write_around(ctx: Context) -> None:
        assert isinstance(ctx.session.bind, Connection)
        ctx.session.bind.connection.cursor().execute("INSERT INTO effect_ledger (name) VALUES ('around')")

    def lose(ctx: Context) -> None:
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM outboxq.job WHERE id = :id"), {"id": ctx.job.id})
        ctx.session.add(Effect(name="lost"))

    work.tasks = {"writes": write_around, "loses": lose}
    work.enqueue("first", "writes", "loses", "last")
    events = work.drain()
    assert [len(of(events, kind)) for kind in (JobDone, JobLeaseLost)] == [3, 1]
    assert effects(engine) == ["around"]


@PATIENT
def test_a_kind_that_nobody_knows_is_parked_uncounted_out_of_a_batch(engine: Engine, work: Work) -> None:
    """The others of its claim are done, and the rest of its kind is parked with it."""
    work.enqueue("known")
    insert = (
        "INSERT INTO outboxq.job (id, queue, kind, args) SELECT gen_random_uuid(), 'held', 'unheard of', "
        '\'{"name": "unknown"}\' FROM generate_series(1, 12)'
    )
    with engine.begin() as connection:
        connection.execute(text(insert))
    work.enqueue()
    events = work.drain()
    assert len(of(events, JobDone)) == 1
    assert set(rows(engine)) == {("unknown", "scheduled", 0, 0)}
    assert sum(event.count for event in events if isinstance(event, JobsParked)) == 12


@PATIENT
@pytest.mark.parametrize("meanwhile", ["cancelled", "reaped"])
@pytest.mark.parametrize("which", ["finished", "writes", "waiting"])
def test_a_lost_lease_of_one_job_costs_the_others_nothing(
    engine: Engine, work: Work, which: str, meanwhile: str
) -> None:
    """Each is fenced by its own token, and only the one whose row is not ours any more is told as lost."""

    def lose(_ctx: Context) -> None:
        change = "DELETE FROM outboxq.job" if meanwhile == "cancelled" else "UPDATE outboxq.job SET lease_token = 9"
        with engine.begin() as connection:
            connection.execute(text(f"{change} WHERE args->>'name' = :name"), {"name": which})

    work.tasks = {"loses": lose, "writes": write("written")}
    work.enqueue("finished", "loses", "writes", "waiting", "behind")
    events = work.drain()
    names = {"finished", "loses", "writes", "waiting", "behind"}
    assert sorted(of(events, JobLeaseLost)) == [f'{{"name": "{which}"}}']
    assert sorted(of(events, JobDone)) == sorted(f'{{"name": "{name}"}}' for name in names - {which})
    assert Counter(work.ran[BEFORE_EIGHT:]) == Counter(names)
    assert effects(engine) == ([] if which == "writes" else ["written"])
    assert rows(engine, "args->>'name', lease_token") == ([] if meanwhile == "cancelled" else [(which, 9)])


@pytest.mark.parametrize("after", ["the lease", "its time"])
def test_what_has_not_begun_does_not_begin_without_the_lease_or_after_its_time(
    engine: Engine,
    work: Work,
    start_relay: StartRelay,
    relay_limits: RelayLimits,
    monkeypatch: pytest.MonkeyPatch,
    after: str,
) -> None:
    """It waits where it waited, uncounted, under another token; what was done before it is removed."""
    limits = PATIENT_LIMITS if after == "the lease" else relay_limits

    def pass_away(_ctx: Context) -> None:
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO outboxq.queue (name, paused_at) VALUES ('held', now())"))
        if after == "the lease":
            monkeypatch.setattr(RelayLease, "want", lambda _self: False)
        else:
            monkeypatch.setattr(lease_mode, "clock", lambda: later + 3600.0)

    later = lease_mode.clock()
    work.tasks = {"passes": pass_away}
    work.enqueue("first", "passes", "third", "fourth")
    config = RelayConfig(slots_per_queue=1, batch_size=8)
    with start_relay(work.jobs, config, engine=engine, limits=limits) as running:
        wait_until(lambda: len(running.of(JobDone)) == BEFORE_EIGHT + 2, "what was begun")
        assert rows(engine, "args->>'name', state, attempt, lease_owner IS NULL") == [
            ("third", "ready", 0, True),
            ("fourth", "ready", 0, True),
        ]
    assert work.ran[BEFORE_EIGHT:] == ["first", "passes"]


def test_a_slow_handler_holds_up_nothing_that_was_claimed_with_it(
    engine: Engine, work: Work, start_relay: StartRelay
) -> None:
    """While it runs, what is done is removed, and what has not begun is done by another slot."""
    entered, leave = threading.Event(), threading.Event()
    work.tasks = {"slow": hold(entered, leave)}
    config = RelayConfig(slots_per_queue=2, batch_size=8, poll_seconds=60.0)
    work.enqueue("first", "slow", "third", "fourth")
    with start_relay(work.jobs, config, engine=engine) as running:
        try:
            assert entered.wait(PATIENCE)
            wait_until(lambda: rows(engine) == [("slow", "leased", 1, 0)], "all but the slow one")
        finally:
            leave.set()
        wait_until(lambda: not rows(engine), "the slow one")
    assert Counter(work.ran).most_common(1)[0][1] == 1
    assert {event.job.attempt for event in running.of(JobDone)} == {1}
    assert len(running.of(JobDone)) == BEFORE_EIGHT + 4


def note_claims(monkeypatch: pytest.MonkeyPatch, note: Callable[[Claimed], object]) -> None:
    """Have `note` called with each claim that took jobs."""
    record = Planner.record_claim

    def noting(planner: Planner, claimed: Claimed, *, is_called: bool) -> bool:
        if claimed.jobs:
            note(claimed)
        return record(planner, claimed, is_called=is_called)

    monkeypatch.setattr(Planner, "record_claim", noting)


@pytest.mark.relay_limits(FOLLOW_ON)
def test_claims_follow_the_pace_of_their_handlers(
    sessions: sessionmaker[OutboxSession],
    drain: Callable[..., list[Event]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice as many while they are fast; as few as fit into the time when they are slow."""
    now, sizes = [1_000.0], []
    monkeypatch.setattr(lease_mode, "clock", lambda: now[0])
    jobs = Jobs()
    seconds = iter([0.001] * 15 + [0.02] * 24 + [3.0] + [0.02] * 10)

    @jobs.handler(queue="held", claim="lease")
    def take_time(ctx: Context) -> None:
        now[0] += next(seconds)

    note_claims(monkeypatch, lambda claimed: sizes.append(len(claimed.jobs)))
    with sessions.begin() as session:
        session.add_jobs(take_time.job() for _ in range(50))
    drain(jobs, slots_per_queue=1, batch_size=20)
    # 16 at 20 ms are 0.32 s, and the last of them are given back; then two fit, until one took 3 s.
    assert sizes[:6] == [1, 2, 4, 8, 16, 2]
    assert set(sizes[6:]) <= {1, 2}
    assert 1 in sizes[6:]


@PATIENT
@pytest.mark.parametrize("how", ["in time", "cut off"])
def test_a_relay_that_stops_gives_back_what_has_not_begun(
    engine: Engine, work: Work, start_relay: StartRelay, how: str
) -> None:
    """Uncounted; what was done before is removed, and who runs may end, or is interrupted when the drain is over."""
    entered, leave = threading.Event(), threading.Event()
    work.tasks = {"runs": hold(entered, leave)}
    work.enqueue("first", "runs", "third", "fourth")
    drain_seconds = 20.0 if how == "in time" else 0.2
    config = RelayConfig(slots_per_queue=1, batch_size=8, drain_seconds=drain_seconds)
    with start_relay(work.jobs, config, engine=engine) as running:
        assert entered.wait(PATIENCE)
        running.relay.stop()
        if how == "in time":
            leave.set()
        else:
            wait_until(lambda: running.of(JobInterrupted), "the drain to be over")
    leave.set()
    assert len(running.of(JobDone)) == BEFORE_EIGHT + (2 if how == "in time" else 1)
    left = {row[0]: row[1:] for row in rows(engine, "args->>'name', state, attempt, crashes, lease_owner")}
    expected = {"third", "fourth"} | (set() if how == "in time" else {"runs"})
    assert left == dict.fromkeys(expected, ("ready", 0, 0, None))


@PATIENT
def test_a_handler_past_its_deadline_is_charged_alone(engine: Engine, start_relay: StartRelay) -> None:
    """What was claimed with it is done, uncharged, whether its handler had run or not."""
    jobs, leave, ran, hanging = Jobs(), threading.Event(), [], []

    @jobs.handler(queue="held", claim="lease", timeout_seconds=0.2, retry=Backoff(max_attempts=1))
    def work(ctx: Context, name: str) -> None:
        ran.append(name)
        if name == "hangs":
            hanging.append(threading.current_thread())
            leave.wait(PATIENCE)

    with OutboxSession(engine) as session, session.begin():
        session.add_jobs(work.job(name=name) for name in ["q"] * BEFORE_EIGHT + ["first", "hangs", "third"])
    with start_relay(jobs, RelayConfig(slots_per_queue=1, batch_size=8), engine=engine) as running:
        wait_until(lambda: running.of(JobDied), "the deadline")
        wait_until(lambda: len(running.of(JobDone)) == BEFORE_EIGHT + 2, "the others")
        leave.set()
        (slot,) = hanging
        slot.join(PATIENCE)
        assert not slot.is_alive()
    assert not running.of(JobLeaseLost)
    assert Counter(ran)["first"] == Counter(ran)["third"] == 1
    assert {event.job.attempt for event in running.of(JobDone)} == {1}
    assert rows(engine) == []


@PATIENT
def test_a_lost_connection_charges_who_ran_and_nobody_else(engine: Engine, work: Work, start_relay: StartRelay) -> None:
    """What was done is removed on the next connection, what had not begun waits, and the one that ran is a suspect."""

    def end_own_backend(ctx: Context) -> None:
        if work.ran.count("ends") == 1:
            ctx.session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    work.tasks = {"ends": end_own_backend}
    work.enqueue("first", "ends", "third")
    with start_relay(
        work.jobs, RelayConfig(slots_per_queue=1, batch_size=8, poll_seconds=0.1), engine=engine
    ) as running:
        wait_until(lambda: len(running.of(JobDone)) == BEFORE_EIGHT + 3, "every job")
    assert Counter(work.ran[BEFORE_EIGHT:]) == {"first": 1, "ends": 2, "third": 1}
    assert [(event.kind, event.crashes) for event in running.of(JobCrashed)] == [("work", 0)]
    assert {event.job.attempt for event in running.of(JobDone)} == {1}


@PATIENT
@pytest.mark.parametrize("error", ["SELECT 1 / 0", "SELECT pg_terminate_backend(pg_backend_pid())"])
def test_a_next_claim_that_fails_undoes_no_removal_for_good(
    engine: Engine, work: Work, start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """They are one transaction, so the jobs are removed by themselves, and told once; no handler runs again."""
    statements = [error]

    def breaking(script: Script) -> None:
        owners = [owner for owner, _ in script.parts]
        if statements and {"finished", "claim"} <= set(owners):
            script.parts.insert(owners.index("claim"), ("settings", statements.pop()))

    change_scripts(monkeypatch, breaking)
    work.enqueue("first", "second")
    with start_relay(
        work.jobs, RelayConfig(slots_per_queue=1, batch_size=8, poll_seconds=0.1), engine=engine
    ) as running:
        wait_until(lambda: len(running.of(JobDone)) == BEFORE_EIGHT + 2, "every job")
    assert max(Counter(work.ran).values()) == 1
    assert not running.of(JobLeaseLost)
    assert rows(engine) == []


@PATIENT
def test_jobs_whose_removal_was_in_doubt_are_told_whenever_the_connection_is_lost(
    engine: Engine, work: Work, start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """COMMIT's answer was lost; what stands is asked with the next try, and not in a question that may be lost too."""
    original = Script.send
    answered: list[str] = []

    def losing(script: Script, connection: Connection) -> Answer:
        answer = original(script, connection)
        if not answered and "finished" in [owner for owner, _ in script.parts]:
            answered.append("lost")
            with engine.connect() as other:
                pid = connection.connection.driver_connection.info.backend_pid
                assert other.scalar(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid})
            answer = original(script, connection)
        return answer

    monkeypatch.setattr(Script, "send", losing)
    work.enqueue("first", "second", "third")
    config = RelayConfig(slots_per_queue=1, batch_size=8, poll_seconds=0.1, lease_seconds=2)
    with start_relay(work.jobs, config, engine=engine) as running:
        wait_until(lambda: len(running.of(JobDone)) >= BEFORE_EIGHT + 3, "every job")
    assert len(running.of(JobDone)) == BEFORE_EIGHT + 3
    assert max(Counter(work.ran).values()) == 1
    assert not running.of(JobLeaseLost)
    assert rows(engine) == []


@PATIENT
def test_what_became_of_a_job_is_told_though_the_rest_of_its_claim_cannot_be_settled(
    engine: Engine, work: Work, start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is settled later; what was committed is told at once."""
    original = lease_mode.release_waiting
    failed: list[bool] = []

    def failing(connection: Connection, held: LeasedBatch, schema: str) -> BatchReport:
        if not failed:
            failed.append(True)
            connection.connection.driver_connection.close()
        return original(connection, held, schema)

    def escape(ctx: Context) -> None:
        ctx.session.add(Effect(name="never"))
        ctx.session.flush()
        ctx.session.connection().connection.driver_connection.execute("ROLLBACK")

    monkeypatch.setattr(lease_mode, "release_waiting", failing)
    work.tasks = {"escapes": escape}
    work.enqueue("escapes", "behind", "last")
    config = RelayConfig(slots_per_queue=1, batch_size=8, poll_seconds=0.1, lease_seconds=2)
    with start_relay(work.jobs, config, engine=engine) as running:
        wait_until(lambda: len(running.of(JobDone)) >= BEFORE_EIGHT + 2, "the others")
    assert failed
    assert [event.job.args for event in running.of(JobRetried)] == ['{"name": "escapes"}']
    assert len(running.of(JobDone)) == BEFORE_EIGHT + 2
    assert effects(engine) == []


@PATIENT
def test_what_waits_for_its_turn_is_no_orphan(engine: Engine, work: Work, start_relay: StartRelay) -> None:
    """The relay's own sweep for jobs that no slot runs leaves a claim alone, however long it lasts."""
    entered, leave = threading.Event(), threading.Event()
    work.tasks = {"slow": hold(entered, leave)}
    work.enqueue("first", "slow", "third")
    config = RelayConfig(slots_per_queue=1, batch_size=8, lease_seconds=1, heartbeat_seconds=0.05)
    with start_relay(work.jobs, config, engine=engine) as running:
        assert entered.wait(PATIENCE)
        with engine.connect() as connection:
            alive = text("SELECT alive_until FROM outboxq.relay")
            seen = {connection.execute(alive).scalar_one()}
            wait_until(lambda: len(seen.add(connection.execute(alive).scalar_one()) or seen) > 6, "some beats")
        leave.set()
        wait_until(lambda: len(running.of(JobDone)) == BEFORE_EIGHT + 3, "every job")
    assert not running.of(JobCrashed)
    assert max(Counter(work.ran).values()) == 1


@PATIENT
@pytest.mark.parametrize("writes", [True, False])
def test_users_listeners_see_each_leased_job_begin(engine: Engine, work: Work, writes: bool) -> None:
    """A listener that sets a role or a tenant must not miss a transaction that a string of ours began."""
    begun: list[Connection] = []
    seen: list[object] = []

    @event.listens_for(engine, "begin")
    def begins(connection: Connection) -> None:
        begun.append(connection)
        if writes:
            connection.exec_driver_sql(f"SET LOCAL outboxq.tenant = 'number {len(begun)}'")

    def look(ctx: Context) -> None:
        seen.append(len(begun))
        if writes:
            tenant = ctx.session.execute(text("SELECT current_setting('outboxq.tenant', true)")).scalar_one()
            assert tenant == f"number {len(begun)}"
            ctx.session.add(Effect(name="looked"))

    names = [f"look {number}" for number in range(5)]
    work.tasks = dict.fromkeys(names, look)
    work.enqueue(*names)
    assert len(of(work.drain(), JobDone)) == 5
    assert len(set(seen)) == 5
    assert (effects(engine), rows(engine)) == (["looked"] * 5 if writes else [], [])


@PATIENT
def test_async_handlers_are_settled_together_too(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Callable[..., list[Event]]
) -> None:
    """In one event loop, some with rows and some without."""
    jobs = Jobs()

    @jobs.handler(queue="held-async", claim="lease")
    async def work(ctx: AsyncContext, number: int) -> None:
        if number % 10 == 0:
            ctx.session.add(Effect(name=str(number)))

    with sessions.begin() as session:
        session.add_jobs(work.job(number=number) for number in range(60))
    events = drain(jobs, slots_per_queue=2, batch_size=8)
    assert len(of(events, JobDone)) == 60
    assert (len(effects(engine)), rows(engine)) == (6, [])


def test_suspects_are_claimed_one_at_a_time(engine: Engine, work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the batches are: a suspect that kills its relay takes no other along."""
    sizes: list[tuple[int, int]] = []
    note_claims(monkeypatch, lambda claimed: sizes.append((len(claimed.jobs), claimed.jobs[0].crashes)))
    work.enqueue(*(f"suspect {number}" for number in range(5)))
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET state = 'suspect', crashes = 1 WHERE args::text ~ 'susp'"))
        assert run_script(connection, "SELECT count(*) FROM outboxq.job WHERE state = 'suspect'") == [(5,)]
    events = work.drain()
    assert sorted(size for size, crashes in sizes if crashes) == [1] * 5
    assert len(of(events, JobDone)) == 5


@pytest.mark.parametrize("analyzed", sampled(["before", "after"]))
def test_leased_jobs_are_settled_by_their_keys_whatever_statistics_say(engine: Engine, analyzed: str) -> None:
    """A thousand of a hundred thousand: neither the plans nor the server's own count knows a scan of the table."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ALTER TABLE outboxq.job SET (autovacuum_enabled = off)")
        if analyzed == "before":
            connection.exec_driver_sql("ANALYZE outboxq.job")
        connection.exec_driver_sql(
            "INSERT INTO outboxq.job (id, queue, kind, args, state, lease_owner, lease_token) "
            "SELECT gen_random_uuid(), 'held', 'work', '{}', 'leased', gen_random_uuid(), 1 "
            "FROM generate_series(1, 100000)"
        )
        if analyzed == "after":
            connection.exec_driver_sql("ANALYZE outboxq.job")
        ids = connection.exec_driver_sql("SELECT id FROM outboxq.job LIMIT 2000").scalars().all()
    empty = dict.fromkeys((name for name in Job.__struct_fields__ if name not in ("id", "lease_token")), None)
    jobs = tuple(Job(id=job_id, lease_token=1, **empty) for job_id in ids)
    script = Script()
    Unsettled(tuple(JobDone(job, 0.0) for job in jobs[:1000]), jobs[1000:], False).add_to(script, "outboxq")
    settings, *statements = text_of(script).split("WITH oq_held")
    counts = "SELECT seq_scan, n_tup_del, n_tup_upd FROM pg_stat_xact_user_tables WHERE relname = 'job'"
    with engine.connect() as connection, connection.begin():
        run_script(connection, settings)
        for statement in statements:
            plan = [str(row[0]) for row in run_script(connection, f"EXPLAIN WITH oq_held{statement}")]
            assert not [line for line in plan if "Seq Scan" in line]
            assert [line for line in plan if "Index Cond: (id = ANY" in line]
        before = connection.exec_driver_sql(counts).one()
        assert script.send(connection).error is None
        after = connection.exec_driver_sql(counts).one()
    assert [new - old for old, new in zip(before, after, strict=True)] == [0, 1_000, 1_000]


@PATIENT
def test_a_claim_of_an_earlier_term_of_the_lease_begins_nothing_more(
    engine: Engine, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay whose lease ran out, and was taken again, cannot know which of its jobs another relay has done."""
    leases: list[RelayLease] = []
    want, claims = RelayLease.want, list[list[str]]()

    def wanting(lease: RelayLease) -> bool:
        leases.append(lease)
        return want(lease)

    def note(claimed: Claimed) -> None:
        if names := [job.args for job in claimed.jobs if "quick" not in job.args]:
            claims.append(names)

    def lapse(_ctx: Context) -> None:
        leases[-1].term += 1

    monkeypatch.setattr(RelayLease, "want", wanting)
    note_claims(monkeypatch, note)
    work.tasks = {"lapses": lapse}
    work.enqueue("first", "lapses", "third", "last")
    work.drain()
    first, lapses, third, last = (f'{{"name": "{name}"}}' for name in ("first", "lapses", "third", "last"))
    assert claims[0] == [first, lapses, third, last]
    # Given back, and claimed again in the term that has begun.
    assert [job for jobs in claims[1:] for job in jobs] == [third, last]
    assert work.ran[BEFORE_EIGHT:] == ["first", "lapses", "third", "last"]
    assert rows(engine) == []


@PATIENT
def test_a_claim_that_cannot_be_read_hides_no_job_that_was_settled_with_it(
    engine: Engine, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was committed in its transaction is reported, and the slot goes on."""
    unread: list[Script] = []

    def make_unreadable(script: Script) -> None:
        owners = [owner for owner, _ in script.parts]
        if not unread and {"finished", "claim"} <= set(owners):
            unread.append(script)
            script.parts[owners.index("claim")] = "claim", "SELECT 'infinity'::timestamptz"

    change_scripts(monkeypatch, make_unreadable)
    work.enqueue("one", "two")
    events = work.drain()
    assert unread
    assert sorted(of(events, JobDone)) == ['{"name": "one"}', '{"name": "two"}']
    assert (Counter(work.ran).most_common(1)[0][1], rows(engine)) == (1, [])
