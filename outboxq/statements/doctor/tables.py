"""The state of the tables: if they exist, are whole and vacuumed, and if this role may use them.

Reads only catalogs, which any role may read, and waits for no lock.
"""

from sqlalchemy import TextClause, text

from outboxq.statements.doctor.sessions import schema_name

_OF_SCHEMA = """\
FROM pg_catalog.pg_class AS class JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace
"""


def tables(schema: str) -> TextClause:
    """Select the names of the tables in the schema."""
    return text(
        f"SELECT class.relname::text {_OF_SCHEMA} WHERE namespace.nspname = :schema AND class.relkind IN ('r', 'p')"
    ).bindparams(schema_name(schema))


def indexes(schema: str) -> TextClause:
    """Select every index of the schema's tables: its table, and its definition from the method on (`btree (...)`)."""
    return text(
        f"""\
SELECT index_class.relname::text AS name, class.relname::text AS table, entry.indisunique AS is_unique,
  entry.indisvalid AND entry.indisready AND entry.indislive AS is_valid,
  pg_catalog.split_part(pg_catalog.pg_get_indexdef(entry.indexrelid), ' USING ', 2) AS definition
{_OF_SCHEMA} JOIN pg_catalog.pg_index AS entry ON entry.indrelid = class.oid
  JOIN pg_catalog.pg_class AS index_class ON index_class.oid = entry.indexrelid
WHERE namespace.nspname = :schema ORDER BY 1"""
    ).bindparams(schema_name(schema))


def triggers(schema: str) -> TextClause:
    """Select the triggers of the schema's tables that fire in ordinary sessions, each with its table."""
    return text(
        f"SELECT class.relname::text AS of_table, tgname::text AS name {_OF_SCHEMA} "
        "JOIN pg_catalog.pg_trigger ON tgrelid = class.oid "
        "WHERE namespace.nspname = :schema AND tgenabled IN ('O', 'A')"
    ).bindparams(schema_name(schema))


def functions(schema: str) -> TextClause:
    """Select the names of the schema's functions, and their texts."""
    return text(
        "SELECT proname::text AS name, prosrc AS body "
        "FROM pg_catalog.pg_proc JOIN pg_catalog.pg_namespace ON pg_namespace.oid = pronamespace "
        "WHERE nspname = :schema"
    ).bindparams(schema_name(schema))


def vacuum_state(schema: str) -> TextClause:
    """Select the dead and live rows, the last vacuum and the storage options of each table."""
    return text(
        f"""\
SELECT class.relname::text AS table, coalesce(class.reloptions, '{{}}') AS options,
  coalesce(counts.n_live_tup, 0) AS live, coalesce(counts.n_dead_tup, 0) AS dead,
  extract(
    epoch FROM pg_catalog.clock_timestamp() - greatest(counts.last_vacuum, counts.last_autovacuum)
  )::float8 AS vacuumed_seconds_ago
{_OF_SCHEMA} LEFT JOIN pg_catalog.pg_stat_all_tables AS counts ON counts.relid = class.oid
WHERE namespace.nspname = :schema AND class.relkind IN ('r', 'p') ORDER BY 1"""
    ).bindparams(schema_name(schema))


def schema_usage(schema: str) -> TextClause:
    """Select one row: true if this role has the right USAGE on the schema."""
    return text(
        "SELECT pg_catalog.has_schema_privilege(oid, 'USAGE') FROM pg_catalog.pg_namespace WHERE nspname = :schema"
    ).bindparams(schema_name(schema))


def missing_rights(schema: str, wanted: list[tuple[str, str]]) -> TextClause:
    """Select those of these pairs (table, privilege) that this role lacks. A right on some columns counts."""
    return text(
        f"""\
SELECT class.relname::text AS table, wanted.privilege
{_OF_SCHEMA} JOIN unnest(CAST(:tables AS text[]), CAST(:privileges AS text[])) AS wanted (name, privilege)
  ON wanted.name = class.relname
WHERE namespace.nspname = :schema AND NOT CASE
  WHEN wanted.privilege = 'DELETE' THEN pg_catalog.has_table_privilege(class.oid, wanted.privilege)
  ELSE pg_catalog.has_any_column_privilege(class.oid, wanted.privilege) END
ORDER BY 1, 2"""
    ).bindparams(schema_name(schema), tables=[table for table, _ in wanted], privileges=[right for _, right in wanted])


def columns_without(right: str, schema: str, table: str, columns: tuple[str, ...]) -> TextClause:
    """Select those of these columns of the table on which this role lacks the right."""
    return text(
        f"""\
SELECT attribute.attname::text
{_OF_SCHEMA} JOIN pg_catalog.pg_attribute AS attribute ON attribute.attrelid = class.oid
WHERE namespace.nspname = :schema AND class.relname = CAST(:table AS text)
  AND attribute.attname = ANY (CAST(:columns AS text[]))
  AND NOT pg_catalog.has_column_privilege(class.oid, attribute.attnum, CAST(:right AS text))
ORDER BY pg_catalog.array_position(CAST(:columns AS text[]), attribute.attname::text)"""
    ).bindparams(schema_name(schema), right=right, table=table, columns=list(columns))


def inserters(schema: str) -> TextClause:
    """Select the roles, PUBLIC included, that have INSERT on the whole table `job`, but not DELETE.

    Such roles are producers.
    """
    return text(
        f"""\
SELECT DISTINCT coalesce(pg_roles.rolname::text, 'PUBLIC') AS role, held.grantee <> 0::oid AS is_role
{_OF_SCHEMA} CROSS JOIN pg_catalog.aclexplode(class.relacl) AS held
  LEFT JOIN pg_catalog.pg_roles ON pg_roles.oid = held.grantee
WHERE namespace.nspname = :schema AND class.relname = 'job' AND held.privilege_type = 'INSERT'
  AND NOT pg_catalog.has_table_privilege(held.grantee, class.oid, 'DELETE')
ORDER BY 1"""
    ).bindparams(schema_name(schema))


def row_security(schema: str) -> TextClause:
    """Select the tables with row level security, and the commands that their permissive policies allow.

    `mine`: the commands that a policy allows to this role; `anybodys`: those that some policy allows to some role.
    """
    return text(
        f"""\
SELECT class.relname::text AS table, pg_catalog.row_security_active(class.oid) AS is_active,
  coalesce(pg_catalog.array_agg(DISTINCT policy.polcmd::text) FILTER (WHERE policy.oid IS NOT NULL), '{{}}')
    AS anybodys,
  coalesce(pg_catalog.array_agg(DISTINCT policy.polcmd::text) FILTER (WHERE EXISTS (
    SELECT FROM pg_catalog.unnest(policy.polroles) AS member (oid)
    WHERE CASE WHEN member.oid = 0::oid THEN true ELSE pg_catalog.pg_has_role(member.oid, 'USAGE') END
  )), '{{}}') AS mine
{_OF_SCHEMA} LEFT JOIN pg_catalog.pg_policy AS policy ON policy.polrelid = class.oid AND policy.polpermissive
WHERE namespace.nspname = :schema AND class.relrowsecurity
GROUP BY class.oid, class.relname ORDER BY 1"""
    ).bindparams(schema_name(schema))


def groups_of_role(names: list[str]) -> TextClause:
    """Select those of the roles `names` that exist and whose rights this role has as a member.

    From them the doctor concludes the role's purpose, such as a relay's or a producer's. Catalogs only; no locks.
    """
    return text(
        "SELECT rolname::text FROM pg_catalog.pg_roles "
        "WHERE rolname = ANY (CAST(:names AS name[])) AND pg_catalog.pg_has_role(oid, 'USAGE')"
    ).bindparams(names=names)


def search_path() -> TextClause:
    """Select the search path in which this role's sessions find functions and operators."""
    return text("SELECT session_user::text AS role, pg_catalog.current_setting('search_path') AS value")


def schema_creators(schema: str, names: list[str]) -> TextClause:
    """Select roles that may create in these schemas, except this one, superusers, and owners of schema or database.

    SQL that names no schema could call functions that such a role creates there.
    """
    return text(
        """\
SELECT namespace.nspname::text AS schema, coalesce(role.rolname::text, 'PUBLIC') AS creator
FROM pg_catalog.pg_namespace AS namespace
  CROSS JOIN LATERAL pg_catalog.aclexplode(
    coalesce(namespace.nspacl, pg_catalog.acldefault('n', namespace.nspowner))
  ) AS entry
  LEFT JOIN pg_catalog.pg_roles AS role ON role.oid = entry.grantee
WHERE namespace.nspname = ANY (CAST(:names AS text[])) AND entry.privilege_type = 'CREATE'
  AND (role.oid IS NULL OR NOT role.rolsuper AND role.rolname NOT IN (session_user, 'pg_database_owner'))
  AND NOT EXISTS (
    SELECT FROM pg_catalog.pg_namespace AS ours WHERE ours.nspname = :schema AND ours.nspowner = entry.grantee
  )
  AND NOT EXISTS (
    SELECT FROM pg_catalog.pg_database
    WHERE datname = pg_catalog.current_database() AND datdba = entry.grantee
  )
ORDER BY 1, 2"""
    ).bindparams(schema_name(schema), names=names)
