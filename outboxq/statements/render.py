"""Values and names in SQL that has no parameters: statements that are sent as text, or written to a file."""

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
    """The statement with the schema's tables for {job}, {dead}, {queue_table} and so on, and these values.

    A value becomes a literal, unless it is SQL already.
    """
    return compose(schema, statement, **values).as_string(None)


def compose(schema: str, statement: LiteralString, /, **values: object) -> sql.Composed:
    """The result of `render` as a part that another statement takes as a value."""
    tables = {name: sql.Identifier(schema, table) for name, table in _TABLES.items()}
    return sql.SQL(statement).format(**tables, **_as_sql(values))


def fill(statement: LiteralString, /, **values: object) -> str:
    """A statement that names no table of ours, with these values; a value becomes a literal, unless it is SQL."""
    return sql.SQL(statement).format(**_as_sql(values)).as_string(None)


def named(statement: str, types: str) -> tuple[str, str]:
    """The name under which a statement with parameters of these types is prepared, and its PREPARE."""
    # The name is a hash of the text: another client's statement of this name, behind a pooler, is the same one.
    name = f"outboxq_{hashlib.sha256(statement.encode()).hexdigest()[:32]}"
    return name, f"PREPARE {name} ({types}) AS {statement}"


def _as_sql(values: dict[str, object]) -> dict[str, sql.Composable]:
    return {name: value if isinstance(value, sql.Composable) else sql.Literal(value) for name, value in values.items()}


def quote_identifier(*names: str) -> str:
    """A name as an SQL identifier, each part of it in double quotes."""
    return sql.Identifier(*names).as_string(None)


def quote_literal(value: str) -> str:
    """A string as an SQL literal."""
    if "'" not in value and "\\" not in value and "\0" not in value:
        # As the driver writes it, in a hundredth of the time: each COMMIT with finished rows has a few of these.
        return f"'{value}'"
    return sql.Literal(value).as_string(None)
