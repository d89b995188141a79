"""The roles of `outboxq roles --sql`: each can do what it is for; what each is refused is in `test_role_matrix.py`."""

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import Engine, create_engine, make_url
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, Relay, RelayConfig, external
from outboxq.admin.roles import PARTS, RIGHTS, Part, roles_sql
from outboxq.cli.roles import rights_in_words
from outboxq.effects.api import Effects
from outboxq.errors import CallRefused, EffectFailed
from outboxq.events import Event, JobDied, JobDone, JobRetried, JobSnoozed, JobsParked
from outboxq.inbox import Inbox
from outboxq.migrations import LATEST
from outboxq.migrations.runner import migrate
from outboxq.postgres import Database, Server
from outboxq.statements.prune import delete_effects, delete_messages
from tests.support import app
from tests.support.cli import Outcome, call
from tests.support.urls import libpq_url
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Cast:
    """A login role for each part, which has its rights through a group, as users would do it."""

    database: Database
    groups: Mapping[Part, str]
    password: str

    def apply(self) -> None:
        """Run what `outboxq roles --sql` prints."""
        options = [word for part, name in self.groups.items() for word in (f"--{part.replace('_', '-')}", name)]
        with psycopg.connect(libpq_url(self.database.url), autocommit=True) as connection:
            connection.execute(call("roles", "--sql", *options).ok().stdout)

    def url(self, part: Part) -> str:
        url = make_url(self.database.url).set(username=login(self.groups[part]), password=self.password)
        return url.render_as_string(hide_password=False)

    def refuses(self, part: Part, *statements: str) -> None:
        with psycopg.connect(libpq_url(self.url(part)), autocommit=True) as connection:
            for statement in statements:
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(statement)

    def call(self, part: Part, *words: object) -> Outcome:
        return call(*words, url=self.url(part))


def login(group: str) -> str:
    return f"{group}_login"


@pytest.fixture
def roles(outboxq_database: Database, outboxq_server: Server) -> Iterator[Cast]:
    """Groups and logins of this test's own, with the rights that the SQL gives, and no others."""
    unique = secrets.token_hex(4)
    cast = Cast(outboxq_database, {part: f'oq_{part}"{unique}' for part in PARTS}, secrets.token_hex(12))
    with dropped_roles(outboxq_database, cast.groups.values()):
        cast.apply()
        with psycopg.connect(libpq_url(outboxq_database.url), autocommit=True) as connection:
            for group in cast.groups.values():
                connection.execute(
                    sql.SQL("CREATE ROLE {} LOGIN PASSWORD {} IN ROLE {}").format(
                        sql.Identifier(login(group)), sql.Literal(cast.password), sql.Identifier(group)
                    )
                )
        yield cast


@contextmanager
def dropped_roles(database: Database, groups: Iterable[str]) -> Iterator[None]:
    """Drop groups and their logins at the end, while the database that holds their rights is there."""
    try:
        yield
    finally:
        with psycopg.connect(libpq_url(database.url), autocommit=True) as connection:
            for group in groups:
                for name in (login(group), group):
                    if connection.execute("SELECT FROM pg_roles WHERE rolname = %s", (name,)).fetchone() is not None:
                        connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
                        connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


@contextmanager
def role_engine(url: str) -> Iterator[Engine]:
    engine = create_engine(url)
    try:
        yield engine
    finally:
        engine.dispose()


def grant_application(database: Database, group: str) -> None:
    """The application's own tables: what handlers, and the producers' business transactions, need besides."""
    with psycopg.connect(libpq_url(database.url), autocommit=True) as connection:
        for statement in (
            "GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA public TO {}",
            "GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {}",
        ):
            connection.execute(sql.SQL(statement).format(sql.Identifier(group)))


def test_a_producer_enqueues_and_does_nothing_else(roles: Cast, engine: Engine) -> None:
    """Plain jobs, bulk, jobs that wait for a new entity's key, and SQL's add_job; nothing can be read or taken back."""
    grant_application(roles.database, roles.groups["producer"])
    with psycopg.connect(libpq_url(roles.database.url)) as connection:
        # Where functions are nobody's unless they are granted.
        connection.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA outboxq FROM PUBLIC")
    with (
        role_engine(roles.url("producer")) as producer,
        sessionmaker(producer, class_=OutboxSession).begin() as session,
    ):
        session.add_job(app.record, name="one")
        session.add_jobs(app.record.job(name=f"many {number}") for number in range(3))
        account = app.Account()
        session.add(account)
        session.add_job(app.credit, account=account, cents=5)
    with psycopg.connect(libpq_url(roles.url("producer"))) as connection:
        connection.execute("""SELECT outboxq.add_job('record', '{"name": "by SQL"}', 'ledger')""")
    assert roles.call("reader", "stats", "--json").json["queues"][0]["ready"] == 6
    roles.refuses(
        "producer",
        "SELECT FROM outboxq.job",
        "DELETE FROM outboxq.job",
        "UPDATE outboxq.job SET priority = 1",
        "SELECT FROM outboxq.dead_job",
        "SELECT FROM outboxq.queue",
        "INSERT INTO outboxq.queue VALUES ('x')",
        "SELECT FROM outboxq.migration",
        "CREATE TABLE outboxq.mine ()",
        "TRUNCATE outboxq.job",
    )


def test_the_page_says_what_is_granted() -> None:
    """Each right of each role, as `outboxq roles` prints them."""
    rows = re.findall(r"^\| `outboxq_(\w+)` \|.*\| (.*) \|$", (ROOT / "docs/roles.md").read_text(), re.MULTILINE)
    said = {part: rights.replace("`", "").split("; ") for part, rights in rows}
    assert said == {part: rights_in_words(RIGHTS[part]) for part in PARTS}


def test_what_is_over_in_the_audit_is_rewritten_by_no_one(roles: Cast, engine: Engine) -> None:
    """Not its counts either, which an operator may change while an action goes on; and not by the tables' owner."""
    roles.call("operator", "queues", "pause", "mail", "--because", "a drill").ok()
    with psycopg.connect(libpq_url(roles.url("operator")), autocommit=True) as connection:
        connection.execute(
            "INSERT INTO outboxq.audit (id, actor, via, action) VALUES (gen_random_uuid(), 'anna', 'cli', 'job.cancel')"
        )
        assert connection.execute("UPDATE outboxq.audit SET changed = 5 WHERE finished_at IS NULL").rowcount == 1
    roles.refuses("operator", "UPDATE outboxq.audit SET actor = 'bob'", "DELETE FROM outboxq.audit")
    for url in (roles.url("operator"), roles.database.url):
        with psycopg.connect(libpq_url(url)) as connection:
            for column in ("changed = 0", "finished_at = NULL", "error = 'x'"):
                with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="over"), connection.transaction():
                    connection.execute(f"UPDATE outboxq.audit SET {column} WHERE action = 'queue.pause'".encode())


def test_a_producer_copies_and_inserts_by_hand_into_its_columns_alone(roles: Cast) -> None:
    """COPY and INSERT by their names; without a list both mean every column, and the identity cannot be chosen."""
    columns = "(id, queue, kind, args, headers, priority, max_attempts, state, run_at)"
    row = (secrets.token_hex(16), "ledger", "record", "{}", "{}", 0, None, "ready", "now")
    with psycopg.connect(libpq_url(roles.url("producer")), autocommit=True) as connection:
        with connection.cursor() as cursor, cursor.copy(f"COPY outboxq.job {columns} FROM STDIN") as copy:
            copy.write_row(row)
        row = (secrets.token_hex(16), *row[1:])
        connection.execute(f"INSERT INTO outboxq.job {columns} VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)", row)
        connection.execute("INSERT INTO outboxq.job (id, queue, kind, args) VALUES (gen_random_uuid(), 'q', 'k', '{}')")
    assert roles.call("reader", "stats", "--json").json["queues"][0]["ready"] == 2
    roles.refuses(
        "producer",
        "COPY outboxq.job FROM STDIN",
        "COPY outboxq.job (id, attempt) FROM STDIN",
        "INSERT INTO outboxq.job DEFAULT VALUES RETURNING id",
        "INSERT INTO outboxq.job (id, seq) OVERRIDING SYSTEM VALUE VALUES (gen_random_uuid(), 1)",
        "INSERT INTO outboxq.job (id, queue, kind, args) VALUES (gen_random_uuid(), 'q', 'k', '{}') "
        "ON CONFLICT (id) DO UPDATE SET attempt = 5",
    )


@pytest.mark.parametrize("part", ["receiver", "relay"])
def test_receivers_and_relays_accept_messages_and_call_effects(roles: Cast, part: Part) -> None:
    """Accepting, repeating, calling, replaying and being refused, each within its rights."""
    calls: list[str] = []

    def fail(key: str) -> str:
        raise CallRefused("no")

    with role_engine(roles.url(part)) as engine:
        with sessionmaker(engine, class_=OutboxSession).begin() as session:
            inbox = Inbox("shop")
            assert inbox.accept(session, "evt_1", payload=b"content")
            assert not inbox.accept(session, "evt_1", payload=b"content")
            assert not inbox.try_accept(session, "evt_1")
            assert inbox.accept_all(session, ["evt_1", "evt_2"]).accepted == ("evt_2",)
        effects = Effects(engine)
        try:
            for _ in range(2):
                effects.once("pay", key="one", call=calls.append)
            with pytest.raises(EffectFailed):
                effects.once("pay", key="two", call=fail)
        finally:
            effects.dispose()
    assert len(calls) == 1
    roles.refuses(
        part,
        "UPDATE outboxq.deployment SET id = gen_random_uuid()",
        "DELETE FROM outboxq.deployment",
        "TRUNCATE outboxq.inbox",
        "TRUNCATE outboxq.effect",
    )


def test_a_relay_prunes(roles: Cast, sessions: sessionmaker[OutboxSession]) -> None:
    """Messages and effects that have expired are deleted with its own rights."""
    with sessions.begin() as session:
        remember(session)
        for statement in (
            "UPDATE outboxq.inbox SET expires_at = now() - interval '1 hour'",
            "UPDATE outboxq.effect SET status = 'done', expires_at = now() - interval '1 hour'",
        ):
            session.connection().exec_driver_sql(statement)
    with psycopg.connect(libpq_url(roles.url("relay")), autocommit=True) as connection:
        for prune in (delete_messages, delete_effects):
            assert connection.execute(prune("outboxq", 10).encode()).fetchone() == (1,)


def test_a_receiver_does_nothing_else(roles: Cast) -> None:
    """It forgets nothing, and has nothing to do with jobs."""
    roles.refuses(
        "receiver",
        "DELETE FROM outboxq.inbox",
        "UPDATE outboxq.inbox SET expires_at = now()",
        "DELETE FROM outboxq.effect",
        "SELECT FROM outboxq.job",
        "INSERT INTO outboxq.job (id, queue, kind, args) VALUES (gen_random_uuid(), 'q', 'k', '{}')",
        "SELECT FROM outboxq.dead_job",
        "SELECT FROM outboxq.queue",
    )
    roles.refuses("producer", "SELECT FROM outboxq.inbox", "SELECT FROM outboxq.effect")


def test_a_relay_works_and_may_not_pause_or_migrate(roles: Cast, sessions: sessionmaker[OutboxSession]) -> None:
    """Jobs are done, retried, buried (a second time, too), snoozed and parked, by a relay with its own rights."""
    grant_application(roles.database, roles.groups["relay"])
    with sessions.begin() as session:
        session.add_job(app.record, name="a")
        session.add_job(app.record_async, name="b")
        failing = session.add_job(app.fail, name="c")
        session.add_job(app.end, how="snooze")
        session.add_job(external("nobody_knows", queue="ledger"))
    events: list[Event] = []
    Relay(roles.url("relay"), app.jobs, hooks=[events.append]).drain()
    assert {JobDone, JobRetried, JobDied, JobSnoozed, JobsParked} == {
        type(event) for event in events if not type(event).__name__.startswith("Relay")
    }
    with sessions.begin() as session, session.connection().connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO outboxq.job (id, queue, kind, args, max_attempts) "
            """VALUES (%s, 'ledger', 'fail', '{"name": "again"}', 1)""",
            (failing.id,),
        )
    Relay(roles.url("relay"), app.jobs, RelayConfig(batch_size=5), hooks=[]).drain()
    assert roles.call("reader", "dead", "show", failing.id, "--json").ok().json["max_attempts"] == 1
    roles.refuses(
        "relay",
        "INSERT INTO outboxq.queue VALUES ('x')",
        "INSERT INTO outboxq.migration (step) VALUES (99)",
        "ALTER TABLE outboxq.job DISABLE TRIGGER ALL",
        "DROP TABLE outboxq.job",
    )


def test_a_relay_sleeps_wakes_and_serves(roles: Cast, sessions: sessionmaker[OutboxSession], start_relay) -> None:
    """LISTEN, the sleep flag and whatever a running relay writes of itself are within its rights."""
    grant_application(roles.database, roles.groups["relay"])
    with start_relay(engine=roles.url("relay")) as running:
        with sessions.begin() as session:
            session.add_job(app.record, name="a")
        wait_until(lambda: running.of(JobDone), "the job")


def test_a_relay_ends_its_own_connections_and_nobody_elses(roles: Cast, engine: Engine) -> None:
    """What a deadline takes needs no further right, and gives none over others."""
    url = libpq_url(roles.url("relay"))
    with psycopg.connect(url, autocommit=True) as one, psycopg.connect(url) as other, engine.connect() as owner:
        end = "SELECT pg_terminate_backend(%s)"
        assert one.execute(end, (other.info.backend_pid,)).fetchone() == (True,)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            one.execute(end, (owner.exec_driver_sql("SELECT pg_backend_pid()").scalar_one(),))


@pytest.mark.large
def test_a_reader_sees_everything_and_changes_nothing(roles: Cast, sessions: sessionmaker[OutboxSession]) -> None:
    """Every command that only looks works, running jobs included; every one that changes is refused."""
    with sessions.begin() as session:
        handle = session.add_job(app.record, name="a")
        dead = session.add_job(app.fail, name="b")
        remember(session)
    Relay(roles.database.url, app.jobs, RelayConfig(), hooks=[]).drain()
    with sessions.begin() as session:
        handle = session.add_job(app.record, name="a")
    with sessions() as holder:
        holder.connection().exec_driver_sql("DELETE FROM outboxq.job")
        (running,) = roles.call("reader", "jobs", "list", "--running", "--json").ok().json["jobs"]
        assert running["id"] == str(handle.id)
    for words in (
        ("stats",),
        ("queues", "list"),
        ("jobs", "list"),
        ("jobs", "show", handle.id),
        ("dead", "list"),
        ("dead", "show", dead.id),
        ("inbox", "list"),
        ("inbox", "show", "shop", "evt_1"),
        ("effects", "list"),
        ("effects", "show", "pay", "one"),
    ):
        roles.call("reader", *words).ok()
    for words in (
        ("jobs", "cancel", handle.id),
        ("dead", "retry", dead.id),
        ("dead", "discard", dead.id),
        ("queues", "pause", "ledger"),
        ("queues", "resume", "ledger"),
        ("inbox", "forget", "shop", "evt_1"),
        ("effects", "resolve", "pay", "one", "--applied"),
    ):
        said = roles.call("reader", *words)
        assert said.exit_code == 1
        assert "permission denied" in said.stderr


@pytest.mark.large
def test_an_operator_mends_and_does_not_migrate(roles: Cast, sessions: sessionmaker[OutboxSession]) -> None:
    """Cancel, retry, discard, pause and resume; the tables themselves and the marker of the migrations stay."""
    with sessions.begin() as session:
        dead = [session.add_job(app.fail, name=name) for name in "ab"]
        remember(session)
    Relay(roles.database.url, app.jobs, RelayConfig(), hooks=[]).drain()
    for words in (
        ("queues", "pause", "ledger"),
        ("queues", "resume", "ledger"),
        ("queues", "list"),
        ("dead", "retry", dead[0].id),
        ("dead", "discard", dead[1].id),
        ("jobs", "list"),
        ("jobs", "change", dead[0].id, "--run-now"),
        ("kinds", "pause", "fail", "--queue", "ledger"),
        ("kinds", "resume", "fail", "--queue", "ledger"),
        ("jobs", "cancel", dead[0].id, "--running", "--dead-letter"),
        ("stats",),
        ("inbox", "forget", "shop", "evt_1"),
        ("effects", "resolve", "pay", "one", "--applied"),
    ):
        roles.call("operator", *words).ok()
    refused = roles.call("operator", "effects", "new-installation", "--yes")
    assert "permission denied for table deployment" in refused.stderr
    assert refused.exit_code == 1
    roles.refuses(
        "operator",
        "DELETE FROM outboxq.queue",
        "INSERT INTO outboxq.inbox SELECT",
        "INSERT INTO outboxq.effect SELECT",
        "DELETE FROM outboxq.effect",
        "DELETE FROM outboxq.migration",
        "TRUNCATE outboxq.job",
        "DROP TABLE outboxq.job",
    )


def remember(session: OutboxSession) -> None:
    """A message that was accepted, and an effect that nobody knows about."""
    Inbox("shop").accept(session, "evt_1")
    session.connection().exec_driver_sql(
        "INSERT INTO outboxq.effect (scope, key, status, provider_key, lock_token, locked_until) "
        "VALUES ('pay', 'one', 'unknown', gen_random_uuid(), gen_random_uuid(), now())"
    )


def test_running_the_sql_again_changes_nothing(roles: Cast) -> None:
    """It may be part of every deployment."""
    before = rights(roles)
    roles.apply()
    assert rights(roles) == before


def rights(roles: Cast) -> list[tuple[object, ...]]:
    with psycopg.connect(libpq_url(roles.database.url)) as connection:
        return connection.execute(
            "SELECT relname, acl.grantee::regrole::text, acl.privilege_type, acl.is_grantable, NULL FROM pg_class, "
            "aclexplode(relacl) AS acl WHERE relnamespace = 'outboxq'::regnamespace UNION ALL "
            "SELECT relname, acl.grantee::regrole::text, acl.privilege_type, acl.is_grantable, attname FROM pg_class "
            "JOIN pg_attribute ON attrelid = pg_class.oid, aclexplode(attacl) AS acl "
            "WHERE relnamespace = 'outboxq'::regnamespace ORDER BY 1, 2, 3, 5"
        ).fetchall()


def test_a_producer_of_before_is_left_the_columns_that_it_needs(roles: Cast) -> None:
    """It had INSERT on the whole table; the SQL takes it away, says so once, and what is left is what a new one has."""
    group, new = roles.groups["producer"], rights(roles)
    heard: list[str | None] = []
    with psycopg.connect(libpq_url(roles.database.url), autocommit=True) as connection:
        connection.add_notice_handler(lambda notice: heard.append(notice.message_primary))
        connection.execute(sql.SQL("GRANT INSERT ON outboxq.job TO {}").format(sql.Identifier(group)))
        assert rights(roles) != new
        for _ in range(2):
            connection.execute(roles_sql({"producer": group}))
    assert rights(roles) == new
    told = f'outboxq: role {group} could insert into every column of "outboxq".job, '
    assert heard == [told + "and may now into those that it needs"]
    roles.refuses("producer", "INSERT INTO outboxq.job (id, attempt) VALUES (gen_random_uuid(), 1)")


def test_an_operator_of_before_is_left_the_columns_of_the_audit_that_it_needs(roles: Cast) -> None:
    """It had INSERT and UPDATE on the whole table, by which it could rewrite who did what."""
    group, new = roles.groups["operator"], rights(roles)
    heard: list[str | None] = []
    with psycopg.connect(libpq_url(roles.database.url), autocommit=True) as connection:
        connection.add_notice_handler(lambda notice: heard.append(notice.message_primary))
        connection.execute(sql.SQL("GRANT INSERT, UPDATE ON outboxq.audit TO {}").format(sql.Identifier(group)))
        for _ in range(2):
            connection.execute(roles_sql({"operator": group}))
    assert rights(roles) == new
    told = f'outboxq: role {group} could {{}} every column of "outboxq".audit, and may now {{}} those that it needs'
    assert heard == [told.format("insert into", "into"), told.format("update", "update")]
    roles.refuses("operator", "UPDATE outboxq.audit SET actor = 'bob'")


@pytest.mark.first_and_last
@pytest.mark.parametrize("other", ["relay", "operator"])
@pytest.mark.parametrize("how", ["in one run", "in runs of their own"])
def test_a_role_of_two_parts_keeps_what_the_other_needs(roles: Cast, other: Part, how: str) -> None:
    """Of one run, where the producer's block comes first, and of an earlier one: a relay inserts into every column."""
    group = roles.groups[other]
    # In the order of the mapping, which is not the order of the blocks.
    runs: list[dict[Part, str]] = [{other: group}, {"producer": group}]
    if how == "in one run":
        runs = [{other: group, "producer": group}] * 2
    with psycopg.connect(libpq_url(roles.database.url), autocommit=True) as connection:
        connection.execute(sql.SQL("REVOKE ALL ON outboxq.job FROM {}").format(sql.Identifier(group)))
        for names in runs:
            connection.execute(roles_sql(names))
    with psycopg.connect(libpq_url(roles.url(other))) as connection:
        connection.execute(
            "INSERT INTO outboxq.job (id, queue, kind, args, attempt) VALUES (gen_random_uuid(), 'q', 'k', '{}', 1)"
        )


def test_what_a_producer_inherits_is_not_taken_from_it(roles: Cast) -> None:
    """A role that is a producer by name and a relay by membership: the group's rights are the group's."""
    member, group = roles.groups["producer"], roles.groups["relay"]
    before = rights(roles)
    with psycopg.connect(libpq_url(roles.database.url), autocommit=True) as connection:
        connection.execute(sql.SQL("GRANT {} TO {}").format(sql.Identifier(group), sql.Identifier(member)))
        connection.execute(roles_sql({"producer": member}))
    assert rights(roles) == before


@pytest.mark.first_and_last
@pytest.mark.parametrize("step", range(1, LATEST + 1))
def test_the_sql_fits_every_step(outboxq_server: Server, step: int) -> None:
    """Tables that come with a later step are passed over, and their rights follow when the SQL is run again."""
    names: dict[Part, str] = {part: f"oq_{part}_{secrets.token_hex(4)}" for part in PARTS}
    with outboxq_server.create_database() as database, dropped_roles(database, names.values()):
        with role_engine(database.url) as owner, owner.begin() as connection:
            migrate(connection, to=step, schema="other")
        with psycopg.connect(libpq_url(database.url), autocommit=True) as connection:
            connection.execute(roles_sql(names, "other"))
            # As the step that brings leases has it.
            connection.execute("CREATE TABLE IF NOT EXISTS other.relay (id uuid PRIMARY KEY)")
            connection.execute(roles_sql(names, "other"))
            for part, right, expected in (
                ("relay", "SELECT", True),
                ("relay", "DELETE", True),
                ("reader", "SELECT", True),
                ("reader", "UPDATE", False),
                ("operator", "SELECT", True),
                ("operator", "UPDATE", False),
                ("producer", "SELECT", False),
                ("receiver", "SELECT", False),
            ):
                query = "SELECT has_table_privilege(%s, 'other.relay', %s)"
                assert connection.execute(query, (names[part], right)).fetchone() == (expected,), (part, right)


def test_a_role_that_had_to_be_made_is_told(outboxq_server: Server) -> None:
    """The name of a login role may have been mistyped, and the role that is made instead is of no use."""
    name = f"oq%{secrets.token_hex(4)}"
    with (
        outboxq_server.create_database() as database,
        dropped_roles(database, [name]),
        psycopg.connect(libpq_url(database.url), autocommit=True) as connection,
    ):
        heard: list[str | None] = []
        connection.add_notice_handler(lambda notice: heard.append(notice.message_primary))
        with role_engine(database.url) as owner, owner.begin() as migrating:
            migrate(migrating)
        connection.execute(roles_sql({"reader": name}))
        connection.execute(roles_sql({"reader": name}))
    assert heard == [f"outboxq: there was no role {name}, so it was made, without login"]


def test_without_tables_the_sql_says_what_to_run(outboxq_server: Server) -> None:
    """A schema that is missing is an error with a hint, and no role is made."""
    name = f"oq_{secrets.token_hex(4)}"
    with (
        outboxq_server.create_database() as database,
        dropped_roles(database, [name]),
        psycopg.connect(libpq_url(database.url), autocommit=True) as connection,
    ):
        with pytest.raises(psycopg.errors.InvalidSchemaName) as caught:
            connection.execute(roles_sql({"reader": name}))
        connection.rollback()
        assert caught.value.diag.message_hint == "Run `outboxq migrate` first."
        assert connection.execute("SELECT FROM pg_roles WHERE rolname = %s", (name,)).fetchone() is None


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    "options",
    [
        ("--reader", "public"),
        ("--reader", "none"),
        ("--relay", "pg_monitor"),
        ("--producer", ""),
        ("--producer", "x" * 64),
        ("--operator", "two\nlines"),
        ("--operator", "x$outboxq$ BEGIN"),
        ("--schema", "pg_catalog"),
        ("--sql", "--json"),
    ],
    ids=" ".join,
)
def test_names_that_cannot_be_are_wrong_usage(options: tuple[str, ...]) -> None:
    """Above all `public`, which would open the tables to everybody."""
    said = call("roles", *options)
    assert said.exit_code == 2
    assert said.stderr.startswith('{"error":' if "--json" in options else "Error: ")


def test_only_the_named_roles_are_printed() -> None:
    """Without names every one has ours; the table and JSON tell the same."""
    everything = call("roles", "--sql").ok().stdout
    assert [f'CREATE ROLE "outboxq_{part}" NOLOGIN' in everything for part in PARTS] == [True] * len(PARTS)
    one = call("roles", "--sql", "--relay", "worker").ok().stdout
    assert one.count("CREATE ROLE") == 1
    assert 'CREATE ROLE "worker" NOLOGIN' in one
    assert [row["role"] for row in call("roles", "--json").ok().json["roles"]] == [f"outboxq_{part}" for part in PARTS]
    table = call("roles", "--relay", "worker").ok().stdout
    assert "worker" in table
    assert "INSERT, UPDATE, DELETE on job" in table
    producer = call("roles", "--producer", "web").ok().stdout
    columns = ", ".join(RIGHTS["producer"].inserts["job"])
    assert f"INSERT ({columns}) on job" in " ".join(producer.split())
    (row,) = call("roles", "--producer", "web", "--json").ok().json["roles"]
    assert (row["tables"], row["inserts"].keys()) == ({}, {"job", "batch"})
    assert "outboxq_producer" not in table
