"""Functions and operators of our statements are PostgreSQL's own, whatever stands beside them in `public`."""

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import Connection, Engine, Executable, Text, bindparam, create_engine, text, update
from sqlalchemy.orm import Session

from outboxq import (
    Backoff,
    Context,
    DeadLetter,
    Inbox,
    Jobs,
    OutboxSession,
    RelayConfig,
    Snooze,
    add_job,
    doctor,
    external,
    find_job,
)
from outboxq.admin import queues
from outboxq.admin.dead_letters import DeadFilter, discard_page, list_dead, retry_page
from outboxq.admin.effects import EffectFilter, list_effects, show_effect
from outboxq.admin.jobs import JobFilter, cancel_jobs, list_jobs
from outboxq.admin.messages import MessageFilter, forget_messages, list_messages
from outboxq.admin.stats import collect_stats
from outboxq.database.driver import run_script
from outboxq.events import JobsParked, Pruned
from outboxq.migrations.runner import migrate, migrate_committing, migration_sql
from outboxq.postgres import Server
from tests.conftest import StartRelay
from tests.support import app
from tests.support.citus import stand_in
from tests.support.overloads import looted, make_overloads
from tests.support.parsed_sql import Names, queries
from tests.support.statements import all_statements, compiled_text
from tests.support.urls import libpq_url
from tests.support.waiting import wait_until

FIRST_OID_OF_USERS = 16_384


@pytest.fixture(scope="module")
def hostile(outboxq_server: Server) -> Iterator[Engine]:
    """A database that was migrated when better-matching overloads of all that we name stood in its `public`."""
    named = [Names(compiled_text(statement)) for _, statement, _ in all_statements()]
    migrations = migration_sql()
    with outboxq_server.create_database() as database:
        # What SQLAlchemy and psycopg ask the catalogs on their own is not ours.
        engine = create_engine(database.url, connect_args={"prepare_threshold": None}, use_native_hstore=False)
        app.Base.metadata.create_all(engine)
        make_overloads(
            libpq_url(database.url),
            {operator for names in named for operator in names.operators}
            | set(re.findall(r" ([-+*/<>=~!@#%^&|?]+) ", migrations)),
            {(name[-1], arity) for names in named for name, arity in names.calls}
            | {(name, arity) for name in re.findall(r"(?<![.\w])([a-z_0-9]+)\(", migrations) for arity in range(1, 6)},
        )
        with engine.connect() as connection:
            migrate_committing(connection)
        yield engine
        engine.dispose()


@pytest.mark.wide
def test_every_statement_is_resolved_to_postgresqls_own(hostile: Engine) -> None:
    """By the trees that the server makes of them: also what stands where no row comes by."""
    theirs: dict[str, set[int]] = {}
    # Some statements are for Citus alone.
    stand_in(hostile.url.render_as_string(hide_password=False))
    with hostile.connect() as connection:
        trees = read_trees(connection)
        for where, statement, parameters in all_statements():
            # What stands between them, SET LOCAL or COMMIT, names nothing.
            parts = queries(statement) if isinstance(statement, str) else (statement,)
            trees.clear()
            with connection.begin_nested() as savepoint:
                for part in parts:
                    execute(connection, part, parameters)
                savepoint.rollback()
            assert len(trees) >= len(parts), f"{where}: the server has shown nothing"
            if found := user_oids(trees):
                theirs[where] = theirs.get(where, set()) | found
        connection.execute(text("SET debug_print_parse = off"))
        assert {where: signatures(connection, oids) for where, oids in theirs.items()} == {}


@pytest.mark.large
def test_the_whole_way_of_a_job_calls_nothing_else(hostile: Engine, start_relay: StartRelay) -> None:
    """From the migration to the dead letters, in both modes, with what operators do: the loot stays empty."""
    jobs, kinds = handlers()
    enqueue(hostile, kinds)
    config = RelayConfig(slots_per_queue=1, batch_size=5, heartbeat_seconds=0.2, prune_seconds=1, max_crashes=2)
    with start_relay(jobs, config, engine=hostile.url.render_as_string(hide_password=False)) as relay:
        wait_until(lambda: relay.of(JobsParked) and waiting(hostile) == WAITING, "the jobs to come to their ends")
        # The relay sleeps by now, and is woken.
        with Session(hostile) as session, session.begin():
            add_job(session, kinds["credit"], account=session.get_one(app.Account, 1), cents=1)
            session.execute(text("SELECT outboxq.add_job('record', '{\"name\": \"woken\"}', queue => 'plain')"))
        wait_until(lambda: waiting(hostile) == WAITING, "what woke the relay to be done")
        wait_until(lambda: relay.of(Pruned), "what has expired to be pruned")
    operate(hostile)
    with hostile.connect() as connection:
        migrate(connection)
        connection.rollback()
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        assert looted(driver) == []
        assert kept_from_public(connection) == []


# What waits at the end: of an unknown kind, snoozed, and put off.
WAITING = ["later", "nobody knows", "snooze"]


def handlers() -> tuple[Jobs, dict[str, Any]]:
    """Handlers in transaction mode, in shared batches and under a lease, with every outcome."""
    jobs = Jobs()
    quick = Backoff(max_attempts=2, first_seconds=0.0, jitter=0.0)

    @jobs.handler(queue="plain", retry=quick)
    def record(ctx: Context, name: str) -> None:
        Inbox("record").accept(ctx.session, name, payload=name)
        ctx.session.add(app.Effect(name=name))

    @jobs.handler(queue="plain", retry=quick)
    def later(ctx: Context) -> None: ...

    @jobs.handler(queue="plain", retry=quick)
    def snooze(ctx: Context) -> Snooze:
        return Snooze(timedelta(hours=1))

    @jobs.handler(queue="plain", retry=quick)
    def fail(ctx: Context) -> None:
        raise ValueError("no luck")

    @jobs.handler(queue="shared", retry=quick, batchable=True)
    def credit(ctx: Context, account: app.Account, cents: int) -> None:
        account.balance += cents
        ctx.defer(DEFERRED, {"of_row": account.id, "new_name": "seen"})

    @jobs.handler(queue="leased", retry=quick, claim="lease")
    def call(ctx: Context, name: str) -> None:
        ctx.once("call", key=name, call=lambda _: None)
        if name == "retry" and ctx.job.attempt == 1:
            raise ValueError("once more")

    @jobs.handler(queue="leased", retry=quick, claim="lease")
    def fail_leased(ctx: Context) -> DeadLetter:
        return DeadLetter("cannot be done")

    return jobs, {kind.kind: kind for kind in (record, later, snooze, fail, credit, call, fail_leased)}


DEFERRED = (
    update(app.Effect).where(app.Effect.row == bindparam("of_row")).values(name=bindparam("new_name", type_=Text()))
)


def enqueue(engine: Engine, kinds: dict[str, Any]) -> None:
    """Alone, many at once, with an entity that has no key yet, by the SQL function; and what dead relays left."""
    with OutboxSession(engine) as session, session.begin():
        session.add_job(kinds["record"], name="alone")
        session.add_jobs(kinds["record"].job(name=f"many {number}") for number in range(3))
        session.add_job(kinds["later"].options(delay=timedelta(hours=1)))
        for kind in ("snooze", "fail", "fail_leased"):
            session.add_job(kinds[kind])
        session.add_jobs(kinds["call"].job(name=name) for name in ("well", "retry", "well"))
        for _ in range(3):
            account = app.Account(balance=0)
            session.add(account)
            session.add_job(kinds["credit"], account=account, cents=1)
        session.add_job(external("nobody knows", queue="plain"))
        for crashes in (0, 2):
            parameters = {"id": uuid4(), "owner": uuid4(), "crashes": crashes, "args": f'{{"name": "lost {crashes}"}}'}
            session.execute(LOST, parameters)
        assert Inbox("tests", retention=timedelta(seconds=1)).accept(session, "old")


LOST = text(
    "INSERT INTO outboxq.job (id, queue, kind, args, state, crashes, lease_owner) "
    "VALUES (:id, 'plain', 'record', CAST(:args AS jsonb), 'leased', :crashes, :owner)"
)


def waiting(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT kind FROM outboxq.job ORDER BY kind")).scalars())


def operate(engine: Engine) -> None:
    """What operators ask for and change."""
    found = doctor.run_checks(lambda: engine.connect(), schema="outboxq")
    assert not [finding for finding in found if finding.code == "check-not-made"], found
    with engine.connect() as connection:
        collect_stats(connection)
        dead = list_dead(connection)
        assert sorted(job.kind for job in dead) == ["fail", "fail_leased", "record"]
        assert retry_page(connection, DeadFilter(queue="plain", kind="fail", reason="OF 2")).changed
        assert discard_page(connection, DeadFilter(queue="leased")).changed
        listed = list_jobs(connection, JobFilter(queue="plain"))
        assert find_job(connection, listed[0].id) is not None
        assert cancel_jobs(connection, [listed[0].id])
        assert queues.pause(connection, ["plain"]) == queues.resume(connection, ["plain"])
        assert queues.list_queues(connection)
        (effect, _) = list_effects(connection, EffectFilter(status="done"))
        show_effect(connection, effect.scope, effect.key)
        (message, *_) = list_messages(connection, MessageFilter(consumer="record"))
        forget_messages(connection, message.consumer, [message.message_id])
        connection.rollback()


def kept_from_public(connection: Connection) -> list[str]:
    """What defaults, indexes, checks and triggers have of `public`, to be called with each row that is written."""
    connection.execute(text("SET LOCAL search_path = pg_catalog"))
    kept = text(
        "SELECT pg_describe_object(classid, objid, objsubid) || ': ' || pg_describe_object(refclassid, refobjid, 0) "
        "FROM pg_depend WHERE classid NOT IN ('pg_proc'::regclass, 'pg_operator'::regclass) AND ("
        "refobjid IN (SELECT oid FROM pg_proc WHERE pronamespace = 'public'::regnamespace) "
        "OR refobjid IN (SELECT oid FROM pg_operator WHERE oprnamespace = 'public'::regnamespace))"
    )
    return list(connection.execute(kept).scalars())


def test_a_migration_leaves_its_callers_search_path_as_it_was(outboxq_server: Server) -> None:
    """The rest of the transaction, and of the session, finds its own tables again."""
    with outboxq_server.create_database() as database:
        engine = create_engine(database.url)
        with engine.connect() as connection:
            connection.execute(text('SET search_path = "$user", public'))
            connection.commit()
            connection.execute(text("SET LOCAL search_path = app, public"))
            migrate(connection)
            assert connection.execute(text("SHOW search_path")).scalar() == "app, public"
            migrate(connection, to=0)
            assert connection.execute(text("SHOW search_path")).scalar() == "app, public"
            connection.commit()
            assert connection.execute(text("SHOW search_path")).scalar() == '"$user", public'
        engine.dispose()


def read_trees(connection: Connection) -> list[str]:
    """What the server makes of each statement from now on, as it is sent."""
    trees: list[str] = []
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    driver.add_notice_handler(lambda notice: trees.append(notice.message_detail or ""))
    connection.execute(text("SET debug_print_parse = on; SET debug_pretty_print = off; SET client_min_messages = log"))
    return trees


def execute(connection: Connection, statement: Executable | str, parameters: Mapping[str, object]) -> None:
    """As it is sent."""
    if not isinstance(statement, str):
        connection.execute(statement, parameters)
        return
    run_script(connection, statement)
    if statement.startswith("PREPARE"):
        run_script(connection, "DEALLOCATE ALL")


def user_oids(trees: Iterable[str]) -> set[int]:
    """Of the functions and operators in these trees, those that PostgreSQL does not bring along."""
    # The server breaks lines where a space is.
    one = re.compile(r":(?:opno|funcid|aggfnoid|winfnoid)\s+(\d+)")
    row = re.compile(r":opnos\s+\(o\s+([\d\s]+)\)")
    found = {int(oid) for tree in trees for oid in [*one.findall(tree), *" ".join(row.findall(tree)).split()]}
    return {oid for oid in found if oid >= FIRST_OID_OF_USERS}


def signatures(connection: Connection, oids: set[int]) -> list[str]:
    found = text(
        "SELECT oid::pg_catalog.regoperator::text FROM pg_catalog.pg_operator "
        "WHERE oid OPERATOR(pg_catalog.=) ANY (CAST(:oids AS oid[])) "
        "UNION ALL SELECT oid::pg_catalog.regprocedure::text FROM pg_catalog.pg_proc "
        "WHERE oid OPERATOR(pg_catalog.=) ANY (CAST(:oids AS oid[])) ORDER BY 1"
    )
    return list(connection.execute(found, {"oids": sorted(oids)}).scalars())
