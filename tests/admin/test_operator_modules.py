"""The modules below the command line: a caller's connection, any schema, and no more locks than said."""

import re
from datetime import timedelta
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.sql import Identifier
from sqlalchemy import Connection, Engine, text

from outboxq.admin import dead_letters, jobs, queues
from outboxq.admin.dead_letters import DeadFilter
from outboxq.admin.jobs import JobFilter
from outboxq.admin.stats import collect_stats
from outboxq.errors import ArgumentError, JobNotFound
from outboxq.migrations.runner import migrate
from outboxq.postgres import Database
from outboxq.statements.paging import database_clock
from tests.support.leases import lease
from tests.support.waiting import PATIENCE

SCHEMA = 'jobs\'s "odd"; 50% :place'


@pytest.fixture
def elsewhere(engine: Engine) -> Engine:
    """An engine on tables in a schema whose name needs every kind of quoting; the usual schema is gone."""
    with engine.begin() as connection:
        migrate(connection, to=0)
        migrate(connection, schema=SCHEMA)
    return engine.execution_options(schema_translate_map={"outboxq": SCHEMA})


def add(connection: Connection, number: int, *, table: str = "job", kind: str = "k") -> list[UUID]:
    """Insert rows as a producer, or a settling relay, in whichever schema there is."""
    schema = connection.execute(
        text("SELECT nspname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace WHERE relname = 'dead_job'")
    ).scalar_one()
    quoted = Identifier(schema).as_string(None).replace(":", r"\:")
    columns = "id, queue, kind, args"
    values = "gen_random_uuid(), 'q', :kind, '{}'"
    if table == "dead_job":
        columns += ", headers, priority, attempt, crashes, errors, reason, created_at"
        values += ", '{}', 0, 9, 2, '[]', 'tired', now()"
    statement = (
        f"INSERT INTO {quoted}.{table} ({columns}) SELECT {values} FROM generate_series(1, :number) RETURNING id"
    )
    return list(connection.execute(text(statement), {"kind": kind, "number": number}).scalars())


def test_every_operation_works_in_a_schema_of_another_name(elsewhere: Engine) -> None:
    """`schema_translate_map` leads all of them to the caller's schema, whatever its name."""
    with elsewhere.begin() as connection:
        first, second = add(connection, 2)
        (dead,) = add(connection, 1, table="dead_job")
    with elsewhere.begin() as connection:
        assert [found.id for found in jobs.list_jobs(connection)] == [first, second]
        assert jobs.list_jobs(connection, running=True) == []
        assert jobs.show_job(connection, first).job.queue == "q"
        assert [found.id for found in dead_letters.list_dead(connection)] == [dead]
        assert dead_letters.show_dead(connection, dead).dead.reason == "tired"
        assert collect_stats(connection).queues[0].ready == 2
        assert queues.pause(connection, ["q"]) == ("q",)
        assert [found.queue for found in queues.list_queues(connection)] == ["q"]
        assert dead_letters.retry_page(connection, DeadFilter()).changed == (dead,)
        assert jobs.cancel_jobs(connection, [first]).cancelled == (first,)
        assert set(jobs.cancel_page(connection, JobFilter()).changed) == {second, dead}
    with elsewhere.begin() as connection:
        add(connection, 1, table="dead_job")
        assert len(dead_letters.discard_page(connection, DeadFilter(queue="q")).changed) == 1


def test_resume_notifies_on_the_channel_of_its_schema(elsewhere: Engine, outboxq_database: Database) -> None:
    """Relays that sleep on the queue in this schema are woken at commit, and only if something was resumed."""
    with psycopg.connect(outboxq_database.url.replace("+psycopg", ""), autocommit=True) as listening:
        listening.execute('LISTEN "outboxq_' + SCHEMA.replace('"', '""') + '"')
        with elsewhere.begin() as connection:
            queues.pause(connection, ["a'b", "b", "other"])
        with elsewhere.begin() as connection:
            assert queues.resume(connection, ["b", "never paused", "a'b", "b"]) == ("a'b", "b")
        heard = [notification.payload for notification in listening.notifies(timeout=PATIENCE, stop_after=2)]
        assert heard == ["a'b", "b"]
        with elsewhere.begin() as connection:
            assert queues.resume(connection, ["b"]) == ()
            connection.execute(text("SELECT pg_notify(:channel, 'end')"), {"channel": f"outboxq_{SCHEMA}"})
        assert [n.payload for n in listening.notifies(timeout=PATIENCE, stop_after=1)] == ["end"]


def test_a_rolled_back_change_never_happened(engine: Engine) -> None:
    """The modules commit nothing themselves."""
    with engine.begin() as connection:
        (waiting,) = add(connection, 1)
        (dead,) = add(connection, 1, table="dead_job")
    with engine.connect() as connection:
        assert jobs.cancel_jobs(connection, [waiting]).cancelled == (waiting,)
        assert dead_letters.retry_page(connection, DeadFilter(ids=(dead,))).changed == (dead,)
        queues.pause(connection, ["q"])
        connection.rollback()
    with engine.connect() as connection:
        assert [found.id for found in jobs.list_jobs(connection)] == [waiting]
        assert [found.id for found in dead_letters.list_dead(connection)] == [dead]
        assert [(found.queue, found.paused_at) for found in queues.list_queues(connection)] == [("q", None)]


def test_pages_go_on_behind_the_last_row_that_was_seen(engine: Engine) -> None:
    """A page takes `limit` rows at most, reports those that are held, and the next one does not see them again."""
    with engine.begin() as connection:
        ids = sorted(add(connection, 5))
    with engine.connect() as holder, engine.begin() as connection:
        holder.execute(text("SELECT id FROM outboxq.job WHERE id = :id FOR UPDATE"), {"id": ids[1]})
        first = jobs.cancel_page(connection, JobFilter(queue="q"), limit=2)
        second = jobs.cancel_page(connection, JobFilter(queue="q"), after=first.last, limit=2)
        third = jobs.cancel_page(connection, JobFilter(queue="q"), after=second.last, limit=2)
        end = jobs.cancel_page(connection, JobFilter(queue="q"), after=third.last, limit=2)
        holder.rollback()
    assert (first.changed, first.held) == ((ids[0],), (ids[1],))
    assert (second.changed, second.held) == ((ids[2], ids[3]), ())
    assert third.changed == (ids[4],)
    assert end.last is None


def test_a_sweep_leaves_alone_what_came_after_it_began(engine: Engine) -> None:
    """With the database's clock as a bound, a command that takes several pages never chases producers."""
    with engine.begin() as connection:
        add(connection, 2)
    with engine.connect() as connection:
        began = database_clock(connection)
        connection.commit()
        add(connection, 3)
        add(connection, 3, table="dead_job")
        assert len(jobs.cancel_page(connection, JobFilter(created_before=began)).changed) == 2
        assert dead_letters.discard_page(connection, DeadFilter(died_before=began)).changed == ()
        connection.rollback()


def test_a_cancel_with_stale_statistics_takes_one_page(engine: Engine) -> None:
    """The limit holds whatever the planner believes of the table."""
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outboxq.job SET (autovacuum_enabled = off)"))
        connection.execute(text("ANALYZE outboxq.job"))
        add(connection, 200)
        for setting in ("enable_hashjoin", "enable_mergejoin", "enable_material"):
            connection.execute(text(f"SET LOCAL {setting} = off"))
        assert len(jobs.cancel_page(connection, JobFilter(queue="q"), limit=3).changed) == 3


def test_a_job_that_is_retried_meanwhile_is_cancelled_all_the_same(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its relay puts the row back under the same id after the first look: the second look finds it."""
    with engine.begin() as connection:
        (job_id,) = add(connection, 1)
    relay = engine.connect()
    relay.execute(text("DELETE FROM outboxq.job"))
    real, looks = jobs.cancel_page, list[object]()

    def look_then_retry(*arguments: object, **options: object) -> object:
        page = real(*arguments, **options)  # type: ignore[arg-type]
        if not looks:
            relay.execute(
                text("INSERT INTO outboxq.job (id, queue, kind, args) VALUES (:id, 'q', 'k', '{}')"), {"id": job_id}
            )
            relay.commit()
        looks.append(page)
        return page

    monkeypatch.setattr(jobs, "cancel_page", look_then_retry)
    with engine.begin() as connection:
        found = jobs.cancel_jobs(connection, [job_id])
    relay.close()
    assert (found.cancelled, found.running, found.not_found) == ((job_id,), (), ())


def test_a_leased_job_is_listed_as_running_and_can_be_cancelled(engine: Engine) -> None:
    """A lease holds it, and no transaction: deleting it takes the lease away."""
    with engine.begin() as connection:
        leased, orphaned, _waits = add(connection, 3)
        lease(connection, leased, "1 hour")
        lease(connection, orphaned, "-1 second")
    with engine.begin() as connection:
        found = jobs.list_jobs(connection, running=True)
        assert [(job.id, job.state, job.pid) for job in found] == [(leased, "leased", None)]
        assert [job.id for job in jobs.list_jobs(connection, JobFilter(state="orphaned"))] == [orphaned]
        assert jobs.show_job(connection, orphaned).job.state == "orphaned"
        assert jobs.cancel_jobs(connection, [leased]).cancelled == (leased,)


@pytest.mark.parametrize("running", [False, True])
def test_a_dead_letter_whose_job_exists_again_stays_and_the_others_are_retried(engine: Engine, running: bool) -> None:
    """Whether that job waits, or a handler runs it at this moment, which is not waited for."""
    with engine.begin() as connection:
        dead, other = add(connection, 2, table="dead_job")
        connection.execute(
            text("INSERT INTO outboxq.job (id, queue, kind, args) VALUES (:id, 'q', 'k', '{}')"), {"id": dead}
        )
    with engine.connect() as relay, engine.begin() as connection:
        if running:
            relay.execute(text("DELETE FROM outboxq.job WHERE id = :id"), {"id": dead})
        connection.execute(text("SET LOCAL lock_timeout = '1s'"))
        page = dead_letters.retry_page(connection, DeadFilter())
        relay.rollback()
    assert (page.changed, page.refused, page.held) == ((other,), (dead,), ())
    with engine.connect() as connection:
        assert dead_letters.is_dead(connection, dead)
        assert not dead_letters.is_dead(connection, other)
        assert {found.id for found in jobs.list_jobs(connection)} == {dead, other}


def test_a_dead_letter_comes_back_with_what_it_had(engine: Engine) -> None:
    """Arguments, headers, errors, priority and limits are the dead letter's; attempts and crashes begin anew."""
    with engine.begin() as connection:
        (dead,) = add(connection, 1, table="dead_job")
        connection.execute(
            text(
                """UPDATE outboxq.dead_job SET args = '{"a": [1.50, "x"]}', headers = '{"h": "y"}',
                errors = '[{"e": 1}]', priority = 7, max_attempts = 3, unique_key = 'u', group_key = 'g'"""
            )
        )
        dead_letters.retry_page(connection, DeadFilter())
        detail = jobs.show_job(connection, dead)
    # It died before what waits now was added: no coalescing puts it in front.
    assert detail.headers == '{"h": "y", "outboxq.added": "0"}'
    assert (detail.args, detail.errors) == ('{"a": [1.50, "x"]}', '[{"e": 1}]')
    assert (detail.unique_key, detail.group_key, detail.job.priority, detail.job.max_attempts) == ("u", "g", 7, 3)
    assert (detail.job.attempt, detail.job.crashes, detail.job.state) == (0, 0, "grouped")


def test_jobs_of_one_millisecond_are_listed_as_they_came(engine: Engine) -> None:
    """Random in their ids, they stand in the order in which they were added; so do the oldest of many."""
    prefix = "01929e1c-5a7d-7"
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outboxq.job (id, queue, kind, args) SELECT (:prefix || right(gen_random_uuid()::text, 21))"
                "::uuid, 'q', n::text, '{}' FROM generate_series(1, 100) n"
            ),
            {"prefix": prefix},
        )
        connection.execute(
            text(
                "INSERT INTO outboxq.job (id, queue, kind, args) "
                "VALUES (:id, 'q', 'older', '{}'), (:later, 'q', 'l', '{}')"
            ),
            {"id": "01929e1c-5a7c-7000-8000-000000000000", "later": "01929e1c-5a7e-7000-8000-000000000000"},
        )
        kinds = [found.kind for found in jobs.list_jobs(connection, limit=200)]
        oldest = [found.kind for found in jobs.list_jobs(connection, limit=10)]
        few = [found.kind for found in jobs.list_jobs(connection, JobFilter(kind="7"), limit=10)]
    assert kinds == [*map(str, range(1, 101)), "older", "l"]
    assert oldest == [*map(str, range(1, 10)), "older"]
    assert few == ["7"]


def test_a_rolled_back_cancellation_can_be_cleared(engine: Engine) -> None:
    """What a caller's own transaction leaves behind: afterwards no claim takes it for a death."""
    with engine.begin() as connection:
        ids = add(connection, 3)
    marked = text("SELECT count(*) FROM outboxq.job WHERE pg_xact_status(xmax::text::xid8) = 'aborted'")
    with engine.connect() as connection:
        assert jobs.cancel_jobs(connection, ids).cancelled
        connection.rollback()
        assert connection.execute(marked).scalar_one() == 3
        assert jobs.clear_marks(connection, ids)
        connection.commit()
        assert connection.execute(marked).scalar_one() == 0


def test_retry_wakes_relays_as_any_producer_does(engine: Engine) -> None:
    """The insert fires the trigger that wakes sleepers: without one, it holds the queue's sleep flag shared."""
    with engine.begin() as connection:
        add(connection, 1, table="dead_job")
    with engine.begin() as connection:
        dead_letters.retry_page(connection, DeadFilter())
        flags = connection.execute(
            text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()")
        ).scalar_one()
    assert flags == 1


def test_what_is_not_there_is_an_error_with_its_id(engine: Engine) -> None:
    """`show` raises, with the id as an attribute."""
    missing = uuid4()
    with engine.connect() as connection:
        with pytest.raises(JobNotFound) as error:
            jobs.show_job(connection, missing)
        assert error.value.job_id == missing
        with pytest.raises(JobNotFound, match="dead letter"):
            dead_letters.show_dead(connection, missing)


def test_a_pause_refuses_names_that_no_queue_can_have(engine: Engine) -> None:
    """The same rule as for producers, before anything is sent."""
    with engine.connect() as connection, pytest.raises(ArgumentError):
        queues.pause(connection, ["fine", "x" * 64])


def test_listing_sorts_no_more_than_it_shows(engine: Engine) -> None:
    """The list walks the primary key and stops at its limit, however many jobs wait."""
    with engine.begin() as connection:
        add(connection, 3000)
        connection.execute(text("ANALYZE outboxq.job"))
    with engine.connect() as connection:
        statement = jobs.statements.select_jobs(JobFilter(), [], running=False, limit=10)
        compiled = statement.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True})
        question = f"EXPLAIN (ANALYZE, TIMING off) {compiled}".replace("%%", "%")
        plan = list(connection.exec_driver_sql(question).scalars())
        # Jobs of one millisecond are sorted together.
        tenth = "SELECT left(id::text, 13) FROM outboxq.job ORDER BY id OFFSET 9 LIMIT 1"
        count = text(f"SELECT count(*) FROM outboxq.job WHERE left(id::text, 13) = ({tenth})")
        alike = connection.execute(count).scalar_one()
    assert [line for line in plan if "using job_pkey on job listed" in line]
    assert not [line for line in plan if "Seq Scan on job" in line]
    read = [float(number) for number in re.findall(r"actual rows=([\d.]+)", "\n".join(plan))]
    # Its incremental sort takes up to 32 rows at a time.
    assert max(read) <= 32 + alike < 1000


def test_the_age_of_the_oldest_is_since_it_could_run(engine: Engine) -> None:
    """A job that was scheduled for a minute ago has waited for a minute, whenever it was added."""
    with engine.begin() as connection:
        add(connection, 1)
        connection.execute(
            text("UPDATE outboxq.job SET state = 'scheduled', run_at = now() - :ago"), {"ago": timedelta(minutes=1)}
        )
    with engine.connect() as connection:
        (found,) = collect_stats(connection).queues
    assert found.oldest_waiting_seconds is not None
    assert 60 <= found.oldest_waiting_seconds < 120
