"""Step 3: one row per relay process that holds leases. Frozen.

The lease belongs to the relay and not to each job: extending it is one HOT update for any number of jobs, and never
waits for a job that is just being completed.
"""

UP = """\
    CREATE TABLE @schema@.relay (
      id uuid NOT NULL PRIMARY KEY,
      alive_until timestamptz NOT NULL,
      started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
      host text,
      pid integer
    ) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);"""

DOWN = """\
    DROP TABLE @schema@.relay;"""
