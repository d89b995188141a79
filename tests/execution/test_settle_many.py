"""Outcomes of many leased jobs in one string leave the rows, and have the events, that each has by itself."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import psycopg
import pytest
from sqlalchemy import Connection, Engine, text

from outboxq import Backoff, Context, DeadLetter, Discard, Jobs, Retry, Snooze
from outboxq.database.driver import Script, run_script
from outboxq.database.guard import Guard
from outboxq.error_record import ErrorRecord
from outboxq.events import Event, JobDied, JobDone, JobLeaseLost, JobRetried, JobSnoozed
from outboxq.execution import settle
from outboxq.execution.callback_batches import FinishBatches
from outboxq.execution.failure import Failed
from outboxq.execution.invoke import SyncInvoker
from outboxq.execution.keep import Keeper
from outboxq.execution.runtime import CancelledResult, ExpiredResult, GivenBack, Result, Runtime, UnknownKindResult
from outboxq.execution.settle import Settlement, settle_result, settlement_of
from outboxq.execution.settle_many import Settled, SettleMany
from outboxq.handlers.returned import DoneWithResult
from outboxq.job import ADDED_HEADER, THEN_HEADER, Job
from outboxq.outcomes import Done
from outboxq.postgres import Database
from outboxq.relay.connections import connection_options
from outboxq.statements.results import result_channel, try_result_flags
from tests.support.leases import add_leased, leased_jobs
from tests.support.urls import libpq_url

MINUTE = timedelta(minutes=1)
_RECORD = ErrorRecord(1, "ValueError", 'it\'s \\ "no"', ("app.py:1 in work",))
OUTCOMES: Mapping[str, Result] = {
    "done": Done(),
    "done with a result": DoneWithResult('{"a": "it\'s \\\\"}'),
    "discarded": Discard("too late"),
    "expired": ExpiredResult(),
    "failed": Failed(_RECORD),
    "failed for good": Failed(_RECORD, permanent=True),
    "retried at once": Retry(timedelta(0), "again"),
    "retried later": Retry(40 * MINUTE, "again"),
    "snoozed": Snooze(50 * MINUTE),
    "snoozed for a century": Snooze(timedelta(days=36_500)),
    "snoozed for no time": Snooze(timedelta(0)),
    "dead": DeadLetter("it's \\ over"),
    "of an unknown kind": UnknownKindResult(),
    "given back": GivenBack(),
}
_GROUPED = {"state": "'group_leased'", "group_key": "'g'"}
_LAST = "(SELECT jsonb_agg(jsonb_build_object('attempt', a)) FROM generate_series(1, 30) AS a)"
JOBS: Mapping[str, Mapping[str, str]] = {
    "plain": {},
    "last attempt": {"attempt": "3"},
    "own attempts": {"attempt": "3", "max_attempts": "9", "priority": "-7"},
    "many errors": {"errors": _LAST},
    "errors that are none": {"errors": "'{\"a\": 1}'"},
    "grouped": _GROUPED,
    "grouped, passes": {**_GROUPED, "kind": "'passing'"},
    "several of a group": {**_GROUPED, "queue": "'several'"},
    "one of a group": {**_GROUPED, "queue": "'one'"},
    "several by declaration": {**_GROUPED, "queue": "'declared'"},
    "coalesced": {"unique_key": "'u'", "headers": "'{\"a\": \"b\"}'"},
    "coalesced, added before": {"unique_key": "'u'", "headers": f"'{{\"{ADDED_HEADER}\": \"7\"}}'"},
    "coalesced, no number": {"unique_key": "'u'", "headers": f"'{{\"{ADDED_HEADER}\": \"x\"}}'"},
    "coalesced in a group": {**_GROUPED, "unique_key": "'u'"},
    "expiring": {"expires_at": "clock_timestamp() + interval '20 minutes'"},
    "expiring in a group": {**_GROUPED, "expires_at": "clock_timestamp() + interval '20 minutes'"},
    "of a callback batch": {"batch_id": "gen_random_uuid()"},
    "suspect": {"crashes": "3"},
    "suspect in a group": {**_GROUPED, "crashes": "3"},
    "greatest numbers": {
        "attempt": "2147483646", "parked": "32766", "crashes": "32766", "lease_token": "9223372036854775806 - n",
        "max_attempts": "32767", "priority": "32767",
    },
    "parked": {"parked": "3"},
    "parked in a group": {**_GROUPED, "parked": "2"},
    "died before": {},
    "died before, of another kind": {},
}  # fmt: skip


def registry_of() -> Jobs:
    """Handlers of one queue after the other, without a random part in their delays."""
    jobs = Jobs()
    backoff = Backoff(max_attempts=3, first_seconds=1_800.0, jitter=0.0)

    @jobs.handler(queue="q", kind="k", claim="lease", retry=backoff, keep=timedelta(days=1), keep_result=True)
    def work(ctx: Context) -> dict[str, str] | None: ...

    @jobs.handler(queue="declared", kind="passing", claim="lease", retry=backoff, on_failure="pass")
    def passing(ctx: Context) -> None: ...

    jobs.limit("declared", per_group=2)
    return jobs


@pytest.fixture
def connection(engine: Engine) -> Any:
    with engine.connect().execution_options(**connection_options(engine, "outboxq")) as connection:
        yield connection


def runtime_on(connection: Connection) -> Runtime:
    registry = registry_of().resolve()
    options = {"schema": "outboxq", "max_crashes": 3, "caller": None, "sharing_queues": frozenset()}
    keeper = Keeper.of(registry)
    return Runtime(
        registry, None, SyncInvoker(), Guard(connection), **options, is_interruption=lambda _: False, keeper=keeper
    )


def stage(connection: Connection) -> list[tuple[str, Result, Job]]:
    """A leased job for each outcome of each sort of jobs, as its claim read it."""
    run_script(connection, "INSERT INTO outboxq.queue (name, max_per_group) VALUES ('several', 2), ('one', 1)")
    for columns in JOBS.values():
        add_leased(connection, len(OUTCOMES), **columns)
    jobs = leased_jobs(connection)
    names = [(f"{sort}, {outcome}", sort, result) for sort in JOBS for outcome, result in OUTCOMES.items()]
    staged = []
    for (name, sort, result), job in zip(names, jobs, strict=True):
        if sort.startswith("died before"):
            values = {"id": job.id, "kind": "k" if sort == "died before" else "other"}
            connection.execute(
                text(
                    "INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, priority, attempt, crashes, errors, "
                    "reason, created_at, died_at) VALUES (:id, 'q', :kind, '{}', '{}', 0, 1, 0, '[]', 'before', "
                    "clock_timestamp(), clock_timestamp() - interval '1 day')"
                ),
                values,
            )
        # Its claim counted the crash in the row.
        claimed = msgspec.structs.replace(job, crashes=job.crashes - 1) if sort.startswith("suspect") else job
        staged.append((name, result, claimed))
    return staged


def rows_of(connection: Connection, staged: Sequence[tuple[str, Result, Job]]) -> dict[str, Any]:
    """The rows of each job in our tables, without ids and tokens, with times as multiples of five minutes from now."""
    by_id = {job.id: (name, job) for name, _, job in staged}
    found: dict[str, Any] = {name: [] for name in (name for name, _, _ in staged)}
    now: datetime = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
    for row in connection.execute(text("SELECT * FROM outboxq.job")).mappings():
        name, job = by_id[row["id"]]
        seen = dict(row) | {"run_at": round((row["run_at"] - now).total_seconds() / 300)}
        seen["has new token"] = seen.pop("lease_token") not in (job.lease_token, 0)
        seen["kept its place"] = seen.pop("seq") == job.seq
        seen["errors"] = _timeless(seen["errors"], now)
        found[name].append(seen)
    for row in connection.execute(text("SELECT * FROM outboxq.dead_job")).mappings():
        # One of another id is found by what only it has.
        seen = dict(row) | {"died_at": round((row["died_at"] - now).total_seconds() / 300)}
        others = (name for name, job in by_id.values() if job.created_at == row["created_at"])
        name = by_id[row["id"]][0] if row["id"] in by_id else next(others)
        seen["has other id"] = seen.pop("id") not in by_id
        seen["errors"] = _timeless(seen["errors"], now)
        found[name].append(seen)
    for row in connection.execute(text("SELECT * FROM outboxq.done_job")).mappings():
        found[by_id[row["id"]][0]].append(
            dict(row) | {"finished_at": None, "expires_at": round((row["expires_at"] - now).total_seconds() / 300)}
        )
    return {name: sorted(seen, key=str) for name, seen in found.items()}


def _timeless(errors: Any, now: datetime) -> Any:
    if not isinstance(errors, list):
        return errors
    for record in errors:
        if "at" in record:
            assert abs((datetime.fromisoformat(record.pop("at")) - now).total_seconds()) < 300
    return errors


def settle_one(connection: Connection, job: Job, result: Result, runtime: Runtime) -> list[Event]:
    if isinstance(result, UnknownKindResult):
        settle.park(connection, job)
        return []
    if isinstance(result, GivenBack):
        settle.release(connection, job)
        return []
    event = settle_result(connection, job, result, runtime, 0.5)
    for step in runtime.keeper.steps("outboxq", [event]):
        run_script(connection, *step.statements())
    return [event]


def settle_together(
    connection: Connection, settlements: Sequence[Settlement], runtime: Runtime, **options: Any
) -> Settled:
    """Settle in the connection's transaction, which stays open."""
    many = SettleMany(settlements, "outboxq", runtime.keeper, **options)
    script = Script()
    many.add_to(script)
    many.add_question(script)
    answer = script.send(connection)
    assert answer.error is None, answer.error
    return many.read(answer)


def decided(result: Result, job: Job, runtime: Runtime) -> Settlement:
    found = settlement_of(job, result, runtime, 0.5)
    assert found is not None
    return found


@pytest.mark.large
def test_each_outcome_of_each_sort_of_job_leaves_what_it_leaves_by_itself(connection: Connection) -> None:
    """The same rows but for ids, tokens and clocks, and the same events; all of them in one string."""
    with connection.begin() as whole:
        staged, runtime = stage(connection), runtime_on(connection)
        with connection.begin_nested() as savepoint:
            events = [event for _, result, job in staged for event in settle_one(connection, job, result, runtime)]
            alone = rows_of(connection, staged)
            savepoint.rollback()
        with connection.begin_nested() as savepoint:
            settled = settle_together(connection, [decided(*each[1:], runtime) for each in staged], runtime)
            together = rows_of(connection, staged)
            savepoint.rollback()
        whole.rollback()
    assert {name: row for name, row in together.items() if row != alone[name]} == {
        name: row for name, row in alone.items() if row != together[name]
    }
    assert settled == Settled(tuple(events), ())
    assert len(events) == len(JOBS) * (len(OUTCOMES) - 2)


@pytest.mark.parametrize("result", [CancelledResult(), Done()], ids=["cancelled", "done, with a follower"])
def test_what_needs_statements_of_its_own_is_not_decided(connection: Connection, result: Result) -> None:
    """A cancelled job's request is queried, and a follower is added: by `settle_result`."""
    with connection.begin():
        add_leased(connection, 1, headers=f'\'{{"{THEN_HEADER}": "{{}}"}}\'')
        (job,) = leased_jobs(connection)
        assert settlement_of(job, result, runtime_on(connection), 0.5) is None


def _several(connection: Connection, *results: Result, **columns: str) -> list[tuple[Job, Result]]:
    with connection.begin():
        add_leased(connection, len(results), **columns)
        return list(zip(leased_jobs(connection), results, strict=True))


def test_a_lost_job_is_reported_and_a_held_one_comes_back(engine: Engine, connection: Connection) -> None:
    """Of each outcome; nothing is written of them, and the others are settled."""
    results = [OUTCOMES[name] for name in ("done", "failed", "dead")]
    given = _several(connection, *results, *results, *results)
    runtime = runtime_on(connection)
    settlements = [decided(result, job, runtime) for job, result in given]
    lost, held, fine = (settlements[at : at + 3] for at in (0, 3, 6))
    with engine.connect() as other, connection.begin():
        for each in lost:
            other.execute(text("UPDATE outboxq.job SET lease_token = 99 WHERE id = :id"), {"id": each.job.id})
        other.commit()
        for each in held:
            other.execute(text("SELECT FROM outboxq.job WHERE id = :id FOR UPDATE"), {"id": each.job.id})
        settled = settle_together(connection, settlements, runtime)
    assert settled.held == tuple(held)
    assert settled.events == (*(JobLeaseLost(each.job) for each in lost), *(each.event for each in fine))
    with connection.begin():
        assert {job.id for job in leased_jobs(connection)} == {each.job.id for each in (*lost, *held)}
        found = connection.execute(text("SELECT id FROM outboxq.done_job UNION ALL SELECT id FROM outboxq.dead_job"))
        assert set(found.scalars()) == {fine[0].job.id, fine[2].job.id}
        again = settle_together(connection, settled.held, runtime)
    assert again == Settled(tuple(each.event for each in held), ())


def test_a_finished_row_has_the_queue_and_the_claim_of_its_job(connection: Connection) -> None:
    """Also if the jobs are of several claims; a run's row names the jobs that it took along."""
    times = [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2)]
    given = _several(connection, Done(), Done())
    jobs = [
        msgspec.structs.replace(job, claimed_at=at, queue=queue)
        for (job, _), at, queue in zip(given, times, ("q", "other"), strict=True)
    ]
    runtime = runtime_on(connection)
    settlements = [decided(Done(), job, runtime) for job in jobs]
    with connection.begin():
        settle_together(connection, settlements, runtime, stands_for={jobs[1].id: (UUID(int=5),)})
        rows = connection.execute(text("SELECT id, queue, claimed_at, stands_for FROM outboxq.done_job")).all()
    assert sorted(map(tuple, rows)) == sorted(
        [(jobs[0].id, "q", times[0], None), (jobs[1].id, "other", times[1], [UUID(int=5)])]
    )


def test_waiters_for_results_are_told_of_each_end(outboxq_database: Database, connection: Connection) -> None:
    """Of dead letters, discarded and expired jobs too, and not of what goes on."""
    names = ("done", "discarded", "expired", "dead", "failed", "snoozed")
    given = _several(connection, *(OUTCOMES[name] for name in names))
    runtime = runtime_on(connection)
    with psycopg.connect(libpq_url(outboxq_database.url), autocommit=True) as waiter:
        waiter.execute(f'LISTEN "{result_channel("outboxq")}"')
        waiter.execute(try_result_flags("outboxq", [str(job.id) for job, _ in given]).encode())
        with connection.begin():
            settle_together(connection, [decided(result, job, runtime) for job, result in given], runtime)
        told = {note.payload for note in waiter.notifies(timeout=10, stop_after=4)}
        assert told == {str(job.id) for job, _ in given[:4]}
        # The notifications of one COMMIT come together.
        assert list(waiter.notifies(timeout=0)) == []


def test_callback_batches_of_ended_jobs_are_checked_after_commit(connection: Connection) -> None:
    """Not those of jobs that go on, whose rows are there."""
    given = _several(connection, OUTCOMES["done"], OUTCOMES["dead"], OUTCOMES["failed"], batch_id="gen_random_uuid()")
    runtime = runtime_on(connection)
    many = SettleMany([decided(result, job, runtime) for job, result in given], "outboxq", runtime.keeper)
    after_commit = [step for step in many.steps if step.after_commit()]
    assert after_commit == [FinishBatches("outboxq", frozenset(job.batch_id for job, _ in given[:2] if job.batch_id))]
    assert SettleMany(many.settlements[2:], "outboxq").steps == []


def test_settlements_whose_commit_had_no_answer_are_sent_again(connection: Connection) -> None:
    """A job that the first string settled has not lost its lease; one that another relay has did."""
    given = _several(connection, *(OUTCOMES[name] for name in ("done", "dead", "failed", "snoozed", "done", "dead")))
    runtime = runtime_on(connection)
    settlements = [decided(result, job, runtime) for job, result in given]
    first, other = settlements[:4], settlements[4:]
    with connection.begin():
        settle_together(connection, first, runtime)
        for each in other:
            connection.execute(text("UPDATE outboxq.job SET lease_token = 99 WHERE id = :id"), {"id": each.job.id})
    with connection.begin():
        settled = settle_together(connection, settlements, runtime, unsure=True)
    assert settled.events == (*(each.event for each in first), *(JobLeaseLost(each.job) for each in other))
    assert [type(event) for event in settled.events[:4]] == [JobDone, JobDied, JobRetried, JobSnoozed]


def test_rows_that_their_table_refuses_fail_at_their_own_statement(connection: Connection) -> None:
    """Also those of a constraint that is deferred: the owner of the statement says which sort of outcome it was."""
    given = _several(connection, OUTCOMES["failed"], OUTCOMES["dead"])
    runtime = runtime_on(connection)
    with connection.begin():
        run_script(
            connection,
            "CREATE FUNCTION outboxq.refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'no'; END$$",
            "CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON outboxq.dead_job DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION outboxq.refuse()",
        )
    script = Script()
    SettleMany([decided(result, job, runtime) for job, result in given], "outboxq", runtime.keeper).add_to(script)
    with connection.begin():
        assert script.add("commit", "COMMIT").send(connection).failed_at == "buried"
        run_script(connection, "ROLLBACK")
