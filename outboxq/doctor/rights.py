"""Checks of rights: those that this role lacks, those that other roles should not have, and row level security."""

import re
import shlex
from collections.abc import Iterator, Mapping

from outboxq.admin.roles import RIGHTS, Part, default_names
from outboxq.doctor.findings import CheckContext, Finding
from outboxq.doctor.formatting import identifier
from outboxq.names import with_article
from outboxq.statements.doctor import tables as statements
from outboxq.statements.doctor.sessions import role_settings

# An identifier of a search path: in quotes, or as it is.
_SCHEMA = re.compile(r'"((?:[^"]|"")+)"|([^",\s]+)')
_SELECT = ("SELECT",)
_WIDEST: tuple[Part, ...] = ("relay", "operator", "reader", "receiver", "unique_producer", "producer")
_POLICY_COMMANDS = {"SELECT": "r", "INSERT": "a", "UPDATE": "w", "DELETE": "d"}


def use_of(context: CheckContext) -> Part:
    """Return the purpose of this database role, such as relay, by its membership in the groups of `outboxq roles`.

    A role that is in none of the groups is taken for a relay's.
    """
    groups = default_names()
    member = set(context.scalars(statements.groups_of_role(list(groups.values()))))
    for part in _WIDEST:
        if groups[part] in member:
            return part
    return "relay"


def find_missing_rights(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for rights on the schema and its tables that this role lacks for its purpose (`context.use`)."""
    schema, use = context.schema, context.use
    if True not in context.scalars(statements.schema_usage(schema)):
        yield Finding(
            "grant-missing",
            "problem",
            f"this role may not look into schema {schema!r}",
            {"use": use, "object": schema, "missing": ["USAGE"]},
            f"GRANT USAGE ON SCHEMA {identifier(schema)} TO the role.",
        )
    wanted = [(table, right) for table in sorted(context.tables) for right in _needed(use, table)]
    missing: dict[str, list[str]] = {}
    for row in context.rows(statements.missing_rights(schema, wanted)):
        missing.setdefault(row.table, []).append(row.privilege)
    for right, by_table in _on_columns(use).items():
        for table in sorted(context.tables & by_table.keys()):
            columns = context.scalars(statements.columns_without(right, schema, table, by_table[table]))
            if lacking := ", ".join(columns):
                missing.setdefault(table, []).append(f"{right} ({lacking})")
    for table, privileges in missing.items():
        yield Finding(
            "grant-missing",
            "problem",
            f"this role lacks {', '.join(privileges)} on table {table}, which {with_article(use)} needs",
            {"use": use, "object": table, "missing": privileges},
            f"GRANT {', '.join(privileges)} ON {identifier(schema, table)} TO the role "
            f"(`outboxq roles --sql` prints all it takes); or say with --for what else than {with_article(use)} it is.",
        )


def find_wide_producers(context: CheckContext) -> Iterator[Finding]:
    """Yield a finding for each role that may insert into every column of `job`, but needs only a producer's columns."""
    for row in context.rows(statements.inserters(context.schema)):
        grant = f"Run what `outboxq roles --sql --producer {shlex.quote(row.role)}` prints"
        revoke = f"REVOKE INSERT ON {identifier(context.schema, 'job')} FROM PUBLIC"
        yield Finding(
            "producer-writes-every-column",
            "warning",
            f"role {row.role} may insert into every column of table job, and so hold up the jobs of others",
            {"role": row.role},
            f"{grant if row.is_role else revoke}: a producer needs INSERT on some columns alone.",
        )


def find_hidden_rows(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for tables whose row level security hides rows from this role.

    Row level security does not apply to some roles, such as a table's owner. For such a role, the findings are for
    tables that hide rows from all other roles.
    """
    for row in context.rows(statements.row_security(context.schema)):
        wanted = _commands(context.use, row.table)
        allowed = row.mine if row.is_active else row.anybodys
        refused = [] if "*" in allowed else [right for right in wanted if _POLICY_COMMANDS[right] not in allowed]
        if refused:
            table = identifier(context.schema, row.table)
            whom = "this role" if row.is_active else "any role but its owner and superusers"
            yield Finding(
                "row-security-without-policy",
                "problem" if row.is_active else "warning",
                f"row level security on table {row.table} lets nothing through for {', '.join(refused)} of {whom}",
                {"table": row.table, "commands": refused, "applies_to_this_role": row.is_active},
                f"CREATE POLICY relays ON {table} TO the role USING (true) WITH CHECK (true); "
                f"or ALTER TABLE {table} DISABLE ROW LEVEL SECURITY.",
            )


def find_open_schemas(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for schemas in a relay's search path in which other roles could create functions and operators.

    SQL of the relay that names no schema could then call their functions, with the rights of the relay.
    """
    paths = _search_paths(context)
    behind = {role: path[: path.index("pg_catalog")] for role, path in paths.items() if "pg_catalog" in path[1:]}
    for role, before in behind.items():
        yield Finding(
            "search-path-hides-pg-catalog",
            "warning",
            f"role {role!r} looks for functions, operators and types in {', '.join(before)} before pg_catalog",
            {"role": role, "schemas": before},
            "Take pg_catalog out of its search_path, so that it comes first by itself, or put it first.",
        )
    creators: dict[str, list[str]] = {}
    names = sorted({name for path in paths.values() for name in path})
    for row in context.rows(statements.schema_creators(context.schema, names)):
        creators.setdefault(row.schema, []).append(row.creator)
    for schema, roles in creators.items():
        users = [role for role, path in paths.items() if schema in path]
        yield Finding(
            "search-path-open",
            "warning",
            f"{', '.join(roles)} may create in schema {schema!r}, where {', '.join(users)} looks for what SQL names "
            "without a schema",
            {"schema": schema, "creators": roles, "roles": users},
            f"REVOKE CREATE ON SCHEMA {identifier(schema)} FROM "
            f"{', '.join('PUBLIC' if role == 'PUBLIC' else identifier(role) for role in roles)}; what a role creates "
            "there could be called by handlers and triggers, with the rights of their role (docs/search-path.md).",
        )


def _search_paths(context: CheckContext) -> dict[str, list[str]]:
    """Return the schemas in the search path of this role and of roles that could be a relay's: `{role: [schema]}`."""
    own = context.rows(statements.search_path())
    others = context.rows(role_settings(context.schema, ("search_path",)))
    return {row.role: _schemas(row.value, row.role) for row in (*own, *others)}


def _schemas(path: str, role: str) -> list[str]:
    found = [quoted.replace('""', '"') or plain.lower() for quoted, plain in _SCHEMA.findall(path)]
    return [role if name == "$user" else name for name in found]


def _needed(use: Part, table: str) -> tuple[str, ...]:
    rights = RIGHTS[use]
    return tuple(dict.fromkeys((*(_SELECT if rights.reads_all else ()), *rights.tables.get(table, ()))))


def _commands(use: Part, table: str) -> tuple[str, ...]:
    return (*_needed(use, table), *(right for right, by_table in _on_columns(use).items() if table in by_table))


def _on_columns(use: Part) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """Return the rights that a purpose needs on single columns: `{right: {table: columns}}`."""
    rights = RIGHTS[use]
    return {"INSERT": rights.inserts, "SELECT": rights.selects, "UPDATE": rights.updates}
