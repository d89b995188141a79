"""Step 11: tables for the history of relays and queues, finished jobs, progress, and operators' actions. Frozen.

Relays of the previous version go on, write no rows into these tables, and delete no dead letters. Every claim reads
`queue`: its new column is added under a lock that never waits long for a claim.
"""

from outboxq.migrations.step_07_checks import LOCK

# The lock of the table that is changed: a session that holds `queue` must not delay work on `job`.
LOCK_QUEUE = LOCK.replace(".job", ".queue")

UP = f"""\
    -- What each relay says of itself, several times a minute: free room on the page keeps the updates HOT.
    CREATE TABLE @schema@.relay_status (
      id uuid NOT NULL PRIMARY KEY,
      host text NOT NULL,
      pid integer NOT NULL,
      version text NOT NULL,
      schema_step integer NOT NULL,
      started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
      seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
      state text NOT NULL,
      queues text[] NOT NULL,
      kinds text[] NOT NULL,
      slots integer NOT NULL,
      busy integer NOT NULL,
      -- The queues that one of its slots could have claimed from when it was last seen.
      free text[] NOT NULL DEFAULT '{{}}',
      listens boolean NOT NULL,
      -- The jobs that have run for long: id, queue, kind, attempt, seconds, backend.
      running jsonb NOT NULL,
      -- The limits that its application declares: name (of the queue), running, per_group, rate_jobs, rate_seconds,
      -- rate_burst.
      limits jsonb NOT NULL DEFAULT '[]',
      -- How often the relay has added to `stat`: the same numbers are never added twice.
      flush bigint NOT NULL,
      CONSTRAINT relay_status_running CHECK (jsonb_typeof(running) = 'array' AND jsonb_typeof(limits) = 'array')
    ) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

    -- What became of jobs, by minutes (grain 60) and by hours (3600). All relays add to the same rows.
    CREATE TABLE @schema@.stat (
      grain smallint NOT NULL,
      at timestamptz NOT NULL,
      queue text NOT NULL,
      kind text NOT NULL,
      done bigint NOT NULL DEFAULT 0,
      retried bigint NOT NULL DEFAULT 0,
      died bigint NOT NULL DEFAULT 0,
      snoozed bigint NOT NULL DEFAULT 0,
      discarded bigint NOT NULL DEFAULT 0,
      crashed bigint NOT NULL DEFAULT 0,
      lost bigint NOT NULL DEFAULT 0,
      wait_seconds double precision NOT NULL DEFAULT 0,
      run_seconds double precision NOT NULL DEFAULT 0,
      -- How many jobs waited, and ran, for up to so many seconds: .001 .0025 .005 .01 .025 .05 .1 .25 .5 1 2.5 5 10 30
      -- 60 300 1800 7200 43200, and longer.
      wait bigint[] NOT NULL,
      run bigint[] NOT NULL,
      PRIMARY KEY (grain, at, queue, kind),
      CONSTRAINT stat_grain CHECK (grain IN (60, 3600)),
      CONSTRAINT stat_buckets CHECK (cardinality(wait) = 20 AND cardinality(run) = 20)
    ) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);

    -- How each queue stood, once a minute. `exact`: false if a number above 10,000 is an estimate.
    CREATE TABLE @schema@.gauge (
      at timestamptz NOT NULL,
      queue text NOT NULL,
      ready integer NOT NULL,
      scheduled integer NOT NULL,
      due integer NOT NULL,
      leased integer NOT NULL,
      suspect integer NOT NULL,
      dead integer NOT NULL,
      exact boolean NOT NULL,
      oldest_seconds real,
      PRIMARY KEY (at, queue)
    );

    CREATE TABLE @schema@.done_job (
      id uuid NOT NULL PRIMARY KEY,
      queue text NOT NULL,
      kind text NOT NULL,
      outcome text NOT NULL,
      attempt integer NOT NULL,
      created_at timestamptz NOT NULL,
      claimed_at timestamptz,
      finished_at timestamptz NOT NULL DEFAULT clock_timestamp(),
      seconds double precision NOT NULL,
      relay uuid,
      args jsonb,
      headers jsonb,
      result jsonb,
      -- The jobs that its run took along, as it was coalesced with them.
      stands_for uuid[],
      expires_at timestamptz NOT NULL,
      CONSTRAINT done_job_outcome CHECK (outcome IN ('done', 'discarded', 'cancelled', 'expired'))
    ) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, vacuum_index_cleanup = on);
    CREATE INDEX done_job_expires ON @schema@.done_job (expires_at);

    -- How far handlers are that run, by their own notes: written beside their transactions, and deleted when they end.
    CREATE TABLE @schema@.progress (
      job_id uuid NOT NULL PRIMARY KEY,
      attempt integer NOT NULL,
      fraction double precision NOT NULL,
      note text NOT NULL,
      relay uuid NOT NULL,
      noted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
      CONSTRAINT progress_fraction CHECK (fraction BETWEEN 0 AND 1)
    ) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

    -- What operators did: each page of a change of many rows counts its rows here, in its own transaction.
    CREATE TABLE @schema@.audit (
      id uuid NOT NULL PRIMARY KEY,
      at timestamptz NOT NULL DEFAULT clock_timestamp(),
      finished_at timestamptz,
      actor text NOT NULL,
      role text,
      via text NOT NULL,
      db_user text NOT NULL DEFAULT session_user,
      action text NOT NULL,
      target text,
      -- Which rows were meant, and what was to become of them: never arguments, results or other payloads.
      filter jsonb,
      change jsonb,
      reason text,
      -- How many rows the preview showed, were changed, and were passed over because others held them.
      expected bigint,
      changed bigint NOT NULL DEFAULT 0,
      held bigint NOT NULL DEFAULT 0,
      -- The last row of a change of many rows that was looked at: it goes on behind that one.
      position uuid,
      -- How often it was gone on with: a process that finds another number than its own ends.
      resumed integer NOT NULL DEFAULT 0,
      stopped_at timestamptz,
      error text,
      CONSTRAINT audit_via CHECK (via IN ('cli', 'web', 'api'))
    );
    CREATE INDEX audit_at ON @schema@.audit (at);
    CREATE FUNCTION @schema@.keep_audit() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $function$
    BEGIN
      RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
        MESSAGE = 'outboxq: an action that is over is not rewritten in the audit';
    END
    $function$;
    -- A role that may count the pages of a change of many rows cannot rewrite it once it is over, and no single action.
    CREATE TRIGGER keep_audit BEFORE UPDATE ON @schema@.audit
      FOR EACH ROW WHEN (OLD.finished_at IS NOT NULL) EXECUTE FUNCTION @schema@.keep_audit();

{LOCK_QUEUE}
    -- How long dead letters are kept; 0 for ever, whatever an application declares, and NULL as it declares.
    ALTER TABLE @schema@.queue
      ADD COLUMN keep_dead_seconds double precision,
      ADD CONSTRAINT queue_keep_dead CHECK (keep_dead_seconds = 0 OR keep_dead_seconds BETWEEN 60 AND 315619200);"""

DOWN = f"""\
{LOCK_QUEUE}
    ALTER TABLE @schema@.queue DROP COLUMN keep_dead_seconds;
    DROP TABLE @schema@.relay_status, @schema@.stat, @schema@.gauge, @schema@.done_job, @schema@.progress,
      @schema@.audit;
    DROP FUNCTION @schema@.keep_audit();"""
