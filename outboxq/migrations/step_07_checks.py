"""Step 7: checks on the values in a row of `job`, and the search path of outboxq's functions. Frozen.

The checks apply to rows written from now on; step 8, a separate transaction, reads the whole table for earlier rows.
Counters end one below their type's maximum, so that incrementing cannot overflow. Arguments and headers are measured as
the text that a claim reads; a stored value of up to 1,024 bytes, uncompressed, cannot exceed the bound as text.
"""

from outboxq.migrations.repair import REPAIR_WHAT_IS_FREE

# The lock is exclusive, and held only for the change of a catalog row. During the wait for it, claims and producers
# wait too: so each try takes a fifth of a second at most. An autovacuum gives way only to a session that has waited for
# deadlock_timeout: if one may be in the way, every fifth try takes that long.
LOCK = """\
    DECLARE
      lock_timeout_before text := current_setting('lock_timeout');
      give_up_at timestamptz := clock_timestamp() + interval '5 minutes';
      tries integer := 0;
      vacuums boolean;
      in_use_by text;
    BEGIN
      LOOP
        BEGIN
          PERFORM set_config('lock_timeout', '200ms', true);
          IF mod(tries, 5) = 4 AND vacuums THEN
            PERFORM set_config('lock_timeout', extract(epoch FROM
              current_setting('deadlock_timeout')::interval + interval '200ms') || 's', true);
          END IF;
          LOCK TABLE @schema@.job IN ACCESS EXCLUSIVE MODE;
          EXIT;
        EXCEPTION WHEN lock_not_available THEN
          SELECT coalesce(bool_or(mode = 'ShareUpdateExclusiveLock'), false),
            coalesce(', which is in use by ' || string_agg(DISTINCT coalesce('pid ' || pid, 'a prepared transaction')
              || coalesce(' (' || nullif(application_name, '') || ')', ''), ', '), '')
          INTO vacuums, in_use_by
          FROM pg_locks LEFT JOIN pg_stat_activity USING (pid)
          WHERE granted AND locktype = 'relation' AND pid IS DISTINCT FROM pg_backend_pid()
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND relation = to_regclass(@schema_identifier_literal@ || '.job');
          IF clock_timestamp() > give_up_at THEN
            RAISE EXCEPTION USING
              ERRCODE = 'lock_not_available',
              MESSAGE = 'outboxq: for 5 minutes there was no moment without an open transaction on '
                || @schema_identifier_literal@ || '.job' || in_use_by,
              HINT = 'Pause the queues (outboxq queues pause) or stop the relays until this step is done.';
          END IF;
          IF tries = 0 THEN
            RAISE NOTICE USING MESSAGE = 'outboxq: waiting for a moment without an open transaction on '
              || @schema_identifier_literal@ || '.job' || in_use_by;
          END IF;
          tries := tries + 1;
          PERFORM pg_sleep(0.8);
        END;
      END LOOP;
      PERFORM set_config('lock_timeout', lock_timeout_before, true);
    END;
"""

CHECKS = """\
      ADD CONSTRAINT job_numbers CHECK (
        attempt BETWEEN 0 AND 2147483646 AND crashes BETWEEN 0 AND 32766 AND parked BETWEEN 0 AND 32766
        AND lease_token BETWEEN 0 AND 9223372036854775806
      ) NOT VALID,
      ADD CONSTRAINT job_lease CHECK (state <> 'leased' OR lease_owner IS NOT NULL) NOT VALID,
      ADD CONSTRAINT job_sizes CHECK (
        (pg_column_size(args) <= 1024 AND pg_column_compression(args) IS NULL OR octet_length(args::text) <= 16777216)
        AND (
          pg_column_size(headers) <= 1024 AND pg_column_compression(headers) IS NULL
          OR octet_length(headers::text) <= 1048576
        )
        AND octet_length(unique_key) <= 1024 AND octet_length(group_key) <= 1024
      ) NOT VALID"""

_ADD_JOB = "@schema@.add_job(text, jsonb, text, interval, timestamptz, integer, integer, jsonb, uuid)"

UP = f"""\
{REPAIR_WHAT_IS_FREE}
    -- A role that may create functions in a schema of a caller's search_path would have its own called otherwise.
    ALTER FUNCTION {_ADD_JOB} SET search_path = pg_catalog, pg_temp;
    ALTER FUNCTION @schema@.wake_relays() SET search_path = pg_catalog, pg_temp;
{LOCK}
    ALTER TABLE @schema@.job
{CHECKS};"""

DOWN = f"""\
{LOCK}
    ALTER TABLE @schema@.job DROP CONSTRAINT job_numbers, DROP CONSTRAINT job_lease, DROP CONSTRAINT job_sizes;
    ALTER FUNCTION @schema@.wake_relays() RESET search_path;
    ALTER FUNCTION {_ADD_JOB} RESET search_path;"""
