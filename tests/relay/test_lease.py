"""Lease mode: the claim is committed first, and only who still has the lease can commit what the handler wrote."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import psycopg
import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Backoff, Context, DeadLetter, Discard, Jobs, OutboxSession, RelayConfig, Retry, Snooze
from outboxq.database.driver import run_script
from outboxq.errors import RegistryError
from outboxq.events import Event, JobCrashed, JobDied, JobDone, JobLeaseLost, JobRetried, RelayStarted
from outboxq.relay.lease import REAP_LIMIT
from outboxq.statements.dead_letters import DeadFilter, retry_page
from outboxq.statements.lease import reap
from tests.conftest import StartRelay
from tests.support.app import Effect
from tests.support.ledger import effects
from tests.support.waiting import PATIENCE, wait_until

Drain = Callable[..., list[Event]]
BURY = (
    "WITH gone AS (DELETE FROM outboxq.job RETURNING *) INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, "
    "priority, attempt, crashes, errors, reason, created_at) "
    "SELECT id, queue, kind, args, headers, priority, attempt, crashes, errors, 'stopped', created_at FROM gone"
)
QUICK = Backoff(max_attempts=2, first_seconds=0.0, jitter=0.0)


def rows(engine: Engine, what: str = "state, attempt, crashes") -> list[tuple[object, ...]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(f"SELECT {what} FROM outboxq.job ORDER BY id"))]


def leased_jobs() -> tuple[Jobs, dict[str, list[object]]]:
    """One handler of each flavour, which say what they saw of the database while they ran."""
    jobs, seen = Jobs(), {}

    @jobs.handler(queue="lease", claim="lease", retry=QUICK)
    def work(ctx: Context, name: str) -> None:
        seen[name] = rows(ctx.state) if isinstance(ctx.state, Engine) else [ctx.job.lease_token]
        ctx.session.add(Effect(name=name))

    @jobs.handler(queue="lease-async", claim="lease", retry=QUICK)
    async def work_async(ctx: AsyncContext, name: str) -> None:
        seen[name] = [ctx.job.lease_token]
        ctx.session.add(Effect(name=name))

    return jobs, seen


def test_a_leased_job_is_gone_with_its_handlers_rows(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Sync and async: done once, nothing left, and no row of the relay after its orderly end."""
    jobs, seen = leased_jobs()
    with sessions.begin() as session:
        session.add_job(jobs.resolve().find("work"), name="sync")
        session.add_job(jobs.resolve().find("work_async"), name="async")
    events = drain(jobs)
    assert effects(engine) == ["async", "sync"]
    assert rows(engine) == []
    assert all(token for (token,) in seen.values()), seen
    assert seen.keys() == {"sync", "async"}
    assert [event.job.attempt for event in events if isinstance(event, JobDone)] == [1, 1]
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM outboxq.relay")).scalar_one() == 0


def test_the_claim_is_committed_before_the_handler_starts(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Others see the job leased and its attempt counted, and no transaction is open while the handler works outside."""
    jobs, entered, leave = Jobs(), threading.Event(), threading.Event()

    @jobs.handler(queue="lease", claim="lease")
    def outside(ctx: Context) -> None:
        entered.set()
        leave.wait(PATIENCE)
        ctx.session.add(Effect(name="outside"))

    with sessions.begin() as session:
        session.add_job(outside)
    with start_relay(jobs, RelayConfig(slots_per_queue=1)) as running:
        assert entered.wait(PATIENCE)
        assert rows(engine, "state, attempt, crashes, lease_token > 0") == [("leased", 1, 0, True)]
        open_transactions = text(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
        )
        with engine.connect() as connection:
            assert connection.execute(open_transactions).scalar_one() == 0
        leave.set()
        wait_until(lambda: running.of(JobDone), "the job")
    assert effects(engine) == ["outside"]


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (ValueError("no"), [("scheduled", 1, 0)]),
        (Retry(timedelta(hours=1)), [("scheduled", 1, 0)]),
        (Snooze(timedelta(hours=1)), [("scheduled", 0, 0)]),
        (Discard("no"), []),
        (DeadLetter("no"), []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_outcomes_leave_the_lease_behind(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, outcome: object, expected: object
) -> None:
    """The rows are undone, the job waits again or is gone, and whoever had the old token has nothing any more."""
    jobs, held = Jobs(), []

    @jobs.handler(queue="lease", claim="lease", retry=Backoff(max_attempts=3, first_seconds=3600))
    def end(ctx: Context):  # it returns what it was told
        held.append(ctx.job.lease_token)
        ctx.session.add(Effect(name="undone"))
        ctx.session.flush()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with sessions.begin() as session:
        session.add_job(end)
    drain(jobs)
    assert effects(engine) == []
    assert rows(engine) == expected
    assert {row[0] for row in rows(engine, "lease_owner")} <= {None}
    assert all(row[0] > held[0] for row in rows(engine, "lease_token"))


def test_attempts_are_bounded_in_lease_mode(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The last one moves the job to the dead letters, its errors with it."""
    jobs = Jobs()

    @jobs.handler(queue="lease", claim="lease", retry=QUICK)
    def fail(ctx: Context) -> None:
        raise ValueError("never")

    with sessions.begin() as session:
        session.add_job(fail)
    events = drain(jobs)
    assert [type(event) for event in events if isinstance(event, JobRetried | JobDied)] == [JobRetried, JobDied]
    with engine.connect() as connection:
        row = connection.execute(text("SELECT attempt, jsonb_array_length(errors) FROM outboxq.dead_job")).one()
    assert tuple(row) == (2, 2)


@pytest.mark.first_and_last
@pytest.mark.parametrize("meanwhile", ["reaped", "cancelled"])
@pytest.mark.parametrize("how", ["sync", "async", "failing"])
def test_a_handler_that_lost_its_lease_commits_nothing(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, how: str, meanwhile: str
) -> None:
    """The token in the completion: zero rows mean that another run counts; it is told, and changes nothing."""
    jobs, entered, leave = Jobs(), threading.Event(), threading.Event()

    @jobs.handler(queue="lease", claim="lease")
    def work(ctx: Context) -> None:
        ctx.session.add(Effect(name=f"run {ctx.job.lease_token}"))
        entered.set()
        leave.wait(PATIENCE)
        if how == "failing":
            raise ValueError("too late")

    @jobs.handler(queue="lease-async", claim="lease")
    async def work_async(ctx: AsyncContext) -> None:
        ctx.session.add(Effect(name=f"run {ctx.job.lease_token}"))
        entered.set()
        await asyncio.to_thread(leave.wait, 20)

    with sessions.begin() as session:
        session.add_job(work_async if how == "async" else work)
    with start_relay(jobs, RelayConfig(slots_per_queue=1, poll_seconds=0.1)) as running:
        assert entered.wait(PATIENCE)
        with engine.begin() as connection:
            if meanwhile == "cancelled":
                connection.execute(text("DELETE FROM outboxq.job"))
            else:
                # As a reaper leaves it, and another relay that has claimed it.
                connection.execute(text("UPDATE outboxq.job SET lease_token = 7"))
        leave.set()
        wait_until(lambda: running.of(JobLeaseLost), "the loss to be noticed")
        assert effects(engine) == []
        assert rows(engine, "state, lease_token") == ([] if meanwhile == "cancelled" else [("leased", 7)])
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM outboxq.job"))


@pytest.mark.parametrize("again", ["retried", "chosen again"])
def test_a_run_of_an_earlier_row_of_the_same_id_commits_nothing(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, again: str
) -> None:
    """The row begins anew, as of a dead letter that is retried, and its tokens do not: none is given twice."""
    entered, leave = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]

    def application(run: int) -> Jobs:
        jobs = Jobs()

        @jobs.handler(queue="lease", kind="work", claim="lease")
        def work(ctx: Context) -> None:
            ctx.session.add(Effect(name=f"run {run}"))
            entered[run].set()
            leave[run].wait(PATIENCE)

        return jobs

    config = RelayConfig(slots_per_queue=1, poll_seconds=0.1)
    add = text("SELECT outboxq.add_job('work', '{}', queue => 'lease', id => '01a21a6f-a65a-7bc8-8d6b-4e29fc55f7c7')")
    with engine.begin() as connection:
        connection.execute(add)
    with start_relay(application(0), config) as stale:
        assert entered[0].wait(PATIENCE)
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM outboxq.job" if again == "chosen again" else BURY))
            if again == "chosen again":
                connection.execute(add)
            else:
                connection.execute(retry_page(DeadFilter(), after=None, limit=10))
        with start_relay(application(1), config) as running:
            assert entered[1].wait(PATIENCE)
            leave[0].set()
            wait_until(lambda: stale.of(JobLeaseLost) or stale.of(JobDone), "the run of the earlier row to end")
            leave[1].set()
            wait_until(lambda: running.of(JobLeaseLost) or running.of(JobDone), "the run that counts to end")
    assert effects(engine) == ["run 1"]


def test_a_relay_reaps_what_a_dead_owner_left(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Its jobs come back as suspects, without the attempt that never ended, and run under a new token."""
    jobs, seen = leased_jobs()
    with sessions.begin() as session:
        session.add_job(jobs.resolve().find("work"), name="orphan")
    with engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE outboxq.job SET state = 'leased', lease_owner = gen_random_uuid(), lease_token = 7, attempt = 1"
            )
        )
    with start_relay(jobs, RelayConfig(lease_seconds=1, poll_seconds=0.1)) as running:
        wait_until(lambda: running.of(JobDone), "the orphan")
    (crash,) = running.of(JobCrashed)
    assert (crash.crashes, crash.dead_letter) == (0, False)
    (done,) = running.of(JobDone)
    assert (done.job.attempt, done.job.crashes) == (1, 0)
    assert seen["orphan"] > [7]


def test_a_relay_leaves_the_jobs_of_the_living_alone(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Only an owner whose time has passed is dead."""
    jobs, _ = leased_jobs()
    with sessions.begin() as session:
        session.add_job(jobs.resolve().find("work"), name="held")
    with engine.begin() as connection:
        connection.execute(
            text(
                "WITH owner AS (INSERT INTO outboxq.relay (id, alive_until) "
                "VALUES (gen_random_uuid(), now() + interval '1 hour') RETURNING id) "
                "UPDATE outboxq.job SET state = 'leased', lease_owner = (SELECT id FROM owner), lease_token = 1"
            )
        )
    with start_relay(jobs, RelayConfig(lease_seconds=1, heartbeat_seconds=0.05, poll_seconds=0.1)) as running:
        beats = text("SELECT count(*) FROM outboxq.relay WHERE alive_until < now() + interval '10 min'")
        wait_until(lambda: running.of(RelayStarted), "the start")
        with engine.connect() as connection:
            wait_until(lambda: connection.execute(beats).scalar_one(), "its lease")
        first = rows_of_relay(engine)
        wait_until(lambda: rows_of_relay(engine) != first, "a few sweeps")
        assert rows(engine, "state, lease_token") == [("leased", 1)]


def rows_of_relay(engine: Engine) -> list[object]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT alive_until FROM outboxq.relay ORDER BY alive_until")).scalars())


@pytest.mark.large
def test_a_sweep_is_bounded(engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay) -> None:
    """However many a dead relay left, one statement takes a bounded number, and all come back in the end."""
    jobs, _ = leased_jobs()
    assert REAP_LIMIT == 100
    with sessions.begin() as session:
        session.add_jobs(jobs.resolve().find("work").job(name=str(number)) for number in range(250))
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET state = 'leased', lease_owner = gen_random_uuid()"))
    with engine.begin() as connection:
        assert len(run_script(connection, reap("outboxq", 3, REAP_LIMIT))) == REAP_LIMIT
    with start_relay(jobs, RelayConfig(lease_seconds=1, slots_per_queue=4, poll_seconds=0.1)) as running:
        wait_until(lambda: len(running.of(JobDone)) == 250, "every orphan")
    assert len(running.of(JobCrashed)) == 150
    assert len(effects(engine)) == 250


def test_a_claim_whose_answer_was_lost_is_found_by_its_own_relay(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Its owner lives, so nobody reaps it: the owner sees that no slot of its own runs it."""
    jobs, _ = leased_jobs()
    with start_relay(jobs, RelayConfig(lease_seconds=1, poll_seconds=0.1)) as running:
        wait_until(lambda: rows_of_relay(engine), "the lease")
        with engine.begin() as connection:
            connection.execute(
                text(
                    "INSERT INTO outboxq.job (id, queue, kind, args, state, lease_owner, lease_token, attempt) SELECT "
                    "gen_random_uuid(), 'lease', 'work', '{\"name\": \"lost\"}', 'leased', id, 1, 1 FROM outboxq.relay"
                )
            )
        wait_until(lambda: running.of(JobDone), "the lost job")
    assert effects(engine) == ["lost"]


def test_a_queue_has_one_claim_mode() -> None:
    """The message names both handlers and the fix; an unknown mode is refused where it is written."""
    jobs = Jobs()

    @jobs.handler(queue="mixed")
    def one(ctx: Context) -> None: ...

    @jobs.handler(queue="mixed", claim="lease")
    def two(ctx: Context) -> None: ...

    with pytest.raises(RegistryError, match=r"claim='transaction' \(one\) and with claim='lease' \(two\).*mixed-lease"):
        jobs.resolve()
    with pytest.raises(RegistryError, match="claim takes 'transaction' or 'lease', got 'leese'"):
        jobs.handler(claim="leese")(one.function)  # type: ignore[arg-type]


@pytest.mark.first_and_last
@pytest.mark.parametrize("how", ["session", "bind", "driver"])
@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_failed_attempt_leaves_nothing_whatever_it_wrote_through(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, how: str, flavour: str
) -> None:
    """The transaction begins with the first use of the session, or of the connection below it."""
    jobs = Jobs()
    insert = "INSERT INTO effect_ledger (name) VALUES ('undone')"

    @jobs.handler(queue="lease", claim="lease", retry=QUICK)
    def write_and_fail(ctx: Context) -> None:
        bind = ctx.session.bind
        assert isinstance(bind, Connection)
        if how == "session":
            ctx.session.execute(text(insert))
        elif how == "bind":
            bind.execute(text(insert))
        else:
            bind.connection.cursor().execute(insert)
        raise ValueError("never")

    @jobs.handler(queue="lease-async", claim="lease", retry=QUICK)
    async def write_and_fail_async(ctx: AsyncContext) -> None:
        bind = ctx.session.bind
        assert isinstance(bind, AsyncConnection)
        if how == "session":
            await ctx.session.execute(text(insert))
        elif how == "bind":
            await bind.execute(text(insert))
        else:
            raw = await bind.get_raw_connection()
            assert raw.driver_connection is not None
            await raw.driver_connection.execute(insert)
        raise ValueError("never")

    with sessions.begin() as session:
        session.add_job(write_and_fail if flavour == "sync" else write_and_fail_async)
    drain(jobs)
    assert effects(engine) == []
    with engine.connect() as connection:
        assert connection.execute(text("SELECT attempt FROM outboxq.dead_job")).scalars().all() == [2]


def test_a_commit_on_the_connection_is_refused(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """A session has no bind before it is used, through which rows could come outside of the job's transaction."""
    jobs = Jobs()

    @jobs.handler(queue="lease", claim="lease", retry=Backoff(max_attempts=1))
    def commit(ctx: Context) -> None:
        assert ctx.session.bind is None
        ctx.session.connection().commit()

    with sessions.begin() as session:
        session.add_job(commit)
    (died,) = [event for event in drain(jobs) if isinstance(event, JobDied)]
    assert "TransactionVerbRefused" in died.reason


def test_a_handler_that_worked_outside_is_done_although_its_idle_connection_is_gone(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """It wrote nothing, so nothing is lost with the connection: its result is settled on the next one."""
    jobs, entered, leave, calls = Jobs(), threading.Event(), threading.Event(), []

    @jobs.handler(queue="lease", claim="lease")
    def outside(ctx: Context) -> None:
        calls.append(ctx.job.attempt)
        entered.set()
        leave.wait(PATIENCE)

    with sessions.begin() as session:
        session.add_job(outside)
    with start_relay(jobs, RelayConfig(slots_per_queue=1)) as running:
        assert entered.wait(PATIENCE)
        end_all_other_backends(engine)
        leave.set()
        wait_until(lambda: running.of(JobDone), "the job")
    assert calls == [1]
    assert rows(engine) == []


def test_a_leased_job_that_was_cancelled_and_committed_by_its_handler_does_not_stop_the_slot(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """There is nothing left to bury: the loss is reported, and the next job runs."""
    jobs, _ = leased_jobs()

    @jobs.handler(queue="lease", claim="lease")
    def cancel_and_commit(ctx: Context) -> None:
        with ctx.state.begin() as other:
            other.execute(text("DELETE FROM outboxq.job WHERE id = :id"), {"id": ctx.job.id})
        ctx.session.execute(text("SELECT 1"))
        ctx.session.connection().connection.commit()

    @contextmanager
    def lifespan() -> Iterator[Engine]:
        yield engine

    top = Jobs(lifespan=lifespan)
    top.include(jobs)
    with sessions.begin() as session:
        session.add_job(cancel_and_commit)
        session.add_job(jobs.resolve().find("work"), name="next")
    with start_relay(top, RelayConfig(slots_per_queue=1)) as running:
        wait_until(lambda: running.of(JobDone), "the next job")
    assert len(running.of(JobLeaseLost)) == 1
    assert effects(engine) == ["next"]


def test_suspects_wake_a_relay_that_sleeps(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Nothing is inserted, so nothing notifies: the heartbeat finds them and rings."""
    jobs, _ = leased_jobs()
    with start_relay(jobs, RelayConfig(lease_seconds=3, poll_seconds=600)) as running:
        wait_until(lambda: rows_of_relay(engine), "the lease")
        with engine.begin() as connection:
            connection.execute(text("SET LOCAL outboxq.notify = 'off'"))
            connection.execute(
                text(
                    "INSERT INTO outboxq.job (id, queue, kind, args, state) "
                    "VALUES (gen_random_uuid(), 'lease', 'work', '{\"name\": \"suspect\"}', 'suspect')"
                )
            )
        wait_until(lambda: running.of(JobDone), "the suspect")


def test_a_job_that_cannot_be_buried_keeps_no_other_from_coming_back(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Whatever is wrong with the table of the dead letters, the sweep brings the rest back."""
    jobs, _ = leased_jobs()
    with sessions.begin() as session:
        session.add_jobs(jobs.resolve().find("work").job(name=name) for name in ("over", "under"))
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outboxq.dead_job ADD CONSTRAINT broken CHECK (false)"))
        connection.execute(
            text(
                "UPDATE outboxq.job SET state = 'leased', lease_owner = gen_random_uuid(), "
                "crashes = CASE WHEN args->>'name' = 'over' THEN 3 ELSE 0 END"
            )
        )
    with start_relay(jobs, RelayConfig(lease_seconds=1, poll_seconds=0.1)) as running:
        wait_until(lambda: len(running.of(JobDone)) == 2, "both")
    assert effects(engine) == ["over", "under"]


def test_a_handler_that_swallows_the_loss_of_its_connection_is_not_done(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """What it wrote is gone with the connection, so it did not work outside the database: it runs again."""
    jobs, entered, leave = Jobs(), threading.Event(), threading.Event()

    @jobs.handler(queue="lease", claim="lease")
    def swallow(ctx: Context) -> None:
        entered.set()
        leave.wait(PATIENCE)
        with suppress(DBAPIError, psycopg.Error):
            ctx.session.execute(text("INSERT INTO effect_ledger (name) VALUES ('written')"))

    with sessions.begin() as session:
        session.add_job(swallow)
    with start_relay(jobs, RelayConfig(slots_per_queue=1)) as running:
        assert entered.wait(PATIENCE)
        end_all_other_backends(engine)
        leave.set()
        wait_until(lambda: running.of(JobDone), "the job")
    assert effects(engine) == ["written"]


def test_a_late_result_that_cannot_be_written_does_not_hold_its_slot(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """The connection was lost, and then the dead letter is refused: the job is put off, and the next one runs."""
    jobs, entered, leave = Jobs(), threading.Event(), threading.Event()

    @jobs.handler(queue="lease", claim="lease")
    def give_up(ctx: Context) -> DeadLetter:
        entered.set()
        leave.wait(PATIENCE)
        return DeadLetter("no")

    @jobs.handler(queue="lease", claim="lease")
    def behind(ctx: Context) -> None:
        ctx.session.add(Effect(name="behind"))

    with sessions.begin() as session:
        session.add_job(give_up)
        session.add_job(behind)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outboxq.dead_job ADD CONSTRAINT broken CHECK (false)"))
    with start_relay(jobs, RelayConfig(slots_per_queue=1)) as running:
        assert entered.wait(PATIENCE)
        end_all_other_backends(engine)
        leave.set()
        wait_until(lambda: running.of(JobDone), "the job behind it")
    assert effects(engine) == ["behind"]
    assert rows(engine) == [("scheduled", 0, 0)]


def end_all_other_backends(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        )
