"""Pages on large tables: what they read is bounded, whatever the planner thinks of the tables."""

import re

import pytest
from sqlalchemy import Engine, create_engine, text

from outboxq.dashboard import Role, create_app
from outboxq.dashboard.segments import as_segment
from outboxq.postgres import Database
from tests.admin.test_explain_large import counting_pages
from tests.support.dashboard import as_user, client_of, stage_dashboard

# One queue has all scheduled jobs, which the planner takes for a fifth of them.
_JOBS = """\
INSERT INTO outboxq.job (id, queue, kind, args, state, run_at)
SELECT gen_random_uuid(), 'queue ' || n % 5, 'k', '{}', CASE WHEN n % 5 = 1 THEN 'scheduled' ELSE 'ready' END,
  now() + (n::bigint * 7919 % 100000) * interval '1 second'
FROM generate_series(1, 400000) AS n"""
# What is counted of a queue in a state, and one more.
_MOST_ROWS = 10_001
_SCAN = re.compile(r"(?:Index|Bitmap Heap|Seq)\b[^(]*Scan[^(]*on job.*\(actual rows=(\d+)")


@pytest.mark.wide
def test_a_page_reads_a_part_of_a_large_table(engine: Engine, outboxq_database: Database) -> None:
    """Each statement of each page follows an index up to its bound."""
    stage_dashboard(engine)
    with engine.begin() as connection:
        connection.execute(text(_JOBS))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE outboxq.job"))
    counted = create_engine(outboxq_database.url, use_native_hstore=False)
    app = create_app({"orders": counted}, auth=as_user(Role.READER))
    with client_of(app) as client, counting_pages(counted) as read:
        for page in ("", "queues", f"queues/{as_segment('queue 1')}", "kinds", "jobs", "flow"):
            assert client.get(f"/orders/{page}").status_code == 200
    counted.dispose()
    rows = [(int(each), plan) for _, plan in read for each in _SCAN.findall(plan)]
    assert max(rows)[0] == _MOST_ROWS, max(rows)[1]
