"""Database roles that have no more rights than their part of a system (such as a producer or a relay) needs.

The rights are data (`RIGHTS`) and SQL (`roles_sql`). Each role is a group without login, to be granted to the roles
that log in. The SQL checks which tables exist, so that it fits every migration step, and may be run again at any time.

Earlier versions granted INSERT to producers, and INSERT and UPDATE on the audit to operators, on all columns. The SQL
reduces these rights to the needed columns, except for roles that may delete rows, because they have other tasks too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from outboxq.config import check_schema
from outboxq.errors import ConfigError
from outboxq.statements.audit import PROGRESS_COLUMNS, WRITTEN_COLUMNS
from outboxq.statements.render import quote_identifier, quote_literal

Part: TypeAlias = Literal["producer", "unique_producer", "receiver", "relay", "reader", "operator"]
PARTS: tuple[Part, ...] = get_args(Part)

_DOLLAR_QUOTE = "$outboxq$"
# PostgreSQL takes these names for keywords even in double quotes.
_RESERVED = ("public", "none")


@dataclass(frozen=True, slots=True)
class Rights:
    """The rights that one part of a system needs, such as a producer or a relay.

    Args:
        purpose: The commands and calls that need these rights.
        tables: Rights by table; a table of a later migration step is skipped until it exists.
        inserts: Columns by table that the role may set in an INSERT, and no others.
        selects: Columns by table that the role may read, and no others.
        updates: Columns by table that the role may change, and no others.
        reads_all: True for SELECT on every table of the schema.
        calls_functions: True for EXECUTE on the functions of the schema, such as `add_job`.
    """

    purpose: str
    tables: Mapping[str, tuple[str, ...]]
    inserts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    selects: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    updates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reads_all: bool = False
    calls_functions: bool = False


_CHANGE = ("SELECT", "INSERT", "UPDATE", "DELETE")

# The columns that add_job writes, in Python and in SQL. Relays write the others: attempts, crashes and leases.
_JOB_COLUMNS = (
    "id", "queue", "kind", "args", "headers", "priority", "max_attempts", "state", "run_at", "unique_key", "group_key",
    "batch_id", "expires_at",
)  # fmt: skip

RIGHTS: Mapping[Part, Rights] = {
    "producer": Rights(
        "enqueues: add_job in a session, and in SQL",
        {},
        inserts={"job": _JOB_COLUMNS, "batch": ("id", "callback", "parent_id")},
        calls_functions=True,
    ),
    "unique_producer": Rights(
        "all that a producer does, also for jobs with a unique key",
        {"unique_key": ("SELECT", "INSERT", "UPDATE")},
        inserts={"job": _JOB_COLUMNS, "batch": ("id", "callback", "parent_id")},
        # A producer of unique jobs reads if the job that has a key still exists and, if it has expired, whether it
        # runs.
        selects={"job": ("id", "state", "expires_at", "xmax")},
        calls_functions=True,
    ),
    "receiver": Rights(
        "accepts messages and calls effects outside of handlers, such as a web process",
        {
            "inbox": ("SELECT", "INSERT"),
            "effect": ("SELECT", "INSERT", "UPDATE"),
            "deployment": ("SELECT",),
        },
    ),
    "relay": Rights(
        "runs `outboxq relay`; its handlers also need rights on their own tables",
        {
            "job": _CHANGE,
            # UPDATE: a job that dies a second time replaces its dead letter. DELETE: queues may keep dead letters for a
            # time.
            "dead_job": _CHANGE,
            "queue": ("SELECT",),
            "migration": ("SELECT",),
            "relay": _CHANGE,
            "schedule": ("SELECT", "INSERT", "UPDATE"),
            "unique_key": _CHANGE,
            "rate": _CHANGE,
            "batch": _CHANGE,
            "cancel_request": _CHANGE,
            "paused_kind": ("SELECT",),
            # UPDATE, because pruning locks what it deletes.
            "inbox": _CHANGE,
            "effect": _CHANGE,
            "deployment": ("SELECT",),
            # A relay adds rows to the history, and prunes them.
            "relay_status": _CHANGE,
            "stat": _CHANGE,
            "gauge": _CHANGE,
            "done_job": _CHANGE,
            "progress": _CHANGE,
        },
        calls_functions=True,
    ),
    "reader": Rights("stats, explain, and every list and show", {}, reads_all=True),
    "operator": Rights(
        "all that a reader does, and jobs cancel and change, kinds pause and resume, dead retry and discard, done "
        "run-again, bulk stop and resume, queues pause, resume and set, schedules put, pause, resume, run-now, adopt "
        "and remove, inbox forget, effects resolve",
        {
            # UPDATE, because PostgreSQL requires it to lock a row.
            "job": ("INSERT", "UPDATE", "DELETE"),
            "dead_job": ("INSERT", "UPDATE", "DELETE"),
            "queue": ("INSERT", "UPDATE"),
            "inbox": ("UPDATE", "DELETE"),
            "effect": ("UPDATE",),
            "schedule": ("INSERT", "UPDATE", "DELETE"),
            "unique_key": ("INSERT", "UPDATE"),
            "cancel_request": ("INSERT", "UPDATE", "DELETE"),
            "paused_kind": ("INSERT", "DELETE"),
        },
        # Entries of the audit are never changed.
        inserts={"audit": WRITTEN_COLUMNS},
        updates={"audit": PROGRESS_COLUMNS},
        reads_all=True,
    ),
}

_BLOCK = """\
-- {part}: {purpose}
DO $outboxq$
BEGIN
  IF to_regnamespace({schema_literal}) IS NULL THEN
    RAISE EXCEPTION USING
      ERRCODE = 'invalid_schema_name',
      MESSAGE = 'outboxq: there is no schema ' || {schema_literal},
      HINT = 'Run `outboxq migrate` first.';
  END IF;
  IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = {role_literal}) THEN
    CREATE ROLE {role} NOLOGIN;
    -- A name that was mistyped would go unnoticed otherwise.
    RAISE NOTICE USING MESSAGE = 'outboxq: there was no role ' || {role_literal} || ', so it was made, without login';
  END IF;
{grants}
END
$outboxq$;
"""

_GRANT_ON_TABLE = """\
  IF to_regclass({table_literal}) IS NOT NULL THEN
    GRANT {rights} ON {table} TO {role};
  END IF;"""

# Every part that inserts into other columns also deletes rows: so a role without DELETE needs these columns only. Only
# direct grants are searched, because an inherited right cannot be revoked from the role.
_REVOKE_ON_TABLE = """\
  IF to_regclass({table_literal}) IS NOT NULL THEN
    IF NOT has_table_privilege({role_literal}, {table_literal}, 'DELETE') AND EXISTS (
      SELECT FROM pg_class CROSS JOIN aclexplode(relacl) AS held
      WHERE pg_class.oid = to_regclass({table_literal}) AND held.privilege_type = '{right}'
        AND held.grantee = (SELECT oid FROM pg_roles WHERE rolname = {role_literal})
    ) THEN
      REVOKE {right} ON {table} FROM {role};
      RAISE NOTICE USING MESSAGE = 'outboxq: role ' || {role_literal} || ' could {can} every column of '
        || {table_literal} || ', and may now {may} those that it needs';
    END IF;
  END IF;"""

# A column of a later step is skipped until it exists.
_GRANT_ON_COLUMNS = """\
  IF to_regclass({table_literal}) IS NOT NULL THEN
    EXECUTE 'GRANT {right} (' || (
      SELECT string_agg(quote_ident(attname), ', ') FROM pg_attribute
      WHERE attrelid = to_regclass({table_literal}) AND attname = ANY ({columns}) AND NOT attisdropped
    ) || ') ON {table_in_text} TO {role_in_text}';
  END IF;"""


def default_names() -> dict[Part, str]:
    """Return the default name of each part's role, such as `outboxq_relay`, by part."""
    return {part: f"outboxq_{part}" for part in PARTS}


def roles_sql(names: Mapping[Part, str], schema: str = "outboxq") -> str:
    """Return SQL that creates the roles that are missing, and grants every role its rights.

    Run the SQL as the owner of the tables, who needs the right to create roles unless all of them exist.

    Args:
        names: The parts, each with the name of its role. Parts may share a role.

    Raises:
        ConfigError: a name that cannot be a role or a schema.
    """
    check_schema(schema)
    for name in (schema, *names.values()):
        if _DOLLAR_QUOTE in name:
            raise ConfigError(f"the name may not hold {_DOLLAR_QUOTE}, got {name!r}")
    blocks = [_block(part, _check_role(names[part]), schema) for part in PARTS if part in names]
    return "\n".join(("BEGIN;", *blocks, "COMMIT;")) + "\n"


def _check_role(name: str) -> str:
    if not 1 <= len(name.encode()) <= 63 or not name.isprintable():
        raise ConfigError(f"a role name takes 1 to 63 bytes without control characters, got {name!r}")
    if name.startswith("pg_") or name in _RESERVED:
        raise ConfigError(f"PostgreSQL keeps the role name {name!r} for itself: choose another")
    return name


def _block(part: Part, name: str, schema: str) -> str:
    return _BLOCK.format(
        part=part,
        purpose=RIGHTS[part].purpose,
        schema_literal=quote_literal(quote_identifier(schema)),
        role_literal=quote_literal(name),
        role=quote_identifier(name),
        grants="\n".join(_grants(RIGHTS[part], name, quote_identifier(schema))),
    )


def _grants(rights: Rights, name: str, schema: str) -> Iterable[str]:
    role = quote_identifier(name)
    yield f"  GRANT USAGE ON SCHEMA {schema} TO {role};"
    if rights.reads_all:
        yield f"  GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {role};"
    if rights.calls_functions:
        yield f"  GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO {role};"
    for right, can, by_table in (
        ("INSERT", "insert into", rights.inserts),
        ("UPDATE", "update", rights.updates),
        ("SELECT", None, rights.selects),
    ):
        for name_of_table, columns in by_table.items():
            yield from _on_columns(right, can, f"{schema}.{name_of_table}", columns, name)
    for name_of_table, wanted in rights.tables.items():
        table = f"{schema}.{name_of_table}"
        yield _GRANT_ON_TABLE.format(
            table_literal=quote_literal(table), rights=", ".join(wanted), table=table, role=role
        )


def _on_columns(right: str, can: str | None, table: str, columns: tuple[str, ...], name: str) -> Iterable[str]:
    """Yield SQL that grants a role the right `right` (such as INSERT) on these columns of a table only.

    `can`: the right in words for a notice, such as `insert into`. If it is given, the SQL also revokes the right on the
    whole table, and says so in the notice.
    """
    table_literal, role = quote_literal(table), quote_identifier(name)
    if can is not None:
        yield _REVOKE_ON_TABLE.format(
            right=right,
            can=can,
            may=can.removeprefix("insert "),
            table_literal=table_literal,
            role_literal=quote_literal(name),
            table=table,
            role=role,
        )
    yield _GRANT_ON_COLUMNS.format(
        right=right,
        table_literal=table_literal,
        columns=f"ARRAY[{', '.join(map(quote_literal, columns))}]::name[]",
        table_in_text=table_literal[1:-1],
        role_in_text=quote_literal(role)[1:-1],
    )
