"""Rendering of SQL templates without parameters, for statements that are sent as text, or written to a file."""

import hashlib
from typing import LiteralString

from psycopg import sql

# The placeholder of each table in a text; a plain {queue} is the name of a queue.
_TABLES = {
    "job": "job",
    "dead": "dead_job",
    "done": "done_job",
    "queue_table": "queue",
    "relay": "relay",
    "schedule": "schedule",
    "unique_key": "unique_key",
    "rate": "rate",
    "batch": "batch",
    "cancel_request": "cancel_request",
    "paused_kind": "paused_kind",
    "relay_status": "relay_status",
    "stat": "stat",
    "gauge": "gauge",
    "progress": "progress",
    "migration": "migration",
}


def render(schema: str, statement: LiteralString, /, **values: object) -> str:
    """Return `statement` with its placeholders replaced: {job}, {dead}, {queue_table} and so on by the schema's tables.

    The other placeholders are replaced by `values`: a value becomes a literal, unless it is SQL already.
    """
    return compose(schema, statement, **values).as_string(None)


def compose(schema: str, statement: LiteralString, /, **values: object) -> sql.Composed:
    """Do the same as `render`, but return psycopg's `Composed`, which may be a value in another statement.

    Placeholders of tables, such as {job}, are replaced by the schema's tables, the others by `values`.
    """
    tables = {name: sql.Identifier(schema, table) for name, table in _TABLES.items()}
    return sql.SQL(statement).format(**tables, **_as_sql(values))


def fill(statement: LiteralString, /, **values: object) -> str:
    """Return `statement`, which names no table of outboxq, with its placeholders replaced by `values`.

    A value becomes a literal, unless it is SQL already.
    """
    return sql.SQL(statement).format(**_as_sql(values)).as_string(None)


def named(statement: str, types: str) -> tuple[str, str]:
    """Return a name for a statement with parameters of these types, and the PREPARE statement under this name.

    The name is a hash of the text.
    """
    # The name is a hash of the text, so behind a pooler another client's statement of this name is the same one.
    name = f"outboxq_{hashlib.sha256(statement.encode()).hexdigest()[:32]}"
    return name, f"PREPARE {name} ({types}) AS {statement}"


def _as_sql(values: dict[str, object]) -> dict[str, sql.Composable]:
    return {name: value if isinstance(value, sql.Composable) else sql.Literal(value) for name, value in values.items()}


def quote_identifier(*names: str) -> str:
    """Return a name of one or more parts, such as schema and table, as an SQL identifier with quoted parts."""
    return sql.Identifier(*names).as_string(None)


def quote_literal(value: str) -> str:
    """Return a string as an SQL literal."""
    if "'" not in value and "\\" not in value and "\0" not in value:
        # As the driver writes it, in a hundredth of the time, because each COMMIT with finished rows has a few of
        # these.
        return f"'{value}'"
    return sql.Literal(value).as_string(None)
