"""COMMIT itself is refused: nothing that the jobs did stands, and nothing is reported that does not."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, Jobs, OutboxSession, RelayConfig
from outboxq.database.driver import Script
from outboxq.events import Event, JobDone
from outboxq.execution import recovery
from outboxq.handlers.options import ClaimMode
from outboxq.postgres import Server
from tests.conftest import StartRelay
from tests.support.app import Effect
from tests.support.ledger import ledger, of
from tests.support.own_server import own_database, own_server
from tests.support.scripts import change_scripts
from tests.support.waiting import PATIENCE, wait_until

_NUMBER = 6
_NOTIFY = "SELECT pg_notify('anything', 'x'), set_config('lock_timeout', '100ms', true), nextval('tries')"
# No transaction that is rolled back takes its numbers back.
_TRIES = "SELECT last_value FROM tries"


@pytest.fixture
def lonely_primary() -> Iterator[Server]:
    """A server that makes those wait who ask for it, for a standby which is never there."""
    with own_server({"synchronous_standby_names": "gone", "synchronous_commit": "local"}) as server:
        yield server


@pytest.mark.large
@pytest.mark.parametrize("claim", ["transaction", "lease"])
@pytest.mark.parametrize("keep", [None, timedelta(days=7)], ids=["plain", "kept"])
def test_a_commit_that_gets_no_lock_is_not_taken_for_one_that_stands(
    lonely_primary: Server,
    start_relay: StartRelay,
    monkeypatch: pytest.MonkeyPatch,
    keep: timedelta | None,
    claim: ClaimMode,
) -> None:
    """One that notifies waits for the COMMIT of another that does, for as long as `lock_timeout` lets it.

    Nor is that a failure of a job.
    """
    monkeypatch.setattr(recovery, "POSTPONED", timedelta(seconds=0.05))
    jobs = Jobs()

    @jobs.handler(keep=keep, claim=claim, retry=Backoff(max_attempts=1))
    def work(ctx: Context, number: int) -> None:
        ctx.session.add(Effect(name=str(number)))
        ctx.session.execute(text(_NOTIFY))

    with own_database(lonely_primary) as (database, engine):
        with engine.begin() as connection:
            connection.execute(text("CREATE SEQUENCE tries"))
        with sessionmaker(engine, class_=OutboxSession).begin() as session:
            session.add_jobs(work.job(number=number) for number in range(_NUMBER))
        blocker = threading.Thread(target=_notify_and_wait, args=(engine,))
        blocker.start()
        try:
            wait_until(lambda: _waits_for_its_standby(engine), "a COMMIT that holds the lock")
            with start_relay(jobs, RelayConfig(slots_per_queue=1, poll_seconds=0.1), engine=database.url) as running:
                # All of them in one transaction, and the first one alone.
                wait_until(lambda: _scalar(engine, _TRIES) > _NUMBER + 1, "refused COMMITs")
                assert (running.of(JobDone), ledger(engine)) == ([], {})
                _end_the_wait(engine)
                wait_until(lambda: ledger(engine).total() >= _NUMBER, "every effect")
                wait_until(lambda: len(running.of(JobDone)) >= _NUMBER, "every job")
            assert ledger(engine) == {str(number): 1 for number in range(_NUMBER)}
            assert len(running.of(JobDone)) == _NUMBER
        finally:
            _end_the_wait(engine)
            blocker.join(PATIENCE)


@pytest.mark.large
@pytest.mark.parametrize(
    ("options", "waiting"),
    [({"coalesce": "index"}, 0), ({"group": "g", "on_failure": "pass"}, 1)],
    ids=["taken along", "passed"],
)
def test_a_job_whose_commit_gets_no_lock_is_put_off_as_after_a_failure(
    lonely_primary: Server, start_relay: StartRelay, options: dict[str, Any], waiting: int
) -> None:
    """The next run of its key takes it along, and does not run before it; its group may pass it."""
    jobs = Jobs()

    @jobs.handler(retry=Backoff(max_attempts=1), **options)
    def rebuild(ctx: Context, version: int) -> None:
        ctx.session.add(Effect(name=str(version)))
        ctx.session.execute(text(_NOTIFY))

    with own_database(lonely_primary) as (database, engine):
        with engine.begin() as connection:
            connection.execute(text("CREATE SEQUENCE tries"))
        new_session = sessionmaker(engine, class_=OutboxSession)
        with new_session.begin() as session:
            session.add_job(rebuild, version=1)
        blocker = threading.Thread(target=_notify_and_wait, args=(engine,))
        blocker.start()
        try:
            wait_until(lambda: _waits_for_its_standby(engine), "a COMMIT that holds the lock")
            with start_relay(jobs, RelayConfig(slots_per_queue=1, poll_seconds=0.1), engine=database.url) as running:
                put_off = "SELECT count(*) FROM outboxq.job WHERE run_at > now() + interval '1 minute'"
                wait_until(lambda: _scalar(engine, put_off) == 1, "the job to be put off")
                _end_the_wait(engine)
                blocker.join(PATIENCE)
                with new_session.begin() as session:
                    session.add_job(rebuild, version=2)
                wait_until(lambda: running.of(JobDone), "the newer one to be done")
            assert (ledger(engine), _scalar(engine, "SELECT count(*) FROM outboxq.job")) == ({"2": 1}, waiting)
        finally:
            _end_the_wait(engine)
            blocker.join(PATIENCE)


_NOTIFYING = """\
CREATE SEQUENCE tries;
CREATE FUNCTION notify() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_notify('anything', 'x');
  PERFORM set_config('lock_timeout', CASE WHEN nextval('tries') <= TG_ARGV[0]::integer THEN '100ms' ELSE '0' END, true);
  RETURN NULL;
END $$;
CREATE TRIGGER notify AFTER DELETE ON outboxq.job FOR EACH ROW EXECUTE FUNCTION notify(%d)"""


@pytest.mark.large
@pytest.mark.parametrize("refused", [1, 2])
def test_the_rows_of_finished_jobs_are_not_blamed_for_a_commit_that_gets_no_lock(
    lonely_primary: Server, start_relay: StartRelay, caplog: pytest.LogCaptureFixture, refused: int
) -> None:
    """Under a lease, where the next try leaves the claim of others out, and could leave out the rows."""
    jobs = Jobs()

    @jobs.handler(keep=timedelta(days=7), claim="lease")
    def work(ctx: Context) -> None: ...

    with own_database(lonely_primary) as (database, engine):
        with engine.begin() as connection:
            connection.execute(text(_NOTIFYING % refused))
        with sessionmaker(engine, class_=OutboxSession).begin() as session:
            session.add_job(work)
        blocker = threading.Thread(target=_notify_and_wait, args=(engine,))
        blocker.start()
        try:
            wait_until(lambda: _waits_for_its_standby(engine), "a COMMIT that holds the lock")
            with start_relay(jobs, RelayConfig(slots_per_queue=1), engine=database.url) as running:
                wait_until(lambda: _scalar(engine, _TRIES) == refused + 1, "the COMMIT that may wait")
                _end_the_wait(engine)
                wait_until(lambda: running.of(JobDone), "the job to be done")
            assert _scalar(engine, "SELECT count(*) FROM outboxq.done_job") == 1
            assert "not kept" not in caplog.text
            assert refused > 1 or not [record for record in caplog.records if record.levelname == "WARNING"]
        finally:
            _end_the_wait(engine)
            blocker.join(PATIENCE)


def test_a_backend_that_ends_at_the_rows_of_finished_jobs_stops_no_later_rows(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    drain: Callable[..., list[Event]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The end is no refusal of the table's: the next COMMIT writes rows again."""
    jobs, ended = Jobs(), []

    @jobs.handler(keep=timedelta(days=7))
    def work(ctx: Context, number: int) -> None: ...

    def end_once(script: Script) -> None:
        owners = [owner for owner, _ in script.parts]
        if not ended and "finished rows" in owners:
            ended.append(owners)
            script.parts[owners.index("finished rows")] = (
                "finished rows",
                "SELECT pg_terminate_backend(pg_backend_pid())",
            )

    change_scripts(monkeypatch, end_once)
    with sessions.begin() as session:
        session.add_jobs(work.job(number=number) for number in range(3))
    events = drain(jobs)
    assert ended
    assert (len(of(events, JobDone)), _scalar(engine, "SELECT count(*) FROM outboxq.done_job")) == (3, 3)
    assert "not kept" not in caplog.text


def _notify_and_wait(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL synchronous_commit = on"))
        connection.execute(text("CREATE TABLE written ()"))
        connection.execute(text("NOTIFY anything"))


def _waits_for_its_standby(engine: Engine) -> bool:
    return _scalar(engine, "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'") == 1


def _scalar(engine: Engine, query: str) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text(query)).scalar_one())


def _end_the_wait(engine: Engine) -> None:
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"))
