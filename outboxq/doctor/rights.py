"""What this role may do, by what it is for, and what row level security hides from it."""

from collections.abc import Iterator, Sequence

from outboxq.doctor.findings import Check, Examination, Finding
from outboxq.doctor.words import identifier, shell_word
from outboxq.roles import RIGHTS, Part
from outboxq.statements import doctor_tables as statements

_SELECT = ("SELECT",)
_POLICY_COMMANDS = {"SELECT": "r", "INSERT": "a", "UPDATE": "w", "DELETE": "d"}


def find_missing_rights(examination: Examination) -> Iterator[Finding]:
    """Grants that this role lacks for its use."""
    connection, schema, use = examination.connection, examination.schema, examination.use
    if not connection.execute(statements.schema_usage(schema)).scalar():
        yield Finding(
            "grant-missing",
            "problem",
            f"this role may not look into schema {schema!r}",
            {"use": use, "object": schema, "missing": ["USAGE"]},
            f"GRANT USAGE ON SCHEMA {identifier(schema)} TO the role.",
        )
    wanted = [(table, right) for table in sorted(examination.tables) for right in _needed(use, table)]
    missing: dict[str, list[str]] = {}
    for row in connection.execute(statements.missing_rights(schema, wanted)):
        missing.setdefault(row.table, []).append(row.privilege)
    for table in examination.tables & RIGHTS[use].inserts.keys():
        columns = connection.execute(
            statements.columns_without_insert(schema, table, RIGHTS[use].inserts[table])
        ).scalars()
        if lacking := ", ".join(columns):
            missing[table] = [f"INSERT ({lacking})"]
    for table, privileges in missing.items():
        yield Finding(
            "grant-missing",
            "problem",
            f"this role lacks {', '.join(privileges)} on table {table}, which a {use} needs",
            {"use": use, "object": table, "missing": privileges},
            f"GRANT {', '.join(privileges)} ON {identifier(schema, table)} TO the role "
            f"(`outboxq roles --sql` prints all it takes); or say with --for what else than a {use} it is.",
        )


def find_wide_producers(examination: Examination) -> Iterator[Finding]:
    """Roles that may write the relays' own columns of a new job, without being a relay or an operator."""
    for row in examination.connection.execute(statements.inserters(examination.schema)):
        grant = f"Run what `outboxq roles --sql --producer {shell_word(row.role)}` prints"
        revoke = f"REVOKE INSERT ON {identifier(examination.schema, 'job')} FROM PUBLIC"
        yield Finding(
            "producer-writes-every-column",
            "warning",
            f"role {row.role} may insert into every column of table job, and so hold up the jobs of others",
            {"role": row.role},
            f"{grant if row.is_role else revoke}: a producer needs INSERT on some columns alone.",
        )


def find_hidden_rows(examination: Examination) -> Iterator[Finding]:
    """Row level security without a policy that lets this role, or anybody, through."""
    for row in examination.connection.execute(statements.row_security(examination.schema)):
        wanted = _commands(examination.use, row.table)
        allowed = row.mine if row.is_active else row.anybodys
        refused = [] if "*" in allowed else [right for right in wanted if _POLICY_COMMANDS[right] not in allowed]
        if refused:
            table = identifier(examination.schema, row.table)
            whom = "this role" if row.is_active else "any role but its owner and superusers"
            yield Finding(
                "row-security-without-policy",
                "problem" if row.is_active else "warning",
                f"row level security on table {row.table} lets nothing through for {', '.join(refused)} of {whom}",
                {"table": row.table, "commands": refused, "applies_to_this_role": row.is_active},
                f"CREATE POLICY relays ON {table} TO the role USING (true) WITH CHECK (true); "
                f"or ALTER TABLE {table} DISABLE ROW LEVEL SECURITY.",
            )


def _needed(use: Part, table: str) -> tuple[str, ...]:
    rights = RIGHTS[use]
    return tuple(dict.fromkeys((*(_SELECT if rights.reads_all else ()), *rights.tables.get(table, ()))))


def _commands(use: Part, table: str) -> tuple[str, ...]:
    return (*_needed(use, table), *(("INSERT",) if table in RIGHTS[use].inserts else ()))


_MARKED = frozenset({"migration"})

CHECKS: Sequence[Check] = (
    Check("the rights of this role", find_missing_rights, _MARKED),
    Check("the rights of producers", find_wide_producers, _MARKED),
    Check("row level security", find_hidden_rows, _MARKED),
)
