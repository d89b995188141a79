"""What a statement may leave on its connection, by its text."""

import pytest

from outboxq.database.session_state import CALLABLE_WORDS, Leavings, _read, left_by
from tests.support.growth import LINEAR, growth


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT a, count(*) AS n FROM t AS x(a, b) WHERE x.id IN (1, 2) AND b = %(b)s::VARCHAR(30) FOR UPDATE OF x",
        "select pg_catalog.lower(a) from t;  -- behind it\n",
        "/* who='me' */ SELECT 'a;b' || 'it''s', \"a(b\" FROM t WHERE x = ANY (%(x)s) AND NOT (a OR b)",
        "INSERT INTO outboxq.job (id, a) VALUES (%(id)s::UUID, now()) RETURNING id",
        'INSERT INTO __[SCHEMA_outboxq]."Job" (id) SELECT unnest(%(x)s) ON CONFLICT (id) DO UPDATE SET (a, b) = (1, 2)',
        "INSERT INTO t AS own (a) VALUES (1)",
        "UPDATE t SET a=(t.a + %(b)s) WHERE t.id IN (__[POSTCOMPILE_id_1])",
        "DELETE FROM t USING u WHERE (t.a, t.b) IN (SELECT c, d FROM u)",
        "MERGE INTO t USING (VALUES (1)) AS v(a) ON (t.a = v.a) WHEN MATCHED AND (t.b > 0) THEN DELETE",
        "WITH RECURSIVE p(a, b) AS (SELECT 1, 2), q(c) AS MATERIALIZED (SELECT sum(a) FROM p) SELECT c FROM q",
        "(SELECT 1) UNION ALL (SELECT 2)",
        "SELECT CAST(x AS NUMERIC(10, 2)), y::character varying(3), extract(epoch FROM z), 7 %% 2",
        "SELECT rank() OVER (PARTITION BY a ORDER BY b), sum(x) FILTER (WHERE x > 0) FROM t GROUP BY ROLLUP (a)",
        "SAVEPOINT a",
        "ROLLBACK TO SAVEPOINT a",
        "SET CONSTRAINTS ALL IMMEDIATE",
        "NOTIFY channel, 'payload'",
        "LOCK TABLE t IN SHARE MODE",
        "SELECT nextval('s'), pg_advisory_xact_lock(1)",
    ],
)
def test_statements_on_rows_leave_nothing(sql: str) -> None:
    """They cost a handler nothing, as long as no function is called as a word of the syntax."""
    leavings = left_by(sql)
    assert leavings == Leavings(functions=leavings.functions)
    assert leavings.functions <= CALLABLE_WORDS


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
def test_a_setting_of_the_transaction_leaves_nothing_and_is_told(sql: str) -> None:
    assert left_by(sql) == Leavings(sets_locally=True)


@pytest.mark.parametrize(
    ("sql", "what"),
    [
        ("SET search_path = x", "SET"),
        ('SET "search_path" = x', "SET"),
        ("/* SET LOCAL */ set x = 1", "SET"),
        ("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY", "SET"),
        ("RESET ALL", "RESET"),
        ("CREATE TEMP TABLE t (a int)", "CREATE"),
        ("LISTEN a", "LISTEN"),
        ("EXPLAIN ANALYZE SELECT f()", "EXPLAIN"),
        ("SELECT 1 AS a INTO TEMP t", "SELECT INTO"),
        ("SELECT 1into t", "SELECT INTO"),
        ("WITH a AS (SELECT 1) SELECT * INTO t FROM a", "SELECT INTO"),
        ("UPDATE pg_settings SET setting = 'x'", "pg_settings"),
        ("UPDATE pg_catalog.pg_settings SET setting = 'x'", "pg_settings"),
        ("UPDATE pg_catalog.\"pg_settings\" SET setting = 'x'", "pg_settings"),
        ("SELECT 1; SET x = 1", "several statements"),
        ("WITH a AS (SELECT 1) TABLE a ORDER BY 1, pg_advisory_lock(42)", "TABLE"),
        ("SELECT set_config('a', 'b', false)", "set_config()"),
        ("SELECT pg_catalog.set_config('a', 'b', false)", "set_config()"),
        ("SELECT \"set_config\"('a', 'b', false)", "set_config()"),
        ("SELECT set_config('a', 'b', 1 = 1)", "set_config()"),
        ("SELECT set_config('a', 'b', true), set_config('a', 'b', false)", "set_config()"),
        ("SELECT 5 %(set_config('a','b',false)::int)", "set_config()"),
        ("SELECT 5 %(1)s, set_config('a','b',false)", "set_config()"),
        ("DO $$ BEGIN END $$", "DO"),
        ("SELECT $$a$$", "a statement that cannot be read for certain"),
        ("SELECT E'\\'' || f()", "a statement that cannot be read for certain"),
        ("SELECT /* /* */ f() */ 1", "a statement that cannot be read for certain"),
        ("SELECT 'open", "a statement that cannot be read for certain"),
        ("", "a statement without a text"),
        ('"a"', "a statement without a verb"),
    ],
)
def test_what_lasts_longer_than_its_transaction_is_named(sql: str, what: str) -> None:
    """However it is spelled; what cannot be read for certain counts as such."""
    assert left_by(sql).what == what


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT f(1)",
        "SELECT F (1)",
        "SELECT a FROM t AS x WHERE f(x.a)",
        "SELECT x::int, f(x) FROM t",
        "SELECT x::timestamp AT TIME ZONE f(x) FROM t",
        "SELECT 1 FROM t AS x CROSS JOIN f(x)",
        "SELECT 1 FROM other.f(1)",
        'SELECT 1 FROM other."f"(1)',
        "SELECT CASE WHEN a THEN f(1) END",
        "INSERT INTO t (a) SELECT f(1)",
        "INSERT INTO t AS x VALUES (f(1))",
        "WITH a AS (SELECT 1), b(c) AS (SELECT f(1)) SELECT 1",
        "WITH a AS (SELECT 1) SELECT 1, f(1)",
        "UPDATE t AS x SET a = f(a)",
        "UPDATE t SET a = 1 RETURNING f(a)",
        "SELECT lower(f(1))",
        "SELECT 'it''s', f(1)",
        "SELECT 1 -- '\n, f(1)",
        "SELECT __[POSTCOMPILE_a~~f(~~REPL~~)~~]",
    ],
)
def test_a_function_that_is_not_known_is_named(sql: str) -> None:
    """Wherever it stands, a name that is called is told from names of tables, types, aliases and CTEs."""
    assert left_by(sql) == Leavings(None, frozenset({"f"}), ())


def test_a_setting_by_parameters_is_local_if_the_parameter_is_true() -> None:
    """As SQLAlchemy compiles `func.set_config(name, value, True)`."""
    sql = "SELECT set_config(%(a)s::VARCHAR, %(b)s::VARCHAR, %(c)s::BOOLEAN) AS d"
    assert left_by(sql) == Leavings(None, frozenset(), ("c",), sets_locally=True)


UNITS = ["(", ")", "a ", "a.", "f(", "::", "'", "''", '"a"', "/*", "/**/", "--", "--\n", " ", "%(", "__[", "$", ","]


@pytest.mark.parametrize("unit", UNITS)
def test_a_statement_is_read_in_linear_time(unit: str) -> None:
    """32 times the text takes about 32 times as long."""
    assert growth(_read, lambda size: f"SELECT {unit * size}", 100) < LINEAR


def test_a_setting_of_many_arguments_is_read_in_linear_time() -> None:
    """What is looked ahead for is bounded by one call."""
    assert growth(_read, lambda size: "SELECT " + "set_config(%(a)s, %(b)s, %(c)s), " * size, 20) < LINEAR
