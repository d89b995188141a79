"""What claims of grouped jobs cost: some entries of an index for each group, whatever waits in it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine, text

from outboxq.database.driver import run_script
from outboxq.execution.claim import ClaimRequest, claim
from outboxq.relay.connections import connection_options
from outboxq.relay.queue_claims import GroupCursor
from outboxq.statements.claim import Sort
from outboxq.statements.group_claim import GROUPS_SEEN, GroupScript
from outboxq.statements.wake import poll_queues

FILL = """
INSERT INTO outboxq.job (id, queue, kind, args, state, group_key, run_at)
SELECT gen_random_uuid(), 'mine', 'k', '{}', 'grouped', :prefix || lpad((n % :groups)::text, 6, '0'),
  clock_timestamp() + make_interval(secs => :delay)
FROM generate_series(0, :count - 1) AS n
"""
SCRIPT = GroupScript("outboxq", "mine")


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    """A connection as the relay sets it up."""
    with engine.connect().execution_options(**connection_options(engine, "outboxq")) as connection:
        yield connection


def fill(connection: Connection, count: int, *, groups: int, prefix: str = "g", delay: float = 0) -> None:
    with connection.begin():
        values = {"count": count, "groups": groups, "prefix": prefix, "delay": delay}
        connection.execute(text(FILL), values)


def plans(connection: Connection, script: str) -> list[tuple[str, int]]:
    """The plan of each query of a script, as text, and the buffers that it read. The effect is rolled back."""
    found = []
    with connection.begin() as transaction:
        for statement in script.split("; "):
            if statement.startswith("SET"):
                run_script(connection, statement)
                continue
            rows = run_script(connection, f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}")
            plan = rows[0][0] if isinstance(rows[0][0], list) else json.loads(str(rows[0][0]))
            buffers = int(plan[0]["Plan"]["Shared Hit Blocks"]) + int(plan[0]["Plan"]["Shared Read Blocks"])
            found.append((json.dumps(plan), buffers))
        transaction.rollback()
    return found


def assert_by_index(plan: str) -> None:
    """No sort, no scan of a table, and nothing compiled."""
    for node in ('"Sort"', '"Seq Scan"', '"JIT"'):
        assert node not in plan


@pytest.mark.first_and_last
@pytest.mark.parametrize("limit", [1, 50])
@pytest.mark.parametrize("analyzed", [False, True])
def test_a_claim_walks_over_its_indexes_alone(connection: Connection, limit: int, analyzed: bool) -> None:
    """No sort, no scan of the table, no compilation, and a few buffers for each group, whatever statistics say."""
    fill(connection, 20_000, groups=1, prefix="hot")
    fill(connection, 3_000, groups=3_000)
    if analyzed:
        with connection.begin():
            connection.execute(text("ANALYZE outboxq.job"))
    lease = GroupScript("outboxq", "mine", owner=uuid4())
    for script in (SCRIPT, lease):
        found = plans(connection, script.text(limit, "g001000"))
        assert len(found) == 2
        for plan, buffers in found:
            assert_by_index(plan)
            assert buffers <= 40 + limit * 30


@pytest.mark.first_and_last
@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize(("limit", "in_company"), [(1, None), (16, True), (1, False)])
def test_a_claim_of_suspects_walks_over_its_indexes_alone(
    connection: Connection, limit: int, in_company: bool | None, analyzed: bool
) -> None:
    """As far as to the last one that it takes: half of them are of either sort. So it does for a limit that counts."""
    fill(connection, 20_000, groups=1, prefix="hot")
    fill(connection, 3_000, groups=3_000)
    died = '[{"type": "outboxq.RelayDied"}, {"type": "outboxq.RelayDied"}]'
    owner = uuid4()
    with connection.begin():
        connection.execute(
            text(
                "UPDATE outboxq.job SET state = 'group_suspect', "
                "errors = CASE WHEN seq % 2 = 0 THEN CAST(:died AS jsonb) ELSE '[]' END WHERE group_key <> 'hot000000'"
            ),
            {"died": died},
        )
        connection.execute(text("INSERT INTO outboxq.relay VALUES (:id, now() + interval '1 hour')"), {"id": owner})
        if analyzed:
            connection.execute(text("ANALYZE outboxq.job"))
    script = GroupScript("outboxq", "mine", owner, suspects=True, in_company=in_company)
    for each in (script, replace(script, most=50, counts_leases=True)):
        for plan, buffers in plans(connection, each.text(limit, "")):
            assert_by_index(plan)
            assert buffers <= 60 + limit * 40
        with connection.begin():
            assert len(claim(connection, ClaimRequest(each, limit, "")).jobs) == limit


def test_a_poll_looks_at_the_first_groups_alone(connection: Connection) -> None:
    """However many groups there are, and however many jobs in one."""
    fill(connection, 20_000, groups=1, prefix="a hot one")
    fill(connection, 3_000, groups=3_000)
    ((plan, buffers),) = plans(connection, poll_queues("outboxq", ("mine",)))
    assert '"Seq Scan"' not in plan
    assert buffers <= 500


def serve(connection: Connection, limit: int) -> tuple[list[str], int]:
    """Claim until a round is over; the groups of the jobs, and how many claims it took."""
    cursor, served, claims = GroupCursor("outboxq", "mine", list[str]().append), list[str](), 0
    while True:
        with connection.begin():
            claims += 1
            found = claim(connection, ClaimRequest(SCRIPT, limit, cursor.place(), sort=Sort.GROUPED))
        served += [str(job.group_key) for job in found.jobs]
        cursor.record(found)
        if cursor.is_at_end() or len(served) >= 500:
            return served, claims


def test_every_group_has_its_turn_before_one_has_another(connection: Connection) -> None:
    """Round robin: a group with many jobs keeps no other one waiting."""
    fill(connection, 2_000, groups=1, prefix="hot")
    fill(connection, 299, groups=299)
    served, _ = serve(connection, 50)
    assert len(set(served[:300])) == 300


def test_a_slot_looks_behind_groups_that_are_held_up(connection: Connection) -> None:
    """Each claim looks at a bounded number of groups, the next one goes on there, and a round ends."""
    fill(connection, 2_000, groups=1_000, prefix="blocked", delay=3600)
    fill(connection, 1, groups=1, prefix="free")
    served, claims = serve(connection, 50)
    assert served == ["free000000"]
    assert claims <= 2 * (1_000 // GROUPS_SEEN + 2)


def test_five_thousand_groups_that_are_held_up_cost_each_claim_what_its_look_ahead_does(connection: Connection) -> None:
    """A claim reads for as many groups as it looks at, wherever it begins; a round has as many claims as that takes."""
    held_up = 5_000
    fill(connection, 2 * held_up, groups=held_up, prefix="blocked", delay=3600)
    fill(connection, 1, groups=1, prefix="free")
    served, claims = serve(connection, 50)
    assert served == ["free000000"]
    assert claims <= 2 * (held_up // GROUPS_SEEN + 2)
    for after in ("", "blocked002500", "blocked004990"):
        for plan, buffers in plans(connection, SCRIPT.text(50, after)):
            assert_by_index(plan)
            assert buffers <= 6 * GROUPS_SEEN


@pytest.mark.large
def test_the_jobs_of_a_group_that_are_done_are_read_once_behind_an_old_snapshot(
    connection: Connection, engine: Engine
) -> None:
    """Vacuum may not remove 200,000 of them: each statement walks over them once, however many jobs a claim takes.

    A claim that goes on behind the group does not see them.
    """
    fill(connection, 200_000, groups=1, prefix="hot")
    fill(connection, 3_000, groups=3_000)
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as old, old.begin():
        old.execute(text("SELECT 1 FROM outboxq.job LIMIT 1"))
        with connection.begin():
            last = "(SELECT max(seq) FROM outboxq.job WHERE group_key = 'hot000000')"
            connection.execute(text(f"DELETE FROM outboxq.job WHERE group_key = 'hot000000' AND seq < {last}"))
            sizes = "SELECT (pg_relation_size('outboxq.job') + pg_relation_size('outboxq.job_group')) / 8192"
            pages = int(connection.execute(text(sizes)).scalar_one())
        for limit in (1, 50):
            for _, buffers in plans(connection, SCRIPT.text(limit, "g999999")):
                assert buffers <= pages + 1_600
        assert pages > 4_000
        for _, buffers in plans(connection, SCRIPT.text(50, "g000000")):
            assert buffers <= 1_600


@pytest.mark.wide
def test_no_group_waits_for_a_million_jobs_of_another(connection: Connection) -> None:
    """With a million jobs in one group, 10,000 others are all served in one round, by claims that cost the same."""
    fill(connection, 1_000_000, groups=1, prefix="hot")
    fill(connection, 10_000, groups=10_000)
    cursor, served = GroupCursor("outboxq", "mine", list[str]().append), set[str]()
    for _ in range(205):
        with connection.begin():
            found = claim(connection, ClaimRequest(SCRIPT, 50, cursor.place(), sort=Sort.GROUPED))
        cursor.record(found)
        served.update(str(job.group_key) for job in found.jobs)
    assert len(served) == 10_001
    lease = GroupScript("outboxq", "mine", owner=uuid4())
    for prepare in ("SELECT 1", "ANALYZE outboxq.job"):
        with connection.begin():
            connection.execute(text(prepare))
        for script in (SCRIPT, lease):
            for after in ("", "g005000", "g009999", "hot000000"):
                for plan, buffers in plans(connection, script.text(50, after)):
                    assert_by_index(plan)
                    assert buffers <= 1_600


def test_suspects_whose_groups_others_claim_are_passed_over(connection: Connection, engine: Engine) -> None:
    """Also all of several: the claim finds nothing, and waits for none of the locks."""
    fill(connection, 2, groups=2)
    owner = uuid4()
    with connection.begin():
        connection.execute(text("UPDATE outboxq.job SET state = 'group_suspect'"))
        connection.execute(text("INSERT INTO outboxq.relay VALUES (:id, now() + interval '1 hour')"), {"id": owner})
    script = GroupScript("outboxq", "mine", owner, suspects=True)
    with engine.connect() as other, other.begin() as transaction:
        run_script(other, script.text(2))
        with connection.begin():
            assert claim(connection, ClaimRequest(script, 1, "")).jobs == ()
        transaction.rollback()
    with connection.begin():
        assert len(claim(connection, ClaimRequest(script, 1, "")).jobs) == 1
