"""`explain_job` and `explain_queue` read a few pages of a million jobs."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Connection, Engine, event, text

from outboxq.admin.explain import explain_job, explain_queue
from outboxq.postgres import Database
from tests.support.doctor import execute, open_session

# Of 8 kB each: one that read all jobs would read more than 20,000.
MOST_PAGES = 12_000
_FILL = """\
INSERT INTO outboxq.job (id, queue, kind, args, state, run_at, group_key, unique_key)
SELECT gen_random_uuid(), CASE WHEN n % 2 = 0 THEN 'mail' ELSE 'post' END, 'send', '{}',
  CASE WHEN n % 10 = 1 THEN 'scheduled' WHEN n % 10 IN (2, 3) THEN 'grouped'
    WHEN n % 100 = 6 THEN 'suspect' ELSE 'ready' END,
  clock_timestamp() + CASE WHEN n % 10 = 1 THEN interval '1 hour' ELSE interval '0' END,
  CASE WHEN n % 10 IN (2, 3) THEN 'group ' || n % 3 END, CASE WHEN n % 10 = 8 THEN 'one key' END
FROM generate_series(1, 1000000) AS n"""
_DEAD = """\
INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, priority, attempt, crashes, errors, reason, created_at)
SELECT gen_random_uuid(), 'mail', 'send', '{}', '{}', 0, 1, 0, '[]', 'no luck', clock_timestamp()
FROM generate_series(1, 100000)"""
_BATCHES = """\
INSERT INTO outboxq.batch (id, callback)
SELECT gen_random_uuid(), '{"kind": "report", "queue": "reports"}' FROM generate_series(1, 100000)"""
# The last of each sort, in the order of the claims.
_LAST = """\
SELECT DISTINCT ON (state, unique_key IS NULL) id FROM outboxq.job WHERE queue = 'mail' OR state = 'scheduled'
ORDER BY state, unique_key IS NULL, seq DESC"""


@contextmanager
def counting_pages(engine: Engine) -> Iterator[list[tuple[int, str]]]:
    """How many pages each statement of a connection has read, by running each a second time with EXPLAIN ANALYZE."""
    found: list[tuple[int, str]] = []

    def look(connection: Connection, cursor: Any, statement: str, parameters: Any, *_: object) -> None:
        if "EXPLAIN" in statement or not statement.lstrip().startswith(("SELECT", "WITH")):
            return
        with connection.connection.cursor() as second:
            # Counted are pages, not seconds: the second run has no time-out, and reads no clock for each row.
            second.execute("SELECT set_config('statement_timeout', '0', true)")
            second.execute(f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF) {statement}", parameters)
            plan = [line for (line,) in second.fetchall()]
        # The first node's number includes those of all below it.
        pages = next((line for line in plan if "Buffers: shared" in line), "")
        found.append((sum(map(int, re.findall(r"(?:hit|read)=(\d+)", pages))), "\n".join([statement, *plan])))

    event.listen(engine, "before_cursor_execute", look)
    try:
        yield found
    finally:
        event.remove(engine, "before_cursor_execute", look)


@pytest.mark.wide
def test_a_million_jobs_cost_as_much_as_a_few(outboxq_database: Database, engine: Engine) -> None:
    """Whatever waits, each look reads a small part of the table; before and after it was analyzed."""
    url = outboxq_database.url
    execute(url, _FILL, _DEAD, _BATCHES)
    with engine.connect() as connection:
        ids: list[UUID] = list(connection.execute(text(_LAST)).scalars())
    assert len(ids) >= 5
    codes = set[str]()
    for prepare in ("SELECT 1", "ANALYZE"):
        execute(url, prepare)
        relay = open_session(url, "SELECT 1", name="outboxq relay")
        with counting_pages(engine) as read, relay, engine.connect() as connection:
            for job_id in (*ids, uuid4()):
                codes |= {reason.code for reason in explain_job(connection, job_id).reasons}
            for queue in ("mail", "reports", "nothing"):
                codes |= {reason.code for reason in explain_queue(connection, queue).reasons}
        assert len(read) > 30
        pages, plan = max(read)
        assert pages < MOST_PAGES, plan
    assert codes >= {
        "behind-others", "behind-in-group", "suspect", "scheduled", "coalesced", "waits-for-batch", "queue-empty",
        "not-found",
    }  # fmt: skip
    assert "not-known" not in codes
