"""Step 2: `add_job` for SQL producers, and the trigger that wakes sleeping relays. Frozen.

The trigger reads the sleep flag: a relay that sleeps on a queue holds an exclusive advisory lock on the queue. After an
insert the trigger tries to take the same lock in shared mode, until the end of its transaction. If the lock is refused,
a relay sleeps, so the trigger notifies. If the lock is granted, it keeps relays from falling asleep until this
transaction has ended, so that no wake-up is missed. Nothing is written either way.
"""

ADD_JOB = """\
    CREATE FUNCTION @schema@.add_job(
      kind text,
      args jsonb DEFAULT '{}'::jsonb,
      queue text DEFAULT 'default',
      delay interval DEFAULT NULL,
      run_at timestamptz DEFAULT NULL,
      priority integer DEFAULT 0,
      max_attempts integer DEFAULT NULL,
      headers jsonb DEFAULT '{}'::jsonb,
      id uuid DEFAULT NULL
    ) RETURNS uuid LANGUAGE plpgsql AS $function$
    DECLARE
      -- A UUIDv7 (RFC 9562, section 5.7): 48 bits of Unix milliseconds over a random version 4, then the version bits.
      job_id uuid := coalesce(add_job.id, encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid())
        PLACING substring(int8send(floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
        FROM 1 FOR 6), 52, 1), 53, 1), 'hex')::uuid);
      -- Refused here, by the rules of Python's add_job: the errors of the table's constraints hold the whole row.
      problem text := CASE
        WHEN num_nulls(kind, args, queue, priority, headers) > 0
          THEN 'no NULL for kind, args, queue, priority and headers'
        WHEN octet_length(kind) NOT BETWEEN 1 AND 63 OR kind ~ '[[:cntrl:]]'
          THEN 'a kind of 1 to 63 bytes without control characters, got ' || quote_literal(left(kind, 80))
        WHEN octet_length(queue) NOT BETWEEN 1 AND 63 OR queue ~ '[[:cntrl:],=*]' OR queue <> btrim(queue)
          THEN 'a queue of 1 to 63 bytes without control characters, commas, "=", "*" and outer spaces, got '
            || quote_literal(left(queue, 80))
        WHEN jsonb_typeof(args) <> 'object'
          THEN 'args that are a JSON object, got a JSON ' || jsonb_typeof(args)
        WHEN jsonb_typeof(headers) <> 'object'
          OR jsonb_path_exists(headers, 'strict $.* ? (@.type() <> "string")')
          THEN 'headers that are a JSON object of strings'
        WHEN delay IS NOT NULL AND run_at IS NOT NULL
          THEN 'delay or run_at, not both'
        WHEN delay NOT BETWEEN interval '0' AND interval '36500 days'
          THEN 'a delay of 0 to 36500 days, got ' || delay
        WHEN run_at NOT BETWEEN timestamptz '0001-01-03 00:00:00+00' AND timestamptz '9999-12-29 00:00:00+00'
          THEN 'a run_at in the years 1 to 9999, got ' || run_at
        WHEN priority NOT BETWEEN -32767 AND 32767
          THEN 'a priority from -32767 to 32767, got ' || priority
        WHEN max_attempts NOT BETWEEN 1 AND 32767
          THEN 'max_attempts from 1 to 32767, got ' || max_attempts
      END;
    BEGIN
      IF problem IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'add_job takes ' || problem;
      END IF;
      IF octet_length(add_job.args::text) > 262144 THEN
        RAISE EXCEPTION USING ERRCODE = 'program_limit_exceeded',
          MESSAGE = 'add_job takes args of up to 256 KiB of JSON, got ' || octet_length(add_job.args::text) || ' bytes',
          HINT = 'Store the data in a table of yours and pass its key.';
      END IF;
      INSERT INTO @schema@.job (id, queue, kind, args, headers, priority, max_attempts, state, run_at)
      VALUES (
        job_id, add_job.queue, add_job.kind, add_job.args, add_job.headers, add_job.priority, add_job.max_attempts,
        CASE WHEN coalesce(add_job.delay, interval '0') = interval '0' AND add_job.run_at IS NULL THEN 'ready'
          ELSE 'scheduled' END,
        coalesce(add_job.run_at, clock_timestamp() + coalesce(add_job.delay, interval '0'))
      );
      RETURN job_id;
    END
    $function$;"""

UP = (
    """\
    CREATE FUNCTION @schema@.wake_relays() RETURNS trigger LANGUAGE plpgsql AS $function$
    DECLARE
      woken text;
    BEGIN
      IF current_setting('outboxq.notify', true) = 'off' THEN
        RETURN NULL;
      END IF;
      FOR woken IN SELECT DISTINCT queue FROM new_jobs LOOP
        IF NOT pg_try_advisory_xact_lock_shared(hashtext(@channel_literal@), hashtext(woken)) THEN
          PERFORM pg_notify(@channel_literal@, woken);
        END IF;
      END LOOP;
      RETURN NULL;
    END
    $function$;
    CREATE TRIGGER wake_relays AFTER INSERT ON @schema@.job
      REFERENCING NEW TABLE AS new_jobs
      FOR EACH STATEMENT EXECUTE FUNCTION @schema@.wake_relays();
    -- For triggers and other languages. No RETURNING, so that INSERT on the table is the only right it needs.
"""
    + ADD_JOB
)

DOWN = """\
    DROP FUNCTION @schema@.add_job(text, jsonb, text, interval, timestamptz, integer, integer, jsonb, uuid);
    DROP TRIGGER wake_relays ON @schema@.job;
    DROP FUNCTION @schema@.wake_relays();"""
