"""Claims are prepared once for each connection, planned for their indexes, and sent as text where that is lost."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

import pytest
from psycopg.errors import DivisionByZero
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.orm import sessionmaker

from outboxq import Context, Jobs, OutboxSession, Relay, RelayConfig, SlotGroup
from outboxq.database.driver import PreparedStatements, Script, ServerSession, run_script
from outboxq.execution.claim import ClaimRequest, claim
from outboxq.postgres import Database
from outboxq.statements.claim import ClaimScript, ClaimStatements, Cursor
from tests.support.app import Effect
from tests.support.ledger import dead, ledger, waiting
from tests.support.limits import FOLLOW_ON, with_limits
from tests.support.scripts import behind_commit, change_scripts, text_of

JOBS = 60
OWNER = UUID(int=7)
# A half are ready, and one in a hundred is a suspect; the relays of every other one of these have died twice.
FILL = """\
INSERT INTO outboxq.job (id, queue, kind, args, state, run_at, errors)
SELECT gen_random_uuid(), 'mine', 'kind', '{}',
  CASE WHEN n % 2 = 0 THEN 'ready' WHEN n % 100 = 1 THEN 'suspect' ELSE 'scheduled' END, now(),
  CASE WHEN n % 200 = 1 THEN '[{"type": "outboxq.RelayDied"}, {"type": "outboxq.RelayDied"}]' ELSE '[]' END::jsonb
FROM generate_series(1, 100000) AS n ORDER BY random()"""
INDEXES = {
    "ready": "job_ready",
    "due": "job_scheduled",
    "lease_ready": "job_ready",
    "lease_due": "job_scheduled",
    "lease_suspect": "job_suspect",
    "lease_suspects_in_company": "job_suspect",
    "lease_suspect_alone": "job_suspect",
}
# Of suspects, every other one is passed over.
PASSED = {"lease_suspects_in_company": 200, "lease_suspect_alone": 200}
UNLIMITED, SLOTS, COUNTED = (
    ClaimStatements("outboxq", "mine", OWNER, most=most, counts_leases=counts)
    for most, counts in ((None, False), (5, False), (5, True))
)
CURSOR = Cursor(0, 30_000)
CASES = [
    *((UNLIMITED, "ready", limit, cursor) for limit in (1, 50, 500) for cursor in (None, CURSOR)),
    *((UNLIMITED, "due", limit, None) for limit in (1, 50, 500)),
    *((UNLIMITED, sort, 50, None) for sort in ("lease_ready", "lease_due", "lease_suspect", *PASSED)),
    *((claims, sort, 200, None) for claims in (UNLIMITED, COUNTED) for sort in ("lease_ready", "lease_due")),
    *((SLOTS, sort, 50, None) for sort in ("ready", "due", "lease_suspect")),
    *(
        (COUNTED, sort, limit, None)
        for sort in ("lease_ready", "lease_due", "lease_suspect", *PASSED)
        for limit in (1, 50)
    ),
]


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each claim that came with a COMMIT, whether it was executed by its name."""
    found: list[bool] = []

    def note(script: Script) -> None:
        sent = text_of(script)
        if behind_commit(script) is not None and ("FOR UPDATE SKIP LOCKED" in sent or "EXECUTE" in sent):
            found.append("EXECUTE" in sent)

    change_scripts(monkeypatch, note)
    return found


def enqueue(sessions: sessionmaker[OutboxSession], jobs: Jobs) -> list[str]:
    names = [f"job {number}" for number in range(JOBS)]
    kind = jobs.resolve().find("record")
    with sessions.begin() as session:
        session.add_jobs([kind.job(name=name) for name in names])
    return names


def recording(also: Callable[[Context, str], None]) -> Jobs:
    """A registry whose only handler records its job, and does this too."""
    jobs = Jobs()

    @jobs.handler(queue="ledger", kind="record")
    def record(ctx: Context, name: str) -> None:
        ctx.session.add(Effect(name=name))
        also(ctx, name)

    return jobs


def drain(target: str | Engine, jobs: Jobs, batch_size: int) -> None:
    config = RelayConfig(slots_per_queue=1, batch_size=batch_size)
    with_limits(Relay(target, jobs, config), FOLLOW_ON).drain()


@pytest.mark.large
def test_a_claim_that_was_prepared_for_an_empty_table_walks_its_index_in_a_large_one(engine: Engine) -> None:
    """For exactly the jobs that it takes, and not compiled. With the planner as the server has it, this plan would read
    everything."""
    with engine.connect() as connection:
        with connection.begin():
            connection.execute(text("ALTER TABLE outboxq.job SET (autovacuum_enabled = off)"))
            connection.execute(text("ANALYZE outboxq.job"))
            # As low as it is for a table of millions, where a claim is reckoned to want a tenth of them.
            connection.execute(text("SET jit_above_cost = 1000"))
            connection.execute(text("INSERT INTO outboxq.relay VALUES (:id, now() + interval '1 day')"), {"id": OWNER})
        with connection.begin():
            for script in {script_of(claims, sort, limit) for claims, sort, limit, _ in CASES}:
                run_script(connection, script.texts.definition, *execution(script, 1))
        with connection.begin():
            connection.execute(text(FILL))
        for analyze in ("SELECT", "ANALYZE outboxq.job"):
            with connection.begin():
                connection.execute(text(analyze))
            for claims, sort, limit, cursor in CASES:
                nodes = explained(connection, *execution(script_of(claims, sort, limit), limit, cursor))
                case = analyze, sort, limit, cursor, nodes
                scanned = {node["Node Type"] for node in nodes if node.get("Relation Name", "job") == "job"}
                assert scanned.isdisjoint({"Sort", "Incremental Sort", "Seq Scan"}), case
                walks = [node for node in nodes if node.get("Index Name") in INDEXES.values() and node["Actual Loops"]]
                # Leased jobs, which a limit counts, are found by an index that is not listed.
                assert [node["Index Name"] for node in walks] == [INDEXES[sort]], case
                # The limit of COUNTED has room for as many.
                taken = min(limit, claims.most or limit) if claims is COUNTED else limit
                assert walks[0]["Actual Rows"] == taken, case
                assert walks[0].get("Rows Removed by Filter", 0) <= PASSED.get(sort, 0), case
                # A count visits what the claims before it leased, some hundred rows, until vacuum takes them.
                bound = (400 if claims is COUNTED else 100) + 30 * limit
                assert nodes[0]["Shared Hit Blocks"] + nodes[0]["Shared Read Blocks"] < bound, case
                # Once.
                counts = [node for node in nodes if node.get("Index Name") == "job_leased"]
                assert len(counts) == (claims is COUNTED), case


def script_of(claims: ClaimStatements, sort: str, limit: int) -> ClaimScript:
    script: ClaimScript = getattr(claims, sort)
    return script.for_limit(limit)


def execution(script: ClaimScript, limit: int, cursor: Cursor | None = None) -> list[str]:
    server = ServerSession(claims=PreparedStatements())
    server.claims.succeeded(script.name)
    return [statement for _, statement in script.parts(limit, cursor, server)]


def explained(connection: Connection, *execution: str) -> list[dict[str, object]]:
    explain = [each.replace("EXECUTE", "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE") for each in execution]
    with connection.begin() as transaction:
        answer = run_script(connection, *explain)[-1][0]
        transaction.rollback()
    (plan,) = json.loads(answer) if isinstance(answer, str) else answer
    assert "JIT" not in plan
    found: list[dict[str, object]] = []
    pending = [plan["Plan"]]
    while pending:
        node = pending.pop(0)
        found.append(node)
        pending += node.get("Plans", [])
    return found


@pytest.mark.large
def test_a_handler_finds_the_planner_as_the_server_has_it(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database, engine: Engine
) -> None:
    """What is set for the claim ends with it."""
    seen: set[str] = set()
    settings = text(
        "SELECT string_agg(name || '=' || setting, ' ' ORDER BY name) FROM pg_settings "
        "WHERE name IN ('enable_sort', 'enable_seqscan', 'jit', 'plan_cache_mode')"
    )

    def look(ctx: Context, _name: str) -> None:
        seen.add(str(ctx.session.scalar(settings)))

    jobs = recording(look)
    expected = enqueue(sessions, jobs)
    drain(outboxq_database.url, jobs, 1)
    with engine.connect() as connection:
        assert seen == {connection.scalar(settings)}
    assert ledger(engine) == Counter(expected)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_claims_are_executed_by_name(
    batch_size: int,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    engine: Engine,
    executed: list[bool],
) -> None:
    """All of them, once they are prepared."""
    jobs = recording(lambda _ctx, _name: None)
    names = enqueue(sessions, jobs)
    drain(outboxq_database.url, jobs, batch_size)
    assert ledger(engine) == Counter(names)
    assert len(executed) >= JOBS // batch_size - 1
    assert all(executed)


@pytest.mark.each_value
@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("losses", [1, 2])
def test_a_driver_that_lets_go_of_all_statements_costs_no_job(
    losses: int,
    batch_size: int,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    engine: Engine,
    executed: list[bool],
) -> None:
    """As it does after each failed attempt: prepared again, and sent as text for a while after two losses in a row."""

    def forget(ctx: Context, name: str) -> None:
        if name in ("job 20", "job 25")[:losses]:
            # So often that it prepares it: otherwise it has nothing to let go of.
            for statement in ["SELECT 1"] * 7 + ["SAVEPOINT own", "ROLLBACK TO SAVEPOINT own"]:
                ctx.session.execute(text(statement))
            prepared = text("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'outboxq%'")
            lost.append(ctx.session.scalar(prepared) == 0)

    lost: list[bool] = []
    jobs = recording(forget)
    names = enqueue(sessions, jobs)
    drain(outboxq_database.url, jobs, batch_size)
    assert ledger(engine) == Counter(names)
    assert (waiting(engine), dead(engine)) == (0, 0)
    assert lost == [True] * losses
    assert (False in executed) is (losses == 2)
    # With five jobs a claim, too few claims come after the losses.
    assert executed[-1] is (losses == 1 or batch_size == 1)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_a_handler_that_lets_go_of_claims_costs_no_job(
    batch_size: int, sessions: sessionmaker[OutboxSession], outboxq_database: Database, engine: Engine
) -> None:
    """Its slot goes on with another connection, and prepares them anew."""

    def forget(ctx: Context, name: str) -> None:
        if name in ("job 20", "job 40"):
            # Not the driver's, which would be missed, and whose jobs would fail for it.
            prepared = text("SELECT name FROM pg_prepared_statements WHERE name LIKE 'outboxq%'")
            for statement in ctx.session.scalars(prepared).all():
                ctx.session.execute(text(f"DEALLOCATE {statement}"))

    jobs = recording(forget)
    names = enqueue(sessions, jobs)
    drain(outboxq_database.url, jobs, batch_size)
    assert ledger(engine) == Counter(names)
    assert (waiting(engine), dead(engine)) == (0, 0)


def test_nothing_is_prepared_where_the_driver_shall_prepare_nothing(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database, engine: Engine, executed: list[bool]
) -> None:
    """As it is set behind a transaction pooler."""
    jobs = recording(lambda _ctx, _name: None)
    names = enqueue(sessions, jobs)
    own = create_engine(outboxq_database.url, connect_args={"prepare_threshold": None})
    drain(own, jobs, 1)
    own.dispose()
    assert ledger(engine) == Counter(names)
    assert not any(executed)


def test_a_name_that_is_taken_is_used(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database, engine: Engine, executed: list[bool]
) -> None:
    """One name stands for one text, whoever prepared it: an earlier try, or another client of a pooler."""
    script = ClaimStatements("outboxq", "ledger").ready
    own = create_engine(outboxq_database.url)

    @event.listens_for(own, "connect")
    def prepare(connection: object, _record: object) -> None:
        connection.cursor().execute(script.texts.definition)  # type: ignore[attr-defined]  # the driver's cursor
        connection.commit()  # type: ignore[attr-defined]

    jobs = recording(lambda _ctx, _name: None)
    names = enqueue(sessions, jobs)
    drain(own, jobs, 1)
    own.dispose()
    assert ledger(engine) == Counter(names)
    assert executed[-1]


def test_a_table_that_changes_below_a_prepared_claim_stops_nothing(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database, engine: Engine
) -> None:
    """An upgrade beside running relays: PostgreSQL refuses a plan whose columns have other types by now."""
    jobs = recording(lambda _ctx, _name: None)
    names = enqueue(sessions, jobs)
    server, script = ServerSession(claims=PreparedStatements()), ClaimStatements("outboxq", "ledger").ready
    with engine.connect() as connection:
        with connection.begin() as transaction:
            request = ClaimRequest(script, 1, server=server)
            assert claim(connection, request).jobs
            transaction.rollback()
        with engine.begin() as other:
            other.execute(text("ALTER TABLE outboxq.job ALTER COLUMN max_attempts TYPE bigint"))
        request = ClaimRequest(script, 1, server=server)
        with pytest.raises(Exception, match="cached plan") as caught, connection.begin():
            claim(connection, request)
        assert request.failed(caught.value)
        with connection.begin() as transaction:
            assert claim(connection, ClaimRequest(script, 1, server=server)).jobs
            transaction.rollback()
    drain(outboxq_database.url, jobs, 1)
    assert ledger(engine) == Counter(names)


def prepared_here(connection: Connection) -> int:
    counted = text("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'outboxq%'")
    return int(connection.execute(counted).scalar_one())


@pytest.mark.large
def test_a_backend_keeps_as_many_claims_for_a_hundred_queues_as_for_one(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """Each is some 200 kB in the server: they are for any queue and limit, which come with the execution."""
    jobs, seen = Jobs(), []

    def count(ctx: Context) -> None:
        seen.append(prepared_here(ctx.session.connection()))

    kinds = [jobs.handler(queue=f"queue {number}", kind=f"kind {number}")(count) for number in range(100)]
    with sessions.begin() as session:
        session.add_jobs(kind.job() for kind in kinds * 2)
    with_limits(Relay(outboxq_database.url, jobs, RelayConfig(groups=(SlotGroup(("*",)),))), FOLLOW_ON).drain()
    assert len(seen) == 200
    assert max(seen) <= 4


def test_a_claim_that_fails_leaves_all_claims_prepared(engine: Engine) -> None:
    """It is rolled back by a statement: the driver's own rollback would drop them."""
    server, claims = ServerSession(claims=PreparedStatements()), ClaimStatements("outboxq", "ledger")
    with engine.connect() as connection:
        with connection.begin():
            # So often that the driver prepares it: otherwise it has nothing to drop.
            for _ in range(7):
                connection.execute(text("SELECT 1"))
            claim(connection, ClaimRequest(claims.ready, 1, server=server))
        with pytest.raises(DivisionByZero), connection.begin():
            claim(connection, ClaimRequest(replace(claims.due, queue="(1 / 0)::text"), 1, server=server))
        assert prepared_here(connection) == 2


@pytest.mark.parametrize(("mode", "most"), [("transaction", 6), ("lease", 12)])
def test_a_connection_prepares_twelve_claims_at_most(engine: Engine, mode: str, most: int) -> None:
    """One for each sort with a limit of the queue and one without, shared by all queues, batch sizes and starts.

    Under a lease of ready and due jobs another one, for many at a time.
    """
    server, is_leasing = ServerSession(claims=PreparedStatements()), mode == "lease"
    sorts = ("lease_ready", "lease_due", *PASSED) if is_leasing else ("ready", "due", "lease_suspect")
    with engine.connect() as connection:
        for number, running in enumerate((None, 1, 2, None)):
            claims = ClaimStatements("outboxq", f"queue {number}", OWNER, most=running, counts_leases=is_leasing)
            for sort in sorts:
                for limit, cursor in ((1, None), (7, None), (7, CURSOR), (16 if "suspect" in sort else 200, None)):
                    with connection.begin():
                        claim(connection, ClaimRequest(getattr(claims, sort), limit, cursor, server=server))
        assert prepared_here(connection) == most
