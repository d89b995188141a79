"""Quoting for SQL that must also be written to a file, where no driver can bind a parameter."""

from psycopg import sql


def quote_identifier(name: str) -> str:
    """`name` as an SQL identifier, always in double quotes."""
    return sql.Identifier(name).as_string(None)


def quote_literal(value: str) -> str:
    """`value` as an SQL string literal."""
    return sql.Literal(value).as_string(None)
