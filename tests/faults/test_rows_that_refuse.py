"""Rows that no statement of a relay can take: they are set aside, and no other job waits for them."""

import logging
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, Jobs, OutboxSession, RelayConfig
from outboxq.events import Event, JobCrashed, JobDone, JobSetAside, JobsSuspected, RelayStarted
from outboxq.statements.claim import ClaimScript
from tests.conftest import StartRelay
from tests.support.app import Effect
from tests.support.ledger import ledger
from tests.support.waiting import wait_until

Drain = Callable[..., list[Event]]

# Rows of the kind "bad" are refused by a trigger of the users' in front of these commands.
REFUSING = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
  IF OLD.kind = 'bad' AND ({condition}) THEN
    RAISE 'refused, with secret 4711' USING ERRCODE = '{sqlstate}';
  END IF;
  RETURN coalesce(NEW, OLD);
END$$;
CREATE TRIGGER refuse BEFORE {commands} ON outboxq.job FOR EACH ROW EXECUTE FUNCTION refuse();
"""
NO_DEAD_LETTERS = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'refused'; END$$;
CREATE TRIGGER refuse BEFORE INSERT ON outboxq.dead_job FOR EACH ROW EXECUTE FUNCTION refuse();
"""
# What the claim of each mode does to a row.
CLAIMS = {"transaction": "DELETE", "lease": "UPDATE"}
# From the claim on: a bad row may still be buried, by DELETE in lease mode, or put off, by UPDATE in transaction mode.
GOOD = [f"good {number}" for number in range(5)]


def application(mode: str, batchable: bool = False) -> Jobs:
    jobs = Jobs()

    def work(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))

    for kind in ("good", "bad"):
        jobs.handler(queue="q", kind=kind, claim=mode, batchable=batchable, retry=Backoff(max_attempts=2))(work)
    return jobs


def enqueue(sessions: sessionmaker[OutboxSession], jobs: Jobs) -> None:
    handlers = jobs.resolve().handlers
    with sessions.begin() as session:
        session.add_jobs(handlers["good"].job(name=name) for name in GOOD[:2])
        session.add_job(handlers["bad"], name="bad")
        session.add_jobs(handlers["good"].job(name=name) for name in GOOD[2:])


def run(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def refuse(engine: Engine, commands: str, condition: str = "true", sqlstate: str = "P0001") -> None:
    run(engine, REFUSING.format(commands=commands, condition=condition, sqlstate=sqlstate))


def fetch(engine: Engine, query: str) -> list[tuple[object, ...]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(query))]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, "outboxq"):
        yield caplog


@pytest.mark.first_and_last
@pytest.mark.parametrize("batch_size", [1, 10])
@pytest.mark.parametrize("state", ["ready", "scheduled"])
def test_a_job_that_a_lease_cannot_take_is_a_dead_letter(
    state: str, batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """All others of its queue are done, none of them charged or suspected; the reason names what refused it."""
    jobs = application("lease")
    enqueue(sessions, jobs)
    run(engine, f"UPDATE outboxq.job SET state = '{state}' WHERE kind = 'bad'")
    refuse(engine, "UPDATE")
    events = drain(jobs, batch_size=batch_size, slots_per_queue=1)
    assert ledger(engine) == dict.fromkeys(GOOD, 1)
    reason = "it could not be claimed: RaiseException (P0001)"
    assert [(event.kind, event.reason) for event in events if isinstance(event, JobSetAside)] == [("bad", reason)]
    assert [(event.job.attempt, event.job.crashes) for event in events if isinstance(event, JobDone)] == [(1, 0)] * 5
    assert fetch(engine, "SELECT kind, reason, attempt, args->>'name' FROM outboxq.dead_job") == [
        ("bad", reason, 0, "bad")
    ]
    assert fetch(engine, "SELECT FROM outboxq.job") == []


@pytest.mark.first_and_last
@pytest.mark.parametrize("sqlstate", ["45000", "APP01", "20000", "2F000"])
def test_a_trigger_may_refuse_a_row_by_a_code_of_its_own(
    sqlstate: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """The row is to blame whatever the code; the others of its queue are done."""
    jobs = application("lease")
    enqueue(sessions, jobs)
    refuse(engine, "UPDATE", sqlstate=sqlstate)
    events = drain(jobs, batch_size=10, slots_per_queue=1)
    assert ledger(engine) == dict.fromkeys(GOOD, 1)
    assert [event.kind for event in events if isinstance(event, JobSetAside)] == ["bad"]


@pytest.mark.first_and_last
@pytest.mark.parametrize("batch_size", [1, 10])
@pytest.mark.parametrize("batchable", [False, True])
def test_a_job_that_can_neither_be_claimed_nor_buried_is_put_off(
    batchable: bool, batch_size: int, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain,
    said: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It waits for five minutes and no longer in front of others; an error in the log names its kind and id."""
    jobs = application("transaction", batchable)
    enqueue(sessions, jobs)
    refuse(engine, "DELETE")
    events = drain(jobs, batch_size=batch_size, slots_per_queue=1)
    assert ledger(engine) == dict.fromkeys(GOOD, 1)
    assert not [event for event in events if isinstance(event, JobsSuspected | JobSetAside)]
    ((job_id, state, minutes, attempt),) = fetch(
        engine, "SELECT id::text, state, ceil(extract(epoch FROM run_at - now()) / 60)::int, attempt FROM outboxq.job"
    )
    assert (state, minutes, attempt) == ("scheduled", 5, 0)
    (line,) = [record for record in said.records if getattr(record, "outboxq_job_id", None) == job_id]
    assert line.outboxq_kind == "bad"
    assert f": kind=bad id={job_id}: " in line.getMessage()
    assert "4711" not in said.text.replace(job_id, "")


@pytest.mark.parametrize("mode", CLAIMS)
def test_a_row_that_nothing_can_change_keeps_no_other_queue_waiting(
    mode: str, engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay,
    said: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Its own queue comes to it again and again, and says so; when it can be changed, all go on."""
    jobs = application(mode)

    @jobs.handler(queue="other", claim=mode)
    def elsewhere(ctx: Context) -> None:
        ctx.session.add(Effect(name="elsewhere"))

    enqueue(sessions, jobs)
    refuse(engine, "UPDATE OR DELETE")
    with sessions.begin() as session:
        session.add_job(elsewhere)
    with start_relay(jobs, RelayConfig(slots_per_queue=1, poll_seconds=0.1)) as running:
        wait_until(lambda: "elsewhere" in ledger(engine), "the other queue")
        wait_until(lambda: "nor put off" in said.text, "the log to name the row")
        run(engine, "DROP TRIGGER refuse ON outboxq.job")
        wait_until(lambda: len(ledger(engine)) == 7, "all jobs")
    assert not running.of(JobSetAside)


@pytest.mark.first_and_last
@pytest.mark.parametrize("mode", CLAIMS)
@pytest.mark.parametrize("refusal", ["each row", "the statement", "a table that is missing"])
def test_what_ails_all_jobs_blames_none(
    refusal: str, mode: str, engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay,
    said: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A trigger of the users' that needs mending makes no dead letters, whatever it says; then all of them run."""
    jobs = application(mode)
    if refusal == "a table that is missing":
        ail = ["ALTER TABLE outboxq.queue RENAME TO elsewhere"]
        mend = "ALTER TABLE outboxq.elsewhere RENAME TO queue"
    else:
        for_each = "ROW" if refusal == "each row" else "STATEMENT"
        ail = [
            (
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
                "$$BEGIN RAISE 'no partition' USING ERRCODE = 'check_violation'; END$$"
            ),
            f"CREATE TRIGGER refuse BEFORE {CLAIMS[mode]} ON outboxq.job FOR EACH {for_each} EXECUTE FUNCTION refuse()",
        ]
        mend = "DROP TRIGGER refuse ON outboxq.job"
    with start_relay(jobs, RelayConfig(slots_per_queue=1, batch_size=10, poll_seconds=0.1)) as running:
        # Behind its first look at its queues, without which it does not start.
        wait_until(lambda: running.of(RelayStarted), "the relay to start")
        run(engine, *ail)
        enqueue(sessions, jobs)
        wait_until(lambda: said.text.count("statements fail, trying again") > 1, "claims to fail")
        assert fetch(engine, "SELECT DISTINCT state, attempt FROM outboxq.job") == [("ready", 0)]
        run(engine, mend)
        wait_until(lambda: len(ledger(engine)) == 6, "all jobs")
    assert not running.of(JobSetAside)
    assert not running.of(JobsSuspected)


def test_a_reaper_that_can_take_no_job_buries_none(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, said: pytest.LogCaptureFixture
) -> None:
    """What refuses all of them will be mended: then they come back."""
    jobs = application("lease")
    enqueue(sessions, jobs)
    run(
        engine,
        "UPDATE outboxq.job SET state = 'leased', lease_owner = gen_random_uuid()",
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'no partition'; END$$",
        "CREATE TRIGGER refuse BEFORE UPDATE ON outboxq.job FOR EACH ROW EXECUTE FUNCTION refuse()",
    )
    with start_relay(jobs, RelayConfig(slots_per_queue=1, lease_seconds=1, poll_seconds=0.1)):
        wait_until(lambda: said.text.count("taken back one by one") > 1, "two sweeps")
        assert fetch(engine, "SELECT DISTINCT state FROM outboxq.job") == [("leased",)]
        run(engine, "DROP TRIGGER refuse ON outboxq.job")
        wait_until(lambda: len(ledger(engine)) == 6, "all jobs")
    assert fetch(engine, "SELECT FROM outboxq.dead_job") == []


def test_a_single_bad_row_among_many_costs_a_few_claims(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jobs in front of it run one by one, and not each of them is tried beforehand."""
    tried: list[object] = []
    one = ClaimScript.one
    monkeypatch.setattr(ClaimScript, "one", lambda script, job_id: (tried.append(job_id), one(script, job_id))[1])
    jobs = application("lease")
    handlers = jobs.resolve().handlers
    with sessions.begin() as session:
        session.add_jobs(handlers["good"].job(name=f"before {number}") for number in range(60))
        session.add_job(handlers["bad"], name="bad")
        session.add_jobs(handlers["good"].job(name=f"behind {number}") for number in range(60))
    refuse(engine, "UPDATE")
    events = drain(jobs, batch_size=100, slots_per_queue=1)
    assert len(ledger(engine)) == 120
    assert len([event for event in events if isinstance(event, JobSetAside)]) == 1
    assert len(tried) <= 3


UNCHANGED = "its relay died, and its row cannot be changed"


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("commands", "crashes", "reason"),
    [
        ("UPDATE", 0, UNCHANGED),
        ("UPDATE", 9, "crashed 9 of 3 times while it ran alone"),
        ("DELETE", 0, None),
        ("DELETE", 9, None),
        ("UPDATE OR DELETE", 0, None),
        ("UPDATE OR DELETE", 9, None),
    ],
)
def test_a_lost_job_that_cannot_be_taken_back_keeps_no_other_leased(
    commands: str, crashes: int, reason: str | None, engine: Engine, sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
) -> None:  # fmt: skip
    """Jobs of dead relays come back or are buried in the same sweep; one that refuses is a dead letter if it can be."""
    jobs = application("lease")
    enqueue(sessions, jobs)
    run(
        engine,
        "UPDATE outboxq.job SET state = 'leased', lease_owner = gen_random_uuid(), "
        f"crashes = CASE WHEN kind = 'bad' THEN {crashes} ELSE 0 END",
    )
    refuse(engine, commands)
    with start_relay(jobs, RelayConfig(slots_per_queue=1, lease_seconds=1, poll_seconds=0.1)) as running:
        wait_until(lambda: ledger(engine).keys() >= set(GOOD), "the others")
        if reason is not None:
            wait_until(lambda: [event for event in running.of(JobCrashed) if event.dead_letter], "the burial")
    assert {name: count for name, count in ledger(engine).items() if name != "bad"} == dict.fromkeys(GOOD, 1)
    assert fetch(engine, "SELECT kind, reason FROM outboxq.dead_job") == ([] if reason is None else [("bad", reason)])


def test_an_orphan_that_cannot_be_taken_back_ends_no_lease(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """A job under the lease of a living relay that runs it no more: the relay goes on, and reaps others' jobs."""
    jobs = application("lease")
    with start_relay(jobs, RelayConfig(slots_per_queue=1, lease_seconds=1, poll_seconds=0.1)) as running:
        enqueue(sessions, jobs)
        wait_until(lambda: len(ledger(engine)) == 6, "a lease, by which all jobs are done")
        refuse(engine, "UPDATE OR DELETE")
        row = "gen_random_uuid(), 'q', '{}', '{{\"name\": \"{}\"}}', 'leased', {}, 7"
        insert = "INSERT INTO outboxq.job (id, queue, kind, args, state, lease_owner, lease_token) SELECT "
        run(
            engine,
            insert + row.format("bad", "orphan", "id") + " FROM outboxq.relay",
            insert + row.format("good", "of a dead relay", "gen_random_uuid()"),
        )
        wait_until(lambda: ledger(engine)["of a dead relay"], "the reaped job")
    assert not [event for event in running.of(JobCrashed) if event.dead_letter]
    assert fetch(engine, "SELECT args->>'name' FROM outboxq.job") == [("orphan",)]


@pytest.mark.parametrize("mode", ["transaction", "lease"])
def test_a_job_that_escaped_and_cannot_be_a_dead_letter_is_put_off(
    mode: str, engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay
) -> None:
    """Its attempt cannot be recorded: it does not run again and again meanwhile, and no relay counts as dead for it."""
    jobs, ran = Jobs(), []

    @jobs.handler(queue="q", kind="bad", claim=mode, retry=Backoff(max_attempts=1))  # type: ignore[arg-type]  # a mode
    def bad(ctx: Context) -> None:
        ran.append(mode)
        ctx.session.execute(text("SELECT 1"))
        ctx.session.connection().connection.driver_connection.execute("ROLLBACK")

    @jobs.handler(queue="other", kind="good")
    def good(ctx: Context) -> None:
        ctx.session.add(Effect(name="good"))

    run(engine, NO_DEAD_LETTERS)
    with sessions.begin() as session:
        session.add_job(bad)
    config = RelayConfig(slots_per_queue=1, poll_seconds=0.1, lease_seconds=2)
    with start_relay(jobs, config, engine=engine):
        state = "SELECT state, crashes, run_at > now() + interval '4 minutes' FROM outboxq.job WHERE kind = 'bad'"
        wait_until(lambda: fetch(engine, state) == [("scheduled", 0, True)], "the job to be put off")
        with sessions.begin() as session:
            session.add_job(good)
        wait_until(lambda: ledger(engine) == {"good": 1}, "another job")
    assert ran == [mode]
