"""Lists and previews read a bounded part of a large table, or each of its blocks once."""

from collections.abc import Callable
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, text

from outboxq.admin import effects, finished, kinds, messages
from outboxq.admin.bulk import preview
from outboxq.admin.bulk_actions import CancelJobs, ChangeJobs, DiscardDead, RetryDead
from outboxq.admin.dead_letters import DeadFilter, list_dead
from outboxq.admin.effects import EffectFilter
from outboxq.admin.finished import DoneFilter
from outboxq.admin.jobs import JobChange, JobFilter, find_ids, list_jobs
from outboxq.admin.messages import MessageFilter
from tests.support.leases import lease

ROWS, QUEUES = 400_000, 5
# Ids in another order than that of the rows, as of many producers: each entry of the primary key leads to a page of its
# own.
_FILL = f"""INSERT INTO outboxq.job (id, queue, kind, args, state, run_at)
SELECT gen_random_uuid(), 'q' || g % {QUEUES}, 'k', '{{}}', CASE WHEN g % 10 < 8 THEN 'ready' ELSE 'scheduled' END,
  now() + make_interval(secs => g) FROM generate_series(1, {ROWS}) AS g"""
_FILL_DEAD = f"""INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, priority, attempt, crashes, errors,
  reason, created_at, died_at) SELECT gen_random_uuid(), 'q' || g % {QUEUES}, 'k', '{{}}', '{{}}', 0, 1, 0, '[]',
  'gone', now(), now() - random() * interval '30 days' FROM generate_series(1, {ROWS}) AS g"""
_FILL_OTHERS = (
    f"""INSERT INTO outboxq.done_job (id, queue, kind, outcome, attempt, created_at, seconds, expires_at)
      SELECT gen_random_uuid(), 'q', 'k', 'done', 1, now(), 1, now() FROM generate_series(1, {ROWS})""",
    f"""INSERT INTO outboxq.effect (scope, key, status, provider_key, lock_token, locked_until, expires_at)
      SELECT 's' || g % {QUEUES}, 'k' || g, 'done', gen_random_uuid(), gen_random_uuid(), now(),
      now() + random() * interval '30 days' FROM generate_series(1, {ROWS}) AS g""",
    f"""INSERT INTO outboxq.inbox (consumer, message_id, expires_at) SELECT 'c' || g % {QUEUES}, 'm' || g,
      now() + random() * interval '30 days' FROM generate_series(1, {ROWS}) AS g""",
)
_LOOKS: dict[str, tuple[str, Callable[[Connection], list[object]]]] = {
    "jobs of a kind": ("job", lambda on: [*list_jobs(on, JobFilter(kind="no"))]),
    "jobs of a queue": ("job", lambda on: [*list_jobs(on, JobFilter(queue="no"))]),
    "jobs of a queue and a kind": ("job", lambda on: [*list_jobs(on, JobFilter(queue="q1", kind="no"))]),
    "jobs of a state": ("job", lambda on: [*list_jobs(on, JobFilter(state="grouped"))]),
    "jobs of a group": ("job", lambda on: [*list_jobs(on, JobFilter(group="no"))]),
    "paused kinds": ("job", lambda on: [each for each in kinds.list_paused(on) if each.jobs]),
    "dead letters of a kind": ("dead_job", lambda on: [*list_dead(on, DeadFilter(kind="no"))]),
    "dead letters of a queue": ("dead_job", lambda on: [*list_dead(on, DeadFilter(queue="q1", kind="no"))]),
    "dead letters for a reason": ("dead_job", lambda on: [*list_dead(on, DeadFilter(reason="no"))]),
    "finished jobs of a kind": ("done_job", lambda on: [*finished.list_finished(on, DoneFilter(kind="no"))]),
    "effects of a scope": ("effect", lambda on: [*effects.list_effects(on, EffectFilter("no"))]),
    "failed effects": ("effect", lambda on: [*effects.list_effects(on, EffectFilter(status="failed"))]),
    "effects by their error": ("effect", lambda on: [*effects.list_effects(on, EffectFilter(error="no"))]),
    "messages of a consumer": ("inbox", lambda on: [*messages.list_messages(on, MessageFilter("no"))]),
    "messages by their id": ("inbox", lambda on: [*messages.list_messages(on, MessageFilter(message_id="no"))]),
}
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


@pytest.mark.wide
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


@pytest.mark.wide
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


@pytest.mark.wide
def test_a_list_of_what_is_rare_reads_each_block_of_its_table_once(engine: Engine) -> None:
    """After the first 12,700 rows by an index, two blocks each, and what leads to them: of 400,000 in no order."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for each in (_FILL, _FILL_DEAD, *_FILL_OTHERS):
            connection.execute(text(each))
        connection.execute(text("INSERT INTO outboxq.paused_kind (queue, kind) VALUES ('q1', 'no')"))
        connection.execute(text("ANALYZE"))
        of = "SELECT pg_relation_size('outboxq.{}') / 8192"
        size = {name: connection.execute(text(of.format(name))).scalar_one() for name, _ in _LOOKS.values()}
    with engine.connect() as connection:
        for name, (table, look) in _LOOKS.items():
            before = blocks(connection, table)
            assert look(connection) == [], name
            connection.commit()
            assert blocks(connection, table) - before < 1.1 * size[table] + 2 * 12_700 + 2_000, name
        before = blocks(connection)
        assert len(list_jobs(connection)) == 50
        connection.commit()
        assert blocks(connection) - before < 1_000


@pytest.mark.wide
@pytest.mark.parametrize("every", [15, 400])
def test_all_pages_of_a_change_read_three_blocks_a_row(engine: Engine, every: int) -> None:
    """Be what matches frequent or rare: no page reads much behind the rows that it needs."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(_FILL.replace("'k'", f"CASE WHEN g % {every} = 0 THEN 'some' ELSE 'k' END")))
        connection.execute(text("ANALYZE outboxq.job"))
    with engine.connect() as connection:
        before, found = blocks(connection), list[UUID]()
        while page := find_ids(connection, JobFilter(kind="some"), after=found[-1] if found else None):
            found += page
        connection.commit()
        assert len(found) == ROWS // every
        assert blocks(connection) - before < 3.2 * ROWS


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
