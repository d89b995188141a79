"""The statements of flow control go by indexes, whatever the statistics of the tables say, and compile nothing."""

import re

import pytest
from sqlalchemy import Engine, create_engine, text

from outboxq.postgres import Server
from tests.support.matrices import sampled
from tests.tools.plans import fill, plans

# What relays and producers send for each claim or job.
_NAMES = (
    "cancel.sharing",
    "claim.ClaimStatements",
    "coalesce",
    "group_claim",
    "limit",
    "rate",
    "windows",
    "callback_batches.finish_batches",
    "unique.add_unique",
    "unique.insert_without_keys",
    "unique.key_owners",
    "unique.take_keys",
    "unique.lock_idle_keys",
    "unique.delete_idle_keys",
)
_FILL = """\
INSERT INTO outboxq.unique_key (key, job_id, kept_until)
SELECT 'k' || chr(31) || n, gen_random_uuid(), clock_timestamp() FROM generate_series(1, 20000) AS n;
INSERT INTO outboxq.batch (id, callback)
SELECT gen_random_uuid(), '{"kind": "k", "queue": "q"}' FROM generate_series(1, 20000) AS n;
UPDATE outboxq.job SET unique_key = 'k' || chr(31) || hashtext(id::text) % 50, batch_id = gen_random_uuid()
WHERE hashtext(id::text) % 2 = 0"""
# Tables that grow with the work.
_READ_AS_A_WHOLE = re.compile(r"Seq Scan on (job|unique_key|batch)\b")
# What was given is sorted, a page of the pruner's, and of windows the jobs of one key.
_SORTED = re.compile(r"Sort Key: (?!wanted|added|page|locked|\(?row_number|\(*CASE WHEN)")


@pytest.mark.wide
@pytest.mark.parametrize("analyzed", sampled([False, True]), ids=["not analyzed", "analyzed"])
def test_statements_of_flow_control_read_no_table_as_a_whole(outboxq_server: Server, analyzed: bool) -> None:
    """Nor do they sort one."""
    with outboxq_server.create_database() as database:
        engine: Engine = create_engine(database.url)
        fill(engine, 20_000)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for statement in _FILL.split(";\n"):
                connection.exec_driver_sql(statement.replace("%", "%%"))
            if analyzed:
                connection.execute(text("ANALYZE"))
        found = list(plans(engine, _NAMES))
        engine.dispose()
    assert {plan.name.partition(".")[0] for plan in found} == {name.partition(".")[0] for name in _NAMES}
    for plan in found:
        assert not _READ_AS_A_WHOLE.search(plan.plan), plan
        assert "JIT" not in plan.plan, plan
        assert not _SORTED.search(plan.plan), plan
