"""The tables: their version, and which parts are missing or different."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Index, Row, Table
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex

from outboxq.doctor.findings import Check, CheckContext, Finding
from outboxq.doctor.formatting import identifier
from outboxq.doctor.functions import find_different_functions
from outboxq.migrations import LATEST
from outboxq.statements.doctor import tables as statements
from outboxq.statements.server import NEEDED_VERSION, schema_version
from outboxq.tables import metadata

_TRIGGER = "wake_relays"


@dataclass(frozen=True, slots=True)
class Version:
    """What the version marker says: whether the tables can be looked at, and whether all of their parts can be."""

    findings: Sequence[Finding] = ()
    is_usable: bool = True
    is_current: bool = False


def existing_tables(context: CheckContext) -> frozenset[str]:
    """The names of the tables in the schema."""
    return frozenset(context.scalars(statements.tables(context.schema)))


def look_at_version(context: CheckContext) -> Version:
    """Compare the marker that migrations leave with what the code needs."""
    step = schema_version(context.connection, context.schema) if "migration" in context.tables else None
    if not step:
        return Version([_tables_missing(context.schema)], is_usable=False)
    if step < NEEDED_VERSION:
        return Version([_tables_old(context.schema, step)])
    if step < LATEST:
        return Version([_steps_waiting(context.schema, step)])
    if step > LATEST:
        return Version([_tables_new(context.schema, step)])
    return Version(is_current=True)


def _tables_missing(schema: str) -> Finding:
    return Finding(
        "tables-missing",
        "problem",
        f"there are no outboxq tables in schema {schema!r} of this database",
        {"schema": schema, "needed_step": NEEDED_VERSION},
        "Run `outboxq migrate`, or name the right database (--database-url) and schema (--schema).",
    )


def _tables_old(schema: str, step: int) -> Finding:
    return Finding(
        "tables-old",
        "problem",
        f"the tables are at step {step}, and this outboxq needs step {NEEDED_VERSION}",
        {"schema": schema, "step": step, "needed_step": NEEDED_VERSION},
        f"Run `outboxq migrate`, or call outboxq.migrations.upgrade(op, to={LATEST}) in a revision of yours.",
    )


def _steps_waiting(schema: str, step: int) -> Finding:
    return Finding(
        "tables-behind",
        "warning",
        f"the tables are at step {step}, and this outboxq brings step {LATEST}; their parts were not compared",
        {"schema": schema, "step": step, "latest_step": LATEST},
        f"Run `outboxq migrate` while the relays work on, or call outboxq.migrations.upgrade(op, to={LATEST}) in "
        "revisions of yours, as docs/migrations.md says.",
    )


def _tables_new(schema: str, step: int) -> Finding:
    return Finding(
        "tables-new",
        "info",
        f"the tables are at step {step}, made by a newer outboxq than this one, which knows step {LATEST}; "
        "their parts were not compared",
        {"schema": schema, "step": step, "latest_step": LATEST},
        "Finish the deployment: relays and producers of this version go on working meanwhile.",
    )


def find_missing_tables(context: CheckContext) -> Iterator[Finding]:
    """Tables that should be there by the marker."""
    for name in sorted({str(table.name) for table in metadata.tables.values()} - context.tables):
        yield Finding(
            "table-missing",
            "problem",
            f"table {name!r} is missing, although the tables are at the right step",
            {"table": name},
            "It was dropped: restore it from a backup, or make it again with the DDL of `outboxq migrate --sql`.",
        )


def find_broken_indexes(context: CheckContext) -> Iterator[Finding]:
    """Indexes that are missing, invalid or different."""
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
    """The name and the identity of every index of tables.py, primary keys included."""
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
    """Without what PostgreSQL adds when it prints an expression: spaces, parentheses, casts of literals."""
    kept = definition.replace("::text", "")
    return "".join(character for character in kept if character not in ' ()"\n').lower()


def find_missing_code(context: CheckContext) -> Iterator[Finding]:
    """The functions, and the trigger that wakes relays."""
    yield from find_different_functions(context)
    if _TRIGGER not in context.scalars(statements.triggers(context.schema)):
        yield Finding(
            "trigger-missing",
            "warning",
            f"trigger {_TRIGGER!r} on job is missing or disabled: new jobs wake no relay, and wait until the next poll",
            {"trigger": _TRIGGER},
            f"ALTER TABLE {identifier(context.schema, 'job')} ENABLE TRIGGER {_TRIGGER}; or make it again with the DDL "
            "of `outboxq migrate --sql`.",
        )


_MARKED = frozenset({"migration"})

CHECKS: Sequence[Check] = (
    Check("the tables", find_missing_tables, _MARKED, needs_current=True),
    Check("the indexes", find_broken_indexes, _MARKED, needs_current=True),
    Check("functions and triggers", find_missing_code, _MARKED, needs_current=True),
)
