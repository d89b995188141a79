"""What a statement may leave on its connection, by its text."""

import pytest

from outboxq.database.sql_text import Leavings, left_by
from tests.support.growth import LINEAR, growth


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT a, count(*) AS n FROM t AS x(a, b) WHERE x.id IN (1, 2) AND b = %(b)s::VARCHAR(30) FOR UPDATE OF x",
        "select pg_catalog.lower(a) from t;  -- behind it; and more\n ; /* ; */",
        "/* who='me' */ SELECT 'a;b' || 'it''s', \"a;b(\" FROM t WHERE x = ANY (%(x)s) AND NOT (a OR b)",
        "SELECT E'\\';' || $$a;b$$",
        "INSERT INTO outboxq.job (id, a) VALUES (%(id)s::UUID, now()) RETURNING id",
        'INSERT /* in */ INTO __[SCHEMA_outboxq]."Job" (id) SELECT unnest(%(x)s) ON CONFLICT (id) DO UPDATE SET a = 1',
        "UPDATE t SET a=(t.a + %(b)s) WHERE t.id IN (__[POSTCOMPILE_id_1])",
        "DELETE FROM t USING u WHERE (t.a, t.b) IN (SELECT c, d FROM u)",
        "MERGE INTO t USING (VALUES (1)) AS v(a) ON (t.a = v.a) WHEN MATCHED AND (t.b > 0) THEN DELETE",
        "WITH RECURSIVE p(a, b) AS (SELECT 1, 2), q(c) AS MATERIALIZED (SELECT sum(a) FROM p) SELECT c FROM q",
        "WITH a AS (SELECT 1) TABLE a",
        "(SELECT 1) UNION ALL (SELECT 2)",
        "TABLE t",
        "VALUES (1)",
        "COPY t TO '/tmp/t'",
        "SAVEPOINT a",
        "ROLLBACK TO SAVEPOINT a",
        "SET CONSTRAINTS ALL IMMEDIATE",
        "NOTIFY channel, 'payload'",
        "LOCK TABLE t IN SHARE MODE",
        "SELECT nextval('s'), pg_advisory_xact_lock(1), pg_try_advisory_xact_lock_shared(1)",
        "SELECT f(1), other.f(1), my_set_config(1)",
        "CALL f(1)",
    ],
)
def test_statements_on_rows_and_calls_leave_nothing(sql: str) -> None:
    """They cost a handler nothing, and what they call is not examined."""
    assert left_by(sql) is None


@pytest.mark.parametrize(
    "sql",
    [
        "SET LOCAL ROLE other",
        "SET TRANSACTION READ ONLY",
        "set /* x */ local search_path = x",
        "SELECT set_config('a', %(x)s, true)",
        "SELECT SET_CONFIG('a', %(x)s::VARCHAR, TRUE) AS b",
        "WITH a AS (SELECT pg_catalog.\"set_config\"('a', 'b', true)) DELETE FROM t",
    ],
)
def test_a_setting_of_the_transaction_leaves_nothing_and_is_reported(sql: str) -> None:
    assert left_by(sql) == Leavings(None)


def test_a_setting_by_parameters_is_local_if_the_parameter_is_true() -> None:
    """As SQLAlchemy compiles `func.set_config(name, value, True)`."""
    sql = "SELECT set_config(%(a)s::VARCHAR, %(b)s::VARCHAR, %(constraints)s::BOOLEAN) AS d"
    assert left_by(sql) == Leavings(None, ("constraints",))


@pytest.mark.parametrize(
    ("sql", "what"),
    [
        ("SET search_path = x", "SET"),
        ('SET "search_path" = local', "SET"),
        ("/* SET /* LOCAL */ */ set x = 1", "SET"),
        ("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY", "SET"),
        ("RESET ALL", "RESET"),
        ("CREATE TEMP TABLE t (a int)", "CREATE"),
        ("LISTEN a", "LISTEN"),
        ("UNLISTEN a", "UNLISTEN"),
        ("PREPARE a AS SELECT 1", "PREPARE"),
        ("DEALLOCATE ALL", "DEALLOCATE"),
        ("DISCARD ALL", "DISCARD"),
        ("DECLARE a CURSOR WITH HOLD FOR SELECT 1", "DECLARE"),
        ("LOAD 'auto_explain'", "LOAD"),
        ("DO $$ BEGIN END $$", "DO"),
        ("SOMETHING NEW", "SOMETHING"),
        ("SELECT 1 AS a INTO TEMP t", "SELECT INTO"),
        ("SELECT 1into t", "SELECT INTO"),
        ("WITH a AS (SELECT 1) SELECT * INTO t FROM a", "SELECT INTO"),
        ("SELECT 1; SET x = 1", "several statements"),
        ("SELECT 1;; /* x */ SET x = 1;", "several statements"),
        ("UPDATE pg_catalog.\"pg_settings\" SET setting = 'x'", "pg_settings"),
        ("SELECT set_config('a', 'b', false)", "set_config"),
        ("SELECT \"set_config\"('a', 'b', false)", "set_config"),
        ("SELECT set_config('a', 'b', 1 = 1)", "set_config"),
        ("SELECT set_config('a', 'b', true), set_config('a', 'b', false)", "set_config"),
        ("SELECT 5 %(set_config('a','b',false)::int)", "set_config"),
        ("SET LOCAL x = 1 -- pg_advisory_lock(1)", "pg_advisory_lock"),
        ("SELECT Pg_Advisory_Lock (1)", "pg_advisory_lock"),
        ("SELECT pg_catalog.pg_try_advisory_lock_shared(1)", "pg_try_advisory_lock_shared"),
        ("WITH a AS (SELECT 1) TABLE a ORDER BY pg_advisory_unlock_all()", "pg_advisory_unlock_all"),
        ("SELECT setseed(0.5)", "setseed"),
        ("SELECT set_limit(0.5)", "set_limit"),
        ("SELECT dblink_connect_u('a', 'b')", "dblink_connect_u"),
        ("SELECT pg_replication_origin_session_setup('a')", "pg_replication_origin_session_setup"),
        ("", "a statement without a verb"),
        ('"a"', "a statement without a verb"),
    ],
)
def test_what_lasts_longer_than_its_transaction_is_named(sql: str, what: str) -> None:
    """However it is spelled; a verb that is not known counts as such."""
    assert left_by(sql) == Leavings(what)


@pytest.mark.parametrize(
    "unit", ["(", "a ", "into ", "'", '"a"', "/*", "/**/", "--\n", " ", ";", "; ", "$", "pg_", "%("]
)
def test_a_statement_is_read_in_linear_time(unit: str) -> None:
    """32 times the text takes about 32 times as long."""
    assert growth(left_by, lambda size: f"SELECT {unit * size}", 100) < LINEAR


def test_a_setting_of_many_arguments_is_read_in_linear_time() -> None:
    """What is looked ahead for is bounded by one call."""
    assert growth(left_by, lambda size: "SELECT " + "set_config(%(a)s, %(b)s, true), " * size, 20) < LINEAR
