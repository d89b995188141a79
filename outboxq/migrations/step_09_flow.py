"""Step 9: schedules, groups, unique jobs, limits, batches, cancellations and expiry: their tables and columns. Frozen.

Jobs of a group have states of their own: relays of older versions, which do not know groups, neither claim such jobs
nor take them back. The checks apply to rows written from now on; step 10, a separate transaction, reads the whole
table.

The indexes are partial, without entries for jobs that use none of these features. Building each of them reads the table
once while producers and relays wait: about a tenth of a second for a million waiting jobs.
"""

from outboxq.migrations.step_07_checks import LOCK

CHECKS = """\
      ADD CONSTRAINT job_state CHECK (
        state IN (
          'ready', 'scheduled', 'leased', 'suspect', 'grouped', 'group_waiting', 'group_leased', 'group_suspect'
        )
      ) NOT VALID,
      ADD CONSTRAINT job_groups CHECK (
        (group_key IS NOT NULL OR state IN ('ready', 'scheduled', 'leased', 'suspect'))
        AND (state <> 'group_leased' OR lease_owner IS NOT NULL)
      ) NOT VALID,
      ADD CONSTRAINT job_expiry CHECK (
        expires_at BETWEEN timestamptz '0001-01-03 00:00:00+00' AND timestamptz '9999-12-29 00:00:00+00'
      ) NOT VALID"""

UP = f"""\
    CREATE TABLE @schema@.schedule (
      name text NOT NULL PRIMARY KEY,
      kind text NOT NULL,
      queue text NOT NULL,
      args jsonb NOT NULL DEFAULT '{{}}'::jsonb,
      -- Headers, priority, keys and so on: what `kind.options(...)` took.
      options jsonb NOT NULL DEFAULT '{{}}'::jsonb,
      cron text NOT NULL,
      time_zone text NOT NULL,
      missed text NOT NULL,
      jitter_seconds double precision NOT NULL DEFAULT 0,
      -- Whether an application's code declares it.
      declared boolean NOT NULL DEFAULT false,
      next_at timestamptz NOT NULL,
      last_at timestamptz,
      paused_at timestamptz,
      created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
      CONSTRAINT schedule_name_bytes CHECK (octet_length(name) BETWEEN 1 AND 255),
      CONSTRAINT schedule_queue_bytes CHECK (octet_length(queue) BETWEEN 1 AND 63),
      CONSTRAINT schedule_kind_bytes CHECK (octet_length(kind) BETWEEN 1 AND 63),
      CONSTRAINT schedule_args_object CHECK (jsonb_typeof(args) = 'object'),
      CONSTRAINT schedule_options_object CHECK (jsonb_typeof(options) = 'object'),
      CONSTRAINT schedule_missed CHECK (missed IN ('skip', 'one', 'all')),
      CONSTRAINT schedule_jitter CHECK (jitter_seconds BETWEEN 0 AND 86400),
      CONSTRAINT schedule_times CHECK (
        next_at BETWEEN timestamptz '0001-01-03 00:00:00+00' AND timestamptz '9999-12-29 00:00:00+00'
      )
    );
    CREATE INDEX schedule_next ON @schema@.schedule (next_at) WHERE paused_at IS NULL;

    CREATE TABLE @schema@.unique_key (
      key text NOT NULL PRIMARY KEY,
      job_id uuid NOT NULL,
      kept_until timestamptz,
      CONSTRAINT unique_key_bytes CHECK (octet_length(key) BETWEEN 1 AND 1024)
    ) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, vacuum_index_cleanup = on);

    -- Updated for each chunk of tokens: free room on the page keeps the updates HOT.
    CREATE TABLE @schema@.rate (
      name text NOT NULL PRIMARY KEY,
      tat timestamptz NOT NULL
    ) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

    CREATE TABLE @schema@.batch (
      id uuid NOT NULL PRIMARY KEY,
      callback jsonb NOT NULL,
      -- The batch that its callback is a member of.
      parent_id uuid,
      created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
      CONSTRAINT batch_callback_object CHECK (jsonb_typeof(callback) = 'object')
    ) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, vacuum_index_cleanup = on);
    CREATE INDEX batch_parent ON @schema@.batch (parent_id) WHERE parent_id IS NOT NULL;

    CREATE TABLE @schema@.cancel_request (
      job_id uuid NOT NULL PRIMARY KEY,
      outcome text NOT NULL DEFAULT 'discard',
      requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
      CONSTRAINT cancel_request_outcome CHECK (outcome IN ('discard', 'dead'))
    );

    CREATE TABLE @schema@.paused_kind (
      queue text NOT NULL,
      kind text NOT NULL,
      paused_at timestamptz NOT NULL DEFAULT clock_timestamp(),
      PRIMARY KEY (queue, kind)
    );

    -- How many jobs of a queue, or of each of its groups, run at a time, and how many begin in a time.
    ALTER TABLE @schema@.queue
      ADD COLUMN max_running integer,
      ADD COLUMN max_per_group integer,
      ADD COLUMN rate_jobs integer,
      ADD COLUMN rate_seconds double precision,
      ADD COLUMN rate_burst integer,
      ADD CONSTRAINT queue_running CHECK (max_running BETWEEN 1 AND 10000 AND max_per_group BETWEEN 1 AND 1000),
      ADD CONSTRAINT queue_rate CHECK (
        num_nulls(rate_jobs, rate_seconds, rate_burst) IN (0, 3)
        AND rate_jobs BETWEEN 1 AND 1000000 AND rate_seconds BETWEEN 0.001 AND 2678400
        AND rate_burst BETWEEN 1 AND 1000000
      );

    ALTER TABLE @schema@.dead_job ADD COLUMN batch_id uuid;
    CREATE INDEX dead_job_batch ON @schema@.dead_job (batch_id) WHERE batch_id IS NOT NULL;

{LOCK}
    ALTER TABLE @schema@.job
      ADD COLUMN batch_id uuid,
      ADD COLUMN expires_at timestamptz,
      DROP CONSTRAINT job_state,
{CHECKS};
    CREATE INDEX job_unique ON @schema@.job (unique_key) WHERE unique_key IS NOT NULL;
    CREATE INDEX job_group ON @schema@.job (queue, group_key COLLATE "C", seq)
      WHERE group_key IS NOT NULL AND state <> 'group_waiting';
    CREATE INDEX job_group_state ON @schema@.job (state, queue, run_at)
      WHERE state = 'group_waiting' OR state = 'group_leased' OR state = 'group_suspect';
    CREATE INDEX job_batch ON @schema@.job (batch_id, seq) WHERE batch_id IS NOT NULL;"""

# Grouped jobs would be in states that the code of the earlier step does not know.
DOWN = f"""\
{LOCK}
    DROP INDEX @schema@.job_unique, @schema@.job_group, @schema@.job_group_state, @schema@.job_batch;
    UPDATE @schema@.job SET state = CASE state
        WHEN 'grouped' THEN 'ready' WHEN 'group_waiting' THEN 'scheduled'
        WHEN 'group_leased' THEN 'leased' ELSE 'suspect' END
      WHERE state IN ('grouped', 'group_waiting', 'group_leased', 'group_suspect');
    ALTER TABLE @schema@.job
      DROP CONSTRAINT job_state, DROP CONSTRAINT job_groups, DROP CONSTRAINT job_expiry,
      ADD CONSTRAINT job_state CHECK (state IN ('ready', 'scheduled', 'leased', 'suspect')),
      DROP COLUMN batch_id, DROP COLUMN expires_at;
    ALTER TABLE @schema@.dead_job DROP COLUMN batch_id;
    ALTER TABLE @schema@.queue
      DROP COLUMN max_running, DROP COLUMN max_per_group, DROP COLUMN rate_jobs, DROP COLUMN rate_seconds,
      DROP COLUMN rate_burst;
    DROP TABLE @schema@.schedule, @schema@.unique_key, @schema@.rate, @schema@.batch, @schema@.cancel_request,
      @schema@.paused_kind;"""
