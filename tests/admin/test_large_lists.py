"""Lists of what relays hold read a bounded part of a large table."""

import pytest
from sqlalchemy import Connection, Engine, text

from outboxq.admin.bulk import preview
from outboxq.admin.bulk_actions import CancelJobs, ChangeJobs, DiscardDead, RetryDead
from outboxq.admin.dead_letters import DeadFilter
from outboxq.admin.jobs import JobChange, JobFilter, list_jobs
from tests.support.leases import lease

ROWS, QUEUES = 400_000, 5
# Ids in another order than that of the rows, as of many producers: each entry of the primary key leads to a page of its
# own.
_FILL = f"""INSERT INTO outboxq.job (id, queue, kind, args, state, run_at)
SELECT gen_random_uuid(), 'q' || g % {QUEUES}, 'k', '{{}}', CASE WHEN g % 10 < 8 THEN 'ready' ELSE 'scheduled' END,
  now() + make_interval(secs => g) FROM generate_series(1, {ROWS}) AS g"""
_FILL_DEAD = f"""INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, priority, attempt, crashes, errors,
  reason, created_at, died_at) SELECT gen_random_uuid(), 'q' || g % {QUEUES}, 'k', '{{}}', '{{}}', 0, 1, 0, '[]',
  'gone', now(), now() - make_interval(secs => g) FROM generate_series(1, {ROWS}) AS g"""
_READ = """SELECT heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit FROM pg_statio_user_tables
WHERE schemaname = 'outboxq' AND relname = '{}'"""


def blocks(connection: Connection, table: str = "job") -> int:
    """How many blocks of the table and its indexes this session has looked at, and others that are over."""
    connection.execute(text("SELECT pg_stat_force_next_flush()"))
    connection.commit()
    connection.execute(text("SELECT pg_stat_clear_snapshot()"))
    found = int(connection.execute(text(_READ.format(table))).scalar_one())
    connection.commit()
    return found


@pytest.mark.large
def test_jobs_that_run_are_found_without_reading_the_table(engine: Engine) -> None:
    """Of 400,000 jobs in no order, 10,000 of each queue and each state are looked at, a block or two for each."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(_FILL))
        connection.execute(text("VACUUM ANALYZE outboxq.job"))
        first = "SELECT id FROM outboxq.job WHERE queue = 'q1' AND state = 'ready' ORDER BY -priority, seq LIMIT 1"
        running = connection.execute(text(first)).scalar_one()
        scheduled = "UPDATE outboxq.job SET state = 'suspect' WHERE id = ({}) RETURNING id"
        suspect = connection.execute(text(scheduled.format(first.replace("q1", "q2")))).scalar_one()
    with engine.connect() as relay, engine.connect() as connection:
        relay.execute(text("DELETE FROM outboxq.job WHERE id = :id"), {"id": running})
        looks = {
            "jobs that run": (JobFilter(), True, [running]),
            "of a kind": (JobFilter(kind="no"), True, []),
            "running": (JobFilter(state="running"), False, [running]),
            "suspect": (JobFilter(state="suspect"), False, [suspect]),
            "leased": (JobFilter(state="leased"), False, []),
            "orphaned": (JobFilter(state="orphaned"), False, []),
        }
        for name, (wanted, running_only, expected) in looks.items():
            before = blocks(connection)
            assert [each.id for each in list_jobs(connection, wanted, running=running_only)] == expected, name
            connection.commit()
            # Two walks of each queue have so many jobs here.
            assert blocks(connection) - before < 1.5 * 2 * QUEUES * 10_001, name


@pytest.mark.large
def test_a_preview_reads_each_block_of_its_table_once(engine: Engine) -> None:
    """Not one for each of 400,000 rows: the count and the samples, each of them, whatever matches."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(_FILL))
        connection.execute(text(_FILL_DEAD))
        connection.execute(text("ANALYZE outboxq.job, outboxq.dead_job"))
        of = "SELECT pg_relation_size('outboxq.{}') / 8192"
        size = {name: int(connection.execute(text(of.format(name))).scalar_one()) for name in ("job", "dead_job")}
    with engine.connect() as connection:
        for kind, expected in {"k": ROWS, "no": 0}.items():
            jobs, dead = JobFilter(kind=kind), DeadFilter(kind=kind)
            on_jobs = CancelJobs(jobs), ChangeJobs(jobs, JobChange(run_now=True))
            for each in (*on_jobs, RetryDead(dead), DiscardDead(dead)):
                table = "job" if each in on_jobs else "dead_job"
                before = blocks(connection, table)
                assert preview(connection, each, most=None).count == expected
                connection.commit()
                assert blocks(connection, table) - before < 2 * size[table] + 1_000, each


def test_a_leased_job_is_found_as_one_that_runs(engine: Engine) -> None:
    """Beside others that wait, and by its state too."""
    with engine.begin() as connection:
        connection.execute(text(_FILL.replace(str(ROWS), "20")))
        held = connection.execute(text("SELECT id FROM outboxq.job WHERE state = 'ready' LIMIT 1")).scalar_one()
        lease(connection, held, "1 hour")
    with engine.connect() as connection:
        assert [each.id for each in list_jobs(connection, running=True)] == [held]
        assert [each.id for each in list_jobs(connection, JobFilter(state="leased"))] == [held]
        assert list_jobs(connection, JobFilter(kind="no"), running=True) == []
