"""The claim takes what it asked for, in order, and costs the same whatever waits around it."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import Connection, Engine, text

from outboxq.database.driver import run_script
from outboxq.execution.claim import ClaimRequest, claim
from outboxq.relay.connections import connection_options
from outboxq.relay.parking import park_unknown
from outboxq.statements.claim import ClaimStatements
from tests.support.slots import claim_ready
from tests.support.waiting import wait_until

FILL = """
INSERT INTO outboxq.job (id, queue, kind, args, priority, state, run_at)
SELECT gen_random_uuid(), :queue, :kind, '{}', 0, :state, clock_timestamp() + make_interval(secs => :delay)
FROM generate_series(1, :count)
"""
NAIVE = """
DELETE FROM outboxq.job WHERE queue = 'mine' AND state = 'ready' AND id IN (
  SELECT id FROM outboxq.job WHERE queue = 'mine' AND state = 'ready' ORDER BY (-priority), seq LIMIT 3
  FOR UPDATE SKIP LOCKED
) RETURNING id
"""


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    """A connection as the relay sets it up."""
    with engine.connect().execution_options(**connection_options(engine, "outboxq")) as connection:
        yield connection


def fill(connection: Connection, count: int, queue: str = "mine", kind: str = "k", delay: float | None = None) -> None:
    """Insert jobs by SQL; scheduled ones where `delay` seconds are given."""
    state = "ready" if delay is None else "scheduled"
    values = {"queue": queue, "kind": kind, "count": count, "state": state, "delay": delay or 0}
    with connection.begin():
        connection.execute(text(FILL), values)


def analyze(connection: Connection) -> None:
    with connection.begin():
        connection.execute(text("ANALYZE outboxq.job"))


def explain(connection: Connection, statement: str) -> list[dict[str, object]]:
    """The plan that ran, flattened; its effect is rolled back. The first node carries the buffers of all."""
    with connection.begin() as transaction:
        result = run_script(connection, f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}")[0][0]
        transaction.rollback()
    return flattened(result)


def flattened(result: object) -> list[dict[str, object]]:
    plan = json.loads(result) if isinstance(result, str) else result
    nodes, pending = [], [plan[0]["Plan"]]
    while pending:
        node = pending.pop(0)
        pending.extend(node.pop("Plans", []))
        nodes.append(node)
    return nodes


def node_types(nodes: list[dict[str, object]]) -> set[object]:
    return {node["Node Type"] for node in nodes}


def buffers(nodes: list[dict[str, object]]) -> int:
    return int(nodes[0]["Shared Hit Blocks"]) + int(nodes[0]["Shared Read Blocks"])


def test_jobs_are_claimed_by_priority_then_age(connection: Connection) -> None:
    """Higher priority first, then older first; a claimed batch comes in that order although RETURNING has none."""
    with connection.begin():
        for name, priority in (("a", 0), ("b", 5), ("c", -3), ("d", 5), ("e", 0)):
            connection.execute(
                text("SELECT outboxq.add_job('k', jsonb_build_object('n', CAST(:n AS text)), 'mine', priority => :p)"),
                {"n": name, "p": priority},
            )
    with connection.begin():
        batch = claim_ready(connection, "mine", 4)
    assert batch.jobs
    assert [json.loads(job.args)["n"] for job in batch.jobs] == ["b", "d", "a", "e"]
    assert {job.attempt for job in batch.jobs} == {1}


def test_a_rolled_back_claim_leaves_its_jobs_waiting_as_they_were(connection: Connection) -> None:
    """Nothing is written outside the transaction: the attempt count goes back with it. Only a mark stays."""
    fill(connection, 3)
    statement = ClaimStatements("outboxq", "mine").ready
    with connection.begin() as transaction:
        assert claim(connection, ClaimRequest(statement, 2)).jobs
        transaction.rollback()
    with connection.begin():
        batch = claim_ready(connection, "mine", 10)
        left = connection.execute(text("SELECT state, attempt, crashes FROM outboxq.job")).all()
    assert [job.attempt for job in batch.jobs] == [1]
    assert batch.moved == 2
    assert left == [("suspect", 0, 0)] * 2


def test_concurrent_claims_are_disjoint_and_complete(engine: Engine, connection: Connection) -> None:
    """Eight connections, claims of random size: every job is claimed once."""
    fill(connection, 2_000)

    def claim_all(limit: int) -> list[object]:
        taken: list[object] = []
        with engine.connect() as own:
            while True:
                with own.begin():
                    batch = claim_ready(own, "mine", limit)
                if not batch.jobs:
                    return taken
                taken += [job.id for job in batch.jobs]

    with ThreadPoolExecutor(8) as pool:
        results = [taken for part in pool.map(claim_all, [1, 2, 3, 5, 7, 11, 13, 17]) for taken in part]
    assert len(results) == len(set(results)) == 2_000


def test_a_claim_skips_what_another_transaction_holds(engine: Engine, connection: Connection) -> None:
    """SKIP LOCKED: a job that somebody holds delays nobody."""
    fill(connection, 5)
    statements = ClaimStatements("outboxq", "mine")
    with engine.connect() as other, other.begin():
        held = claim(other, ClaimRequest(statements.ready, 2))
        with connection.begin():
            got = claim(connection, ClaimRequest(statements.ready, 10))
    assert held.jobs
    assert got.jobs
    assert len(got.jobs) == 3
    assert not {job.id for job in held.jobs} & {job.id for job in got.jobs}


def test_a_claim_with_stale_statistics_takes_at_most_its_limit(connection: Connection) -> None:
    """The naive form in the same state takes more than it asked for, so this state is the dangerous one."""
    fill(connection, 2_000, queue="other")
    with connection.begin():
        connection.execute(text("ALTER TABLE outboxq.job SET (autovacuum_enabled = off)"))
    analyze(connection)
    fill(connection, 200)
    with connection.begin() as transaction:
        naive = run_script(connection, NAIVE)
        transaction.rollback()
    assert len(naive) > 3
    with connection.begin() as transaction:
        batch = claim_ready(connection, "mine", 3)
        # The naive form, rolled back, left its marks: those are set aside.
        assert len(batch.jobs) + batch.moved == 3
        transaction.rollback()


@pytest.mark.wide
def test_a_claim_costs_the_same_with_a_million_waiting_and_a_million_scheduled(connection: Connection) -> None:
    """No Sort, no sequential scan, at most 100 buffers for 10 jobs, ready and due alike."""
    with connection.begin():
        connection.execute(text("ALTER TABLE outboxq.job SET (autovacuum_enabled = off)"))
        # Indexes are built at the end: the same tree, and half the time.
        connection.execute(text("DROP INDEX outboxq.job_ready, outboxq.job_scheduled"))
    fill(connection, 1_000_000)
    fill(connection, 20, delay=-60)
    fill(connection, 1_000_000, delay=3600)
    with connection.begin():
        connection.execute(
            text("CREATE INDEX job_ready ON outboxq.job (queue, (-priority), seq) WHERE state = 'ready'")
        )
        connection.execute(text("CREATE INDEX job_scheduled ON outboxq.job (queue, run_at) WHERE state = 'scheduled'"))
    analyze(connection)
    statements = ClaimStatements("outboxq", "mine")
    for statement in (statements.ready.text(10), statements.due.text(10)):
        nodes = explain(connection, statement)
        assert {"Sort", "Incremental Sort", "Seq Scan"}.isdisjoint(node_types(nodes)), nodes
        assert nodes[0]["Actual Rows"] == 10
        assert buffers(nodes) <= 100
    with connection.begin():
        # The rolled back claims left marks; a committed lock overwrites them.
        connection.execute(text("SELECT id FROM outboxq.job WHERE state = 'scheduled' AND run_at < now() FOR UPDATE"))
    # Fewer are due than asked for: the index says where to stop, not a look at the million that are not.
    nodes = explain(connection, statements.due.text(30))
    assert nodes[0]["Actual Rows"] == 20
    assert buffers(nodes) <= 300


def test_a_paused_queue_is_not_claimed(connection: Connection) -> None:
    """Pausing takes effect with the next claim, for ready and for due jobs."""
    fill(connection, 2)
    fill(connection, 2, delay=-1)
    statements = ClaimStatements("outboxq", "mine")
    with connection.begin():
        connection.execute(text("INSERT INTO outboxq.queue (name, paused_at) VALUES ('mine', now())"))
    with connection.begin():
        assert not claim(connection, ClaimRequest(statements.ready, 1)).jobs
        assert not claim(connection, ClaimRequest(statements.due, 1)).jobs
    with connection.begin():
        connection.execute(text("UPDATE outboxq.queue SET paused_at = NULL"))
    with connection.begin():
        assert claim(connection, ClaimRequest(statements.ready, 1)).jobs
        assert claim(connection, ClaimRequest(statements.due, 1)).jobs


def test_only_due_jobs_of_the_scheduled_ones_are_claimed(connection: Connection) -> None:
    """By the database's clock, earliest first."""
    fill(connection, 1, delay=3600)
    for kind, delay in (("late", -5), ("latest", -500), ("later", -50)):
        fill(connection, 1, kind=kind, delay=delay)
    statements = ClaimStatements("outboxq", "mine")
    claimed = []
    for _ in range(4):
        with connection.begin():
            claimed.append([job.kind for job in claim(connection, ClaimRequest(statements.due, 1)).jobs])
    assert claimed == [["latest"], ["later"], ["late"], []]


def test_unknown_kinds_at_the_head_are_parked_in_bulk(connection: Connection) -> None:
    """One statement parks ten thousand, for 5 s at first and ever longer up to 5 minutes, and counts no attempt."""
    fill(connection, 15_000, kind="stranger")
    fill(connection, 1, kind="known")
    with connection.begin():
        assert park_unknown(connection, "outboxq", "mine", ("known",)) == 10_000
        assert park_unknown(connection, "outboxq", "mine", ("known",)) == 5_000
        assert park_unknown(connection, "outboxq", "mine", ("known",)) == 0
        # The others have the same times as these.
        rest = "DELETE FROM outboxq.job WHERE kind = 'stranger' AND seq > (SELECT min(seq) + 100 FROM outboxq.job)"
        connection.execute(text(rest))
    seconds = []
    for _ in range(8):
        with connection.begin():
            row = connection.execute(
                text(
                    "SELECT state, attempt, extract(epoch FROM run_at - clock_timestamp())::float8 AS wait "
                    "FROM outboxq.job WHERE kind = 'stranger' LIMIT 1"
                )
            ).one()
            assert (row.state, row.attempt) == ("scheduled", 0)
            seconds.append(row.wait)
            connection.execute(text("UPDATE outboxq.job SET run_at = now() - interval '1 s' WHERE kind = 'stranger'"))
            park_unknown(connection, "outboxq", "mine", ("known",), limit=20_000)
    rounded = [round(wait / 5) * 5 for wait in seconds]
    assert rounded == [5, 10, 20, 40, 80, 160, 300, 300]


def test_parking_never_waits_for_a_claim(engine: Engine, connection: Connection) -> None:
    """It skips what is locked, so that a long handler delays nobody."""
    fill(connection, 3, kind="stranger")
    with engine.connect() as other, other.begin():
        assert claim_ready(other, "mine", 1).jobs
        with connection.begin():
            assert park_unknown(connection, "outboxq", "mine", ()) == 2


def test_add_job_never_waits_for_a_running_handler(engine: Engine, connection: Connection) -> None:
    """A claim in progress holds no lock that an INSERT needs."""
    fill(connection, 1)
    with engine.connect() as other, other.begin():
        assert claim_ready(other, "mine", 1).jobs
        with connection.begin():
            connection.execute(text("SET LOCAL lock_timeout = '1s'"))
            connection.execute(text("SELECT outboxq.add_job('k', '{}', 'mine')"))


def test_a_name_full_of_sql_is_data(connection: Connection) -> None:
    """Queue names are quoted into the claim's text."""
    name = "it's; DROP TABLE outboxq.job; --\"$1"
    fill(connection, 2, queue=name)
    with connection.begin():
        batch = claim_ready(connection, name, 5)
    assert batch.jobs
    assert [job.queue for job in batch.jobs] == [name, name]


def test_a_claimed_job_can_be_finished_only_once_even_if_claims_queue_up_on_it(
    engine: Engine, connection: Connection
) -> None:
    """A claim that meets the row locked comes back at once and empty, instead of waiting for it."""
    fill(connection, 1)
    statements = ClaimStatements("outboxq", "mine")
    results: list[object] = []
    with connection.begin():
        assert claim(connection, ClaimRequest(statements.ready, 1)).jobs

        def try_too() -> None:
            with engine.connect() as own, own.begin():
                results.append(claim(own, ClaimRequest(statements.ready, 1)).jobs)

        thread = threading.Thread(target=try_too)
        thread.start()
        wait_until(lambda: results, "the second claim's answer")
        thread.join()
    assert results == [()]


def test_psycopg_rejects_what_the_text_would_not(connection: Connection) -> None:
    """The claim is sent as text: a limit that is not a number never reaches the server."""
    with pytest.raises(ValueError, match="invalid literal"):
        ClaimStatements("outboxq", "mine").ready.text("1; DROP TABLE outboxq.job")  # type: ignore[arg-type]
    with pytest.raises(psycopg.errors.UndefinedTable), connection.begin():
        claim(connection, ClaimRequest(ClaimStatements("nowhere", "mine").ready, 1))
