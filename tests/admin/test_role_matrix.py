"""Every statement that the catalog suggests, tried as each role of `outboxq roles`: what is written here is let in.

The tables below say what each part may do, and do not ask `outboxq.roles`. A table, function or sequence without a line
in them fails, and so does a grant more or less.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psycopg
import pytest
from psycopg import sql

from outboxq.admin.roles import PARTS, Part
from tests.admin.test_roles import Cast
from tests.admin.test_roles import roles as roles
from tests.support.urls import libpq_url

# S, I, U, D: SELECT, INSERT, UPDATE, DELETE, on each column where there is such a right.
# R: SELECT ... FOR UPDATE.
# a, r, x: LOCK TABLE in ACCESS SHARE, ROW EXCLUSIVE and ACCESS EXCLUSIVE mode.
_PARTS: tuple[Part, ...] = ("producer", "unique_producer", "receiver", "relay", "reader", "operator")
MAY: Mapping[str, Mapping[Part, str]] = {
    table: dict(zip(_PARTS, rights, strict=True))
    for table, rights in {
        "job": ("", "", "", "SIUDRarx", "Sa", "SIUDRarx"),
        "dead_job": ("", "", "", "SIUDRarx", "Sa", "SIUDRarx"),
        "queue": ("", "", "", "Sa", "Sa", "SIURarx"),
        "relay": ("", "", "", "SIUDRarx", "Sa", "Sa"),
        "inbox": ("", "", "SIar", "SIUDRarx", "Sa", "SUDRarx"),
        "effect": ("", "", "SIURarx", "SIUDRarx", "Sa", "SURarx"),
        "deployment": ("", "", "Sa", "Sa", "Sa", "Sa"),
        "migration": ("", "", "", "Sa", "Sa", "Sa"),
        "schedule": ("", "", "", "SIURarx", "Sa", "SIUDRarx"),
        "unique_key": ("", "SIURarx", "", "SIUDRarx", "Sa", "SIURarx"),
        "rate": ("", "", "", "SIUDRarx", "Sa", "Sa"),
        "batch": ("", "", "", "SIUDRarx", "Sa", "Sa"),
        "cancel_request": ("", "", "", "SIUDRarx", "Sa", "SIUDRarx"),
        "paused_kind": ("", "", "", "Sa", "Sa", "SIDarx"),
        "relay_status": ("", "", "", "SIUDRarx", "Sa", "Sa"),
        "stat": ("", "", "", "SIUDRarx", "Sa", "Sa"),
        "gauge": ("", "", "", "SIUDRarx", "Sa", "Sa"),
        "done_job": ("", "", "", "SIUDRarx", "Sa", "Sa"),
        "progress": ("", "", "", "SIUDRarx", "Sa", "Sa"),
        "audit": ("", "", "", "", "Sa", "SRa"),
    }.items()
}
# A producer's columns of `job`, for INSERT; for SELECT, those of a producer of unique jobs.
PRODUCED = {
    "id", "queue", "kind", "args", "headers", "priority", "max_attempts", "state", "run_at", "unique_key", "group_key",
    "batch_id", "expires_at",
}  # fmt: skip
PRODUCED_BATCHES = {"id", "callback", "parent_id"}
LOOKED_AT = {"id", "state", "expires_at"}
# An operator's columns of the audit: those of a new row, without when and by which database role; and those of the
# progress of a change of many rows.
AUDITED = {
    "id", "actor", "role", "via", "action", "target", "filter", "change", "reason", "expected", "changed", "held",
    "finished_at",
}  # fmt: skip
PROGRESS = {"changed", "held", "position", "resumed", "finished_at", "stopped_at", "error"}
# EXECUTE, in a database that has taken it from PUBLIC, who has it otherwise.
_CALLERS: set[Part] = {"producer", "unique_producer", "relay"}
MAY_CALL: Mapping[str, set[Part]] = {"add_job": _CALLERS, "keep_audit": _CALLERS, "wake_relays": _CALLERS}
# Whose call of add_job comes to a job, while PUBLIC has EXECUTE.
MAY_ADD: set[Part] = {*_CALLERS, "operator"}
# Identities take their numbers without a right on them.
SEQUENCES = {"job_seq_seq"}

_ON_ROWS = {"D": "DELETE FROM {table} WHERE false", "R": "SELECT FROM {table} WHERE false FOR UPDATE"}
_ON_COLUMNS = {
    "S": "SELECT {column} FROM {table} WHERE false",
    "I": "INSERT INTO {table} ({column}) OVERRIDING SYSTEM VALUE SELECT NULL::{type} WHERE false",
    "U": "UPDATE {table} SET {column} = DEFAULT WHERE false",
}
_LOCKS = {
    "a": "LOCK TABLE {table} IN ACCESS SHARE MODE",
    "r": "LOCK TABLE {table} IN ROW EXCLUSIVE MODE",
    "x": "LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE",
}
# No part may. Where a statement takes a schema in which the role may create, it is `playground`.
_NEVER_ON_TABLES = (
    "TRUNCATE {table} CASCADE",
    "CREATE TABLE playground.mine ({keys_with_types}, FOREIGN KEY ({keys}) REFERENCES {table} ({keys}))",
    "CREATE TRIGGER mine BEFORE UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    "CREATE RULE mine AS ON DELETE TO {table} DO ALSO NOTHING",
    "CREATE POLICY mine ON {table} USING (true)",
    "CREATE INDEX mine ON {table} ({keys})",
    "REINDEX TABLE {table}",
    "CLUSTER {table} USING {key_index}",
    "ALTER TABLE {table} ADD COLUMN mine integer",
    "ALTER TABLE {table} DISABLE TRIGGER USER",
    "ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
    "ALTER TABLE {table} SET (fillfactor = 50)",
    "ALTER TABLE {table} OWNER TO CURRENT_USER",
    "ALTER TABLE {table} RENAME TO mine",
    "ALTER TABLE {table} SET SCHEMA playground",
    "COMMENT ON TABLE {table} IS 'mine'",
    "DROP TABLE {table} CASCADE",
)
_NEVER_ON_SEQUENCES = (
    "SELECT last_value FROM {sequence}",
    "SELECT nextval('{sequence}')",
    "SELECT setval('{sequence}', 5)",
    "ALTER SEQUENCE {sequence} RESTART",
)
_NEVER_ON_FUNCTIONS = (
    "ALTER FUNCTION {function} COST 5",
    "DROP FUNCTION {function} CASCADE",
)
_NEVER_ON_THE_SCHEMA = (
    "CREATE TABLE outboxq.mine ()",
    "CREATE VIEW outboxq.mine AS SELECT",
    "CREATE SEQUENCE outboxq.mine",
    "CREATE FUNCTION outboxq.mine() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
    "ALTER SCHEMA outboxq RENAME TO mine",
    "DROP SCHEMA outboxq CASCADE",
)


@dataclass(frozen=True)
class Catalog:
    """What there is in the schema."""

    tables: Mapping[str, list[tuple[str, str]]]
    keys: Mapping[str, tuple[str, list[str]]]
    sequences: set[str]
    functions: Mapping[str, list[str]]


def read_catalog(connection: psycopg.Connection) -> Catalog:
    """Columns and their types by table, the primary key and its index, sequences, and the types that functions take."""
    tables: dict[str, list[tuple[str, str]]] = {}
    for table, column, kind in connection.execute(
        "SELECT relname, attname, format_type(atttypid, atttypmod) FROM pg_class JOIN pg_attribute ON attrelid = "
        "pg_class.oid WHERE relnamespace = 'outboxq'::regnamespace AND relkind NOT IN ('i', 'S') AND attnum > 0 "
        "AND NOT attisdropped ORDER BY 1, attnum"
    ):
        tables.setdefault(table, []).append((column, kind))
    keys = {
        table: (index, columns)
        for table, index, columns in connection.execute(
            "SELECT pg_class.relname, conname, array_agg(attname::text ORDER BY array_position(conkey, attnum)) "
            "FROM pg_constraint JOIN pg_class ON pg_class.oid = conrelid "
            "JOIN pg_attribute ON attrelid = conrelid AND attnum = ANY (conkey) "
            "WHERE contype = 'p' AND connamespace = 'outboxq'::regnamespace GROUP BY 1, 2"
        )
    }
    of_schema = "FROM pg_class WHERE relnamespace = 'outboxq'::regnamespace AND relkind = 'S'"
    sequences = {name for (name,) in connection.execute(f"SELECT relname {of_schema}")}
    functions: dict[str, list[str]] = dict(
        connection.execute(
            "SELECT proname, array(SELECT format_type(type, NULL) FROM unnest(proargtypes) AS type) FROM pg_proc "
            "WHERE pronamespace = 'outboxq'::regnamespace"
        ).fetchall()
    )
    return Catalog(tables, keys, sequences, functions)


@dataclass(frozen=True)
class Trial:
    """A statement, and what it tries: a letter of `MAY` on a table or a column of it, or something that none may."""

    statement: str
    letter: str = ""
    table: str = ""
    column: str = ""

    def is_let_in(self, part: Part) -> bool:
        """By the tables above."""
        if not self.letter:
            return False
        if part in ("producer", "unique_producer") and self.letter == "I" and self.table in ("job", "batch"):
            return self.column in (PRODUCED if self.table == "job" else PRODUCED_BATCHES)
        if (part, self.table) == ("operator", "audit") and self.letter in "IU":
            return self.column in (AUDITED if self.letter == "I" else PROGRESS)
        if (part, self.table, self.letter) == ("unique_producer", "job", "S"):
            return self.column in LOOKED_AT
        return self.letter in MAY[self.table][part]


def trials(catalog: Catalog) -> Iterator[Trial]:
    """Everything to be tried as each part."""
    for table, columns in catalog.tables.items():
        index, keys = catalog.keys[table]
        types = dict(columns)
        names = {
            "table": f"outboxq.{table}",
            "keys": ", ".join(keys),
            "keys_with_types": ", ".join(f"{key} {types[key]}" for key in keys),
            "key_index": index,
        }
        for letter, template in {**_ON_ROWS, **_LOCKS}.items():
            yield Trial(template.format(**names), letter, table)
        for letter, template in _ON_COLUMNS.items():
            for column, kind in columns:
                yield Trial(template.format(**names, column=column, type=kind), letter, table, column)
        yield from (Trial(template.format(**names)) for template in _NEVER_ON_TABLES)
    for sequence in catalog.sequences:
        yield from (Trial(template.format(sequence=f"outboxq.{sequence}")) for template in _NEVER_ON_SEQUENCES)
    for name, types_taken in catalog.functions.items():
        function = f"outboxq.{name}({', '.join(types_taken)})"
        yield from (Trial(template.format(function=function)) for template in _NEVER_ON_FUNCTIONS)
    yield from (Trial(statement) for statement in _NEVER_ON_THE_SCHEMA)


def is_let_in(connection: psycopg.Connection, statement: str) -> bool:
    """Try a statement, and take it back. Another error than a missing right is raised."""
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(statement.encode())
    except psycopg.errors.InsufficientPrivilege:
        return False
    return True


@pytest.fixture
def owner(roles: Cast) -> Iterator[psycopg.Connection]:
    """Where all roles may create tables, in a schema that is not ours."""
    with psycopg.connect(libpq_url(roles.database.url), autocommit=True) as connection:
        connection.execute("CREATE SCHEMA playground; GRANT ALL ON SCHEMA playground TO PUBLIC")
        yield connection


@pytest.fixture
def catalog(owner: psycopg.Connection) -> Catalog:
    return read_catalog(owner)


def test_every_object_has_a_line_here(catalog: Catalog) -> None:
    """What a later migration step brings is decided on for each part, and not forgotten."""
    assert catalog.tables.keys() == MAY.keys()
    assert [table for table, by_part in MAY.items() if by_part.keys() != set(PARTS)] == []
    assert catalog.functions.keys() == MAY_CALL.keys()
    assert catalog.sequences == SEQUENCES
    assert {column for column, _ in catalog.tables["job"]} >= PRODUCED


def test_every_statement_can_be_said(owner: psycopg.Connection, catalog: Catalog) -> None:
    """As the owner each of them runs: none is refused for its spelling."""
    tried = list(trials(catalog))
    assert len(tried) > 300
    assert [trial.statement for trial in tried if not is_let_in(owner, trial.statement)] == []


@pytest.mark.first_and_last
@pytest.mark.parametrize("part", PARTS)
def test_a_part_may_do_what_is_written_here_and_nothing_else(roles: Cast, catalog: Catalog, part: Part) -> None:
    """Each statement as a login role that has its rights through the group."""
    with psycopg.connect(libpq_url(roles.url(part)), autocommit=True) as connection:
        outcomes = [(trial, is_let_in(connection, trial.statement)) for trial in trials(catalog)]
    assert [trial.statement for trial, let_in in outcomes if let_in and not trial.is_let_in(part)] == []
    assert [trial.statement for trial, let_in in outcomes if not let_in and trial.is_let_in(part)] == []


@pytest.mark.first_and_last
@pytest.mark.parametrize("part", PARTS)
def test_a_part_calls_the_functions_that_are_written_here(
    roles: Cast, owner: psycopg.Connection, catalog: Catalog, part: Part
) -> None:
    """While PUBLIC may, the rights on the table decide; without, those on the function."""
    with psycopg.connect(libpq_url(roles.url(part)), autocommit=True) as connection:
        assert is_let_in(connection, "SELECT outboxq.add_job('kind')") is (part in MAY_ADD)
        owner.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA outboxq FROM PUBLIC")
        callable_now = {name for name, types in catalog.functions.items() if is_called(connection, name, types)}
    assert callable_now == {name for name, parts in MAY_CALL.items() if part in parts}


def is_called(connection: psycopg.Connection, name: str, types: list[str]) -> bool:
    """With NULLs, which a function may refuse, or because it is a trigger's: that is behind the right to call it."""
    given = ", ".join(f"NULL::{kind}" for kind in types)
    try:
        return is_let_in(connection, f"SELECT outboxq.{name}({given})")
    except (psycopg.errors.InvalidParameterValue, psycopg.errors.FeatureNotSupported):
        return True


def test_no_part_may_pass_its_rights_on(roles: Cast, owner: psycopg.Connection) -> None:
    """No grant option, on tables, columns, functions, and the schema."""
    held = sql.SQL(" UNION ALL ").join(
        sql.SQL("SELECT held.* FROM {} AS object, aclexplode({}) AS held").format(sql.Identifier(table), column)
        for table, column in (
            ("pg_class", sql.SQL("object.relacl")),
            ("pg_attribute", sql.SQL("object.attacl")),
            ("pg_proc", sql.SQL("object.proacl")),
            ("pg_namespace", sql.SQL("object.nspacl")),
        )
    )
    query = sql.SQL(
        "SELECT count(*), count(*) FILTER (WHERE is_grantable) FROM ({}) AS held "
        "WHERE grantee::regrole::text = ANY (SELECT quote_ident(name) FROM unnest(%s::text[]) AS name)"
    ).format(held)
    found = owner.execute(query, ([*roles.groups.values()],)).fetchone()
    assert found is not None
    assert found[0] > 30
    assert found[1] == 0
