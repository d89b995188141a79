"""What is known of users' tables: read from the catalogs when first needed, and kept for some seconds."""

import time
from dataclasses import dataclass
from typing import Literal, assert_never, cast

from sqlalchemy import Connection, Table

from outboxq.database.driver import run_script
from outboxq.statements.catalog import DEFERRABLE, table_facts

# A migration that runs beside relays is known to them after this time.
FRESH_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class TableFacts:
    """What decides whether changes of a table's rows may wait for others, and be sent with them.

    `oid`: the table itself, by whatever name. `is_plain`: an ordinary table, without row security, rules, children and
    parents. `is_inert`: an UPDATE runs nothing else: no triggers, no functions of the user's in its constraints, no
    generated columns. `bound_columns`: those whose values depend on other rows, of this table or another: unique ones,
    mostly. `contains_inserts`, `contains_deletes`: these change no other table, and no constraint waits for COMMIT.
    """

    oid: int
    is_plain: bool
    is_inert: bool
    primary_key: frozenset[str]
    bound_columns: frozenset[str]
    contains_inserts: bool
    contains_deletes: bool

    def contains(self, write: "RowWrite") -> bool:
        """Whether what is written stays in the table, and is checked at once."""
        if not (self.is_plain and self.is_inert):
            return False
        match write.verb:
            case "INSERT":
                return self.contains_inserts
            case "UPDATE":
                return self.bound_columns.isdisjoint(write.columns)
            case "DELETE":
                return self.contains_deletes
        assert_never(write.verb)


@dataclass(frozen=True, slots=True)
class RowWrite:
    """What a statement writes, besides what the schema itself does: an UPDATE these columns."""

    table: Table
    verb: Literal["INSERT", "UPDATE", "DELETE"]
    columns: frozenset[str]


class Catalog:
    """What one connection knows of tables."""

    def __init__(self) -> None:
        self._read_at = 0.0
        self._facts: dict[tuple[Table, str | None], TableFacts | None] = {}
        self._has_deferrable: bool | None = None

    def refresh(self) -> None:
        """Forget what was read some time ago."""
        if time.monotonic() - self._read_at > FRESH_SECONDS:
            self._facts.clear()
            self._has_deferrable = None
            self._read_at = time.monotonic()

    def facts(self, connection: Connection, table: Table) -> TableFacts | None:
        """The facts of a table, read once; None if there is no such table.

        Raises:
            psycopg.Error: the transaction has failed, or the connection is gone.
        """
        schemas = connection.get_execution_options().get("schema_translate_map") or {}
        named = table, schemas.get(table.schema, table.schema)
        if named not in self._facts:
            self._facts[named] = _read(connection, *named)
        return self._facts[named]

    def has_deferrable(self, connection: Connection) -> bool:
        """Whether any constraint of the database may be checked at COMMIT only. Raises: as `facts`."""
        if self._has_deferrable is None:
            self._has_deferrable = bool(run_script(connection, DEFERRABLE)[0].rows[0][0])
        return self._has_deferrable


def _read(connection: Connection, table: Table, schema: str | None) -> TableFacts | None:
    preparer = connection.dialect.identifier_preparer
    name = preparer.quote(table.name)
    if schema is not None:
        name = f"{preparer.quote_schema(schema)}.{name}"
    rows = run_script(connection, table_facts(name))[0].rows
    if not rows:
        return None
    oid, is_plain, is_inert, inserts, deletes, primary_key, bound_columns = rows[0]
    names, bound = cast("list[str]", primary_key), cast("list[str]", bound_columns)
    flags = bool(is_plain), bool(is_inert)
    return TableFacts(cast("int", oid), *flags, frozenset(names), frozenset(bound), bool(inserts), bool(deletes))
