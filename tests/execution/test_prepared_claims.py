"""Claims are prepared once for each connection, planned for their indexes, and sent as text where that is lost."""

import json
from collections import Counter
from collections.abc import Callable

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.orm import sessionmaker

from outboxq import Context, Jobs, OutboxSession, Relay, RelayConfig, SlotGroup
from outboxq.database.driver import Script, run_script
from outboxq.execution.claim import ClaimRequest, claim
from outboxq.execution.prepared import PREPARED_MOST, PreparedStatements
from outboxq.postgres import Database
from outboxq.statements.claim import ClaimScript, ClaimStatements, Cursor, PreparedClaim
from tests.support.app import Effect
from tests.support.ledger import dead, ledger, waiting
from tests.support.limits import FOLLOW_ON, with_limits
from tests.support.scripts import behind_commit, change_scripts, text_of

JOBS = 60
FILL = """\
INSERT INTO outboxq.job (id, queue, kind, args, state, run_at)
SELECT gen_random_uuid(), 'mine', 'kind', '{}', CASE WHEN n % 2 = 0 THEN 'ready' ELSE 'scheduled' END, now()
FROM generate_series(1, :count) AS n ORDER BY random()"""


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


@pytest.mark.each_value
@pytest.mark.parametrize(("before", "limit"), [(0, 10), (1_500, 500)], ids=["empty", "small"])
@pytest.mark.parametrize(
    ("sort", "cursor"), [("ready", None), ("ready", Cursor(0, 1)), ("due", None)], ids=["start", "behind", "due"]
)
def test_a_claim_that_was_prepared_for_a_small_table_walks_its_index_in_a_large_one(
    sort: str, cursor: Cursor | None, before: int, limit: int, engine: Engine
) -> None:
    """With the planner as the server has it, this very plan would be one that reads, or sorts, everything."""
    with engine.connect() as connection, connection.begin():
        connection.execute(text("ALTER TABLE outboxq.job SET (autovacuum_enabled = off)"))
        connection.execute(text(FILL), {"count": before})
        connection.execute(text("ANALYZE outboxq.job"))
    script: ClaimScript = getattr(ClaimStatements("outboxq", "mine"), sort)
    prepared = script.prepared(limit, behind=cursor is not None)
    with engine.connect() as connection:
        with connection.begin():
            run_script(connection, prepared.definition, *sent_by(prepared, cursor))
            connection.execute(text(FILL), {"count": 50_000})
        nodes = explained(connection, *sent_by(prepared, cursor))
        with connection.begin():
            run_script(connection, "DEALLOCATE ALL")
    assert {node["Node Type"] for node in nodes}.isdisjoint({"Sort", "Seq Scan"})
    assert nodes[0]["Shared Hit Blocks"] + nodes[0]["Shared Read Blocks"] < 30 * limit
    walks = {node.get("Index Name") for node in nodes if node["Actual Loops"]}
    assert walks >= {"job_pkey", "job_ready" if sort == "ready" else "job_scheduled"}


def sent_by(prepared: PreparedClaim, cursor: Cursor | None) -> list[str]:
    return [statement for _, statement in prepared.statements(cursor)]


def explained(connection: Connection, *execution: str) -> list[dict[str, object]]:
    explain = [each.replace("EXECUTE", "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE") for each in execution]
    with connection.begin() as transaction:
        rows = run_script(connection, *explain)
        transaction.rollback()
    plan = rows[0][0]
    found: list[dict[str, object]] = []
    pending = [(json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]]
    while pending:
        node = pending.pop(0)
        found.append(node)
        pending += node.get("Plans", [])
    return found


def test_a_handler_finds_the_planner_as_the_server_has_it(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database, engine: Engine
) -> None:
    """What is set for the claim ends with it."""
    seen: set[tuple[str, ...]] = set()
    names = ("enable_sort", "enable_seqscan", "plan_cache_mode")

    def look(ctx: Context, _name: str) -> None:
        seen.add(tuple(str(ctx.session.scalar(text(f"SHOW {name}"))) for name in names))

    jobs = recording(look)
    expected = enqueue(sessions, jobs)
    drain(outboxq_database.url, jobs, 1)
    assert seen == {("on", "on", "auto")}
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
@pytest.mark.parametrize("lost_after", ["each", "some"])
def test_a_driver_that_lets_go_of_all_statements_costs_no_job(
    lost_after: str,
    batch_size: int,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    engine: Engine,
    executed: list[bool],
) -> None:
    """As it does after each rollback to a savepoint: prepared anew. Where it happens all the time, sent as text."""

    def forget(ctx: Context, name: str) -> None:
        if lost_after == "each" or name in ("job 20", "job 40"):
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
    assert all(lost)
    assert executed[-1] is (lost_after == "some")


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
        for behind in (False, True):
            connection.cursor().execute(script.prepared(1, behind=behind).definition)  # type: ignore[attr-defined]  # the driver's cursor
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
    prepared, script = PreparedStatements(), ClaimStatements("outboxq", "ledger").ready
    with engine.connect() as connection:
        with connection.begin() as transaction:
            request = ClaimRequest(script, 1, prepared=prepared)
            assert claim(connection, request).jobs
            transaction.rollback()
        with engine.begin() as other:
            other.execute(text("ALTER TABLE outboxq.job ALTER COLUMN max_attempts TYPE bigint"))
        request = ClaimRequest(script, 1, prepared=prepared)
        with pytest.raises(Exception, match="cached plan") as caught, connection.begin():
            claim(connection, request)
        assert request.failed(caught.value)
    drain(outboxq_database.url, jobs, 1)
    assert ledger(engine) == Counter(names)


def prepared_here(connection: Connection) -> int:
    counted = text("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'outboxq%'")
    return int(connection.execute(counted).scalar_one())


def test_a_backend_keeps_as_many_claims_for_a_hundred_queues_as_for_one(
    sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """Each is some 200 kB in the server: they are for any queue, which comes with the execution."""
    jobs, seen = Jobs(), []

    def count(ctx: Context) -> None:
        seen.append(prepared_here(ctx.session.connection()))

    kinds = [jobs.handler(queue=f"queue {number}", kind=f"kind {number}")(count) for number in range(100)]
    with sessions.begin() as session:
        session.add_jobs(kind.job() for kind in kinds * 2)
    with_limits(Relay(outboxq_database.url, jobs, RelayConfig(groups=(SlotGroup(("*",)),))), FOLLOW_ON).drain()
    assert len(seen) == 200
    assert max(seen) <= 4


def test_a_backend_lets_go_of_the_claims_that_were_not_used_for_longest(engine: Engine) -> None:
    """Each limit of a claim is a statement of its own, and there may be a thousand."""
    prepared, script = PreparedStatements(), ClaimStatements("outboxq", "mine").ready
    most = PREPARED_MOST
    # The oldest of those that are left, used once more; then another one.
    oldest, another = 2 * most, 1
    with engine.connect() as connection:
        for limit in [*range(1, 3 * most), oldest, another]:
            with connection.begin():
                request = ClaimRequest(script, limit, prepared=prepared)
                claim(connection, request)
                assert prepared_here(connection) <= most
        with connection.begin():
            assert prepared_here(connection) == most
            ours = text("SELECT name FROM pg_prepared_statements WHERE name LIKE 'outboxq%'")
            names = set(connection.execute(ours).scalars())
            run_script(connection, "DEALLOCATE ALL")
    left = (oldest, *range(oldest + 2, 3 * most), another)
    assert names == {script.prepared(limit, behind=False).name for limit in left}
