"""`outboxq jobs cancel --running`: what runs is ended by its relay, or by force, and what became of it is said."""

import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, Jobs, OutboxSession, RelayConfig
from outboxq.admin import cancellation
from outboxq.events import JobCancelled, JobDied, JobDone, JobsSuspected
from outboxq.outbox.handle import JobHandle
from outboxq.postgres import Database
from tests.conftest import StartRelay
from tests.support import operators
from tests.support.app import Effect
from tests.support.cli import call
from tests.support.ledger import dead, effects, waiting
from tests.support.waiting import PATIENCE, wait_until

MODES = pytest.mark.parametrize("claim", ["transaction", "lease"])
# A relay that neither listens nor looks again.
DEAF = {"listen": False, "lease_seconds": 3600, "slots_per_queue": 1}


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets handlers that hang go on, at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def begun() -> threading.Event:
    return threading.Event()


def make_jobs(claim: str, begun: threading.Event, release: threading.Event) -> Jobs:
    jobs = Jobs()

    @jobs.handler(queue="q", kind="hang", claim=claim, retry=Backoff(max_attempts=1), timeout_seconds=None)  # type: ignore[arg-type]  # one of the two modes
    def hang(ctx: Context) -> None:
        if ctx.job.crashes == 0 and not begun.is_set():
            ctx.session.add(Effect(name="hang"))
            ctx.session.flush()
            begun.set()
            while not (ctx.cancelled or release.wait(0.01)):
                pass

    @jobs.handler(queue="q", kind="good", claim=claim)  # type: ignore[arg-type]  # one of the two modes
    def good(ctx: Context) -> None:
        ctx.session.add(Effect(name="good"))

    return jobs


def add(sessions: sessionmaker[OutboxSession], jobs: Jobs, *kinds: str) -> list[JobHandle]:
    registry = jobs.resolve()
    with sessions.begin() as session:
        return [session.add_job(registry.find(kind)) for kind in kinds]


@MODES
def test_what_runs_is_cancelled_and_what_waits_is_gone(
    outboxq_database: Database,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    begun: threading.Event,
    release: threading.Event,
    claim: str,
) -> None:
    """One command for both, by a filter; it waits for the relay's answer."""
    jobs = make_jobs(claim, begun, release)
    add(sessions, jobs, "hang")
    with start_relay(jobs, RelayConfig(slots_per_queue=1)) as running:
        assert begun.wait(PATIENCE)
        add(sessions, jobs, "good", "good")
        said = call("jobs", "cancel", "--queue", "q", "--running", "--json", url=outboxq_database.url).ok().json
        assert running.of(JobCancelled)
    assert said == {"cancelled": 3, "over": [], "running": [], "not_found": []}
    assert (effects(engine), waiting(engine), dead(engine)) == ([], 0, 0)


@MODES
def test_a_dead_letter_is_made_of_what_runs(
    outboxq_database: Database,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    begun: threading.Event,
    release: threading.Event,
    claim: str,
) -> None:
    """And of what waits."""
    jobs = make_jobs(claim, begun, release)
    add(sessions, jobs, "hang")
    with start_relay(jobs, RelayConfig(slots_per_queue=1)) as running:
        assert begun.wait(PATIENCE)
        add(sessions, jobs, "good")
        said = call("jobs", "cancel", "--queue", "q", "--running", "--dead-letter", url=outboxq_database.url).ok()
        wait_until(lambda: running.of(JobDied), "the dead letter")
    assert "cancelled 2 jobs" in said.stdout
    assert (effects(engine), waiting(engine), dead(engine)) == ([], 0, 2)


@MODES
def test_a_job_that_came_to_its_end_is_reported_so(
    outboxq_database: Database,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    begun: threading.Event,
    release: threading.Event,
    claim: str,
) -> None:
    """Its relay did not hear of the request in time: what it did stands. The command first says that it runs on."""
    jobs = make_jobs(claim, begun, release)
    (handle,) = add(sessions, jobs, "hang")
    url = outboxq_database.url
    with start_relay(jobs, RelayConfig(**DEAF)) as running:
        assert begun.wait(PATIENCE)
        still = call("jobs", "cancel", handle.id, "--running", "--wait", 0.1, "--json", url=url)
        assert (still.exit_code, still.json["running"]) == (1, [str(handle.id)])
        release.set()
        wait_until(lambda: running.of(JobDone), "the job to be done")
        with engine.connect() as connection:
            assert cancellation.progress(connection, [handle.id]) == {handle.id: "over"}
    assert effects(engine) == ["hang"]


@MODES
def test_a_job_is_ended_by_force_if_its_relay_does_not_answer(
    outboxq_database: Database,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    begun: threading.Event,
    release: threading.Event,
    claim: str,
) -> None:
    """Its session is ended, or its lease taken: its rows are undone, and it never runs again."""
    jobs = make_jobs(claim, begun, release)
    (handle,) = add(sessions, jobs, "hang")
    options = ("--running", "--force", "--yes", "--wait", 0.1, "--json")
    with start_relay(jobs, RelayConfig(**DEAF)) as running:
        assert begun.wait(PATIENCE)
        said = call("jobs", "cancel", handle.id, *options, url=outboxq_database.url).ok().json
        release.set()
        (next_one,) = add(sessions, jobs, "good")
        wait_until(lambda: running.of(JobDone), "the next job to be done")
    assert said == {"cancelled": 1, "over": [], "running": [], "not_found": []}
    assert [event.job.id for event in running.of(JobDone)] == [next_one.id]
    assert (effects(engine), waiting(engine), dead(engine)) == (["good"], 0, 0)


def test_force_says_what_a_batch_loses(
    outboxq_database: Database,
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    start_relay: StartRelay,
    begun: threading.Event,
    release: threading.Event,
) -> None:
    """How many other jobs share the transaction, before it is ended; they run again, one by one, and once each."""
    jobs = make_jobs("transaction", begun, release)
    _, handle, _ = add(sessions, jobs, "good", "hang", "good")
    options = ("--running", "--force", "--wait", 0.1)
    url = outboxq_database.url
    with start_relay(jobs, RelayConfig(**DEAF, batch_size=3)) as running:
        assert begun.wait(PATIENCE)
        asked = call("jobs", "cancel", handle.id, *options, url=url)
        assert (asked.exit_code, "add --yes" in asked.stderr) == (2, True)
        assert not running.of(JobDone)
        said = call("jobs", "cancel", handle.id, *options, "--yes", url=url).ok()
        release.set()
        wait_until(lambda: len(running.of(JobDone)) == 2, "the others to be done")
    assert "2 other jobs share its transaction" in said.stderr
    assert running.of(JobsSuspected)
    assert (effects(engine), waiting(engine), dead(engine)) == (["good", "good"], 0, 0)


def test_force_ends_no_session_that_runs_another_job_by_now(
    engine: Engine, sessions: sessionmaker[OutboxSession], start_relay: StartRelay, release: threading.Event
) -> None:
    """The same backend runs the next job a moment later: it is asked which transaction holds this job, and no other."""
    jobs, runs = Jobs(), threading.Event()

    @jobs.handler(queue="q", kind="first")
    def first(ctx: Context) -> None: ...

    @jobs.handler(queue="q", kind="second")
    def second(ctx: Context) -> None:
        ctx.session.add(Effect(name="second"))
        ctx.session.flush()
        runs.set()
        assert release.wait(PATIENCE)

    over, _ = add(sessions, jobs, "first", "second")
    (waits,) = add(sessions, jobs, "first")
    with start_relay(jobs, RelayConfig(slots_per_queue=1)) as running:
        assert runs.wait(PATIENCE)
        for job_id in (over.id, waits.id):
            with engine.begin() as connection:
                assert cancellation.count_sharing(connection, job_id) == (0, True)
                statement = cancellation.statements.terminate("outboxq", job_id)
                assert connection.execute(text(statement)).all() == []
        release.set()
        wait_until(lambda: len(running.of(JobDone)) == 3, "all jobs to be done")
    assert effects(engine) == ["second"]
    assert not running.of(JobsSuspected)


def test_many_are_one_action(outboxq_database: Database, engine: Engine) -> None:
    """Of a filter: one row of the audit, with the filter as it was asked for."""
    operators.add(engine, 450, queue="q")
    said = call("jobs", "cancel", "--queue", "q", "--running", "--yes", "--json", url=outboxq_database.url).ok().json
    assert said["cancelled"] == 450
    (row,) = operators.audited(engine)
    assert (row["action"], row["changed"], row["expected"]) == ("job.cancel_running", 450, 450)
    assert row["filter"]["queue"] == "q"


@pytest.mark.parametrize("option", ["--force", "--dead-letter"])
def test_options_about_running_jobs_need_the_word(outboxq_database: Database, option: str) -> None:
    """A plain cancel never ends a session."""
    said = call("jobs", "cancel", "--all", "--yes", option, url=outboxq_database.url)
    assert (said.exit_code, "add --running" in said.stderr) == (2, True)


def test_ids_that_are_not_there_are_named(outboxq_database: Database) -> None:
    """With the exit code of what was not found."""
    missing = "01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10"
    said = call("jobs", "cancel", missing, "--running", "--json", url=outboxq_database.url)
    assert (said.exit_code, said.json["not_found"]) == (1, [missing])
