"""Counting in bounded time: the same as counting all, as long as no queue is very long, and an estimate beyond."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy import Connection, Engine, event, text

from outboxq.admin.stats import COUNTED_MOST, QueueStats, Stats, collect_stats
from outboxq.postgres import Database
from tests.support.cli import call
from tests.support.staged import stage

FILL = """\
INSERT INTO outboxq.job (id, queue, kind, args, state, group_key, run_at, parked, lease_owner)
SELECT gen_random_uuid(), 'q' || number % 3, 'k' || number % 2, '{}', state,
  CASE WHEN state LIKE 'group%' THEN 'g' || number END,
  now() + make_interval(secs => CASE WHEN number % 2 = 0 THEN -90 ELSE 3600 END), number % 5,
  CASE WHEN state LIKE '%leased' THEN gen_random_uuid() END
FROM generate_series(1, 60) AS number, unnest(ARRAY[
  'ready', 'scheduled', 'leased', 'suspect', 'grouped', 'group_waiting', 'group_leased', 'group_suspect']) AS state
"""
MANY = """\
INSERT INTO outboxq.job (id, queue, kind, args, state, run_at)
SELECT gen_random_uuid(), {queue}, 'k', '{{}}', {state}, now() - interval '90 s' FROM generate_series(1, {number}) AS n
"""


def without_ages(found: Stats) -> Stats:
    ages = [round(queue.oldest_waiting_seconds or 0, -1) for queue in found.queues]
    return replace(
        found,
        queues=tuple(replace(queue, oldest_waiting_seconds=age) for queue, age in zip(found.queues, ages, strict=True)),
    )


@pytest.mark.first_and_last
@pytest.mark.parametrize("fill", ["staged", "every state", "nothing"])
def test_the_first_jobs_of_each_queue_are_counted_as_all_are(engine: Engine, fill: str) -> None:
    """In every state, with those that a transaction holds, the parked kinds, the dead and the paused."""
    if fill == "staged":
        stage(engine)
    elif fill == "every state":
        with engine.begin() as connection:
            connection.execute(text(FILL))
    with engine.connect() as holder, engine.connect() as connection:
        holder.execute(text("DELETE FROM outboxq.job WHERE state = 'ready' AND kind = 'k0' AND queue = 'q1'"))
        first, every = collect_stats(connection), collect_stats(connection, exact=True)
        holder.rollback()
    assert without_ages(first) == without_ages(every)
    assert all(queue.exact for queue in first.queues)
    if fill == "every state":
        q1 = next(queue for queue in first.queues if queue.queue == "q1")
        assert q1.running > 0


@pytest.mark.large
def test_a_long_queue_is_estimated_and_says_so(outboxq_database: Database, engine: Engine) -> None:
    """Close to the truth once the table was analyzed, never below what was counted; the others are exact."""
    with engine.begin() as connection:
        connection.execute(text(MANY.format(queue="'long'", state="'ready'", number=3 * COUNTED_MOST)))
        connection.execute(text(MANY.format(queue="'short'", state="'ready'", number=10)))
        connection.execute(text(MANY.format(queue="'short'", state="'scheduled'", number=COUNTED_MOST)))
        connection.execute(text("ANALYZE outboxq.job"))
    with engine.connect() as connection:
        long, short = collect_stats(connection).queues
    assert (long.exact, long.estimated) == (False, ("ready",))
    assert 2.5 * COUNTED_MOST < long.ready < 3.5 * COUNTED_MOST
    assert (short.exact, short.ready, short.due, short.scheduled) == (True, 10, COUNTED_MOST, 0)
    said = call("stats", "--json", url=outboxq_database.url).ok().json["queues"]
    assert [queue["exact"] for queue in said] == [False, True]
    exact = call("stats", "--json", "--exact", url=outboxq_database.url).ok().json["queues"]
    assert [(queue["exact"], queue["ready"]) for queue in exact] == [(True, 3 * COUNTED_MOST), (True, 10)]


def test_long_dead_letters_are_estimated_too(engine: Engine) -> None:
    """At least so many as were counted, also before the table was analyzed."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, priority, attempt, crashes, errors, "
                "reason, created_at) SELECT gen_random_uuid(), 'q', 'k', '{}', '{}', 0, 1, 0, '[]', 'x', now() "
                f"FROM generate_series(1, {COUNTED_MOST + 1})"
            )
        )
        (found,) = collect_stats(connection).queues
    assert found.estimated == ("dead",)
    assert found.dead > COUNTED_MOST
    assert isinstance(found, QueueStats)


class Plans:
    """Explains what is sent on a connection, with what was read for it."""

    def __init__(self, connection: Connection) -> None:
        self.statements: list[tuple[str, object]] = []
        event.listen(connection, "before_cursor_execute", self._note)

    def _note(self, _c: object, _u: object, statement: str, parameters: object, *_: object) -> None:
        self.statements.append((statement, parameters))


@pytest.fixture
def long(engine: Engine) -> Engine:
    """300,000 jobs in five queues, many times more than are counted."""
    with engine.begin() as connection:
        connection.execute(text(MANY.format(queue="'q' || n % 5", state="'ready'", number=200_000)))
        connection.execute(text(MANY.format(queue="'q' || n % 5", state="'scheduled'", number=100_000)))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE outboxq.job"))
    return engine


@pytest.mark.wide
def test_no_look_reads_a_long_table_as_a_whole(long: Engine) -> None:
    """Each statement follows an index, and reads no more than what is counted."""
    with long.connect() as connection:
        plans = Plans(connection)
        found = collect_stats(connection)
        sent = list(plans.statements)
        assert len(sent) >= 10
        for statement, parameters in sent:
            if statement.startswith("EXPLAIN"):
                continue
            explained = connection.exec_driver_sql(
                f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters
            ).scalar_one()
            nodes = list(_nodes(explained[0]["Plan"]))
            whole = [
                node["Relation Name"]
                for node in nodes
                if node["Node Type"] == "Seq Scan" and node["Relation Name"] in ("job", "dead_job", "effect")
            ]
            assert whole == [], statement
            read = explained[0]["Plan"]["Shared Hit Blocks"] + explained[0]["Plan"]["Shared Read Blocks"]
            assert read < 20_000, statement
    assert [queue.estimated for queue in found.queues] == [("ready", "due")] * 5
    assert all(35_000 < queue.ready < 45_000 for queue in found.queues)


def _nodes(plan: dict[str, object]) -> Iterator[dict[str, object]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)
