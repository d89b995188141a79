"""Coalesce: jobs of one key that wait run as one, with the newest arguments, and each is followed by a run."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import msgspec
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

import outboxq.execution.coalesce as coalesce_module
from outboxq import Backoff, BatchContext, BatchItem, Context, Jobs, OutboxSession, RelayConfig, Snooze
from outboxq.admin.dead_letters import DeadFilter, retry_page
from outboxq.database.driver import run_script
from outboxq.events import Event, JobDone, JobRetried, JobsCoalesced, JobsSuspected
from outboxq.handlers.handler import Handler
from outboxq.postgres import Database
from outboxq.statements.coalesce import TAKEN_AT_ONCE, take_along, take_along_leased
from outboxq.statements.lease import reap
from outboxq.testing.transaction import unit_test_job
from tests.coalescing.under_kills import run as run_under_kills
from tests.conftest import StartRelay
from tests.support.app import Account
from tests.support.ledger import leave_marks, of, rows, waiting
from tests.support.waiting import wait_until

Mode = Literal["transaction", "lease"]
Drain = Callable[..., list[Event]]

NEVER = Backoff(max_attempts=5, first_seconds=3600.0, jitter=0.0)
AT_ONCE = Backoff(max_attempts=5, first_seconds=0.0, jitter=0.0)


@pytest.fixture(params=["transaction", "lease"])
def mode(request: pytest.FixtureRequest) -> Mode:
    found: Mode = request.param
    return found


class Rebuild:
    """A handler whose jobs have one key; what it does with a version is in `does`, and `runs` are its versions."""

    def __init__(
        self, sessions: sessionmaker[OutboxSession], mode: Mode, retry: Backoff = NEVER, **options: Any
    ) -> None:
        self.jobs, self.runs = Jobs(), list[int]()
        self.does: dict[int, Callable[[Context], object]] = {}
        self._sessions = sessions

        @self.jobs.handler(queue="rebuild", claim=mode, retry=retry, **({"coalesce": "index"} | options))
        def rebuild(ctx: Context, version: int) -> Any:
            self.runs.append(version)
            return self.does.get(version, lambda _: None)(ctx)

        self.handler: Handler[..., Any, Any] = rebuild

    def add(self, *versions: int, **options: Any) -> None:
        """Add jobs, each committed by itself."""
        for version in versions:
            with self._sessions.begin() as session:
                session.add_job(self.handler.options(**options), version=version)

    def add_at_once(self, versions: Sequence[int], **options: Any) -> None:
        with self._sessions.begin() as session:
            session.add_jobs(self.handler.options(**options).job(version=version) for version in versions)


@pytest.fixture
def rebuild(sessions: sessionmaker[OutboxSession], mode: Mode) -> Rebuild:
    return Rebuild(sessions, mode)


def taken_along(events: list[Event]) -> list[int]:
    return [event.count for event in of(events, JobsCoalesced)]


@pytest.mark.first_and_last
@pytest.mark.parametrize("batch_size", [1, 50])
def test_jobs_of_a_key_that_wait_run_as_one_with_the_newest_arguments(
    rebuild: Rebuild, drain: Drain, engine: Engine, batch_size: int
) -> None:
    """Whether one claim takes several of them or only one."""
    rebuild.add(1, 2, 3, 4, 5)
    events = drain(rebuild.jobs, slots_per_queue=1, batch_size=batch_size)
    assert (rebuild.runs, taken_along(events), len(of(events, JobDone))) == ([5], [4], 1)
    assert waiting(engine) == 0


def test_jobs_of_other_keys_and_without_keys_run_each(rebuild: Rebuild, drain: Drain, mode: Mode) -> None:
    """A key is one of its kind; none is no key."""
    with rebuild._sessions.begin() as session:
        for version, key in enumerate(["index", "index", "other", None, None]):
            session.add_job(rebuild.handler.options(coalesce=key) if key else rebuild.handler, version=version)

    @rebuild.jobs.handler(queue="rebuild", claim=mode, coalesce="index")
    def another(ctx: Context, version: int) -> None:
        rebuild.runs.append(version)

    with rebuild._sessions.begin() as session:
        session.add_job(another, version=10)
    drain(rebuild.jobs, slots_per_queue=1, batch_size=50)
    assert sorted(rebuild.runs) == [2, 4, 10]


def test_as_many_as_wait_run_as_one(rebuild: Rebuild, drain: Drain, engine: Engine) -> None:
    """Also more than one statement takes along, and if the first that is claimed is the newest."""
    rebuild.add_at_once(range(2 * TAKEN_AT_ONCE + 7))
    rebuild.add(5_000, priority=9)
    events = drain(rebuild.jobs, slots_per_queue=1, batch_size=1)
    assert (rebuild.runs, taken_along(events), waiting(engine)) == ([5_000], [2 * TAKEN_AT_ONCE + 7], 0)


def test_a_job_that_is_added_while_another_of_its_key_runs_is_followed_by_a_run(
    rebuild: Rebuild, drain: Drain, engine: Engine
) -> None:
    """The run that is under way has read before it was added."""
    rebuild.does[1] = lambda _: rebuild.add(2, 3)
    rebuild.add(1)
    events = drain(rebuild.jobs, slots_per_queue=1)
    assert (rebuild.runs, taken_along(events), waiting(engine)) == ([1, 3], [1], 0)


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Has something done once, between a claim and the statement that takes jobs along."""

    def at_next(action: Callable[[], None]) -> None:
        pending = [action]

        def doing_first(original: Callable[..., object]) -> Callable[..., object]:
            def made(*given: object) -> object:
                if pending:
                    pending.pop()()
                return original(*given)

            return made

        for name in ("take_along", "take_along_leased"):
            monkeypatch.setattr(coalesce_module, name, doing_first(getattr(coalesce_module, name)))

    return at_next


def test_a_job_that_is_committed_behind_the_claim_is_taken_along(
    rebuild: Rebuild, drain: Drain, engine: Engine, meanwhile: Callable[[Callable[[], None]], None]
) -> None:
    """By a snapshot of its own, newer than the claim's; the run sees what was committed with the job."""
    seen: list[int] = []

    def write_and_add() -> None:
        with rebuild._sessions.begin() as session:
            session.add(Account(id=1, balance=7))
            session.add_job(rebuild.handler, version=2)

    rebuild.does[2] = lambda ctx: seen.append(ctx.session.get_one(Account, 1).balance)
    meanwhile(write_and_add)
    rebuild.add(1)
    events = drain(rebuild.jobs, slots_per_queue=1)
    assert (rebuild.runs, seen, taken_along(events), waiting(engine)) == ([2], [7], [1], 0)


def _fail(_: Context) -> None:
    raise ValueError("no luck")


@pytest.mark.each_value
@pytest.mark.parametrize("retry", [AT_ONCE, NEVER], ids=["due at once", "due later"])
@pytest.mark.parametrize("ending", ["fail", "snooze"])
def test_arguments_of_a_run_that_did_not_end_well_never_follow_newer_ones(
    sessions: sessionmaker[OutboxSession], mode: Mode, drain: Drain, engine: Engine, retry: Backoff, ending: str
) -> None:
    """The failed job is put back behind the one that was added meanwhile, and is the older one nevertheless."""
    rebuild = Rebuild(sessions, mode, retry)

    def end(ctx: Context) -> object:
        rebuild.add(2)
        return _fail(ctx) if ending == "fail" else Snooze(timedelta(seconds=retry.first_seconds))

    rebuild.does[1] = end
    rebuild.add(1)
    drain(rebuild.jobs, slots_per_queue=1)
    assert (rebuild.runs, waiting(engine)) == ([1, 2], 0)


def test_the_newest_of_the_jobs_that_are_taken_along_is_the_one_that_was_added_last(
    rebuild: Rebuild, drain: Drain, engine: Engine
) -> None:
    """Also if an older one was put back behind it."""
    rebuild.does[1] = _fail
    rebuild.add(1)
    drain(rebuild.jobs, slots_per_queue=1)
    rebuild.add(2)
    # In the place of the first.
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET seq = DEFAULT WHERE attempt > 0"))
        connection.execute(
            text(
                "INSERT INTO outboxq.job (id, queue, kind, args, unique_key, priority, seq) OVERRIDING SYSTEM VALUE "
                "SELECT gen_random_uuid(), queue, kind, '{\"version\": 0}', unique_key, 9, 0 "
                "FROM outboxq.job WHERE attempt = 0"
            )
        )
    drain(rebuild.jobs, slots_per_queue=1, batch_size=1)
    assert (rebuild.runs, waiting(engine)) == ([1, 2], 0)


def set_clock_back(engine: Engine) -> None:
    """Each job was added at a time before those that were added before it, as the database's clock went back."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE outboxq.job SET created_at = timestamptz '2026-01-31' - (args->>'version')::int "
                "* interval '1 hour'"
            )
        )


@pytest.mark.first_and_last
@pytest.mark.parametrize("batch_size", [1, 50])
def test_the_job_that_was_added_last_is_the_newest_though_the_clock_went_back(
    rebuild: Rebuild, drain: Drain, engine: Engine, batch_size: int
) -> None:
    """Whether one claim takes several of them or only one."""
    rebuild.add(1, 2, 3)
    set_clock_back(engine)
    drain(rebuild.jobs, slots_per_queue=1, batch_size=batch_size)
    assert (rebuild.runs, waiting(engine)) == ([3], 0)


@pytest.mark.first_and_last
@pytest.mark.parametrize("ending", ["fail", "snooze"])
def test_a_job_that_was_put_back_is_not_the_newest(rebuild: Rebuild, drain: Drain, engine: Engine, ending: str) -> None:
    """It is older than the one that was added while it ran, whose time is an earlier one, and has a later number."""

    def end(ctx: Context) -> object:
        rebuild.add(3)
        with engine.begin() as connection:
            connection.execute(text("UPDATE outboxq.job SET created_at = '2026-01-31' WHERE args = '{\"version\": 3}'"))
        return _fail(ctx) if ending == "fail" else Snooze(timedelta(hours=1))

    rebuild.does[2] = end
    rebuild.add(1, 2)
    drain(rebuild.jobs, slots_per_queue=1, batch_size=1)
    assert (rebuild.runs, waiting(engine)) == ([2, 3], 0)


def test_a_run_that_fails_twice_is_as_old_as_its_newest_job(rebuild: Rebuild, drain: Drain, engine: Engine) -> None:
    """Its row has drawn numbers twice; the first one counts."""
    rebuild.does[1] = _fail
    rebuild.add(1)
    for _ in range(2):
        drain(rebuild.jobs, slots_per_queue=1)
        with engine.begin() as connection:
            connection.execute(text("UPDATE outboxq.job SET state = 'ready', run_at = now()"))
    rebuild.add(2)
    set_clock_back(engine)
    drain(rebuild.jobs, slots_per_queue=1, batch_size=1)
    assert (rebuild.runs, waiting(engine)) == ([1, 1, 2], 0)


def test_a_suspect_and_a_retried_dead_letter_are_not_the_newest(
    sessions: sessionmaker[OutboxSession], drain: Drain, engine: Engine
) -> None:
    """Both take new numbers when they come back."""
    rebuild = Rebuild(sessions, "lease", Backoff(max_attempts=1))
    rebuild.does[1] = _fail
    rebuild.add(1)
    drain(rebuild.jobs, slots_per_queue=1)
    rebuild.add(2)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET state = 'leased', lease_owner = gen_random_uuid()"))
    rebuild.add(3)
    with engine.begin() as connection:
        retry_page(connection, DeadFilter())
        run_script(connection, reap("outboxq", 3, 10))
    set_clock_back(engine)
    assert rows(engine, "SELECT args->>'version' FROM outboxq.job ORDER BY seq") == [("3",), ("1",), ("2",)]
    drain(rebuild.jobs, slots_per_queue=1, batch_size=1)
    assert (rebuild.runs, waiting(engine)) == ([1, 3], 0)


def test_a_run_that_fails_is_put_back_as_the_newest_job(rebuild: Rebuild, drain: Drain, engine: Engine) -> None:
    """What was taken along does not come back with it, and its arguments and its age are those of the newest."""
    rebuild.does[3] = _fail
    rebuild.add(1, 2)
    with rebuild._sessions.begin() as session:
        session.add_job(rebuild.handler.options(headers={"from": "the third"}, max_attempts=4), version=3)
    (newest,) = rows(engine, "SELECT created_at FROM outboxq.job WHERE args = '{\"version\": 3}'")
    (first,) = rows(engine, "SELECT id FROM outboxq.job WHERE args = '{\"version\": 1}'")
    events = drain(rebuild.jobs, slots_per_queue=1, batch_size=1)
    assert (rebuild.runs, taken_along(events), len(of(events, JobRetried))) == ([3], [2], 1)
    found = rows(
        engine,
        "SELECT id, args->>'version', created_at, headers->>'from', max_attempts, attempt, state FROM outboxq.job",
    )
    assert found == [(*first, "3", *newest, "the third", 4, 1, "scheduled")]


def test_a_leased_row_has_the_newest_arguments_before_its_run_begins(
    sessions: sessionmaker[OutboxSession], drain: Drain, engine: Engine
) -> None:
    """So a crash of the relay is followed by a run with them."""
    rebuild, stored = Rebuild(sessions, "lease"), list[tuple[object, ...]]()
    rebuild.does[3] = lambda _: stored.extend(rows(engine, "SELECT args->>'version', state FROM outboxq.job"))
    rebuild.add(1, 2, 3)
    drain(rebuild.jobs, slots_per_queue=1)
    assert stored == [("3", "leased")]


def test_a_job_that_is_not_due_yet_is_left_alone(rebuild: Rebuild, drain: Drain, engine: Engine) -> None:
    """Its producer has set the time. When that has come, it is taken along."""
    rebuild.add(1, delay=timedelta(hours=1))
    rebuild.add(2)
    drain(rebuild.jobs, slots_per_queue=1)
    assert (rebuild.runs, waiting(engine)) == ([2], 1)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET run_at = clock_timestamp()"))
    rebuild.add(3)
    drain(rebuild.jobs, slots_per_queue=1)
    assert (rebuild.runs, waiting(engine)) == ([2, 3], 0)


@pytest.mark.large
def test_jobs_of_a_window_run_once_behind_it(rebuild: Rebuild, start_relay: StartRelay, engine: Engine) -> None:
    """`every`: all of a window are due at its end, and run as one."""
    began = time.time()
    with start_relay(rebuild.jobs, RelayConfig(slots_per_queue=1)):
        for version in range(20):
            rebuild.add(version, every=timedelta(seconds=1))
            time.sleep(0.1)
        wait_until(lambda: waiting(engine) == 0, "the last window's run")
        windows = int(time.time()) - int(began)
    assert rebuild.runs == sorted(set(rebuild.runs))
    assert 2 <= len(rebuild.runs) <= windows + 1
    assert rebuild.runs[-1] == 19


def test_jobs_of_a_group_are_taken_along(rebuild: Rebuild, drain: Drain, engine: Engine) -> None:
    """They wait in another state."""
    rebuild.add(1, 2, group="account-7")
    rebuild.add(3)
    drain(rebuild.jobs, slots_per_queue=1)
    assert (rebuild.runs, waiting(engine)) == ([3], 0)


def test_one_lone_run_of_a_suspect_takes_the_others_along(rebuild: Rebuild, drain: Drain, engine: Engine) -> None:
    """A claim that died leaves a suspect of each job that it took along."""
    rebuild.add(1, 2, 3, 4, 5)
    leave_marks(engine)
    events = drain(rebuild.jobs, slots_per_queue=1, batch_size=3)
    assert (rebuild.runs, taken_along(events), waiting(engine)) == ([5], [4], 0)


def test_what_was_taken_along_comes_back_with_a_batch_that_is_rolled_back(
    sessions: sessionmaker[OutboxSession], drain: Drain, engine: Engine
) -> None:
    """Unmarked, as no relay has died; the next claim takes it along again."""
    rebuild = Rebuild(sessions, "transaction")

    def end_transaction(ctx: Context) -> None:
        # With the claim. The job is charged, and has its own arguments again.
        ctx.session.connection().connection.cursor().execute("ROLLBACK")
        rebuild.does.clear()

    rebuild.does[3] = end_transaction
    rebuild.add(1, 2, 3)
    events = drain(rebuild.jobs, slots_per_queue=1, batch_size=1)
    assert (rebuild.runs, taken_along(events), waiting(engine)) == ([3, 3], [2], 0)
    assert not of(events, JobsSuspected)


@pytest.fixture
def refusing(engine: Engine) -> Callable[[int], None]:
    """Has the server refuse to delete the job of a version."""

    def refuse(version: int) -> None:
        with engine.begin() as connection:
            connection.exec_driver_sql(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN RAISE 'this row stays' USING ERRCODE = '22000'; END $$"
            )
            connection.exec_driver_sql(
                "CREATE TRIGGER refuse BEFORE DELETE ON outboxq.job FOR EACH ROW "
                f"WHEN (OLD.args->>'version' = '{version}') EXECUTE FUNCTION refuse()"
            )

    return refuse


def test_a_row_that_cannot_be_taken_along_holds_up_no_run(
    rebuild: Rebuild, start_relay: StartRelay, engine: Engine, refusing: Callable[[int], None]
) -> None:
    """The claimed job runs by itself."""
    rebuild.add(1)
    rebuild.add(2, priority=-1)
    refusing(2)
    with start_relay(rebuild.jobs, RelayConfig(slots_per_queue=1, batch_size=1)):
        wait_until(lambda: rows(engine, "SELECT args->>'version' FROM outboxq.job") == [("2",)], "the first to be done")
    assert rebuild.runs[0] == 1


def test_a_row_that_another_transaction_holds_is_suspect(rebuild: Rebuild, drain: Drain, engine: Engine) -> None:
    """A run waits for no lock."""
    rebuild.add(1, 2)
    with engine.connect() as connection:
        connection.execute(text("SELECT FROM outboxq.job WHERE args->>'version' = '2' FOR UPDATE"))
        drain(rebuild.jobs, slots_per_queue=1)
        assert rebuild.runs == [1]
        connection.rollback()
        connection.execute(text("UPDATE outboxq.job SET priority = 1"))
        connection.commit()
    drain(rebuild.jobs, slots_per_queue=1)
    assert (rebuild.runs, waiting(engine)) == ([1, 2], 0)


def test_claims_that_go_along_with_a_commit_take_jobs_along_too(rebuild: Rebuild, drain: Drain, engine: Engine) -> None:
    """One slot, batches of two: four claims, of which three come with a COMMIT."""
    with rebuild._sessions.begin() as session:
        for version in range(40):
            session.add_job(rebuild.handler.options(coalesce=str(version % 8)), version=version)
    events = drain(rebuild.jobs, slots_per_queue=1, batch_size=2)
    assert (sorted(rebuild.runs), taken_along(events), waiting(engine)) == (list(range(32, 40)), [4] * 8, 0)


def test_a_batch_handler_is_given_one_job_of_each_key(
    sessions: sessionmaker[OutboxSession], drain: Drain, engine: Engine
) -> None:
    """In one call."""
    jobs, calls = Jobs(), list[list[int]]()

    class Version(dict[str, int]):
        def __init__(self, version: int) -> None:
            self.version = version

    @jobs.batch_handler(Version, queue="rebuild", coalesce=lambda version: str(version % 10))
    def rebuild_all(ctx: BatchContext, items: Sequence[BatchItem[Version]]) -> None:
        calls.append(sorted(item.args.version for item in items))

    with sessions.begin() as session:
        session.add_jobs(rebuild_all.job(version=version) for version in range(50))
    events = drain(jobs, slots_per_queue=1)
    assert calls == [list(range(40, 50))]
    assert (len(of(events, JobDone)), taken_along(events), waiting(engine)) == (10, [4] * 10, 0)


def test_jobs_that_share_a_batch_run_once_for_each_key(
    sessions: sessionmaker[OutboxSession], drain: Drain, engine: Engine
) -> None:
    """`batchable` changes nothing."""
    rebuild = Rebuild(sessions, "transaction", batchable=True, coalesce=lambda version: str(version % 10))
    rebuild.add_at_once(range(50))
    events = drain(rebuild.jobs, slots_per_queue=1, batch_size=20)
    assert sorted(rebuild.runs) == list(range(40, 50))
    assert (len(of(events, JobDone)), sum(taken_along(events)), waiting(engine)) == (10, 40, 0)


def test_no_producer_waits_for_a_run_of_its_key(rebuild: Rebuild, start_relay: StartRelay, engine: Engine) -> None:
    """100 adds while a handler of their key is at work: it goes on only behind all of them."""
    goes_on, runs, waited = threading.Event(), threading.Event(), list[bool]()
    rebuild.does[0] = lambda _: (runs.set(), waited.append(goes_on.wait(60)))
    rebuild.add(0)
    with start_relay(rebuild.jobs, None):
        try:
            assert runs.wait(60)
            for version in range(1, 101):
                rebuild.add(version)
        finally:
            goes_on.set()
        wait_until(lambda: waiting(engine) == 0, "all to be done")
    assert waited == [True]
    assert max(rebuild.runs) == 100


@pytest.mark.parametrize("jobs", [0, 20_000], ids=["empty", "large"])
def test_jobs_are_taken_along_by_the_index_of_keys(engine: Engine, jobs: int) -> None:
    """Neither a scan of the table nor a sort, whatever its statistics are; nothing is compiled."""
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
    held = [msgspec.structs.replace(unit_test_job(), unique_key=f"k{n}", lease_token=n) for n in range(1, 5)]
    for script in (take_along("outboxq", ["k1", "k2"]), take_along_leased("outboxq", held)):
        (place,) = (place for place, each in enumerate(script) if each.startswith("WITH"))
        with engine.begin() as connection:
            for setting in script[:place]:
                connection.exec_driver_sql(setting)
            plan = "\n".join(connection.exec_driver_sql(f"EXPLAIN {script[place]}").scalars())
        assert "job_unique" in plan
        assert "Seq Scan on job" not in plan
        assert "Sort" not in plan
        assert "JIT" not in plan


@pytest.mark.large
@pytest.mark.timeout(600)
def test_each_add_is_followed_by_a_run_under_kills(outboxq_database: Database, mode: Mode) -> None:
    """A few seconds of `python -m tests.coalescing.under_kills`."""
    verdict = run_under_kills(outboxq_database.url, 3, mode, seed=1)
    assert verdict.is_right, verdict
    assert verdict.taken_along
    assert verdict.throttled
