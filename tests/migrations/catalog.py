"""What a schema looks like to PostgreSQL, in a form that can be compared."""

import psycopg

from tests.support.urls import libpq_url

Catalog = dict[str, list[tuple[object, ...]]]

_RELATIONS = "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %(schema)s"

_QUERIES = {
    "relations": f"SELECT c.relname, c.relkind::text, c.relpersistence::text, c.reloptions {_RELATIONS} ORDER BY 1",
    "columns": (
        "SELECT c.relname, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,"
        " a.attidentity::text, a.attgenerated::text, a.attcollation::regcollation::text,"
        " pg_get_expr(d.adbin, d.adrelid) "
        "FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace "
        "LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum "
        "WHERE n.nspname = %(schema)s AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped ORDER BY 1, 2"
    ),
    "constraints": (
        "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(pg_constraint.oid) FROM pg_constraint "
        "JOIN pg_namespace n ON n.oid = connamespace WHERE n.nspname = %(schema)s ORDER BY 1, 2"
    ),
    "indexes": (
        "SELECT c.relname, pg_get_indexdef(c.oid), pg_get_expr(i.indpred, i.indrelid), i.indisunique, c.reloptions "
        "FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = %(schema)s ORDER BY 1"
    ),
    "functions": (
        "SELECT proname, pg_get_functiondef(pg_proc.oid) FROM pg_proc "
        "JOIN pg_namespace n ON n.oid = pronamespace WHERE n.nspname = %(schema)s ORDER BY 1, 2"
    ),
    "triggers": (
        "SELECT tgname, pg_get_triggerdef(pg_trigger.oid) FROM pg_trigger JOIN pg_class c ON c.oid = tgrelid "
        "JOIN pg_namespace n ON n.oid = relnamespace WHERE n.nspname = %(schema)s AND NOT tgisinternal ORDER BY 1"
    ),
}
TABLE_PARTS = ("relations", "columns", "constraints", "indexes")


def read_catalog(url: str, schema: str = "outboxq", *, without: str = "") -> Catalog:
    """Everything in `schema` but the tables named `without`; no entries where the schema is missing or empty."""
    with psycopg.connect(libpq_url(url), autocommit=True) as connection:
        connection.execute("SET timezone = 'UTC'")
        catalog = {part: connection.execute(query, {"schema": schema}).fetchall() for part, query in _QUERIES.items()}
    return {
        part: [row for row in rows if not (without and str(row[0]).startswith(without))]
        for part, rows in catalog.items()
    }


def is_empty(catalog: Catalog) -> bool:
    return not any(catalog.values())


def schema_exists(url: str, schema: str = "outboxq") -> bool:
    return fetch_value(url, "SELECT count(*) FROM pg_namespace WHERE nspname = %s", [schema]) == 1


def fetch_value(url: str, query: str, parameters: list[object] | None = None) -> object:
    with psycopg.connect(libpq_url(url), autocommit=True) as connection:
        row = connection.execute(query, parameters).fetchone()
    assert row is not None
    return row[0]
