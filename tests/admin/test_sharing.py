"""How many jobs share a transaction is found around the job, in the orders of the claims."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, text

from outboxq.admin.cancellation import count_sharing
from outboxq.database.driver import run_script
from outboxq.statements.cancel import sharing

FILL = text("""\
INSERT INTO outboxq.job (id, queue, kind, args, state, priority, run_at, group_key)
SELECT gen_random_uuid(), :queue, 'send', '{}', :state, n % 2, clock_timestamp() + n * interval '1 ms',
  CASE WHEN :state = 'grouped' THEN 'group ' || n % 3 END
FROM generate_series(1, :number) AS n""")
# In the order of the claims: by priority, by time, and group by group.
CLAIM = text("""\
DELETE FROM outboxq.job WHERE id IN (
  SELECT id FROM outboxq.job WHERE queue = :queue AND state = :state
  ORDER BY group_key COLLATE "C", CASE state WHEN 'ready' THEN -priority END, seq LIMIT :number OFFSET :before)
RETURNING id""")
STATES = ("ready", "scheduled", "grouped")


def fill(engine: Engine, queue: str, state: str, number: int) -> None:
    with engine.begin() as connection:
        connection.execute(FILL, {"queue": queue, "state": state, "number": number})


@contextmanager
def claimed(engine: Engine, queue: str, state: str, *, number: int, before: int) -> Iterator[list[UUID]]:
    """Jobs that an open transaction has, as that of a relay; the others before and behind them wait."""
    with engine.connect() as connection, connection.begin() as transaction:
        given = {"queue": queue, "state": state, "number": number, "before": before}
        yield list(connection.execute(CLAIM, given).scalars())
        transaction.rollback()


@pytest.mark.parametrize("state", STATES)
def test_the_jobs_of_a_transaction_are_counted_from_each_of_them(engine: Engine, state: str) -> None:
    """Before it and behind it in the order of its claim, those of no other transaction; a job that waits has none."""
    for queue in ("mail", "post"):
        fill(engine, queue, state, 60)
    with (
        claimed(engine, "mail", state, number=15, before=20) as ours,
        claimed(engine, "mail", state, number=10, before=35),
        claimed(engine, "post", state, number=30, before=0),
        engine.connect() as connection,
    ):
        assert {count_sharing(connection, job_id) for job_id in ours} == {(14, True)}
        waits = connection.execute(text("SELECT id FROM outboxq.job WHERE queue = 'mail' AND xmax::text = '0'"))
        assert count_sharing(connection, waits.scalars().all()[0]) == (0, True)


@pytest.mark.parametrize("state", STATES)
def test_a_look_that_does_not_reach_the_end_says_so(engine: Engine, state: str) -> None:
    """What it found is the least that there is."""
    fill(engine, "mail", state, 60)
    with claimed(engine, "mail", state, number=15, before=20) as ours, engine.connect() as connection:
        looks = {look(connection, job_id, most=4) for job_id in ours}
    # A job in the middle sees four on each side, the first and the last only those on one.
    assert {is_exact for _, is_exact in looks} == {False}
    assert {found for found, _ in looks} == {4, 5, 6, 7, 8}


def look(connection: Connection, job_id: UUID, most: int) -> tuple[object, ...]:
    script = sharing("outboxq", job_id, most=most)
    return tuple(run_script(connection, script)[0])


@pytest.mark.wide
def test_among_many_jobs_a_look_reads_its_neighbours(engine: Engine) -> None:
    """By the index of the claims, on both sides: no sequential scan, no sort, nothing compiled."""
    fill(engine, "mail", "ready", 300_000)
    for prepare in ("SELECT 1", "ANALYZE outboxq.job"):
        with engine.begin() as connection:
            connection.execute(text(prepare))
        with claimed(engine, "mail", "ready", number=50, before=120_000) as ours, engine.connect() as connection:
            assert count_sharing(connection, ours[25]) == (49, False)
            explained = explain(connection, sharing("outboxq", ours[25]))
        nodes = list(below(explained["Plan"]))
        assert "JIT" not in explained
        assert not {"Sort", "Bitmap Heap Scan"} & {str(node["Node Type"]) for node in nodes}
        of_jobs = [node for node in nodes if node.get("Relation Name") == "job"]
        assert "Seq Scan" not in {str(node["Node Type"]) for node in of_jobs}
        assert max(int(node["Actual Rows"]) for node in of_jobs) == 10_000
        # A row and its place in the index for each of 10,000 on two sides, if no two are on one page.
        assert explained["Plan"]["Shared Hit Blocks"] + explained["Plan"]["Shared Read Blocks"] < 45_000


def explain(connection: Connection, script: str) -> dict[str, Any]:
    """The plan, as it was executed."""
    asked = script.replace("WITH its", "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) WITH its")
    plan: Any = run_script(connection, asked)[0][0]
    (explained,) = json.loads(plan) if isinstance(plan, str) else plan
    return dict(explained)


def below(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A node of a plan and all below it."""
    yield node
    for each in node.get("Plans", []):
        yield from below(each)
