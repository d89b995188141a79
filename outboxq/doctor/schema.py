"""Checks of the tables: their version, and missing or different tables, indexes, functions and triggers."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Index, Row, Table
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex

from outboxq.doctor.findings import CheckContext, Finding, Value
from outboxq.doctor.formatting import identifier
from outboxq.migrations import LATEST, upgrade_sql
from outboxq.statements.doctor import tables as statements
from outboxq.statements.render import quote_identifier
from outboxq.statements.server import missing_installation, schema_version
from outboxq.tables import NEEDED_VERSION, metadata

# The consequence if a trigger does not fire, by table.
_TRIGGERS = {
    ("job", "wake_relays"): "new jobs wake no relay, and wait until the next poll",
    (
        "audit",
        "keep_audit",
    ): "an operator's role, and the owner, can rewrite what the audit says of actions that have ended",
}
TABLES_MISSING = "tables-missing"


def look_at_version(context: CheckContext) -> Finding | None:
    """Return a finding if the tables' migration step is not the latest that this code knows, otherwise None."""
    schema = context.schema
    step = schema_version(context.connection, schema) if "migration" in context.tables else None
    if not step:
        return Finding(
            TABLES_MISSING,
            "problem",
            f"there are no outboxq tables in schema {schema!r} of this database",
            {"schema": schema, "needed_step": NEEDED_VERSION},
            f"Is it the right database (--database-url)? Found {missing_installation(context.connection, schema)}.",
        )
    if step < NEEDED_VERSION:
        return Finding(
            "tables-old",
            "problem",
            f"the tables are at step {step}, and this outboxq needs step {NEEDED_VERSION}",
            {"schema": schema, "step": step, "needed_step": NEEDED_VERSION},
            f"Run `outboxq migrate`, or call outboxq.migrations.upgrade(op, to={LATEST}) in your own revision.",
        )
    return None if step == LATEST else _not_latest(schema, step)


def _not_latest(schema: str, step: int) -> Finding:
    detail: dict[str, Value] = {"schema": schema, "step": step, "latest_step": LATEST}
    if step < LATEST:
        return Finding(
            "tables-behind",
            "warning",
            f"the tables are at step {step}, and this outboxq brings step {LATEST}; their parts were not compared",
            detail,
            f"Run `outboxq migrate` while the relays work on, or call outboxq.migrations.upgrade(op, to={LATEST}) in "
            "your own revisions, as docs/migrations.md says.",
        )
    return Finding(
        "tables-new",
        "info",
        f"the tables are at step {step}, made by a newer outboxq than this one, which knows step {LATEST}; "
        "their parts were not compared",
        detail,
        "Finish the deployment: relays and producers of this version go on working until then.",
    )


def find_missing_tables(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for tables that are missing, although the recorded migration step includes them."""
    for name in sorted({str(table.name) for table in metadata.tables.values()} - context.tables):
        yield Finding(
            "table-missing",
            "problem",
            f"table {name!r} is missing, although the tables are at the right step",
            {"table": name},
            "It was dropped: restore it from a backup, or make it again with the DDL of `outboxq migrate --sql`.",
        )


def find_broken_indexes(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for indexes that are missing, invalid, or different from those of `outboxq.tables`."""
    found = context.rows(statements.indexes(context.schema))
    whole = {_identity(row) for row in found if row.is_valid}
    wanted = [item for item in _declared_indexes() if item[1][0] in context.tables]
    for name, identity in wanted:
        if identity not in whole:
            yield _index_missing(name, identity[0], found)
    needed = {identity for _, identity in wanted} - whole
    for row in found:
        if not row.is_valid and _identity(row) not in needed:
            yield Finding(
                "index-invalid",
                "warning",
                f"index {row.name!r} on {row.table} is invalid: it costs every write and serves no read",
                {"index": row.name, "table": row.table},
                "Drop what a cancelled CREATE or REINDEX left: "
                f"DROP INDEX CONCURRENTLY {identifier(context.schema, row.name)};",
            )


def _index_missing(name: str, table: str, found: Sequence[Row[Any]]) -> Finding:
    same = next((row for row in found if row.name == name), None)
    detail = {"index": name, "table": table}
    advice = "Make it as `outboxq migrate --sql` does, with CREATE INDEX CONCURRENTLY."
    if same is None:
        return Finding("index-missing", "problem", f"index {name!r} on {table} is missing", detail, advice)
    if not same.is_valid:
        return Finding(
            "index-invalid",
            "problem",
            f"index {name!r} on {table} is invalid: no query uses it",
            detail,
            f"REINDEX INDEX CONCURRENTLY {name} in its schema; or drop it. {advice}",
        )
    return Finding(
        "index-different",
        "problem",
        f"index {name!r} on {table} is not what the code needs: {same.definition}",
        {**detail, "definition": same.definition},
        f"Drop it. {advice}",
    )


_Identity = tuple[str, bool, str]


def _declared_indexes() -> list[tuple[str, _Identity]]:
    """Return (name, (table, uniqueness, definition)) of every index that the module `outboxq.tables` declares.

    The doctor compares them with the indexes of the database. Primary keys are included.
    """
    found = []
    for table in metadata.tables.values():
        owner = str(table.name)
        key = ", ".join(column.name for column in table.primary_key.columns)
        found.append((f"{owner}_pkey", (owner, True, _plain(f"btree ({key})"))))
        found += [(str(index.name), _declared(index, table)) for index in table.indexes]
    return sorted(found)


def _declared(index: Index, table: Table) -> _Identity:
    ddl = str(CreateIndex(index).compile(dialect=postgresql.dialect()))  # type: ignore[no-untyped-call]  # SQLAlchemy left it untyped
    definition = ddl.partition(f"{table.name} ")[2]
    using = "" if definition.startswith("USING") else "btree "
    return str(table.name), bool(index.unique), _plain(using + definition.removeprefix("USING "))


def _identity(row: Row[Any]) -> _Identity:
    return row.table, row.is_unique, _plain(row.definition)


def _plain(definition: str) -> str:
    """Return an index definition without spaces, parentheses and casts, which PostgreSQL may print differently.

    So two definitions of the same index are equal texts.
    """
    kept = definition.replace("::text", "")
    return "".join(character for character in kept if character not in ' ()"\n').lower()


@dataclass(frozen=True, slots=True)
class Made:
    """A database function as the migrations create it.

    Args:
        body: The text that PostgreSQL keeps of the function, in `pg_proc.prosrc`.
        sql: Statements that create the function again, and leave the rights on it unchanged.
    """

    body: str
    sql: str


def made_by_migrations(schema: str, step: int = LATEST) -> dict[str, Made]:
    """Return the database functions that exist after the migration steps up to `step`, by name.

    They are read from the statements of these steps.
    """
    prefix = re.escape(quote_identifier(schema))
    made = re.compile(
        rf"CREATE (?:OR REPLACE )?FUNCTION {prefix}\.(?P<made>\w+)\(.*? AS \$function\$(?P<body>.*?)\$function\$;"
        rf"|ALTER FUNCTION {prefix}\.(?P<altered>\w+)\b[^;]*;",
        re.DOTALL,
    )
    found: dict[str, Made] = {}
    for change in made.finditer("\n".join(upgrade_sql(number, schema) for number in range(1, step + 1))):
        if change["made"] is not None:
            again = change[0].replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1)
            found[change["made"]] = Made(change["body"], again)
        else:
            before = found[change["altered"]]
            found[change["altered"]] = replace(before, sql=f"{before.sql}\n{change[0]}")
    return found


def find_missing_code(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for database functions that are missing or differ from the migrations', and for disabled triggers.

    A function differs, for example, after ALTER SCHEMA ... RENAME: its text still contains the former name.
    """
    rows = context.rows(statements.functions(context.schema))
    for name, made in sorted(made_by_migrations(context.schema).items()):
        bodies = [row.body for row in rows if row.name == name]
        if not bodies:
            yield Finding(
                "function-missing",
                "problem",
                f"function {name!r} is missing",
                {"function": name, "sql": made.sql},
                "Make it again, with the SQL in `detail` (--json), as the owner of the tables; then run what `outboxq "
                "roles --sql` prints.",
            )
        elif made.body not in bodies:
            yield Finding(
                "function-different",
                "problem",
                f"the text of function {name!r} is not the one that the migrations make for schema "
                f"{context.schema!r}: a schema that was renamed keeps its old name there",
                {"function": name, "sql": made.sql},
                "Give the schema its old name back, or mend the function with the SQL in `detail` (--json), as the "
                "owner of the tables.",
            )
    firing = {(row.of_table, row.name) for row in context.rows(statements.triggers(context.schema))}
    for (table, trigger), meaning in _TRIGGERS.items():
        if table in context.tables and (table, trigger) not in firing:
            yield Finding(
                "trigger-missing",
                "warning",
                f"trigger {trigger!r} on {table} is missing or disabled: {meaning}",
                {"trigger": trigger, "table": table},
                f"ALTER TABLE {identifier(context.schema, table)} ENABLE TRIGGER {trigger}; or make it again with the "
                "DDL of `outboxq migrate --sql`.",
            )
