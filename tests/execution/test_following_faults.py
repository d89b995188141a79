"""What goes wrong where one string commits a batch and begins the next, or where a savepoint is only stood in for."""

from collections import Counter
from collections.abc import Callable

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.orm import sessionmaker

from outboxq import AsyncContext, Backoff, Context, Jobs, OutboxSession, Relay, RelayConfig
from outboxq.database.driver import Script
from outboxq.events import Event, JobDone
from outboxq.postgres import Database
from outboxq.testing.faults import on_passing, terminate_backends
from tests.support import app
from tests.support.app import Effect
from tests.support.ledger import dead, ledger, waiting
from tests.support.limits import many_at_once
from tests.support.scripts import behind_commit, change_scripts

QUICK = Backoff(max_attempts=3, first_seconds=0.0, jitter=0.0)


def enqueue(sessions: sessionmaker[OutboxSession], count: int) -> None:
    with sessions.begin() as session:
        session.add_jobs([app.record.job(name=f"job {number}") for number in range(count)])


def handled_by(function: Callable[..., object], **options: object) -> Jobs:
    """A registry in which `record` is this function."""
    jobs = Jobs()
    jobs.handler(queue="ledger", kind=app.record.kind, retry=QUICK, **options)(function)  # type: ignore[arg-type, call-overload]
    return jobs


def record(ctx: Context, name: str) -> None:
    ctx.session.add(Effect(name=name))


def drain(target: str | Engine, jobs: Jobs, batch_size: int = 1) -> list[Event]:
    events: list[Event] = []
    config = many_at_once(jobs, RelayConfig(slots_per_queue=1, batch_size=batch_size))
    Relay(target, jobs, config, hooks=[events.append]).drain()
    return events


def test_a_listener_that_raises_at_a_savepoint_costs_no_job(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database, engine: Engine
) -> None:
    """Jobs that share a transaction have a savepoint each, which begins anew for the job that could not have one."""
    enqueue(sessions, 2)
    own, raised = create_engine(outboxq_database.url), []

    @event.listens_for(own, "before_cursor_execute")
    def trace(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("SAVEPOINT") and not raised:
            raised.append(1)
            raise RuntimeError("tracer")

    drain(own, handled_by(record), batch_size=2)
    own.dispose()
    assert ledger(engine) == Counter(["job 0", "job 1"])
    assert (waiting(engine), dead(engine), raised) == (0, 0, [1])


def test_an_engine_without_parameters_loses_no_statement(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database, engine: Engine
) -> None:
    """There SQLAlchemy sends its statements another way."""
    enqueue(sessions, 2)
    own = create_engine(outboxq_database.url, execution_options={"no_parameters": True})

    def write(ctx: Context, name: str) -> None:
        ctx.session.connection().execute(text("INSERT INTO effect_ledger (name) VALUES (:name)"), {"name": name})

    drain(own, handled_by(write))
    own.dispose()
    assert ledger(engine) == Counter(["job 0", "job 1"])


@pytest.mark.parametrize("place", ["before", "after"])
def test_statements_with_changing_comments_are_known_by_what_they_are(
    place: str, sessions: sessionmaker[OutboxSession], outboxq_database: Database, engine: Engine
) -> None:
    """As tools write them that carry a trace into the server's log."""
    enqueue(sessions, 2)
    own, numbers = create_engine(outboxq_database.url), iter(range(1_000))

    @event.listens_for(own, "before_cursor_execute", retval=True)
    def comment(_connection: object, _cursor: object, statement: str, parameters: object, *_: object) -> object:
        note = f"/* trace {next(numbers)} */"
        return (f"{note} {statement}" if place == "before" else f"{statement} {note}"), parameters

    drain(own, handled_by(record))
    own.dispose()
    assert ledger(engine) == Counter(["job 0", "job 1"])


@pytest.mark.first_and_last
@pytest.mark.parametrize(("count", "batch_size"), [(1, 1), (1, 5), (2, 2)])
def test_rows_of_a_failed_attempt_that_went_around_its_session_are_undone(
    count: int, batch_size: int, sessions: sessionmaker[OutboxSession], outboxq_database: Database, engine: Engine
) -> None:
    """The savepoint lies below whatever a handler can reach through its session."""
    enqueue(sessions, count)

    def write_and_fail(ctx: Context, name: str) -> None:
        bind = ctx.session.bind
        assert isinstance(bind, Connection)
        bind.connection.cursor().execute("INSERT INTO effect_ledger (name) VALUES ('raw')")
        raise ValueError(name)

    drain(outboxq_database.url, handled_by(write_and_fail), batch_size)
    assert ledger(engine) == Counter()


@pytest.mark.first_and_last
@pytest.mark.parametrize("claim", ["transaction", "lease"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_an_async_handler_may_begin_with_add_job(
    claim: str,
    batch_size: int,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    engine: Engine,
) -> None:
    """Which sends nothing, and so is not awaited: the transaction begins with the flush."""
    enqueue(sessions, 3)

    async def chain(ctx: AsyncContext, name: str) -> None:
        ctx.session.add_job(app.record_async, name=f"after {name}")

    jobs = Jobs()
    jobs.handler(queue="ledger", kind=app.record.kind, retry=QUICK, claim=claim)(chain)  # type: ignore[call-overload]
    drain(outboxq_database.url, jobs, batch_size)
    assert (waiting(engine), dead(engine)) == (3, 0)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_cancellation_during_commit_costs_nothing(
    batch_size: int,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PostgreSQL commits, and raises it at what follows, outside of any transaction."""
    enqueue(sessions, 4)
    cancelled = []

    def cancel_once(script: Script) -> None:
        place = behind_commit(script)
        if place is not None and not cancelled:
            cancelled.append(1)
            script.parts.insert(place, ("settings", "DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '57014'; END $$"))

    change_scripts(monkeypatch, cancel_once)
    events = drain(outboxq_database.url, handled_by(record), batch_size)
    assert cancelled
    assert ledger(engine) == Counter(f"job {number}" for number in range(4))
    assert dead(engine) == 0
    assert Counter(type(each) for each in events)[JobDone] == 4


def test_listeners_of_users_see_every_transaction_begin(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """A role, or a tenant for row-level security, is set for each of them."""
    enqueue(sessions, 3)
    own, seen = create_engine(outboxq_database.url), []

    @event.listens_for(own, "begin")
    def set_tenant(connection: Connection) -> None:
        connection.exec_driver_sql("SET LOCAL app.tenant = 'x'")

    def look(ctx: Context, name: str) -> None:
        del name
        seen.append(ctx.session.execute(text("SELECT current_setting('app.tenant', true)")).scalar())

    drain(own, handled_by(look))
    own.dispose()
    assert seen == ["x"] * 3


def test_a_batch_is_told_once_where_the_next_claim_found_suspects_only(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database, engine: Engine
) -> None:
    """And the connection is lost before their new state is committed."""
    enqueue(sessions, 2)
    with engine.connect() as connection:
        connection.execute(text("DELETE FROM outboxq.job WHERE seq = (SELECT max(seq) FROM outboxq.job)"))
        connection.rollback()
    url = outboxq_database.url
    url += ("&" if "?" in url else "?") + "application_name=outboxq_victim"
    with on_passing("before-claim", 3, lambda: terminate_backends(url)):
        events = drain(url, handled_by(record))
    assert set(Counter(each.job.id for each in events if isinstance(each, JobDone)).values()) == {1}


def test_a_free_retry_keeps_its_deadline(sessions: sessionmaker[OutboxSession], outboxq_database: Database) -> None:
    """The settings of one handler lie below the savepoint that its repetition goes back to."""
    seen = []

    def conflict_once(ctx: Context, name: str) -> None:
        del name
        seen.append(ctx.session.execute(text("SELECT current_setting('statement_timeout')")).scalar())
        if len(seen) == 1:
            ctx.session.execute(text("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$"))

    jobs = handled_by(conflict_once, timeout_seconds=2)

    @jobs.handler(queue="ledger", timeout_seconds=60)
    def slow(ctx: Context) -> None: ...

    enqueue(sessions, 1)
    drain(outboxq_database.url, jobs)
    assert seen == ["2s", "2s"]
