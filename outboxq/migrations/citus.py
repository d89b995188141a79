"""The triggers that make a Citus coordinator commit in two phases: `DO` blocks that install them and remove them.

Otherwise rows on a worker could be committed without outboxq's. Without Citus the blocks do nothing. The triggers are
no numbered step, because Citus may be installed after the latest step: each upgrade adds the missing triggers. A
downgrade removes them with the tables that it drops, and a downgrade to step 0 removes all of them; remaining tables
still need theirs.
"""

from outboxq.migrations.losses import LOCK_ALL
from outboxq.statements.citus import GUARDED, HAS_CITUS

_NAMES = ", ".join(f"'{table}'" for table in GUARDED)

# SECURITY DEFINER, so that producers and relays need no right on the table. The table is empty, and stays empty.
INSTALL = f"""\
DECLARE
  two_phase text := @schema_identifier_literal@ || '.two_phase';
  managed text;
  missing text[];
  guarded text;
BEGIN
  IF NOT ({HAS_CITUS}) THEN
    EXIT work;
  END IF;
  PERFORM pg_advisory_xact_lock(hashtext('outboxq migrations'), hashtext(@schema_literal@));
  managed := (
    SELECT string_agg(relname, ', ' ORDER BY relname) FROM pg_catalog.pg_dist_partition
      JOIN pg_class ON pg_class.oid = logicalrelid::oid
    WHERE relnamespace = to_regnamespace(@schema_identifier_literal@)::oid AND relname <> 'two_phase'
  );
  IF managed IS NOT NULL THEN
    RAISE EXCEPTION USING
      ERRCODE = 'object_not_in_prerequisite_state',
      MESSAGE = 'outboxq: Citus manages tables of schema ' || @schema_identifier_literal@ || ' (' || managed
        || '), and refuses claims on them',
      HINT = 'Make them plain tables of the coordinator again: SELECT undistribute_table(...) for each.';
  END IF;
  IF to_regclass('pg_catalog.pg_dist_schema') IS NOT NULL THEN
    IF EXISTS (
      SELECT FROM pg_catalog.pg_dist_schema WHERE schemaid::oid = to_regnamespace(@schema_identifier_literal@)::oid
    ) THEN
      RAISE NOTICE USING MESSAGE = 'outboxq: schema ' || @schema_identifier_literal@ || ' is distributed by Citus, and '
        || 'the tables of outboxq in it are not: they are on the coordinator, where relays and producers connect';
    END IF;
  END IF;
  IF to_regclass(two_phase) IS NULL THEN
    CREATE TABLE @schema@.two_phase (n integer);
  END IF;
  IF NOT EXISTS (SELECT FROM pg_catalog.pg_dist_partition WHERE logicalrelid::oid = to_regclass(two_phase)::oid) THEN
    PERFORM pg_catalog.citus_add_local_table_to_metadata(to_regclass(two_phase));
  END IF;
  CREATE OR REPLACE FUNCTION @schema@.use_two_phase() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = '' AS $function$
    BEGIN
      DELETE FROM @schema@.two_phase;
      RETURN NULL;
    END
    $function$;
  missing := ARRAY(
    SELECT name FROM unnest(ARRAY[{_NAMES}]) AS wanted (name)
    WHERE to_regclass(@schema_identifier_literal@ || '.' || name) IS NOT NULL AND NOT EXISTS (
      SELECT FROM pg_trigger WHERE tgrelid = to_regclass(@schema_identifier_literal@ || '.' || name)::oid
        AND tgname = 'use_two_phase' AND tgenabled IN ('O', 'A')
    ) ORDER BY name
  );
  IF cardinality(missing) = 0 THEN
    EXIT work;
  END IF;
{LOCK_ALL}
  FOREACH guarded IN ARRAY missing LOOP
    EXECUTE 'CREATE OR REPLACE TRIGGER use_two_phase AFTER INSERT OR UPDATE OR DELETE ON '
      || @schema_identifier_literal@ || '.' || guarded
      || ' FOR EACH STATEMENT EXECUTE FUNCTION ' || @schema_identifier_literal@ || '.use_two_phase()';
  END LOOP;
  RAISE NOTICE USING MESSAGE = 'outboxq: this is a Citus coordinator: commits of ' || @schema_identifier_literal@
    || ' are in two phases from now on, also of what is written to ' || array_to_string(missing, ', ');
END work;"""

REMOVE = """\
BEGIN
  IF to_regclass(@schema_identifier_literal@ || '.two_phase') IS NOT NULL THEN
    DROP FUNCTION IF EXISTS @schema@.use_two_phase() CASCADE;
    DROP TABLE @schema@.two_phase;
  END IF;
END work;"""
