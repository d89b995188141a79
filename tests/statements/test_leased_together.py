"""Many leased jobs are settled by one statement: linear by any statistics, with any text, each job by its token."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, create_engine, text

from outboxq.database.driver import Rows, run_script
from outboxq.job import Job
from outboxq.migrations.runner import migrate_committing
from outboxq.postgres import Server
from outboxq.statements.by_index import NO_SCANS, PLANNED_ONCE
from outboxq.statements.done import FinishedColumns, insert_finished
from outboxq.statements.lease import take_back
from outboxq.statements.lease_mode import (
    bury_leased,
    finish_leased,
    finish_prepared,
    finishing,
    put_back_leased,
    release_leased,
)
from outboxq.statements.settle import Bury, PutBack
from tests.support.leases import add_leased, leased_jobs
from tests.support.matrices import diagonal
from tests.support.waiting import wait_until

MANY = 1_000
RECORD = '{"attempt": 1, "type": "ValueError", "message": "no"}'


def _keeping(jobs: Sequence[Job]) -> str:
    count = len(jobs)
    columns = [["k"], ["done"], [1], [0.0], [0.5], ["{}"], ["{}"], [None], [None], [60.0]]
    ids = [job.id for job in jobs]
    return insert_finished(
        "outboxq", FinishedColumns("q", None, ids, *(each * count for each in columns)), None, gone=True
    )


def _finish(jobs: Sequence[Job], free: bool) -> Sequence[str]:
    return (finish_leased("outboxq", jobs, free=free),)


def _finish_prepared(jobs: Sequence[Job], free: bool) -> Sequence[str]:
    if not free:
        return _finish(jobs, free)
    name, definition = finishing("outboxq")
    # PREPARE and DEALLOCATE have no rows.
    return definition, PLANNED_ONCE, finish_prepared("outboxq", jobs), f"DEALLOCATE {name}"


def _finish_and_keep(jobs: Sequence[Job], free: bool) -> Sequence[str]:
    return (finish_leased("outboxq", jobs, free=free, keeping=_keeping(jobs)),)


def _put_back(jobs: Sequence[Job], free: bool) -> Sequence[str]:
    changes = [PutBack(job=job, attempt=1, record=RECORD, delay=timedelta(seconds=5)) for job in jobs]
    return put_back_leased("outboxq", changes, free=free)


def _bury(jobs: Sequence[Job], free: bool) -> Sequence[str]:
    return (bury_leased("outboxq", [Bury(job=job, reason="no", record=RECORD) for job in jobs], free=free),)


def _release(jobs: Sequence[Job], free: bool) -> Sequence[str]:
    return (release_leased("outboxq", jobs, free=free),)


Change = Callable[[Sequence[Job], bool], Sequence[str]]
CHANGES: dict[str, Change] = {
    "finish": _finish, "keep": _finish_and_keep, "put back": _put_back, "bury": _bury, "release": _release,
}  # fmt: skip
# Without `release`, which returns no rows.
REPORTING = ["finish", "keep", "put back", "bury", "finish prepared"]
# Not planned as the others: see below.
PREPARED: dict[str, Change] = {"finish prepared": _finish_prepared}


@pytest.fixture(scope="module")
def tables(outboxq_server: Server) -> Iterator[Engine]:
    """Tables that no autovacuum looks at."""
    with outboxq_server.create_database() as database:
        engine = create_engine(database.url)
        with engine.connect() as connection:
            migrate_committing(connection)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for table in ("job", "dead_job", "done_job"):
                connection.exec_driver_sql(f"ALTER TABLE outboxq.{table} SET (autovacuum_enabled = off)")
        yield engine
        engine.dispose()


def _fill(connection: Connection, size: int, statistics: str, grouped: bool) -> None:
    connection.exec_driver_sql("TRUNCATE outboxq.job, outboxq.dead_job, outboxq.done_job")
    if statistics == "of an emptied table":
        # Its pages stay, so that it seems to hold a row in a thousand pages.
        add_leased(connection, size)
        connection.exec_driver_sql("DELETE FROM outboxq.job")
    if statistics.endswith("empty") or statistics == "of an emptied table":
        connection.exec_driver_sql("VACUUM ANALYZE outboxq.job")
    add_leased(connection, size, **({"state": "'group_leased'", "group_key": "'g' || n"} if grouped else {}))
    if statistics == "fresh":
        connection.exec_driver_sql("VACUUM ANALYZE outboxq.job")


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for below in plan.get("Plans", ()):
        yield from _nodes(below)


@pytest.mark.first_and_last
@pytest.mark.parametrize("change", CHANGES)
@diagonal(
    pytest.mark.parametrize("statistics", ["none", "fresh", "of the empty table", "of an emptied table"]),
    pytest.mark.parametrize("size", [20_000, MANY]),
    pytest.mark.parametrize("free", [True, False]),
    pytest.mark.parametrize("grouped", [False, True]),
)
def test_a_thousand_jobs_are_found_in_one_walk_whatever_statistics_say(
    tables: Engine, change: str, statistics: str, size: int, free: bool, grouped: bool
) -> None:
    """By the primary key, once each; no step looks at more rows than a few for each job."""
    with tables.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        _fill(connection, size, statistics, grouped)
        jobs = leased_jobs(connection, MANY)
    with tables.connect() as connection, connection.begin():
        run_script(connection, NO_SCANS)
        for statement in CHANGES[change](jobs, free):
            _assert_one_walk(connection, statement)
        connection.rollback()


@pytest.mark.first_and_last
@diagonal(
    pytest.mark.parametrize("statistics", ["none", "fresh", "of the empty table", "of an emptied table"]),
    pytest.mark.parametrize("size", [20_000, MANY]),
)
def test_a_prepared_statement_finds_a_thousand_jobs_in_one_walk_whenever_it_was_planned(
    tables: Engine, statistics: str, size: int
) -> None:
    """Planned for no job, in an empty table, and executed for a thousand."""
    with tables.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        _fill(connection, 1, "none", grouped=False)
        jobs = leased_jobs(connection)
        connection.exec_driver_sql("TRUNCATE outboxq.job")
        run_script(connection, "BEGIN", NO_SCANS, PLANNED_ONCE, finishing("outboxq")[1])
        assert run_script(connection, finish_prepared("outboxq", jobs)) == [(jobs[0].id, False)]
        run_script(connection, "COMMIT")
        _fill(connection, size, statistics, grouped=False)
        run_script(connection, "BEGIN", NO_SCANS, PLANNED_ONCE)
        _assert_one_walk(connection, finish_prepared("outboxq", leased_jobs(connection, MANY)))
        run_script(connection, "ROLLBACK")
        run_script(connection, f"DEALLOCATE {finishing('outboxq')[0]}")


def _assert_one_walk(connection: Connection, statement: str) -> None:
    ((found,),) = run_script(connection, f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}")
    nodes = list(_nodes(found[0]["Plan"]))
    looked_at = [node for node in nodes if "= ANY" in node.get("Index Cond", "")]
    assert looked_at
    assert all(node["Actual Loops"] == 1 for node in looked_at), found
    assert not [node for node in nodes if node["Node Type"] == "Seq Scan" and node["Relation Name"] == "job"]
    removed = ("Rows Removed by Filter", "Rows Removed by Join Filter", "Rows Removed by Index Recheck")
    for node in nodes:
        rows = node["Actual Rows"] + sum(node.get(name, 0) for name in removed)
        assert rows * node["Actual Loops"] <= 4 * MANY, node


HOSTILE = [
    "it's \\ \"quoted\" \\' E'\\'' $$ {0} {ids} %s :name",
    "\\",
    "'",
    "".join(map(chr, range(1, 32))) + "\x7f\u2028\u202e\U0001f600",
    "\\'\"x" * 250_000,
    '","record":{"a":1},"reason":"',
]


@pytest.mark.parametrize("conforming", ["on", "off"])
def test_any_text_is_written_as_it_is(engine: Engine, conforming: str) -> None:
    """Of an error and of a reason, however the session reads backslashes in literals."""
    with engine.begin() as connection:
        add_leased(connection, len(HOSTILE))
        jobs = leased_jobs(connection)
        records = [json.dumps({"attempt": 1, "message": each}) for each in HOSTILE]
        connection.exec_driver_sql(f"SET LOCAL standard_conforming_strings = {conforming}")
        back = [PutBack(job=job, attempt=1, record=record) for job, record in zip(jobs, records, strict=True)]
        assert run_script(connection, *put_back_leased("outboxq", back)) == []
        stored = connection.exec_driver_sql("SELECT errors->0->>'message' FROM outboxq.job ORDER BY seq")
        assert sorted(stored.scalars()) == sorted(HOSTILE)
        connection.exec_driver_sql("DELETE FROM outboxq.job")
        add_leased(connection, len(HOSTILE))
        jobs = leased_jobs(connection)
        given = zip(jobs, HOSTILE, records, strict=True)
        dead = [Bury(job=job, reason=reason, record=record) for job, reason, record in given]
        assert run_script(connection, bury_leased("outboxq", dead)) == []
        stored = connection.exec_driver_sql("SELECT id, reason, errors->0->>'message' FROM outboxq.dead_job")
        assert sorted(map(tuple, stored)) == sorted(
            (job.id, each, each) for job, each in zip(jobs, HOSTILE, strict=True)
        )


@pytest.mark.parametrize("change", REPORTING)
def test_a_row_that_another_transaction_has_locked_is_left_and_named(engine: Engine, change: str) -> None:
    """Apart from the jobs that were lost, which have another token or no row; the others are settled."""
    with engine.begin() as connection:
        add_leased(connection, 5)
        jobs = leased_jobs(connection)
        connection.execute(text("UPDATE outboxq.job SET lease_token = 9 WHERE id = :id"), {"id": jobs[1].id})
        connection.execute(text("DELETE FROM outboxq.job WHERE id = :id"), {"id": jobs[2].id})
    with engine.begin() as other, engine.begin() as connection:
        other.execute(text("SELECT FROM outboxq.job WHERE id = :id FOR UPDATE"), {"id": jobs[3].id})
        connection.exec_driver_sql("SET LOCAL lock_timeout = '1s'")
        left = run_script(connection, *(CHANGES | PREPARED)[change](jobs, True))
    assert sorted(left) == sorted([(jobs[1].id, False), (jobs[2].id, False), (jobs[3].id, True)])
    assert _untouched(engine) == {jobs[1].id, jobs[3].id}


@pytest.mark.first_and_last
@pytest.mark.parametrize("change", REPORTING)
def test_a_reaper_that_has_locked_a_row_first_wins(engine: Engine, change: str) -> None:
    """A statement that waits for it sees another token, and the job is lost."""
    with engine.begin() as connection:
        add_leased(connection, 3)
        jobs = leased_jobs(connection)
    (job, *others) = jobs
    found: list[Rows] = []

    def settle() -> None:
        with engine.begin() as connection:
            found.append(run_script(connection, *(CHANGES | PREPARED)[change](jobs, False)))

    waits = threading.Thread(target=settle)
    with engine.begin() as reaper:
        run_script(reaper, take_back("outboxq", job.id, job.lease_token or 0, 3, "its relay died"))
        waits.start()
        wait_until(lambda: _locks(engine) == 1, "the statement to wait for the reaper")
    waits.join(30)
    assert found == [[(job.id, False)]]
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT id, state FROM outboxq.job WHERE state = 'suspect'").all()
    assert [(row.id, row.state) for row in rows] == [(job.id, "suspect")]
    assert _untouched(engine).isdisjoint(each.id for each in others)


@pytest.mark.parametrize("change", REPORTING)
def test_a_row_that_changed_and_is_still_ours_is_settled_as_it_is_now(engine: Engine, change: str) -> None:
    """A statement that waits for a transaction with another purpose goes on with what that has committed."""
    with engine.begin() as connection:
        add_leased(connection, 3)
        jobs = leased_jobs(connection)
    found: list[Rows] = []

    def settle() -> None:
        with engine.begin() as connection:
            found.append(run_script(connection, *(CHANGES | PREPARED)[change](jobs, False)))

    waits = threading.Thread(target=settle)
    with engine.begin() as other:
        other.exec_driver_sql("UPDATE outboxq.job SET priority = 7")
        waits.start()
        wait_until(lambda: _locks(engine) == 1, "the statement to wait")
    waits.join(30)
    assert found == [[]]
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(
            "SELECT priority, errors->0->>'type', attempt FROM outboxq.job "
            "UNION ALL SELECT priority, errors->0->>'type', attempt FROM outboxq.dead_job"
        )
        is_gone = change in ("finish", "keep", "finish prepared")
        assert list(map(tuple, rows)) == ([] if is_gone else [(7, "ValueError", 1)] * 3)


@pytest.mark.first_and_last
@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("change", REPORTING)
def test_a_row_that_changed_since_the_statement_began_is_locked_as_it_is_now(
    engine: Engine, change: str, free: bool
) -> None:
    """A job that is still ours is settled; one with another token is not, and counts as held if that is possible."""
    with engine.begin() as connection:
        add_leased(connection, 2)
        jobs = leased_jobs(connection)
    # In its first part, after its snapshot was taken.
    waiting = "FROM pg_catalog.pg_advisory_xact_lock(7), unnest("
    statements = [text.replace("FROM unnest(", waiting, 1) for text in (CHANGES | PREPARED)[change](jobs, free)]
    found: list[Rows] = []

    def settle() -> None:
        with engine.begin() as connection:
            found.append(run_script(connection, *statements))

    waits = threading.Thread(target=settle)
    with engine.begin() as gate, engine.begin() as other:
        gate.exec_driver_sql("SELECT pg_advisory_xact_lock(7)")
        waits.start()
        wait_until(lambda: _locks(engine) == 1, "the statement to have begun")
        other.exec_driver_sql("UPDATE outboxq.job SET priority = 7")
        other.execute(text("UPDATE outboxq.job SET lease_token = 9 WHERE id = :id"), {"id": jobs[1].id})
        other.commit()
    waits.join(30)
    assert found == [[(jobs[1].id, free)]]
    assert _untouched(engine) == {jobs[1].id}


def _locks(engine: Engine) -> int:
    with engine.connect() as connection:
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        return int(connection.exec_driver_sql(waiting).scalar_one())


def _untouched(engine: Engine) -> set[UUID]:
    """The jobs that still are under their lease."""
    with engine.connect() as connection:
        return set(connection.exec_driver_sql("SELECT id FROM outboxq.job WHERE lease_owner IS NOT NULL").scalars())


def test_no_job_is_changed_by_the_token_of_another_one(engine: Engine) -> None:
    """Two jobs whose tokens are exchanged are both lost."""
    with engine.begin() as connection:
        add_leased(connection, 2)
        first, second = leased_jobs(connection)
        connection.exec_driver_sql("UPDATE outboxq.job SET lease_token = 3 - lease_token")
        for change in REPORTING:
            for free in (True, False):
                left = run_script(connection, *(CHANGES | PREPARED)[change]([first, second], free))
                assert sorted(left) == sorted([(first.id, False), (second.id, False)])
        run_script(connection, *_release([first, second], True), *_release([first, second], False))
    assert _untouched(engine) == {first.id, second.id}


def test_a_finished_row_is_written_for_the_deleted_jobs_alone(engine: Engine) -> None:
    """Neither for a lost job nor for one whose row is locked."""
    with engine.begin() as connection:
        add_leased(connection, 3)
        jobs = leased_jobs(connection)
        connection.execute(text("UPDATE outboxq.job SET lease_token = 9 WHERE id = :id"), {"id": jobs[0].id})
    with engine.begin() as other, engine.begin() as connection:
        other.execute(text("SELECT FROM outboxq.job WHERE id = :id FOR UPDATE"), {"id": jobs[1].id})
        connection.exec_driver_sql("SET LOCAL lock_timeout = '1s'")
        run_script(connection, *_finish_and_keep(jobs, True))
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT id FROM outboxq.done_job").scalars().all() == [jobs[2].id]
