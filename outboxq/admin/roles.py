"""A least-privilege set of database roles: the rights that each part needs, as data and as SQL.

Each role is a group without login that is granted to the roles which log in. The SQL checks which tables exist, so that
it fits every migration step, and may be run again at any time. It takes rights on every column away that earlier
versions gave, if only some columns are needed: INSERT from producers, INSERT and UPDATE on the audit from operators;
but not from a role that may delete rows, and so is more than that.
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
# PostgreSQL takes these for a keyword even in double quotes.
_RESERVED = ("public", "none")


@dataclass(frozen=True, slots=True)
class Rights:
    """The rights that one part needs.

    Args:
        purpose: The commands and calls that it is for.
        tables: Rights by table; a table that a later migration step makes is passed over until it is there.
        inserts: Columns by table that it may give a value, and no others.
        selects: Columns by table that it may read, and no others.
        updates: Columns by table that it may change, and no others.
        reads_all: SELECT on every table of the schema.
        calls_functions: EXECUTE on the functions of the schema, for SQL's `add_job`.
    """

    purpose: str
    tables: Mapping[str, tuple[str, ...]]
    inserts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    selects: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    updates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reads_all: bool = False
    calls_functions: bool = False


_CHANGE = ("SELECT", "INSERT", "UPDATE", "DELETE")

# What add_job writes, in Python and in SQL. The others are the relays' own accounts of a job: of attempts, crashes and
# leases.
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
        # Whether the job that has a key is still there, and if it has expired, whether it runs.
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
        "runs `outboxq relay`; its handlers need rights on their own tables besides",
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
            # What it adds to the history, and prunes.
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
        # Who did what, when and why is written once.
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

# Every part that inserts into other columns deletes rows too: a role without DELETE needs these columns, and no more.
# Only a direct grant is searched, because an inherited one cannot be revoked from the role.
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

# A column that a later step adds is passed over until it is there.
_GRANT_ON_COLUMNS = """\
  IF to_regclass({table_literal}) IS NOT NULL THEN
    EXECUTE 'GRANT {right} (' || (
      SELECT string_agg(quote_ident(attname), ', ') FROM pg_attribute
      WHERE attrelid = to_regclass({table_literal}) AND attname = ANY ({columns}) AND NOT attisdropped
    ) || ') ON {table_in_text} TO {role_in_text}';
  END IF;"""


def default_names() -> dict[Part, str]:
    """The names that are used if none is given."""
    return {part: f"outboxq_{part}" for part in PARTS}


def roles_sql(names: Mapping[Part, str], schema: str = "outboxq") -> str:
    """The SQL that makes the roles that are missing, and gives all of them their rights.

    To be run by the owner of the tables, who may create roles unless they are there already.

    Args:
        names: Which parts, and the role of each. Parts may share a role.

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
    """A right on columns; with `can`, its name in a notice, a role that has it on the whole table loses it there."""
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
