"""Finished jobs of kinds that keep them: a row in the transaction that removes the job, and nothing sent without."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from uuid import UUID

import msgspec
import psycopg
import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.orm import sessionmaker

import outboxq.execution.keep as keep_module
from outboxq import Backoff, BatchContext, BatchItem, Context, Discard, Jobs, OutboxSession, Retry, find_job
from outboxq.admin.finished import list_finished, run_again, show_finished
from outboxq.database.driver import NOT_PREPARED, PreparedStatements, run_script
from outboxq.errors import ArgsNotKept, JobNotFound, RegistryError
from outboxq.events import JobDied, JobDone, JobLeaseLost
from outboxq.execution.keep import FinishedRows, Keeper
from outboxq.handlers.keeping import Keeping
from outboxq.statements.done import FinishedColumns
from outboxq.statements.prune import delete_finished
from tests.support.app import QUICK, Effect
from tests.support.ledger import ledger, rows
from tests.support.scripts import note_scripts
from tests.support.together import together

KEEP = timedelta(days=7)
_ROWS = [(UUID(int=n), "work", "done", 1, 1e9, 0.5, None, None, None, None, 60.0) for n in (1, 2)]
_SEEN_PATIENCE = """\
CREATE FUNCTION outboxq.seen() RETURNS trigger LANGUAGE plpgsql AS
  $$BEGIN NEW.queue := current_setting('lock_timeout'); RETURN NEW; END$$;
CREATE TRIGGER seen BEFORE INSERT ON outboxq.done_job FOR EACH ROW EXECUTE FUNCTION outboxq.seen()"""
Drain = Callable[..., list[Any]]
Sessions = sessionmaker[OutboxSession]


def kept(engine: Engine) -> list[tuple[object, ...]]:
    """Kind, outcome, attempt and result of each row, sorted."""
    found = rows(engine, "SELECT kind, outcome, attempt, result::text FROM outboxq.done_job")
    return sorted(found, key=str)


def list_done(engine: Engine) -> list[object]:
    """The ids of the jobs that have a row."""
    return [job_id for (job_id,) in rows(engine, "SELECT id FROM outboxq.done_job")]


@pytest.mark.first_and_last
@pytest.mark.parametrize("claim", ["transaction", "lease"])
@pytest.mark.parametrize("batch_size", [1, 10])
def test_each_way_a_job_ends_leaves_its_row(
    engine: Engine, sessions: Sessions, drain: Drain, claim: str, batch_size: int
) -> None:
    """Done with a result, discarded, expired: a row each. A retry and a dead letter leave none."""
    jobs = Jobs()

    @jobs.handler(claim=claim, keep=KEEP, keep_args=True, keep_result=True, retry=QUICK)
    def work(ctx: Context, name: str) -> Any:
        if name == "writes":
            ctx.session.add(Effect(name=name))
        if name == "fails":
            raise ValueError("no")
        if name == "retries" and ctx.job.attempt == 1:
            return Retry()
        return Discard("not needed") if name == "discards" else {"name": name}

    @jobs.handler(claim=claim)
    def plain(ctx: Context) -> None:
        pass

    with sessions.begin() as session:
        handles = [session.add_job(work, name=name) for name in ("writes", "idle", "discards", "fails", "retries")]
        handles.append(session.add_job(work.options(expires=timedelta(seconds=60)), name="late"))
        unkept = session.add_job(plain)
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET expires_at = now() - interval '1 s' WHERE expires_at > now()"))
    drain(jobs, **together(claim, batch_size))
    assert kept(engine) == [
        ("work", "discarded", 1, None),
        ("work", "done", 1, '{"name": "idle"}'),
        ("work", "done", 1, '{"name": "writes"}'),
        ("work", "done", 2, '{"name": "retries"}'),
        ("work", "expired", 1, None),
    ]
    with engine.begin() as connection:
        states = [found and found.state for found in (find_job(connection, handle) for handle in (*handles, unkept))]
        assert states == ["done", "done", "discarded", "dead", "done", "expired", None]
        shown = show_finished(connection, handles[0].id)
        assert (json.loads(shown.args or ""), shown.finished.queue, shown.relay is None) == (
            {"name": "writes"}, "default", False,
        )  # fmt: skip
        found = find_job(connection, handles[0])
        assert found is not None
        assert found.result == '{"name": "writes"}'
        ids = [each.id for each in list_finished(connection)]
        assert ids == sorted(ids, reverse=True)
        assert [each.id for each in list_finished(connection, before=ids[1], limit=2)] == ids[2:4]
        again = run_again(connection, handles[0].id)
    drain(jobs, **together(claim, batch_size))
    with engine.connect() as connection:
        assert find_job(connection, again).state == "done"
    assert ledger(engine) == {"writes": 2}


def test_batches_and_shared_batches_keep_each_of_their_jobs(engine: Engine, sessions: Sessions, drain: Drain) -> None:
    """One row for each job of a batch handler, and of handlers that share their writes; their results are their own."""
    jobs = Jobs()

    class Item:
        def __init__(self, number: int) -> None:
            self.number = number

    @jobs.batch_handler(Item, keep=KEEP, queue="batch")
    def together(ctx: BatchContext, items: list[BatchItem[Item]]) -> Any:
        return [Discard("odd") if item.args.number % 2 else None for item in items]

    @jobs.handler(batchable=True, keep=KEEP, keep_result=True)
    def shared(ctx: Context, number: int) -> int:
        ctx.session.add(Effect(name=str(number)))
        return number

    with sessions.begin() as session:
        for number in range(3):
            session.add_job(together, number=number)
            session.add_job(shared, number=number)
    drain(jobs, batch_size=10)
    assert kept(engine) == [
        *(("shared", "done", 1, str(number)) for number in range(3)),
        ("together", "discarded", 1, None),
        ("together", "done", 1, None),
        ("together", "done", 1, None),
    ]
    with pytest.raises(TypeError, match="keep_result"):
        jobs.batch_handler(Item, keep=KEEP, keep_result=True)


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_each_kind_of_a_batch_keeps_what_it_asks_for(
    engine: Engine, sessions: Sessions, drain: Drain, claim: str
) -> None:
    """Arguments, a result, neither, or no row: whatever the other jobs of the batch keep, and for how long."""
    jobs = Jobs()

    @jobs.handler(claim=claim, keep=KEEP, keep_args=True)
    def args(ctx: Context, number: int) -> int:
        return number

    @jobs.handler(claim=claim, keep=2 * KEEP, keep_result=True)
    def result(ctx: Context, number: int) -> int:
        return number

    @jobs.handler(claim=claim, keep=KEEP)
    def neither(ctx: Context, number: int) -> int:
        return number

    @jobs.handler(claim=claim)
    def nothing(ctx: Context, number: int) -> int:
        return number

    with sessions.begin() as session:
        for number in range(2):
            for kind in (args, result, neither, nothing):
                session.add_job(kind, number=number)
    drain(jobs, **together(claim, 10))
    days = "round(extract(epoch FROM expires_at - finished_at) / 86400)::int"
    found = rows(engine, f"SELECT kind, args->>'number', headers::text, result::text, {days} FROM outboxq.done_job")
    assert sorted(found, key=str) == [
        ("args", "0", "{}", None, 7),
        ("args", "1", "{}", None, 7),
        ("neither", None, None, None, 7),
        ("neither", None, None, None, 7),
        ("result", None, None, "0", 14),
        ("result", None, None, "1", 14),
    ]


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_the_row_of_a_coalesced_run_names_the_jobs_it_stands_for(
    engine: Engine, sessions: Sessions, drain: Drain, claim: str
) -> None:
    """One run, one row, and the ids of the other jobs of its key are in it."""
    jobs = Jobs()

    @jobs.handler(claim=claim, keep=KEEP, coalesce="number")
    def work(ctx: Context, number: int) -> None:
        pass

    with sessions.begin() as session:
        handles = [session.add_job(work, number=1) for _ in range(3)]
    # Two slots may claim two jobs of a key in the same moment.
    drain(jobs, slots_per_queue=1)
    with engine.connect() as connection:
        (only,) = list_finished(connection)
        others = {handle.id for handle in handles} - {only.id}
        assert set(show_finished(connection, only.id).stands_for) == others


@pytest.mark.parametrize("batch_size", [1, 10])
def test_the_row_goes_back_with_a_refused_commit(
    engine: Engine, sessions: Sessions, drain: Drain, batch_size: int
) -> None:
    """A deferred constraint fails at COMMIT: neither effect nor row, and the row of the next attempt stands alone."""
    jobs = Jobs()
    before_second = []
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE kept_pair (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))

    @jobs.handler(keep=KEEP, retry=QUICK)
    def work(ctx: Context, number: int) -> None:
        if ctx.job.attempt == 2:
            before_second.extend(row for row in list_done(engine) if row == ctx.job.id)
        values = [1, 1] if number == 1 and ctx.job.attempt == 1 else [10 * number]
        for value in values:
            ctx.session.execute(text("INSERT INTO kept_pair VALUES (:value)"), {"value": value})

    with sessions.begin() as session:
        for number in (1, 2):
            session.add_job(work, number=number)
    drain(jobs, batch_size=batch_size)
    assert before_second == []
    assert kept(engine) == [("work", "done", 1, None), ("work", "done", 2, None)]
    assert rows(engine, "SELECT n FROM kept_pair ORDER BY n") == [(10,), (20,)]


def test_a_job_whose_lease_was_lost_is_not_kept(engine: Engine, sessions: Sessions, drain: Drain) -> None:
    """Its row may be another relay's by now: what this run was at leaves nothing."""
    jobs = Jobs()
    before_second = []

    @jobs.handler(claim="lease", keep=KEEP)
    def work(ctx: Context, loses: bool) -> None:
        if ctx.job.attempt == 2:
            before_second.extend(list_done(engine))
        if loses and ctx.job.attempt == 1:
            with engine.begin() as connection:
                connection.execute(
                    text("UPDATE outboxq.job SET lease_token = lease_token + 1, state = 'ready', lease_owner = NULL")
                )

    with sessions.begin() as session:
        session.add_job(work, loses=True)
    events = drain(jobs)
    assert sum(isinstance(each, JobLeaseLost) for each in events) == 1
    assert before_second == []
    assert kept(engine) == [("work", "done", 2, None)]
    assert sum(isinstance(each, JobDone) for each in events) == 1


def test_only_rows_whose_time_is_over_are_pruned(engine: Engine) -> None:
    """In pages, the oldest first."""
    fill = (
        "INSERT INTO outboxq.done_job (id, queue, kind, outcome, attempt, created_at, seconds, expires_at) "
        "SELECT gen_random_uuid(), 'q', kind, 'done', 1, now(), 0, now() + seconds * interval '1 s' "
        "FROM (VALUES ('over', -1), ('stands', 60)) AS rows (kind, seconds), generate_series(1, 3)"
    )
    with engine.begin() as connection:
        connection.execute(text(fill))
        assert run_script(connection, delete_finished("outboxq", 2)) == [(2,)]
        assert run_script(connection, delete_finished("outboxq", 2)) == [(1,)]
    assert kept(engine) == [("stands", "done", 1, None)] * 3


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_result_that_cannot_be_kept_fails_its_job_for_good(
    engine: Engine, sessions: Sessions, drain: Drain, claim: str
) -> None:
    """Too large, or no JSON: a dead letter that says so, and no effect."""
    jobs = Jobs()
    values = {
        "large": "x" * 300_000,
        "foreign": object(),
        "word": msgspec.Raw(b"nothing"),
        "number": msgspec.Raw(b"1e999999"),
        "bytes": msgspec.Raw(b'"\xff"'),
        "depth": msgspec.Raw(b"[" * 50_000 + b"]" * 50_000),
    }

    @jobs.handler(claim=claim, keep=KEEP, keep_result=True, retry=QUICK)
    def work(ctx: Context, what: str) -> Any:
        ctx.session.add(Effect(name="x"))
        return values[what]

    with sessions.begin() as session:
        handles = {session.add_job(work, what=what).id: what for what in values}
    died = {handles[each.job.id]: each.reason for each in drain(jobs) if isinstance(each, JobDied)}
    assert "300,002 bytes as JSON, over the cap of 262,144" in died["large"]
    assert "cannot be stored as JSON: it holds a value of type object" in died["foreign"]
    for what in ("word", "number", "bytes", "depth"):
        assert "cannot be read from its JSON" in died[what], what
    assert (ledger(engine), kept(engine)) == ({}, [])


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_result_that_would_come_back_changed_fails_its_job_for_good(
    engine: Engine, sessions: Sessions, drain: Drain, claim: str
) -> None:
    """Of what JSON has no type for, unless the handler says that it returns it; no effect stays."""
    jobs = Jobs()
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    values = {"time": {"at": moment}, "set": {1}, "keys": {1: "a"}, "infinity": [1e23], "same": {"a": [1, 2.5]}}
    options: Any = {"claim": claim, "keep": KEEP, "keep_result": True, "retry": QUICK}

    @jobs.handler(**options)
    def work(ctx: Context, what: str) -> Any:
        ctx.session.add(Effect(name=what))
        return values[what]

    @jobs.handler(**options)
    def declared(ctx: Context) -> dict[str, datetime] | Discard:
        return {"at": moment}

    with sessions.begin() as session:
        handles = {session.add_job(work, what=what).id: what for what in values}
        told = session.add_job(declared)
    died = {handles[each.job.id]: each.reason for each in drain(jobs) if isinstance(each, JobDied)}
    assert died.keys() == values.keys() - {"same"}
    assert "would not come back the same: [key 1], a datetime, would be a str" in died["time"]
    assert "a set would be a list" in died["set"]
    assert ledger(engine) == {"same": 1}
    assert told.result(engine, returns=dict[str, datetime]) == {"at": moment}


def test_the_annotation_of_a_result_is_looked_at_with_those_of_the_arguments() -> None:
    """A name that cannot be found is refused when the registry is resolved."""
    jobs = Jobs()

    def work(ctx: Context) -> "Nowhere": ...  # noqa: F821  # the point

    jobs.handler(keep=KEEP, keep_result=True)(work)
    with pytest.raises(RegistryError, match="is declared to return names 'Nowhere', which cannot be found"):
        jobs.resolve()


def test_without_keep_nothing_else_is_sent_and_with_it_no_statement_of_its_own(
    engine: Engine, sessions: Sessions, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The strings of today; the row goes along in the string of COMMIT."""
    sent = note_scripts(monkeypatch)
    shapes = []
    for options in ({}, {"keep": KEEP}):
        for claim in ("transaction", "lease"):
            jobs = Jobs()

            @jobs.handler(claim=claim, **options)
            def work(ctx: Context) -> None:
                pass

            with sessions.begin() as session:
                session.add_job(work)
            sent.clear()
            drain(jobs)
            # Others are claims by themselves, as many as there is time for before the drain ends.
            shapes.append([script for script in sent if not script.startswith("SET LOCAL statement_timeout = 0; ")])
    assert [["done_job" in script for script in scripts] for scripts in shapes] == [[False], [False], [True], [True]]
    assert re.fullmatch(
        r"RELEASE SAVEPOINT oq_\w+_inner; SET CONSTRAINTS ALL IMMEDIATE; COMMIT(; .*)?", shapes[0][0], re.DOTALL
    )


def test_arguments_that_were_not_kept_are_not_run_again(engine: Engine, sessions: Sessions, drain: Drain) -> None:
    """Refused in words that say what to do."""
    jobs = Jobs()

    @jobs.handler(keep=KEEP)
    def work(ctx: Context, secret: str) -> None:
        pass

    with sessions.begin() as session:
        handle = session.add_job(work, secret="canary")
    drain(jobs)
    with engine.connect() as connection, pytest.raises(ArgsNotKept, match="keep_args=True"):
        run_again(connection, handle.id)
    assert "canary" not in str(rows(engine, "SELECT done_job::text FROM outboxq.done_job"))


def test_a_finished_job_that_is_pruned_meanwhile_is_not_said_to_run_again(
    engine: Engine, sessions: Sessions, drain: Drain
) -> None:
    """Between the look at it and the INSERT."""
    jobs = Jobs()

    @jobs.handler(keep=KEEP, keep_args=True)
    def work(ctx: Context) -> None:
        pass

    with sessions.begin() as session:
        handle = session.add_job(work)
    drain(jobs)
    with engine.connect() as connection:

        @event.listens_for(connection, "after_cursor_execute", once=True)
        def prune(*_: object) -> None:
            with engine.begin() as pruner:
                pruner.execute(text("DELETE FROM outboxq.done_job"))

        with pytest.raises(JobNotFound):
            run_again(connection, handle.id)
    assert rows(engine, "SELECT id FROM outboxq.job") == []


def test_a_relay_that_may_not_write_the_table_works_without_it(
    engine: Engine, sessions: Sessions, drain: Drain, caplog: pytest.LogCaptureFixture
) -> None:
    """Tables of an earlier step: one warning, and the jobs run."""
    jobs = Jobs()

    @jobs.handler(keep=KEEP)
    def work(ctx: Context) -> None:
        pass

    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outboxq.done_job RENAME TO elsewhere"))
    with sessions.begin() as session:
        handle = session.add_job(work)
    assert [each.job.id for each in drain(jobs) if isinstance(each, JobDone)] == [handle.id]
    assert sum("finished jobs are not kept" in record.message for record in caplog.records) == 1
    with engine.connect() as connection:
        assert find_job(connection, handle) is None


def _revoked(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outboxq.done_job RENAME TO elsewhere"))


def _refusing(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outboxq.done_job ADD CONSTRAINT never CHECK (attempt < 0) NOT VALID"))


_RAISE = "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not today'; END $$"


def _raising(engine: Engine) -> None:
    trigger = "CREATE TRIGGER refuse BEFORE INSERT ON outboxq.done_job FOR EACH ROW EXECUTE FUNCTION refuse()"
    with engine.begin() as connection:
        connection.execute(text(f"{_RAISE}; {trigger}"))


def _raising_late(engine: Engine) -> None:
    trigger = (
        "CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON outboxq.done_job DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    with engine.begin() as connection:
        connection.execute(text(f"{_RAISE}; {trigger}"))


@pytest.mark.first_and_last
@pytest.mark.parametrize("claim", ["transaction", "lease"])
@pytest.mark.parametrize("batch_size", [1, 10])
@pytest.mark.parametrize("refuse", [_revoked, _refusing, _raising, _raising_late])
def test_jobs_whose_rows_are_refused_are_done_without(
    engine: Engine,
    sessions: Sessions,
    drain: Drain,
    caplog: pytest.LogCaptureFixture,
    claim: str,
    batch_size: int,
    refuse: Callable[[Engine], None],
) -> None:
    """The table goes, or refuses, while the relay runs: each handler runs once, what it added stands, one warning."""
    jobs = Jobs()
    ran = []

    @jobs.handler(claim=claim, keep=KEEP, retry=QUICK)
    def work(ctx: Context, number: int) -> None:
        if number == 0:
            refuse(engine)
        ran.append(number)
        if number % 2:
            ctx.session.add(Effect(name=str(number)))
            ctx.session.add_job(follow.options(unique=f"key {number}"), number=number)

    @jobs.handler(claim=claim)
    def follow(ctx: Context, number: int) -> None:
        ctx.session.add(Effect(name=f"after {number}"))

    with sessions.begin() as session:
        for number in range(6):
            session.add_job(work, number=number)
    events = drain(jobs, **together(claim, batch_size))
    assert sorted(ran) == list(range(6))
    assert sum(isinstance(each, JobDone) for each in events) == 9
    assert ledger(engine) == {name: 1 for number in (1, 3, 5) for name in (str(number), f"after {number}")}
    said = [record.message for record in caplog.records if "finished jobs are not kept" in record.message]
    assert len(said) == 1


def test_rows_that_several_commits_were_refused_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    keeper = Keeper({"work": Keeping(60.0)})
    keeper.refused(RuntimeError("the first"))
    keeper.refused(RuntimeError("of a COMMIT that was under way"))
    assert sum("finished jobs are not kept" in record.message for record in caplog.records) == 1


@pytest.mark.each_value
@pytest.mark.parametrize("claim", ["transaction", "lease"])
@pytest.mark.parametrize("adds", [0, 1], ids=["alone", "with a unique job"])
def test_a_row_whose_id_was_chosen_twice_gives_way(
    engine: Engine,
    sessions: Sessions,
    drain: Drain,
    caplog: pytest.LogCaptureFixture,
    claim: str,
    adds: int,
) -> None:
    """To a later job of its kind, and not to one of another kind; the jobs beside it keep their rows, and run once."""
    jobs, ran = Jobs(), list[int]()

    def write(ctx: Context, number: int) -> None:
        ran.append(number)
        ctx.session.add(Effect(name=str(number)))
        if adds:
            ctx.session.add_job(follow.options(unique=f"key {number}"))

    work = jobs.handler(kind="work", claim=claim, keep=KEEP)(write)
    other = jobs.handler(kind="other", claim=claim, keep=KEEP)(write)

    @jobs.handler(queue="after")
    def follow(ctx: Context) -> None: ...

    seen: list[dict[UUID, tuple[str, datetime]]] = []
    for kind, first in ((work, 0), (work, 3), (other, 6)):
        with sessions.begin() as session:
            handles = [session.add_job(kind, number=first + n) for n in range(3)]
            session.flush()
            if seen:
                chosen = {"old": handles[1].id, "new": min(seen[0])}
                session.execute(text("UPDATE outboxq.job SET id = :new WHERE id = :old"), chosen)
        drain(jobs, **together(claim, 3))
        with engine.connect() as connection:
            rows = connection.execute(text("SELECT id, kind, finished_at FROM outboxq.done_job"))
            seen.append({row.id: (row.kind, row.finished_at) for row in rows})
    twice = min(seen[0])
    assert sorted(ran) == list(range(9))
    assert [len(each) for each in seen] == [3, 5, 7]
    assert seen[1][twice] > seen[0][twice]
    assert seen[2][twice] == seen[1][twice]
    assert not [each for each in caplog.records if "not kept" in each.message]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_insert_of_rows_is_prepared_once_and_sent_as_text_if_that_is_lost(
    engine: Engine, sessions: Sessions, drain: Drain, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    """The driver drops what is prepared when it sees a rollback: each handler runs once, and all rows stand."""
    jobs, ran, sent = Jobs(), list[int](), note_scripts(monkeypatch)

    @jobs.handler(keep=KEEP, keep_args=True, keep_result=True, retry=QUICK)
    def work(ctx: Context, number: int) -> str:
        ran.append(number)
        ctx.session.add(Effect(name=str(number)))
        if number == 6:
            ctx.session.execute(text("DEALLOCATE ALL"))
        return f"it's {number}"

    with sessions.begin() as session:
        for number in range(12):
            session.add_job(work, number=number)
    drain(jobs, batch_size=batch_size, slots_per_queue=1)
    assert sorted(ran) == list(range(12))
    assert ledger(engine) == {str(number): 1 for number in range(12)}
    found = rows(
        engine, "SELECT args->>'number', result::text, seconds > 0, created_at < claimed_at FROM outboxq.done_job"
    )
    assert sorted(found) == sorted((str(n), f'"it\'s {n}"', True, True) for n in range(12))
    as_text = [each for each in sent if "INSERT" in each and "PREPARE" not in each]
    by_name = [each for each in sent if "oq_steps" in each and "INSERT" not in each]
    assert len(as_text) == 1
    assert len(by_name) >= 12 / batch_size - 3


def test_the_insert_that_is_lost_again_and_again_is_sent_as_text_for_a_while_only() -> None:
    """As claims are: each COMMIT with rows counts, also one that sent them as text."""
    lost, prepared = psycopg.errors.InvalidSqlStatementName(), PreparedStatements()
    step = FinishedRows(Keeper(), "outboxq", FinishedColumns("q", None, *zip(*_ROWS, strict=True)), prepared)
    for _ in range(2):
        step.committed(())
        assert "EXECUTE" in str(step.statements())
        assert "EXECUTE" not in str(cast("FinishedRows", step.refused(lost)).statements())
    texts = 0
    while "EXECUTE" not in str(step.statements()):
        texts += 1
        step.committed(())
    assert 10 < texts < 100


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_locked_table_holds_jobs_up_for_a_moment_only(
    engine: Engine, sessions: Sessions, drain: Drain, caplog: pytest.LogCaptureFixture, claim: str
) -> None:
    """An operator's forgotten session: handlers without a time-out do not wait for it."""
    jobs = Jobs()

    @jobs.handler(claim=claim, keep=KEEP, timeout_seconds=None)
    def work(ctx: Context, number: int) -> None:
        ctx.session.add(Effect(name=str(number)))

    with sessions.begin() as session:
        for number in range(3):
            session.add_job(work, number=number)
    with engine.begin() as operator:
        operator.execute(text("LOCK TABLE outboxq.done_job"))
        events = drain(jobs, slots_per_queue=1)
    assert sum(isinstance(each, JobDone) for each in events) == 3
    assert ledger(engine) == {"0": 1, "1": 1, "2": 1}
    assert list_done(engine) == []
    said = [record.message for record in caplog.records if "finished jobs are not kept" in record.message]
    assert len(said) == 1


@pytest.mark.large
@pytest.mark.parametrize("prepared", [NOT_PREPARED, PreparedStatements()], ids=["text", "prepared"])
def test_rows_wait_for_a_lock_for_a_second_and_what_follows_as_long_as_before(
    engine: Engine, prepared: PreparedStatements
) -> None:
    """Whatever the transaction allows, which holds for the keys of unique jobs, and for a COMMIT that notifies."""
    step = FinishedRows(Keeper(), "outboxq", FinishedColumns("q", None, *zip(*_ROWS, strict=True)), prepared)
    with engine.begin() as connection:
        run_script(connection, _SEEN_PATIENCE)
        shown = run_script(connection, "SET LOCAL lock_timeout = '7s'", *step.statements(), "SHOW lock_timeout")
        assert shown[-1] == ("7s",)
        step.committed([])
    assert rows(engine, "SELECT queue FROM outboxq.done_job") == [("1s",), ("1s",)]
    for held in ("LOCK TABLE outboxq.done_job", "DELETE FROM outboxq.done_job"):
        with engine.begin() as operator, engine.connect() as connection:
            # PREPARE waits too.
            run_script(connection, "DEALLOCATE ALL; SET LOCAL lock_timeout = '7s'")
            run_script(operator, held)
            fresh = PreparedStatements(prepares=prepared is not NOT_PREPARED)
            again, began = replace(step, prepared=fresh), time.monotonic()
            with pytest.raises(psycopg.errors.LockNotAvailable):
                run_script(connection, *again.statements())
            assert 0.9 < time.monotonic() - began < 5


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_keeping_begins_again_after_a_while(
    engine: Engine, sessions: Sessions, drain: Drain, monkeypatch: pytest.MonkeyPatch, claim: str
) -> None:
    """A right that is given back is used without a restart."""
    monkeypatch.setattr(keep_module, "_PAUSE_SECONDS", 0.0)
    jobs = Jobs()

    @jobs.handler(claim=claim, keep=KEEP)
    def work(ctx: Context, number: int) -> None:
        to = {0: ("done_job", "elsewhere"), 1: ("elsewhere", "done_job")}[number]
        with engine.begin() as connection:
            connection.execute(text(f"ALTER TABLE outboxq.{to[0]} RENAME TO {to[1]}"))

    with sessions.begin() as session:
        handles = [session.add_job(work, number=number) for number in range(2)]
    drain(jobs, batch_size=1, slots_per_queue=1)
    assert list_done(engine) == [handles[1].id]


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_a_refused_commit_is_not_taken_for_refused_rows(
    engine: Engine, sessions: Sessions, drain: Drain, caplog: pytest.LogCaptureFixture, claim: str
) -> None:
    """A deferred constraint says no before the rows are written: a failed attempt, and the rows of the others stand."""
    jobs = Jobs()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE kept_pair (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))

    @jobs.handler(claim=claim, keep=KEEP, retry=Backoff(max_attempts=1))
    def work(ctx: Context, number: int) -> None:
        ctx.session.execute(text("INSERT INTO kept_pair VALUES (7), (:n)"), {"n": 7 if number == 0 else 8})

    with sessions.begin() as session:
        handles = [session.add_job(work, number=number) for number in range(2)]
    events = drain(jobs, slots_per_queue=1)
    assert [each.job.id for each in events if isinstance(each, JobDied)] == [handles[0].id]
    assert list_done(engine) == [handles[1].id]
    assert not [record for record in caplog.records if "finished jobs are not kept" in record.message]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 7}, "keep takes a timedelta"),
        ({"keep": timedelta(0)}, "more than 0"),
        ({"keep_args": True}, "keep_args=True needs to know for how long"),
        ({"keep_result": True}, "keep_result=True needs to know for how long"),
        ({"keep": KEEP, "keep_args": 1}, "keep_args takes True or False"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    """At the decorator, with the reason."""
    with pytest.raises(Exception, match=message):

        @Jobs().handler(**options)
        def work(ctx: Context) -> None:
            pass
