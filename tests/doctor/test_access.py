"""The doctor looks at the way to the database: rights, time-outs, poolers; and does without what it may not see."""

import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest
from sqlalchemy import Connection, create_engine, make_url

from outboxq import doctor
from outboxq.admin.roles import RIGHTS, Part, roles_sql
from outboxq.database.engines import make_engine
from outboxq.doctor import rights
from outboxq.postgres import Database
from tests.admin.test_roles import Cast
from tests.admin.test_roles import roles as roles
from tests.support.cli import call
from tests.support.doctor import examine, execute, named, only, open_session
from tests.support.pgbouncer import pgbouncer
from tests.support.urls import libpq_url

AnotherRole = tuple[str, str]
ALL_TABLES = "GRANT USAGE ON SCHEMA outboxq TO {0}; GRANT ALL ON ALL TABLES IN SCHEMA outboxq TO {0}"
# What a server may be like without anything being wrong with the database, or with the role.
OF_THE_SERVER = {
    "autovacuum-off", "connections-nearly-used-up", "fsync-off", "full-page-writes-off", "slot-inactive"
}  # fmt: skip


@pytest.fixture
def role(outboxq_database: Database) -> Iterator[AnotherRole]:
    """A role of this test's own without any rights, and the URL by which it connects."""
    name, password = f"outboxq_{secrets.token_hex(6)}", secrets.token_hex(12)
    execute(outboxq_database.url, f"CREATE ROLE {name} LOGIN PASSWORD '{password}'")
    url = make_url(outboxq_database.url).set(username=name, password=password)
    yield name, url.render_as_string(hide_password=False)
    execute(outboxq_database.url, f"DROP OWNED BY {name}", f"DROP ROLE {name}")


@pytest.fixture
def set_for_database(outboxq_database: Database) -> Callable[[str, str], None]:
    def change(name: str, setting: str) -> None:
        execute(outboxq_database.url, f"ALTER DATABASE {outboxq_database.name} SET {name} = '{setting}'")

    return change


def codes(url: str, *arguments: object) -> set[str]:
    return {finding["code"] for finding in examine(url, *arguments)} - OF_THE_SERVER


def test_a_database_of_the_tests_has_nothing_wrong(outboxq_database: Database) -> None:
    """Apart from settings of its server, a database as the migrations make it has no findings."""
    assert codes(outboxq_database.url) == set()


def test_a_role_without_rights_learns_what_it_lacks(outboxq_database: Database, role: AnotherRole) -> None:
    """No look at the schema: each check says whether it could be made, and which grant allows it."""
    name, url = role
    found = examine(url)
    assert {one["detail"]["object"] for one in found if one["code"] == "grant-missing"} >= {"outboxq", "job", "queue"}
    refused = [one for one in found if one["code"] == "check-not-made"]
    assert {one["detail"]["check"] for one in refused} >= {"the version of the tables", "the kinds that wait"}
    assert all(one["detail"]["grant"] in one["advice"] for one in refused)
    execute(outboxq_database.url, ALL_TABLES.format(name))
    assert codes(url) == set()


def test_each_missing_grant_is_named_by_use(outboxq_database: Database, role: AnotherRole) -> None:
    """A producer needs INSERT on columns of job alone; a relay is told what it lacks, table by table."""
    name, url = role
    execute(
        outboxq_database.url,
        f"GRANT USAGE ON SCHEMA outboxq TO {name}; GRANT INSERT ON outboxq.job, outboxq.batch TO {name}",
    )
    assert named(url, "grant-missing", "--for", "producer") == []
    missing = {one["detail"]["object"]: one["detail"]["missing"] for one in named(url, "grant-missing")}
    assert missing["job"] == ["DELETE", "SELECT", "UPDATE"]
    assert missing["queue"] == ["SELECT"]
    execute(outboxq_database.url, f"REVOKE INSERT ON outboxq.job FROM {name}")
    assert only(url, "grant-missing", "--for", "producer")["detail"]["missing"] == [
        f"INSERT ({', '.join(RIGHTS['producer'].inserts['job'])})"
    ]


@pytest.mark.first_and_last
@pytest.mark.parametrize("part", ["operator", "reader", "relay"])
def test_what_a_role_is_for_is_known_by_its_group(roles: Cast, part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operator is told of what a relay would need."""
    monkeypatch.setattr(rights, "default_names", lambda: roles.groups)
    engine = create_engine(roles.url(part))
    found = doctor.run_checks(lambda: engine.connect())
    engine.dispose()
    assert [each.title for each in found if each.code == "grant-missing"] == []


def test_a_producer_that_lacks_a_column_learns_which(outboxq_database: Database, role: AnotherRole) -> None:
    """INSERT on some of the columns that `add_job` writes is not enough."""
    name, url = role
    execute(
        outboxq_database.url,
        f"GRANT USAGE ON SCHEMA outboxq TO {name}",
        f"GRANT INSERT ON outboxq.batch TO {name}",
        f"GRANT INSERT (id, queue, kind, args, headers, priority, max_attempts) ON outboxq.job TO {name}",
        f"GRANT INSERT (unique_key, group_key, batch_id, expires_at) ON outboxq.job TO {name}",
    )
    found = only(url, "grant-missing", "--for", "producer")
    assert (found["detail"]["object"], found["detail"]["missing"]) == ("job", ["INSERT (state, run_at)"])
    assert "GRANT INSERT (state, run_at) ON outboxq.job TO" in found["advice"]
    execute(outboxq_database.url, f"GRANT INSERT (state, run_at) ON outboxq.job TO {name}")
    assert named(url, "grant-missing", "--for", "producer") == []


@pytest.mark.wide
def test_a_producer_that_may_write_every_column_is_named(outboxq_database: Database, role: AnotherRole) -> None:
    """One from before, and PUBLIC; not a role that may delete jobs too, and not one of `outboxq roles`."""
    name, _ = role
    url = outboxq_database.url
    execute(url, roles_sql({"producer": name}))
    assert named(url, "producer-writes-every-column") == []
    execute(url, f"GRANT INSERT ON outboxq.job TO {name}, PUBLIC")
    by_role = {one["detail"]["role"]: one for one in named(url, "producer-writes-every-column")}
    assert by_role.keys() == {name, "PUBLIC"}
    assert f"outboxq roles --sql --producer {name}" in by_role[name]["advice"]
    assert "REVOKE INSERT ON outboxq.job FROM PUBLIC" in by_role["PUBLIC"]["advice"]
    execute(url, roles_sql({"producer": name}), "REVOKE INSERT ON outboxq.job FROM PUBLIC")
    assert named(url, "producer-writes-every-column") == []
    execute(url, f"GRANT INSERT, DELETE ON outboxq.job TO {name}")
    assert named(url, "producer-writes-every-column") == []


def test_a_receiver_learns_what_it_lacks(outboxq_database: Database, role: AnotherRole) -> None:
    """Whoever accepts messages and calls effects needs nothing of the jobs."""
    name, url = role
    execute(outboxq_database.url, f"GRANT USAGE ON SCHEMA outboxq TO {name}; GRANT INSERT ON outboxq.inbox TO {name}")
    found = named(url, "grant-missing", "--for", "receiver")
    assert {one["detail"]["object"]: one["detail"]["missing"] for one in found} == {
        "deployment": ["SELECT"], "effect": ["INSERT", "SELECT", "UPDATE"], "inbox": ["SELECT"],
    }  # fmt: skip
    assert "which a receiver needs" in found[0]["title"]


def test_transactions_of_others_that_are_hidden_are_told(outboxq_database: Database, role: AnotherRole) -> None:
    """Without pg_monitor the age of others' transactions is hidden, which is said, with the grant that helps."""
    name, url = role
    execute(outboxq_database.url, ALL_TABLES.format(name))
    with open_session(outboxq_database.url, "SELECT outboxq.add_job('ship')") as pid:
        found = only(url, "check-not-made", "--older-than", 0)
        assert "pg_monitor" in found["advice"]
        execute(outboxq_database.url, f"GRANT pg_monitor TO {name}")
        assert named(url, "check-not-made") == []
        assert only(url, "jobs-held-by-session", "--older-than", 0)["detail"]["pid"] == pid


@pytest.mark.wide
def test_row_security_without_a_policy_is_a_problem(outboxq_database: Database, role: AnotherRole) -> None:
    """A role that row level security lets see nothing learns which commands lack a policy; others are warned."""
    name, url = role
    execute(outboxq_database.url, ALL_TABLES.format(name), "ALTER TABLE outboxq.job ENABLE ROW LEVEL SECURITY")
    found = only(url, "row-security-without-policy")
    assert (found["severity"], found["detail"]["commands"]) == ("problem", ["SELECT", "INSERT", "UPDATE", "DELETE"])
    assert only(outboxq_database.url, "row-security-without-policy")["severity"] == "warning"
    execute(outboxq_database.url, f"CREATE POLICY look ON outboxq.job FOR SELECT TO {name} USING (true)")
    assert only(url, "row-security-without-policy")["detail"]["commands"] == ["INSERT", "UPDATE", "DELETE"]
    execute(outboxq_database.url, f"CREATE POLICY work ON outboxq.job TO {name} USING (true)")
    assert named(url, "row-security-without-policy") == []
    assert named(outboxq_database.url, "row-security-without-policy") == []


def test_a_policy_for_another_role_does_not_count(outboxq_database: Database, role: AnotherRole) -> None:
    """A policy lets through only those whom it names."""
    name, url = role
    execute(
        outboxq_database.url,
        ALL_TABLES.format(name),
        "ALTER TABLE outboxq.job ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY work ON outboxq.job TO pg_monitor USING (true)",
    )
    assert only(url, "row-security-without-policy")["severity"] == "problem"


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("name", "short", "enough", "code"),
    [
        ("statement_timeout", "5s", "10min", "statement-timeout-short"),
        ("idle_in_transaction_session_timeout", "5s", "10min", "idle-in-transaction-timeout-short"),
        ("transaction_timeout", "20s", "10min", "transaction-timeout-short"),
        ("lock_timeout", "500ms", "5s", "lock-timeout-short"),
        ("idle_session_timeout", "10min", "1d", "idle-session-timeout-short"),
    ],
)
def test_a_short_time_out_of_the_database_is_told(
    outboxq_database: Database,
    set_for_database: Callable[[str, str], None],
    name: str,
    short: str,
    enough: str,
    code: str,
) -> None:
    """What every session of the database starts with is judged, and a long time is let pass."""
    with psycopg.connect(libpq_url(outboxq_database.url)) as connection:
        if connection.info.server_version < 170_000 and name == "transaction_timeout":
            pytest.skip("transaction_timeout is there from PostgreSQL 17 on")
    set_for_database(name, short)
    found = only(outboxq_database.url, code)
    assert (found["severity"], found["detail"]["setting"], found["detail"]["role"]) == ("warning", name, None)
    set_for_database(name, enough)
    assert named(outboxq_database.url, code) == []


def test_a_short_time_out_of_a_relays_role_is_told(outboxq_database: Database, role: AnotherRole) -> None:
    """An admin's doctor names other roles whose time-outs are short, if they may take jobs."""
    name, _ = role
    execute(outboxq_database.url, f"ALTER ROLE {name} SET statement_timeout = '1500'")
    assert named(outboxq_database.url, "statement-timeout-short") == []
    execute(outboxq_database.url, ALL_TABLES.format(name))
    found = only(outboxq_database.url, "statement-timeout-short")
    assert (found["detail"]["role"], found["detail"]["seconds"]) == (name, 1.5)


SEARCH_PATH_CODES = {"search-path-open", "search-path-hides-pg-catalog"}


@pytest.mark.wide
def test_a_schema_of_the_search_path_that_is_open_to_others_is_told(
    outboxq_database: Database, role: AnotherRole
) -> None:
    """With who may create there, and how to take the right away; the schema's owner and superusers are trusted."""
    name, _ = role
    url = outboxq_database.url
    assert not codes(url) & SEARCH_PATH_CODES
    execute(url, f"GRANT CREATE ON SCHEMA public TO PUBLIC, {name}")
    found = only(url, "search-path-open")
    assert found["detail"]["schema"] == "public"
    assert found["detail"]["creators"] == ["PUBLIC", name]
    assert f"REVOKE CREATE ON SCHEMA public FROM PUBLIC, {name};" in found["advice"]
    execute(url, f"REVOKE CREATE ON SCHEMA public FROM PUBLIC, {name}")
    assert not codes(url) & SEARCH_PATH_CODES


@pytest.mark.wide
def test_the_search_path_of_another_role_that_could_be_a_relays_counts(
    outboxq_database: Database, role: AnotherRole
) -> None:
    """Its own setting, with the schema that has its name; what that role itself may do is its own affair."""
    name, url = role
    execute(
        outboxq_database.url,
        'CREATE SCHEMA "Open to"',
        'GRANT CREATE ON SCHEMA "Open to" TO PUBLIC',
        f"GRANT USAGE ON SCHEMA outboxq TO {name}",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA outboxq TO {name}",
        f'ALTER ROLE {name} SET search_path = "$user", "Open to"',
    )
    for who in (outboxq_database.url, url):
        found = only(who, "search-path-open")
        assert found["detail"] == {"schema": "Open to", "creators": ["PUBLIC"], "roles": [name]}


@pytest.mark.wide
def test_a_search_path_with_pg_catalog_behind_another_schema_is_told(
    outboxq_database: Database,
) -> None:
    """There an operator of the other schema is taken although PostgreSQL has one of exactly the same types."""
    execute(outboxq_database.url, f"ALTER DATABASE {outboxq_database.name} SET search_path = pg_catalog, public")
    assert not codes(outboxq_database.url) & SEARCH_PATH_CODES
    execute(outboxq_database.url, f"ALTER DATABASE {outboxq_database.name} SET search_path = public, pg_catalog")
    assert only(outboxq_database.url, "search-path-hides-pg-catalog")["detail"]["schemas"] == ["public"]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "code"), [("synchronous_commit", "synchronous-commit-off"), ("track_counts", "track-counts-off")]
)
def test_a_setting_of_the_database_that_is_not_safe_is_told(
    outboxq_database: Database, set_for_database: Callable[[str, str], None], name: str, code: str
) -> None:
    """What is switched off for the database is a warning that says where it comes from."""
    assert named(outboxq_database.url, code) == []
    set_for_database(name, "off")
    assert only(outboxq_database.url, code)["detail"] == {"setting": name, "source": "database"}


def test_a_databases_own_limit_of_connections_counts(outboxq_database: Database) -> None:
    """CONNECTION LIMIT is reached long before max_connections."""
    url = outboxq_database.url
    execute(url, f"ALTER DATABASE {outboxq_database.name} CONNECTION LIMIT 2")
    with open_session(url):
        found = [one for one in named(url, "connections-nearly-used-up") if one["detail"]["of"] == "this database"]
    assert [one["detail"]["allowed"] for one in found] == [2]


@pytest.mark.wide
def test_a_transaction_pooler_is_told(outboxq_database: Database) -> None:
    """Through pgbouncer in transaction mode all checks work, and the mode is named; a direct listen URL settles it."""
    with pgbouncer(outboxq_database.url) as url:
        found = only(url, "pooler-transaction-mode")
        assert found["severity"] == "warning"
        assert "--listen-url" in found["advice"]
        assert codes(url) == {"pooler-transaction-mode"}
        assert only(url, "pooler-transaction-mode", "--listen-url", outboxq_database.url)["severity"] == "info"
        assert only(url, "listen-url-pooled", "--listen-url", url)["severity"] == "problem"


def test_a_session_pooler_is_none(outboxq_database: Database) -> None:
    """In session mode a client keeps its backend, so LISTEN works and nothing is found."""
    with pgbouncer(outboxq_database.url, "session") as url:
        assert codes(url) == set()


def test_a_statement_pooler_is_a_problem(outboxq_database: Database) -> None:
    """Statement mode allows no transactions: that is the one finding, and no traceback."""
    # Changed when it runs: whether it answers is asked in a transaction.
    with pgbouncer(outboxq_database.url, settings={"admin_users": make_url(outboxq_database.url).username}) as url:
        console = make_url(url).set(database="pgbouncer").render_as_string(hide_password=False)
        execute(console, "SET pool_mode = 'statement'")
        (found,) = examine(url)
    assert (found["code"], found["severity"]) == ("pooler-statement-mode", "problem")


def test_a_database_that_does_not_answer_is_a_finding() -> None:
    """Nobody listens: one problem with host, port and reason, without the password, as text and as JSON."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    url = f"postgresql://root:hunter2@127.0.0.1:{port}/x"
    (found,) = examine(url)
    assert found["code"] == "database-unreachable"
    assert f"127.0.0.1:{port}: Connection refused" in found["title"]
    text = call("doctor", url=url)
    assert (text.exit_code, text.stderr) == (1, "")
    assert "database-unreachable" in text.stdout
    assert "hunter2" not in text.stdout


def test_a_listen_url_that_leads_nowhere_is_a_finding(outboxq_database: Database) -> None:
    """All other checks are made, and the URL is named by host and port."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"postgresql://root:hunter2@127.0.0.1:{bound.getsockname()[1]}/x"
        found = only(outboxq_database.url, "listen-url-unreachable", "--listen-url", url)
        assert codes(outboxq_database.url, "--listen-url", url) == {"listen-url-unreachable"}
    assert "Connection refused" in found["title"]
    assert "hunter2" not in found["title"]


def test_a_connection_that_is_lost_ends_the_round(outboxq_database: Database) -> None:
    """A backend that is terminated meanwhile is one clear finding, not one for each check."""
    engine = make_engine(outboxq_database.url)

    @contextmanager
    def connect() -> Iterator[Connection]:
        with engine.connect() as connection:
            pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
            connection.commit()
            execute(outboxq_database.url, f"SELECT pg_terminate_backend({pid}, 10000)")
            yield connection

    (found,) = doctor.run_checks(connect)
    assert (found.code, found.severity) == ("connection-lost", "problem")


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("nonsense",), "MODULE:ATTRIBUTE"),
        (("--schema", "pg_odd"), "pg_"),
        (("--older-than", "-1"), "--older-than"),
        (("--for", "fun"), "--for"),
    ],
)
def test_a_wrong_command_is_wrong_usage(arguments: tuple[str, ...], expected: str) -> None:
    """Exit code 2 and the option's name, before anything is connected to."""
    outcome = call("doctor", *arguments, url="postgresql://127.0.0.1:1/x")
    assert outcome.exit_code == 2
    assert outcome.stdout == ""
    assert expected in outcome.stderr
