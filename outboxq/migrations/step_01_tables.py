"""Step 1: the tables. Frozen: later changes are steps of their own."""

UP = """\
    CREATE TABLE @schema@.job (
      id uuid NOT NULL PRIMARY KEY,
      seq bigint NOT NULL GENERATED ALWAYS AS IDENTITY,
      queue text NOT NULL,
      kind text NOT NULL,
      args jsonb NOT NULL,
      headers jsonb NOT NULL DEFAULT '{}'::jsonb,
      priority smallint NOT NULL DEFAULT 0,
      state text NOT NULL DEFAULT 'ready',
      run_at timestamptz NOT NULL DEFAULT clock_timestamp(),
      attempt integer NOT NULL DEFAULT 0,
      max_attempts smallint,
      crashes smallint NOT NULL DEFAULT 0,
      parked smallint NOT NULL DEFAULT 0,
      unique_key text,
      group_key text,
      lease_owner uuid,
      lease_token bigint NOT NULL DEFAULT 0,
      errors jsonb NOT NULL DEFAULT '[]'::jsonb,
      created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
      CONSTRAINT queue_name_bytes CHECK (octet_length(queue) BETWEEN 1 AND 63),
      CONSTRAINT kind_name_bytes CHECK (octet_length(kind) BETWEEN 1 AND 63),
      CONSTRAINT job_state CHECK (state IN ('ready', 'scheduled', 'leased', 'suspect')),
      CONSTRAINT job_priority CHECK (priority > -32768),
      CONSTRAINT job_args_object CHECK (jsonb_typeof(args) = 'object'),
      -- What Python's datetime can hold, in any time zone: a claim could not read anything else, nor get past it.
      CONSTRAINT job_times CHECK (
        run_at BETWEEN timestamptz '0001-01-03 00:00:00+00' AND timestamptz '9999-12-29 00:00:00+00'
        AND created_at BETWEEN timestamptz '0001-01-03 00:00:00+00' AND timestamptz '9999-12-29 00:00:00+00'
      )
    ) WITH (
      fillfactor = 90,
      autovacuum_vacuum_scale_factor = 0,
      autovacuum_vacuum_threshold = 2000,
      autovacuum_analyze_scale_factor = 0,
      autovacuum_analyze_threshold = 10000,
      autovacuum_vacuum_insert_scale_factor = 0,
      autovacuum_vacuum_insert_threshold = 100000,
      autovacuum_vacuum_cost_delay = 0
    );
    CREATE INDEX job_ready ON @schema@.job (queue, (-priority), seq) WHERE state = 'ready';
    CREATE INDEX job_scheduled ON @schema@.job (queue, run_at) WHERE state = 'scheduled';
    CREATE INDEX job_leased ON @schema@.job (lease_owner) WHERE state = 'leased';
    CREATE INDEX job_suspect ON @schema@.job (queue, seq) WHERE state = 'suspect';
    CREATE TABLE @schema@.dead_job (
      id uuid NOT NULL PRIMARY KEY,
      queue text NOT NULL,
      kind text NOT NULL,
      args jsonb NOT NULL,
      headers jsonb NOT NULL,
      priority smallint NOT NULL,
      attempt integer NOT NULL,
      max_attempts smallint,
      crashes smallint NOT NULL,
      unique_key text,
      group_key text,
      errors jsonb NOT NULL,
      reason text NOT NULL,
      created_at timestamptz NOT NULL,
      died_at timestamptz NOT NULL DEFAULT clock_timestamp()
    );
    CREATE INDEX dead_job_queue ON @schema@.dead_job (queue, died_at);
    CREATE TABLE @schema@.queue (
      name text NOT NULL PRIMARY KEY,
      paused_at timestamptz
    );"""

DOWN = """\
    DROP TABLE @schema@.job, @schema@.dead_job, @schema@.queue;"""
