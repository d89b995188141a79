"""The budget of a claim of many jobs under a lease: 4 MB of arguments, and the job that reaches it is the last one."""

import json
import random
from collections.abc import Sequence
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import Connection, Engine, text

from outboxq.database.driver import ANY_SERVER, NOT_PREPARED, PreparedStatements, ServerSession, run_script
from outboxq.execution.claim import Claimed, ClaimRequest, claim
from outboxq.postgres import Database
from outboxq.statements.claim import BUDGET_KILOBYTES, FEW, ClaimScript, ClaimStatements
from tests.support.urls import libpq_url

OWNER = UUID(int=7)
MANY = 200
# Jobs in the order of their places; stored in a hundredth of their size, unless they are not compressed.
FILL = """\
INSERT INTO outboxq.job (id, queue, kind, args, state, run_at, seq) OVERRIDING SYSTEM VALUE
SELECT gen_random_uuid(), 'mine', 'kind', jsonb_build_object('text', repeat('x', size)),
  :state, now() - make_interval(secs => 1000 - n), n
FROM unnest(CAST(:sizes AS integer[])) WITH ORDINALITY AS given (size, n)"""
SORTS = pytest.mark.parametrize(
    ("sort", "state"), [("ready", "ready"), ("due", "scheduled"), ("suspects_in_company", "suspect")]
)
PREPARED = pytest.mark.parametrize("is_prepared", [False, True], ids=["as text", "prepared"])


def fill(engine: Engine, sizes: Sequence[int], state: str = "ready", *, compressed: bool = True) -> None:
    with engine.begin() as connection:
        if not compressed:
            connection.execute(text("ALTER TABLE outboxq.job ALTER COLUMN args SET STORAGE EXTERNAL"))
        connection.execute(text("INSERT INTO outboxq.relay VALUES (:id, now() + interval '1 day')"), {"id": OWNER})
        connection.execute(text(FILL), {"sizes": list(sizes), "state": state})


def script_of(sort: str, most: int | None = None) -> ClaimScript:
    claims = ClaimStatements("outboxq", "mine", OWNER, most=most, counts_leases=most is not None)
    script: ClaimScript = getattr(claims, f"lease_{sort}")
    return script


def claimed(
    connection: Connection, script: ClaimScript, limit: int, prepared: PreparedStatements = NOT_PREPARED
) -> Claimed:
    with connection.begin():
        return claim(connection, ClaimRequest(script, limit, server=ServerSession(claims=prepared)))


def kilobytes(args: str) -> int:
    return len(args.encode()) // 1024 + 1


@pytest.mark.first_and_last
@SORTS
@PREPARED
def test_a_claim_ends_at_the_job_that_reaches_the_budget(
    engine: Engine, sort: str, state: str, is_prepared: bool
) -> None:
    """For jobs of any sizes. It says that more may wait, and the next claim goes on after its last job."""
    chance = random.Random(7)
    sizes = [int(10 ** chance.uniform(0, 6)) for _ in range(300)]
    fill(engine, sizes, state)
    script, prepared = script_of(sort), PreparedStatements() if is_prepared else NOT_PREPARED
    claims, seen = 0, 0
    with engine.connect() as connection:
        while (found := claimed(connection, script, MANY, prepared)).jobs:
            claims += 1
            spent = [kilobytes(job.args) for job in found.jobs]
            assert [len(json.loads(job.args)["text"]) for job in found.jobs] == sizes[seen : seen + len(spent)]
            assert sum(spent[:-1]) < BUDGET_KILOBYTES
            seen += len(spent)
            assert found.is_cut == (sum(spent) >= BUDGET_KILOBYTES)
            assert found.is_cut or seen == len(sizes)
            assert found.may_leave_more(len(spent)) == found.is_cut
    assert seen == len(sizes)
    assert claims > 3


def test_a_job_that_is_larger_than_the_budget_is_claimed_alone(engine: Engine) -> None:
    """Jobs before it go with it, and none after it does."""
    fill(engine, [1, 1, 5_000_000, 1, 6_000_000])
    with engine.connect() as connection:
        assert [len(claimed(connection, script_of("ready"), MANY).jobs) for _ in range(3)] == [3, 2, 0]


@pytest.mark.large
def test_a_claim_of_many_small_jobs_takes_as_many_as_it_may(engine: Engine) -> None:
    """Nor does the budget hold for a claim of few jobs, in which it would cost more than it is worth."""
    fill(engine, [40] * MANY + [1_000_000] * FEW)
    with engine.connect() as connection:
        found = [claimed(connection, script_of("ready"), limit) for limit in (MANY, FEW)]
    assert [(len(each.jobs), each.is_cut) for each in found] == [(MANY, False), (FEW, False)]


@pytest.mark.parametrize(("most", "taken"), [(100, 42), (30, 30)])
def test_the_budget_and_a_limit_hold_together(engine: Engine, most: int, taken: int) -> None:
    """The claim ends at the first of the two that it comes to; both leave jobs."""
    fill(engine, [100_000] * MANY)
    with engine.connect() as connection:
        found = claimed(connection, script_of("ready", most), MANY)
    assert (len(found.jobs), found.is_cut) == (taken, True)


@PREPARED
def test_jobs_over_the_budget_are_neither_locked_nor_read(
    engine: Engine, outboxq_database: Database, is_prepared: bool
) -> None:
    """Each is some hundred blocks beside the table."""
    fill(engine, [1_000_000] * 40, compressed=False)
    script = script_of("ready").for_limit(MANY)
    parts = script.parts(MANY, None, ServerSession(claims=PreparedStatements()) if is_prepared else ANY_SERVER)
    at = next(place for place, (owner, _) in enumerate(parts) if owner == "claim")
    before, explained = (
        [statement for _, statement in parts[:at]],
        f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {parts[at][1]}",
    )
    with engine.connect() as connection, connection.begin() as transaction:
        answer = run_script(connection, *before, explained)[-1][0]
        (plan,) = json.loads(answer) if isinstance(answer, str) else answer
        blocks = int(plan["Plan"]["Shared Hit Blocks"]) + int(plan["Plan"]["Shared Read Blocks"])
        # The arguments of five jobs, read to be measured and to be returned.
        assert blocks < 5 * 2 * 300
        with psycopg.connect(libpq_url(outboxq_database.url)) as other:
            free = other.execute("SELECT count(*) FROM (SELECT FROM outboxq.job FOR UPDATE SKIP LOCKED) AS free")
            assert free.fetchone() == (40 - 5,)
        transaction.rollback()
