"""What a role that may create in `public` can put beside PostgreSQL's functions and operators: better-matching ones.

Each counts its calls in a sequence that is named after it, in the schema `loot`: a rollback does not take that back.
"""

from collections.abc import Collection

import psycopg

# What the arguments of our statements are, and what literals and parameters may be taken for.
_TYPES = (
    "text", "varchar", "name", '"char"', "boolean", "smallint", "integer", "bigint", "numeric", "real",
    "double precision", "oid", "regclass", "regproc", "regtype", "regnamespace", "xid", "xid8", "uuid", "jsonb",
    "bytea", "timestamptz", "interval", "text[]", "name[]", "uuid[]", "oid[]",
)  # fmt: skip

_MAKERS = r"""
CREATE SCHEMA loot;
GRANT USAGE ON SCHEMA loot TO PUBLIC;
CREATE SCHEMA makers;

-- Whether PostgreSQL has something for such arguments; a literal without a type counts as a text.
CREATE FUNCTION makers.is_known(call text, VARIADIC types text[]) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog AS $make$
DECLARE
  typed text[] := ARRAY(SELECT 'NULL::' || type FROM unnest(types) AS type);
BEGIN
  EXECUTE 'EXPLAIN SELECT ' || format(call, VARIADIC typed);
  RETURN true;
EXCEPTION WHEN OTHERS THEN
  IF 'text' <> ALL (types) THEN
    RETURN false;
  END IF;
  BEGIN
    EXECUTE 'EXPLAIN SELECT ' || format(call, VARIADIC array_replace(typed, 'NULL::text', 'NULL'));
    RETURN true;
  EXCEPTION WHEN OTHERS THEN RETURN false;
  END;
END
$make$;

CREATE FUNCTION makers.make_function(own text, arguments text, result regtype, counted text) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog AS $make$
BEGIN
  EXECUTE format('CREATE FUNCTION public.%I(%s) RETURNS %s LANGUAGE plpgsql SECURITY DEFINER AS %L', own, arguments,
    CASE WHEN result::text LIKE 'any%' OR result IN ('name'::regtype, 'internal'::regtype) THEN 'text' ELSE result::text
    END, format('BEGIN PERFORM pg_catalog.nextval(%L); RETURN NULL; END', format('loot.%I', counted)));
  RETURN 1;
EXCEPTION WHEN duplicate_function THEN RETURN 0;
END
$make$;

-- Wherever PostgreSQL has an operator for two types, and none that is exactly theirs.
CREATE FUNCTION makers.make_operators(operator text, types text[]) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog AS $make$
DECLARE
  made integer := 0;
  pair record;
  own text;
BEGIN
  IF NOT EXISTS (SELECT FROM pg_operator WHERE oprname = operator) THEN
    RETURN 0;
  END IF;
  EXECUTE format('CREATE SEQUENCE loot.%I', 'operator ' || operator);
  FOR pair IN
    SELECT of_left, of_right, coalesce(
      (SELECT oprresult FROM pg_operator WHERE oprname = operator AND oprkind = 'b' AND oprresult <> 0
       ORDER BY (oprleft = of_left::regtype)::int + (oprright = of_right::regtype)::int DESC, oid LIMIT 1), 0) AS result
    FROM unnest(types) AS of_left CROSS JOIN unnest(types) AS of_right
    WHERE NOT EXISTS (SELECT FROM pg_operator WHERE oprname = operator AND oprleft = of_left::regtype
        AND oprright = of_right::regtype AND oprnamespace = 'pg_catalog'::regnamespace)
      AND makers.is_known('%s ' || replace(operator, '%', '%%') || ' %s', of_left, of_right)
  LOOP
    made := made + 1;
    own := format('%s %s', operator, made);
    PERFORM makers.make_function(own, pair.of_left || ', ' || pair.of_right, pair.result, 'operator ' || operator);
    EXECUTE format('CREATE OPERATOR public.%s (FUNCTION = public.%I, LEFTARG = %s, RIGHTARG = %s)', operator, own,
      pair.of_left, pair.of_right);
  END LOOP;
  RETURN made;
END
$make$;

-- Of every pair of types that the function takes; of more than two, those of its own signature with others for each.
CREATE FUNCTION makers.make_functions(function text, arity integer, types text[]) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog AS $make$
DECLARE
  made integer := 0;
  signature text[];
  result regtype;
BEGIN
  IF NOT EXISTS (SELECT FROM pg_proc WHERE proname = function AND pronamespace = 'pg_catalog'::regnamespace) THEN
    RETURN 0;
  END IF;
  EXECUTE format('CREATE SEQUENCE IF NOT EXISTS loot.%I', function);
  SELECT prorettype INTO result FROM pg_proc
  WHERE proname = function AND pronamespace = 'pg_catalog'::regnamespace AND prokind <> 'p'
  ORDER BY (pronargs = arity) DESC, oid LIMIT 1;
  FOR signature IN
    WITH RECURSIVE signatures (known, allowed) AS (
      SELECT '{}'::text[], ARRAY(
        SELECT CASE WHEN btrim(type, '"') LIKE 'any%' THEN '{text,integer,jsonb}'
          WHEN type = 'text' THEN '{text,varchar,name}'
          WHEN type IN ('bigint', 'double precision', 'numeric') THEN ARRAY[type, 'integer']
          ELSE ARRAY[type] END::text
        FROM (
          SELECT coalesce(format_type(proargtypes[place], NULL), CASE WHEN provariadic = '"any"'::regtype THEN 'any'
            ELSE format_type(provariadic, NULL) END) AS type, place
          FROM generate_series(0, arity - 1) AS place
        ) AS declared ORDER BY place)
      FROM pg_proc
      WHERE arity BETWEEN 3 AND 5
        AND proname = function AND pronamespace = 'pg_catalog'::regnamespace AND prokind <> 'p'
        AND (pronargs = arity OR provariadic <> 0 OR arity BETWEEN pronargs - pronargdefaults AND pronargs)
      UNION ALL
      SELECT known || type, allowed[2:] FROM signatures CROSS JOIN unnest(allowed[1]::text[]) AS type
      WHERE cardinality(allowed) > 0
    )
    SELECT DISTINCT known FROM signatures WHERE cardinality(known) = arity
    UNION ALL SELECT ARRAY[first] FROM unnest(types) AS first WHERE arity = 1
    UNION ALL
    SELECT ARRAY[first, second] FROM unnest(types) AS first CROSS JOIN unnest(types) AS second WHERE arity = 2
  LOOP
    IF makers.is_known(quote_ident(function) || '(%s' || repeat(', %s', arity - 1) || ')', VARIADIC signature) THEN
      made := made + makers.make_function(function, array_to_string(signature, ', '), result, function);
    END IF;
  END LOOP;
  RETURN made;
END
$make$;
"""


def make_overloads(url: str, operators: Collection[str], functions: Collection[tuple[str, int]]) -> None:
    """Put them into `public`: for each of the operators, and of the functions with so many arguments."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET check_function_bodies = off; SET synchronous_commit = off; " + _MAKERS)
        types = list(_TYPES)
        for operator in operators:
            connection.execute("SELECT makers.make_operators(%s, %s)", [operator, types])
        for function, arity in functions:
            connection.execute("SELECT makers.make_functions(%s, %s, %s)", [function, arity, types])
        connection.execute("DROP SCHEMA makers CASCADE")


def looted(connection: psycopg.Connection) -> list[str]:
    """The functions and operators of which an overload has been called."""
    found = connection.execute(
        "SELECT sequencename FROM pg_catalog.pg_sequences "
        "WHERE schemaname = 'loot' AND last_value IS NOT NULL ORDER BY sequencename"
    )
    return [name for (name,) in found]
