"""`every`: one job of a key in each window, whatever the number of slots and relays, and each is followed by a run."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Literal

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, Jobs, OutboxSession, Relay, RelayConfig, Snooze
from outboxq.admin.roles import roles_sql
from outboxq.events import ClaimsFailed, Event, JobDone, JobRetried, JobsClaimed
from outboxq.postgres import Database
from outboxq.relay.maintenance.pruner import _delete_keys
from outboxq.statements.windows import WantedWindow, take_windows
from outboxq.testing.transaction import unit_test_job
from tests.conftest import StartRelay
from tests.support.ledger import leave_marks, of, rows, waiting
from tests.support.limits import FOLLOW_ON, many_at_once, with_limits
from tests.support.scripts import note_scripts
from tests.support.waiting import wait_until

Mode = Literal["transaction", "lease"]
Drain = Callable[..., list[Event]]

# No window of this length ends while a test runs: the next does in the year 2027.
EVERY = timedelta(days=300)
NEVER = Backoff(max_attempts=5, first_seconds=3600.0, jitter=0.0)
AT_ONCE = Backoff(max_attempts=5, first_seconds=0.0, jitter=0.0)
_NEXT = "date_bin('300 days', clock_timestamp(), 'epoch') + interval '300 days'"


class Rebuild:
    """A handler whose jobs have one key and `every`; `runs` are the versions, `does` what it does with one."""

    def __init__(self, sessions: sessionmaker[OutboxSession], engine: Engine, mode: Mode) -> None:
        self.runs, self.jobs = list[int](), Jobs()
        self.does: dict[int, Callable[[Context], object]] = {}
        self.retry = NEVER
        self._sessions, self._engine = sessions, engine

        @self.jobs.handler(queue="rebuild", claim=mode, coalesce="index", every=EVERY, retry=NEVER)
        def rebuild(ctx: Context, version: int) -> object:
            self.runs.append(version)
            return self.does.get(version, lambda _: None)(ctx)

        self.handler = rebuild

    def add(self, *versions: int, key: str = "index") -> None:
        """Add jobs whose window is over."""
        for version in versions:
            with self._sessions.begin() as session:
                session.add_job(self.handler.options(coalesce=key), version=version)
        self.let_due()

    def let_due(self) -> None:
        with self._engine.begin() as connection:
            # One that runs in transaction mode is locked.
            connection.execute(
                text(
                    "UPDATE outboxq.job SET run_at = clock_timestamp() WHERE id IN "
                    "(SELECT id FROM outboxq.job WHERE state = 'scheduled' FOR UPDATE SKIP LOCKED)"
                )
            )

    def end_window(self) -> None:
        with self._engine.begin() as connection:
            connection.execute(text("UPDATE outboxq.unique_key SET kept_until = clock_timestamp()"))
        self.let_due()

    def put_back(self) -> list[tuple[object, ...]]:
        """The jobs that wait for the next window: the version, and the attempt."""
        return rows(
            self._engine,
            "SELECT (args->>'version')::int, attempt FROM outboxq.job "
            f"WHERE state = 'scheduled' AND run_at = {_NEXT} ORDER BY 1",
        )


@pytest.fixture(params=["transaction", "lease"])
def mode(request: pytest.FixtureRequest) -> Mode:
    found: Mode = request.param
    return found


@pytest.fixture
def rebuild(sessions: sessionmaker[OutboxSession], engine: Engine, mode: Mode) -> Rebuild:
    return Rebuild(sessions, engine, mode)


def _versions(rebuild: Rebuild) -> set[object]:
    """The versions that wait for the next window, each with no attempt counted.

    Without the older ones of two: one that is put back first has the arguments of the newer one if it sees that wait.
    """
    put_back = rebuild.put_back()
    assert all(attempt == 0 for _, attempt in put_back)
    return {version for version, _ in put_back} - {2, 10, 11, 12}


class Held:
    """A handler that is at work until it is let go."""

    def __init__(self) -> None:
        self.runs, self.goes_on = threading.Event(), threading.Event()

    def __call__(self, _: Context) -> None:
        self.runs.set()
        assert self.goes_on.wait(60)


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.goes_on.set()


def test_a_second_claim_of_a_window_waits_for_the_next_one_while_the_first_runs(
    rebuild: Rebuild, start_relay: StartRelay, engine: Engine, held: Held
) -> None:
    """Unharmed: its id is the same, its attempt is not counted, and no lock of the first is waited for."""
    rebuild.does[1] = held
    rebuild.add(1)
    with start_relay(rebuild.jobs, RelayConfig(slots_per_queue=3)) as relay:
        assert held.runs.wait(60)
        rebuild.add(2, 3)
        ids = rows(engine, "SELECT id FROM outboxq.job WHERE args->>'version' > '1' ORDER BY id")
        wait_until(lambda: len(rebuild.put_back()) == 2, "both to be put back")
        assert rows(engine, "SELECT id FROM outboxq.job WHERE args->>'version' > '1' ORDER BY id") == ids
        held.goes_on.set()
        wait_until(lambda: bool(of(relay.events, JobDone)), "the first run to end")
    assert (rebuild.runs, _versions(rebuild), waiting(engine)) == ([1], {3}, 2)


@pytest.mark.large
def test_a_job_that_comes_after_the_run_of_its_window_waits_for_the_next_one(
    rebuild: Rebuild, drain: Drain, engine: Engine
) -> None:
    """As one whose producer has committed late. Then those that wait run as one."""
    rebuild.add(1)
    drain(rebuild.jobs)
    rebuild.add(2, 3)
    drain(rebuild.jobs)
    assert (rebuild.runs, _versions(rebuild), waiting(engine)) == ([1], {3}, 2)
    rebuild.end_window()
    drain(rebuild.jobs, slots_per_queue=1)
    assert (rebuild.runs, waiting(engine)) == ([1, 3], 0)


def test_a_job_that_fails_keeps_its_window(rebuild: Rebuild, drain: Drain, engine: Engine) -> None:
    """Its next attempt is in it, and stands for what has been put back meanwhile."""

    def fail(_: Context) -> None:
        raise ValueError("no luck")

    rebuild.does[1] = fail
    rebuild.add(1)
    assert len(of(drain(rebuild.jobs), JobRetried)) == 1
    rebuild.add(2)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET run_at = clock_timestamp() + '1 h' WHERE attempt > 0"))
    drain(rebuild.jobs)
    assert (rebuild.runs, rebuild.put_back()) == ([1], [(2, 0)])
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET run_at = clock_timestamp() WHERE attempt > 0"))
    drain(rebuild.jobs)
    assert (rebuild.runs, waiting(engine)) == ([1, 2], 0)


def test_a_job_that_is_snoozed_keeps_its_window(rebuild: Rebuild, drain: Drain, engine: Engine) -> None:
    """Though its attempt is not counted."""
    naps = [Snooze(timedelta(0))]
    rebuild.does[1] = lambda _: naps.pop() if naps else None
    rebuild.add(1)
    drain(rebuild.jobs)
    rebuild.let_due()
    drain(rebuild.jobs)
    assert (rebuild.runs, waiting(engine)) == ([1, 1], 0)


def test_a_run_whose_backend_is_terminated_has_not_used_up_its_window(
    rebuild: Rebuild, start_relay: StartRelay, engine: Engine
) -> None:
    """In transaction mode the window goes back with the claim; under a lease the job has it."""

    def end_backend(ctx: Context) -> None:
        rebuild.does.clear()
        pid = ctx.session.execute(text("SELECT pg_backend_pid()")).scalar_one()
        with engine.begin() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid})
        ctx.session.execute(text("SELECT 1"))

    rebuild.does[1] = end_backend
    rebuild.add(1)
    with start_relay(rebuild.jobs, RelayConfig(lease_seconds=2.0)):
        wait_until(lambda: waiting(engine) == 0 or len(rebuild.runs) > 1, "the second run")
        wait_until(lambda: waiting(engine) == 0, "the end of the second run")
    assert rebuild.runs == [1, 1]


def test_the_window_of_a_job_that_has_not_begun_is_that_of_its_key_s_next_claim(
    rebuild: Rebuild, drain: Drain, engine: Engine
) -> None:
    """A job that was released has its window; a claim that has it and a newer one runs the newer one."""
    rebuild.add(1, 2)
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outboxq.unique_key (key, job_id, kept_until) "
                f"SELECT chr(30) || unique_key, id, {_NEXT} FROM outboxq.job WHERE args->>'version' = '1'"
            )
        )
    drain(rebuild.jobs, slots_per_queue=1)
    assert (rebuild.runs, waiting(engine)) == ([2], 0)


def test_each_key_of_a_claim_has_its_own_window(rebuild: Rebuild, drain: Drain, engine: Engine) -> None:
    """Some run and some wait, with one COMMIT."""
    for key in range(3):
        rebuild.add(key, key=str(key))
    drain(rebuild.jobs, slots_per_queue=1)
    for key in range(6):
        rebuild.add(10 + key, 20 + key, key=str(key))
    drain(rebuild.jobs, slots_per_queue=1, batch_size=50)
    assert sorted(rebuild.runs) == [0, 1, 2, 23, 24, 25]
    assert (_versions(rebuild), len(rebuild.put_back()), waiting(engine)) == ({20, 21, 22}, 6, 6)


def test_an_older_job_that_is_put_back_has_the_arguments_of_a_newer_one_that_runs(
    rebuild: Rebuild, start_relay: StartRelay, engine: Engine, held: Held
) -> None:
    """Its own would come after them."""
    rebuild.does[2] = held
    rebuild.add(2)
    with start_relay(rebuild.jobs, RelayConfig(slots_per_queue=2)):
        assert held.runs.wait(60)
        with engine.begin() as connection:
            connection.execute(
                text(
                    "INSERT INTO outboxq.job (id, queue, kind, args, headers, unique_key, seq, created_at) "
                    "OVERRIDING SYSTEM VALUE SELECT gen_random_uuid(), queue, kind, '{\"version\": 1}', headers, "
                    "unique_key, seq - 1, created_at + interval '1 s' FROM outboxq.job"
                )
            )
            connection.execute(text("NOTIFY outboxq"))
        wait_until(lambda: rebuild.put_back() == [(2, 0)], "the older one to be put back")
        held.goes_on.set()
        wait_until(lambda: waiting(engine) == 1, "the run to end")
    assert rebuild.runs == [2]


def test_a_job_without_every_runs_at_once_and_stands_for_the_others(
    rebuild: Rebuild, sessions: sessionmaker[OutboxSession], drain: Drain, engine: Engine, mode: Mode
) -> None:
    """The window is that of the jobs that ask for it."""
    rebuild.add(1)
    drain(rebuild.jobs)
    rebuild.add(2)

    @rebuild.jobs.handler(queue="rebuild", claim=mode, kind="plain")
    def plain(ctx: Context) -> None: ...

    drain(rebuild.jobs)
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outboxq.job (id, queue, kind, args, unique_key) SELECT gen_random_uuid(), queue, kind, "
                "'{\"version\": 3}', unique_key FROM outboxq.job"
            )
        )
    drain(rebuild.jobs)
    assert (rebuild.runs, waiting(engine)) == ([1, 3], 0)


def test_the_length_of_a_window_is_no_header_for_handlers(
    rebuild: Rebuild, drain: Drain, sessions: sessionmaker[OutboxSession]
) -> None:
    """It is the relay's, and stored with the job."""
    seen = list[object]()
    rebuild.does[1] = lambda ctx: seen.append(ctx.headers)
    with sessions.begin() as session:
        session.add_job(rebuild.handler.options(headers={"trace": "7"}), version=1)
    rebuild.let_due()
    drain(rebuild.jobs)
    assert seen == [{"trace": "7"}]


@pytest.mark.large
def test_a_suspect_whose_window_another_job_has_keeps_its_crashes(
    rebuild: Rebuild, drain: Drain, engine: Engine
) -> None:
    """It waits like any other job, and is refused again like one: a poison job cannot lose its count on this way."""
    rebuild.add(1)
    drain(rebuild.jobs)
    rebuild.add(2)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET state = 'suspect', crashes = 2"))
    query = "SELECT state, attempt, crashes FROM outboxq.job"
    for _ in range(3):
        drain(rebuild.jobs)
        assert rows(engine, query) == [("scheduled", 0, 2)]
        rebuild.let_due()
    rebuild.end_window()
    events = drain(rebuild.jobs)
    assert [event.job.crashes for event in of(events, JobDone)] == [2]
    assert (rebuild.runs, waiting(engine)) == ([1, 2], 0)


def test_a_suspect_that_was_refused_is_charged_by_its_next_lone_run(
    rebuild: Rebuild, drain: Drain, engine: Engine, mode: Mode
) -> None:
    """If its relay dies once more it is a suspect again: a refusal puts the charge off, and never takes it back."""
    charged = list[tuple[object, ...]]()
    rebuild.does[2] = lambda _: charged.extend(rows(engine, "SELECT state, crashes FROM outboxq.job"))
    rebuild.add(1)
    drain(rebuild.jobs)
    rebuild.add(2)
    with engine.begin() as connection:
        # Two deaths: in lease mode it runs alone.
        died = "jsonb_build_array(jsonb_build_object('type', 'outboxq.RelayDied'))"
        connection.execute(text(f"UPDATE outboxq.job SET state = 'suspect', crashes = 2, errors = {died} || {died}"))
    drain(rebuild.jobs)
    assert rows(engine, "SELECT state, crashes FROM outboxq.job") == [("scheduled", 2)]
    rebuild.end_window()
    if mode == "transaction":
        leave_marks(engine)
    else:
        # As the reaper leaves it.
        with engine.begin() as connection:
            connection.execute(text("UPDATE outboxq.job SET state = 'suspect'"))
    drain(rebuild.jobs)
    assert charged == [("leased", 3)]
    assert (rebuild.runs, waiting(engine)) == ([1, 2], 0)


def _prune(engine: Engine) -> tuple[int, int]:
    """How many keys were deleted, and how many were looked at."""
    with engine.connect() as connection:
        return _delete_keys(connection.connection.driver_connection.pgconn, "outboxq", "", 1_000)[:2]  # type: ignore[union-attr]  # psycopg's


def test_windows_are_pruned_when_they_are_over(rebuild: Rebuild, drain: Drain, engine: Engine) -> None:
    """And not before, though no job of theirs waits; nor while the job that has one is put off."""
    rebuild.does[1] = lambda _: Snooze(timedelta(hours=1))
    rebuild.add(1)
    rebuild.add(7, key="other")
    drain(rebuild.jobs, slots_per_queue=1)
    assert sorted(rebuild.runs) == [1, 7]
    assert _prune(engine) == (0, 2)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.unique_key SET kept_until = clock_timestamp()"))
    assert _prune(engine) == (1, 2)
    assert rows(engine, "SELECT key FROM outboxq.unique_key") == [("\x1erebuild\x1findex",)]
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM outboxq.job"))
    assert _prune(engine) == (1, 1)


def test_a_relay_that_may_not_write_windows_says_so_and_runs_the_jobs(
    rebuild: Rebuild, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of them, with its own COMMIT: a limit is missing, and no work."""
    role = f"relay_{engine.url.database}"
    rebuild.add(1, key="a")
    rebuild.add(2, key="b")
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(f"CREATE ROLE {role} LOGIN PASSWORD 'p'")
        try:
            connection.exec_driver_sql(roles_sql({"relay": role}))
            connection.exec_driver_sql(f"REVOKE INSERT, UPDATE ON outboxq.unique_key FROM {role}")
            limited = create_engine(engine.url.set(username=role, password="p"))
            config = many_at_once(rebuild.jobs, RelayConfig(batch_size=10))
            assert Relay(limited, rebuild.jobs, config).drain().done == 2
            rebuild.add(3, key="a")
            assert Relay(limited, rebuild.jobs, config).drain().done == 1
            limited.dispose()
        finally:
            connection.exec_driver_sql(f"DROP OWNED BY {role}; DROP ROLE {role}")
    assert (sorted(rebuild.runs), waiting(engine)) == ([1, 2, 3], 0)
    said = [record.message for record in caplog.records if "although their window may be over" in record.message]
    assert said
    assert all("InsufficientPrivilege (42501)" in message for message in said)


@pytest.mark.parametrize("jobs", [0, 20_000], ids=["empty", "large"])
def test_windows_are_taken_by_indexes(engine: Engine, jobs: int) -> None:
    """Whatever the tables' statistics are; nothing is compiled."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outboxq.job (id, queue, kind, args, unique_key) SELECT gen_random_uuid(), 'q', 'k', '{}', "
                "CASE WHEN n % 3 > 0 THEN 'k' || n % 50 END FROM generate_series(1, :jobs) AS n"
            ),
            {"jobs": jobs},
        )
        if jobs:
            connection.exec_driver_sql("ANALYZE outboxq.job")
    wanted = [WantedWindow(f"k{n}", unit_test_job().id, 1_000_000) for n in range(1, 5)]
    settings, _, rest = take_windows("outboxq", wanted, [each.job_id for each in wanted]).partition("WITH ")
    with engine.begin() as connection:
        connection.exec_driver_sql(settings)
        plan = "\n".join(connection.exec_driver_sql(f"EXPLAIN WITH {rest.partition(';')[0]}").scalars())
    assert "job_unique" in plan
    assert "Seq Scan on job" not in plan
    assert "JIT" not in plan


def test_a_refused_commit_of_put_off_jobs_is_no_failed_claim(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """What fails behind an answered claim is no claim that failed."""
    told = list[Event]()
    rebuild = Rebuild(sessions, engine, "transaction")
    rebuild.jobs.on(JobsClaimed, ClaimsFailed)(told.append)
    rebuild.add(1)
    drain(rebuild.jobs)
    rebuild.add(2)
    with engine.begin() as connection:
        # Once: what a sequence has counted stands after a rollback.
        connection.execute(text("CREATE SEQUENCE refusals"))
        connection.execute(
            text(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN "
                "IF nextval('refusals') = 1 THEN RAISE EXCEPTION 'not now'; END IF; RETURN NULL; END$$"
            )
        )
        connection.execute(
            text(
                "CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON outboxq.job DEFERRABLE INITIALLY DEFERRED "
                "FOR EACH ROW EXECUTE FUNCTION refuse()"
            )
        )
    drain(rebuild.jobs)
    assert rebuild.put_back() == [(2, 0)]
    assert rows(engine, "SELECT last_value FROM refusals") == [(2,)]
    assert [event for event in told if isinstance(event, ClaimsFailed)] == []


def test_the_commit_of_a_claim_whose_jobs_all_wait_brings_the_next_jobs(
    engine: Engine, sessions: sessionmaker[OutboxSession], outboxq_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of jobs that ran: it is one round trip."""
    rebuild = Rebuild(sessions, engine, "transaction")
    rebuild.add(1)
    drain_following(outboxq_database.url, rebuild.jobs)
    rebuild.add(2, 3)
    with sessions.begin() as session:
        session.add_jobs(rebuild.handler.options(coalesce=f"other {n}").job(version=10 + n) for n in range(2))
    with engine.begin() as connection:
        # Claimed in the order of their versions, two at a time.
        in_order = "run_at = clock_timestamp() - interval '1 s' * (100 - (args->>'version')::int)"
        connection.exec_driver_sql(f"UPDATE outboxq.job SET {in_order}")
    scripts = note_scripts(monkeypatch)
    drain_following(outboxq_database.url, rebuild.jobs)
    assert rebuild.put_back() == [(2, 0), (3, 0)]
    assert sorted(rebuild.runs) == [1, 10, 11]
    # Of the jobs that were put back, and of those that it brought.
    assert [script.count("; COMMIT; BEGIN") for script in scripts if "; COMMIT" in script] == [1, 1]


def drain_following(url: str, jobs: Jobs) -> None:
    config = RelayConfig(slots_per_queue=1, batch_size=2)
    with_limits(Relay(url, jobs, config), FOLLOW_ON).drain()
