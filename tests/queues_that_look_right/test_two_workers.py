"""Workers at the same time: the page's wrong claims, outboxq's in the same scenes, and the page's last statement."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import LiteralString

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession
from outboxq.execution.claim import ClaimRequest, claim
from outboxq.statements.claim import ClaimStatements, Cursor
from tests.queues_that_look_right.scene import Asked, Crew, one, page_sql
from tests.support import app
from tests.support.ledger import enqueue
from tests.support.slots import claim_ready
from tests.support.waiting import wait_until

# A claim that waits for another's lock fails instead.
IMPATIENT = text("SET LOCAL lock_timeout = '1s'")


@pytest.fixture
def claimers(engine: Engine) -> Iterator[list[Connection]]:
    """Three connections with a transaction each, for outboxq's claim."""
    with ExitStack() as stack:
        connections = [stack.enter_context(engine.connect()) for _ in range(3)]
        for connection in connections:
            stack.enter_context(connection.begin())
            connection.execute(IMPATIENT)
        yield connections


def claimed_by(connection: Connection, limit: int = 1) -> list[str]:
    return [str(job.id) for job in claim_ready(connection, "ledger", limit).jobs]


def test_select_then_update_hands_a_job_out_twice(crew: Crew) -> None:
    """Both have read the row before either writes it."""
    select, update = page_sql("SELECT, then UPDATE")
    crew.add(1)
    with crew.worker() as first, crew.worker() as second:
        found = [one(worker, select) for worker in (first, second)]
        for worker in (first, second):
            assert worker.execute(update, {"id": 1}).rowcount == 1
            worker.commit()
    assert found == [(1,), (1,)]


def test_an_update_over_a_subquery_hands_a_job_out_twice(crew: Crew) -> None:
    """The second has chosen the row before it waits for it, and gets it after all."""
    (update,) = page_sql("UPDATE over a subquery")
    crew.add(2)
    with crew.worker() as first, crew.worker() as second:
        assert one(first, update) == (1,)
        asked = Asked(crew, second, update)
        asked.wait_until_blocked()
        first.commit()
        assert asked.ids() == [1]
        second.commit()
    # Two have been handed out, and one is taken.
    assert crew.states() == ["running", "ready"]


def test_one_job_is_claimed_once(engine: Engine, claimers: list[Connection]) -> None:
    """Ours, in both scenes: the second claim neither gets the job nor waits for it, before and after the COMMIT."""
    enqueue(engine, ["only"], both_flavours=False)
    first, second, _ = claimers
    assert len(claimed_by(first)) == 1
    assert claimed_by(second) == []
    first.commit()
    assert claimed_by(second) == []


def test_for_update_makes_workers_take_turns(crew: Crew) -> None:
    """Two of three wait although two jobs are free; when the first is done, one of them begins and one waits on."""
    (update,) = page_sql("The same with FOR UPDATE")
    crew.add(3)
    with crew.worker() as first, crew.worker() as second, crew.worker() as third:
        assert one(first, update) == (1,)
        waiting = {worker: Asked(crew, worker, update) for worker in (second, third)}
        for asked in waiting.values():
            asked.wait_until_blocked()
        assert crew.looker.execute("SELECT id FROM task WHERE id > 1 FOR UPDATE NOWAIT").fetchall() == [(2,), (3,)]
        first.commit()
        served = wait_until(lambda: [worker for worker in waiting if not waiting[worker].is_alive()], "the next turn")
        (last,) = waiting.keys() - set(served)
        waiting[last].wait_until_blocked()
        served[0].commit()
        assert sorted(id_ for asked in waiting.values() for id_ in asked.ids()) == [2, 3]


def test_workers_do_not_wait_for_each_other(engine: Engine, claimers: list[Connection]) -> None:
    """Ours: three claims in three open transactions, three jobs."""
    enqueue(engine, ["a", "b", "c"], both_flavours=False)
    assert len({job for connection in claimers for job in claimed_by(connection)}) == 3


def test_a_limit_inside_in_takes_more_than_its_limit(crew: Crew) -> None:
    """The planner was told that nothing is ready; with fresh statistics the same text takes three."""
    (delete,) = page_sql("More rows than its limit")
    make_statistics_stale(crew)
    with crew.worker() as worker:
        assert len(worker.execute(delete).fetchall()) > 3
        worker.rollback()
        crew.looker.execute("ANALYZE task")
        assert len(worker.execute(delete).fetchall()) == 3


def make_statistics_stale(crew: Crew) -> None:
    """Statistics from a time when no job was ready, and then 200 that are."""
    crew.looker.execute("ALTER TABLE task SET (autovacuum_enabled = off)")
    crew.looker.execute("INSERT INTO task (state) SELECT 'done' FROM generate_series(1, 2000)")
    crew.looker.execute("ANALYZE task")
    crew.add(200)


def test_a_claim_takes_its_limit_with_the_same_statistics(engine: Engine, claimers: list[Connection]) -> None:
    """Ours, on a table whose statistics know nothing of the queue."""
    enqueue(engine, [f"other-{number}" for number in range(200)])
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outboxq.job SET (autovacuum_enabled = off)"))
        connection.execute(text("UPDATE outboxq.job SET queue = 'other'"))
        connection.execute(text("ANALYZE outboxq.job"))
    enqueue(engine, [f"job-{number}" for number in range(200)], both_flavours=False)
    assert len(claimed_by(claimers[0], 3)) == 3


def test_a_cursor_over_mixed_directions_skips_jobs(crew: Crew) -> None:
    """Behind the first job of a priority the others of it are passed over, and never found again."""
    select, _ = page_sql("A cursor that skips")
    crew.add(2, priority=0)
    crew.add(1, priority=-1)
    taken = []
    with crew.worker() as worker:
        cursor = {"priority": 100, "id": 0}
        while found := one(worker, select, cursor):
            taken.append(found[0])
            cursor = {"id": found[0], "priority": found[1]}
            worker.execute("DELETE FROM task WHERE id = %(id)s", cursor)
            worker.commit()
    assert taken == [1, 3]
    assert crew.states() == ["ready"]


def test_a_cursor_skips_what_is_committed_late(crew: Crew) -> None:
    """Number 1 is drawn before number 2 and committed after it: a cursor that has passed 2 never finds it."""
    _, select = page_sql("A cursor that skips")
    with crew.worker() as producer, crew.worker() as worker:
        producer.execute("INSERT INTO task DEFAULT VALUES")
        crew.add(1)
        assert one(worker, select, {"id": 0}) == (2,)
        worker.execute("DELETE FROM task WHERE id = 2")
        worker.commit()
        producer.commit()
        assert one(worker, select, {"id": 2}) is None
    assert crew.states() == ["ready"]


def test_claims_behind_each_other_find_every_job_in_order(
    sessions: sessionmaker[OutboxSession], claimers: list[Connection]
) -> None:
    """Ours: the cursor of one claim begins the next, by two connections in turn; nothing is skipped or found twice."""
    with sessions.begin() as session:
        handles = [
            session.add_job(app.record.options(priority=priority), name=f"{number}")
            for number, priority in enumerate((0, 5, 0, -3, 5))
        ]
    script, cursor, taken = ClaimStatements("outboxq", "ledger").ready, None, []
    for turn in range(len(handles)):
        (job,) = claim(claimers[turn % 2], ClaimRequest(script, 1, cursor)).jobs
        taken.append(job.id)
        cursor = Cursor(job.priority, job.seq)
    assert taken == [handles[number].id for number in (1, 4, 0, 2, 3)]


@pytest.mark.parametrize("jobs", [1, 3])
def test_the_statement_that_is_left_passes_the_scenes(jobs: int, crew: Crew) -> None:
    """One job for two workers, three for three, and stale statistics: no double, no wait, no more than the limit."""
    (limited,) = page_sql("The statement that is left")
    claim_one: LiteralString = limited.replace("LIMIT 3", "LIMIT 1")
    crew.add(jobs)
    with ExitStack() as stack:
        workers = [stack.enter_context(crew.worker()) for _ in range(3)]
        for worker in workers:
            worker.execute("SET lock_timeout = '1s'")
        found = [one(worker, claim_one) for worker in workers]
        assert sorted(row[0] for row in found if row) == list(range(1, jobs + 1))
        for worker in workers:
            worker.commit()
        make_statistics_stale(crew)
        assert len(workers[0].execute(limited).fetchall()) == 3
