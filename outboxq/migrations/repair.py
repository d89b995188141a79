"""SQL that repairs rows which the checks of steps 7 and 8 would refuse. Frozen: it never changes.

A row that a producer wrote by hand, or that is older than the checks, may contain numbers that outboxq never counts to,
or arguments that no relay can read. Numbers are set to the nearest valid ones; a job that is too long becomes a dead
letter, which can be shown and discarded. Values that cannot be written as text are dropped from it, because the dead
letter could not even be shown with them.
"""

_BAD_NUMBERS = """\
attempt NOT BETWEEN 0 AND 2147483646 OR crashes NOT BETWEEN 0 AND 32766
      OR parked NOT BETWEEN 0 AND 32766 OR lease_token NOT BETWEEN 0 AND 9223372036854775806
      OR state = 'leased' AND lease_owner IS NULL"""

_SET_NUMBERS = """\
    UPDATE @schema@.job SET
      attempt = least(greatest(attempt, 0), 2147483646),
      crashes = least(greatest(crashes, 0), 32766),
      parked = least(greatest(parked, 0), 32766),
      lease_token = least(greatest(lease_token, 0), 9223372036854775806),
      state = CASE WHEN state = 'leased' AND lease_owner IS NULL THEN 'suspect' ELSE state END"""

_SET_FREE_NUMBERS = f"""\
{_SET_NUMBERS}
    WHERE id IN (SELECT id FROM @schema@.job WHERE {_BAD_NUMBERS} FOR UPDATE SKIP LOCKED);"""

# With the checks in place, an UPDATE of a too long row is refused, but a DELETE is not: so too long rows go first.
_BURY = """\
    DECLARE
      candidate uuid;
      too_long boolean;
      has_text boolean;
    BEGIN
      FOR candidate IN SELECT id FROM @schema@.job
        WHERE pg_column_size(args) > 1024 OR pg_column_compression(args) IS NOT NULL
          OR pg_column_size(headers) > 1024 OR pg_column_compression(headers) IS NOT NULL
          OR octet_length(unique_key) > 1024 OR octet_length(group_key) > 1024
      LOOP
        -- A few bytes may stand for a number of a hundred thousand digits: their text may be more than there can be.
        BEGIN
          has_text := true;
          too_long := EXISTS (
            SELECT FROM @schema@.job WHERE id = candidate AND (
              octet_length(args::text) > 16777216 OR octet_length(headers::text) > 1048576
              OR octet_length(unique_key) > 1024 OR octet_length(group_key) > 1024
            )
          );
        EXCEPTION WHEN program_limit_exceeded OR out_of_memory OR data_exception OR internal_error THEN
          too_long := true;
          has_text := false;
        END;
        CONTINUE WHEN NOT too_long;
        PERFORM FROM @schema@.job WHERE id = candidate FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
          {held}
        END IF;
        WITH gone AS (
          DELETE FROM @schema@.job WHERE id = candidate RETURNING *
        )
        INSERT INTO @schema@.dead_job (id, queue, kind, args, headers, priority, attempt, max_attempts, crashes,
          unique_key, group_key, errors, reason, created_at)
        SELECT CASE WHEN EXISTS (SELECT FROM @schema@.dead_job WHERE dead_job.id = gone.id)
            THEN gen_random_uuid() ELSE gone.id END,
          queue, kind, CASE WHEN has_text THEN args ELSE '{{}}' END, CASE WHEN has_text THEN headers ELSE '{{}}' END,
          priority, least(greatest(attempt, 0), 2147483646), max_attempts, least(greatest(crashes, 0), 32766),
          unique_key, group_key, errors,
          'its arguments, headers or keys are longer than a relay reads'
            || CASE WHEN has_text THEN '' ELSE ', and than PostgreSQL can show: they were dropped' END,
          created_at
        FROM gone;
      END LOOP;
    END;"""

_SAY_HELD = """\
RAISE NOTICE USING MESSAGE = 'outboxq: waiting for the end of a transaction that holds a row of '
            || @schema_identifier_literal@ || '.job which must be repaired';"""

# A handler may hold its row for minutes: such a row is left to step 8.
REPAIR_WHAT_IS_FREE = f"""\
{_BURY.format(held="CONTINUE;")}
{_SET_FREE_NUMBERS}"""

REPAIR_ALL = f"""\
{_BURY.format(held=_SAY_HELD)}
{_SET_FREE_NUMBERS}
    IF EXISTS (SELECT FROM @schema@.job WHERE {_BAD_NUMBERS}) THEN
      {_SAY_HELD}
{_SET_NUMBERS}
    WHERE {_BAD_NUMBERS};
    END IF;"""
