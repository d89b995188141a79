-- What relays of the version before groups send, as they sent it, for the queue 'ledger', the lease
-- 00000000-0000-0000-0000-0000000000aa, and the job 00000000-0000-0000-0000-00000000000b. Frozen: relays of that version
-- are at work while a deployment rolls. A heading begins with three dashes.

--- claim of ready jobs
WITH picked AS MATERIALIZED (
  SELECT id, CASE WHEN job.xmax = '0'::xid THEN false ELSE (
    SELECT CASE WHEN distance BETWEEN 1 AND 2147483647 AND distance < next_xid - 2
      THEN coalesce(pg_catalog.pg_xact_status((next_xid - distance)::text::xid8) = 'aborted', false) ELSE false END
    FROM (SELECT next_xid, (next_xid - job.xmax::text::bigint) & 4294967295 AS distance
      FROM (SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint AS next_xid) AS now
    ) AS widened
  ) END AS died FROM "outboxq"."job" AS job
  WHERE queue = 'ledger' AND state = 'ready'
    AND NOT EXISTS (SELECT FROM "outboxq"."queue" WHERE name = 'ledger' AND paused_at IS NOT NULL)
  ORDER BY (-priority), seq
  LIMIT 50
  FOR UPDATE SKIP LOCKED
), moved AS (
  UPDATE "outboxq"."job" AS job SET state = 'suspect' WHERE id = ANY (ARRAY(SELECT id FROM picked WHERE died)) RETURNING id
), claimed AS (
  DELETE FROM "outboxq"."job" AS claimed WHERE id = ANY (ARRAY(SELECT id FROM picked WHERE NOT died))
  RETURNING claimed.id, claimed.queue, claimed.kind, claimed.args::text, claimed.headers::text, claimed.priority, least(greatest(claimed.attempt, 0), 2147483645) + 1, claimed.max_attempts, claimed.crashes, claimed.parked, claimed.unique_key, claimed.group_key, claimed.errors::text, claimed.run_at, claimed.created_at, claimed.seq, NULL::bigint AS lease_token, pg_catalog.pg_current_xact_id()::text, pg_catalog.pg_backend_pid()
)
SELECT count.moved, claimed.*
FROM (SELECT pg_catalog.count(*) AS moved FROM moved) AS count LEFT JOIN claimed ON true;

--- claim of due jobs
WITH picked AS MATERIALIZED (
  SELECT id, CASE WHEN job.xmax = '0'::xid THEN false ELSE (
    SELECT CASE WHEN distance BETWEEN 1 AND 2147483647 AND distance < next_xid - 2
      THEN coalesce(pg_catalog.pg_xact_status((next_xid - distance)::text::xid8) = 'aborted', false) ELSE false END
    FROM (SELECT next_xid, (next_xid - job.xmax::text::bigint) & 4294967295 AS distance
      FROM (SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint AS next_xid) AS now
    ) AS widened
  ) END AS died FROM "outboxq"."job" AS job
  WHERE queue = 'ledger' AND state = 'scheduled' AND run_at <= pg_catalog.statement_timestamp()
    AND NOT EXISTS (SELECT FROM "outboxq"."queue" WHERE name = 'ledger' AND paused_at IS NOT NULL)
  ORDER BY run_at
  LIMIT 50
  FOR UPDATE SKIP LOCKED
), moved AS (
  UPDATE "outboxq"."job" AS job SET state = 'suspect' WHERE id = ANY (ARRAY(SELECT id FROM picked WHERE died)) RETURNING id
), claimed AS (
  DELETE FROM "outboxq"."job" AS claimed WHERE id = ANY (ARRAY(SELECT id FROM picked WHERE NOT died))
  RETURNING claimed.id, claimed.queue, claimed.kind, claimed.args::text, claimed.headers::text, claimed.priority, least(greatest(claimed.attempt, 0), 2147483645) + 1, claimed.max_attempts, claimed.crashes, claimed.parked, claimed.unique_key, claimed.group_key, claimed.errors::text, claimed.run_at, claimed.created_at, claimed.seq, NULL::bigint AS lease_token, pg_catalog.pg_current_xact_id()::text, pg_catalog.pg_backend_pid()
)
SELECT count.moved, claimed.*
FROM (SELECT pg_catalog.count(*) AS moved FROM moved) AS count LEFT JOIN claimed ON true;

--- claim of ready jobs under a lease
WITH picked AS MATERIALIZED (
  SELECT id FROM "outboxq"."job" AS job
  WHERE queue = 'ledger' AND state = 'ready' AND EXISTS (SELECT FROM "outboxq"."relay" WHERE id = '000000000000000000000000000000aa'::uuid AND alive_until > pg_catalog.clock_timestamp())
    AND NOT EXISTS (SELECT FROM "outboxq"."queue" WHERE name = 'ledger' AND paused_at IS NOT NULL)
  ORDER BY (-priority), seq
  LIMIT 50
  FOR UPDATE SKIP LOCKED
), claimed AS (
  UPDATE "outboxq"."job" AS claimed SET state = 'leased', lease_owner = '000000000000000000000000000000aa'::uuid, lease_token = greatest(lease_token, 0) % 9223372036854775806 + 1, attempt = least(greatest(attempt, 0), 2147483645) + 1,
    crashes = crashes
  WHERE id = ANY (ARRAY(SELECT id FROM picked))
  RETURNING claimed.id, claimed.queue, claimed.kind, claimed.args::text, claimed.headers::text, claimed.priority, claimed.attempt, claimed.max_attempts, claimed.crashes, claimed.parked, claimed.unique_key, claimed.group_key, claimed.errors::text, claimed.run_at, claimed.created_at, claimed.seq, claimed.lease_token
)
SELECT 0, claimed.* FROM claimed;

--- claim of due jobs under a lease
WITH picked AS MATERIALIZED (
  SELECT id FROM "outboxq"."job" AS job
  WHERE queue = 'ledger' AND state = 'scheduled' AND run_at <= pg_catalog.statement_timestamp() AND EXISTS (SELECT FROM "outboxq"."relay" WHERE id = '000000000000000000000000000000aa'::uuid AND alive_until > pg_catalog.clock_timestamp())
    AND NOT EXISTS (SELECT FROM "outboxq"."queue" WHERE name = 'ledger' AND paused_at IS NOT NULL)
  ORDER BY run_at
  LIMIT 50
  FOR UPDATE SKIP LOCKED
), claimed AS (
  UPDATE "outboxq"."job" AS claimed SET state = 'leased', lease_owner = '000000000000000000000000000000aa'::uuid, lease_token = greatest(lease_token, 0) % 9223372036854775806 + 1, attempt = least(greatest(attempt, 0), 2147483645) + 1,
    crashes = crashes
  WHERE id = ANY (ARRAY(SELECT id FROM picked))
  RETURNING claimed.id, claimed.queue, claimed.kind, claimed.args::text, claimed.headers::text, claimed.priority, claimed.attempt, claimed.max_attempts, claimed.crashes, claimed.parked, claimed.unique_key, claimed.group_key, claimed.errors::text, claimed.run_at, claimed.created_at, claimed.seq, claimed.lease_token
)
SELECT 0, claimed.* FROM claimed;

--- claim of suspects
WITH picked AS MATERIALIZED (
  SELECT id FROM "outboxq"."job" AS job
  WHERE queue = 'ledger' AND state = 'suspect' AND EXISTS (SELECT FROM "outboxq"."relay" WHERE id = '000000000000000000000000000000aa'::uuid AND alive_until > pg_catalog.clock_timestamp())
    AND NOT EXISTS (SELECT FROM "outboxq"."queue" WHERE name = 'ledger' AND paused_at IS NOT NULL)
  ORDER BY seq
  LIMIT 50
  FOR UPDATE SKIP LOCKED
), claimed AS (
  UPDATE "outboxq"."job" AS claimed SET state = 'leased', lease_owner = '000000000000000000000000000000aa'::uuid, lease_token = greatest(lease_token, 0) % 9223372036854775806 + 1, attempt = least(greatest(attempt, 0), 2147483645) + 1,
    crashes = least(greatest(crashes, 0), 32765) + 1
  WHERE id = ANY (ARRAY(SELECT id FROM picked))
  RETURNING claimed.id, claimed.queue, claimed.kind, claimed.args::text, claimed.headers::text, claimed.priority, claimed.attempt, claimed.max_attempts, claimed.crashes - 1, claimed.parked, claimed.unique_key, claimed.group_key, claimed.errors::text, claimed.run_at, claimed.created_at, claimed.seq, claimed.lease_token
)
SELECT 0, claimed.* FROM claimed;

--- parking, ready
WITH head AS MATERIALIZED (
  SELECT id FROM "outboxq"."job" WHERE queue = 'ledger' AND state = 'ready'  ORDER BY (-priority), seq LIMIT 50
), picked AS MATERIALIZED (
  SELECT id FROM "outboxq"."job" AS job
  WHERE id = ANY (ARRAY(SELECT id FROM head)) AND state = (SELECT 'ready') AND NOT kind = ANY ('{}')
  FOR UPDATE SKIP LOCKED
), parked AS (
  UPDATE "outboxq"."job" AS job SET state = 'scheduled', parked = least(greatest(job.parked, 0), 32765) + 1, run_at = pg_catalog.clock_timestamp() + least(interval '5 minutes', interval '5 seconds' * pg_catalog.power(2, least(greatest(parked, 0), 6)))
  WHERE id = ANY (ARRAY(SELECT id FROM picked)) RETURNING id
)
SELECT pg_catalog.count(*) FROM parked;

--- parking, scheduled
WITH head AS MATERIALIZED (
  SELECT id FROM "outboxq"."job" WHERE queue = 'ledger' AND state = 'scheduled' AND run_at <= pg_catalog.statement_timestamp() ORDER BY run_at LIMIT 50
), picked AS MATERIALIZED (
  SELECT id FROM "outboxq"."job" AS job
  WHERE id = ANY (ARRAY(SELECT id FROM head)) AND state = (SELECT 'scheduled') AND NOT kind = ANY ('{}')
  FOR UPDATE SKIP LOCKED
), parked AS (
  UPDATE "outboxq"."job" AS job SET state = 'scheduled', parked = least(greatest(job.parked, 0), 32765) + 1, run_at = pg_catalog.clock_timestamp() + least(interval '5 minutes', interval '5 seconds' * pg_catalog.power(2, least(greatest(parked, 0), 6)))
  WHERE id = ANY (ARRAY(SELECT id FROM picked)) RETURNING id
)
SELECT pg_catalog.count(*) FROM parked;

--- parking, suspect
WITH head AS MATERIALIZED (
  SELECT id FROM "outboxq"."job" WHERE queue = 'ledger' AND state = 'suspect'  ORDER BY (-priority), seq LIMIT 50
), picked AS MATERIALIZED (
  SELECT id FROM "outboxq"."job" AS job
  WHERE id = ANY (ARRAY(SELECT id FROM head)) AND state = (SELECT 'suspect') AND NOT kind = ANY ('{}')
  FOR UPDATE SKIP LOCKED
), parked AS (
  UPDATE "outboxq"."job" AS job SET state = 'scheduled', parked = least(greatest(job.parked, 0), 32765) + 1, run_at = pg_catalog.clock_timestamp() + least(interval '5 minutes', interval '5 seconds' * pg_catalog.power(2, least(greatest(parked, 0), 6)))
  WHERE id = ANY (ARRAY(SELECT id FROM picked)) RETURNING id
)
SELECT pg_catalog.count(*) FROM parked;

--- clearing of marks of ready jobs
WITH picked AS MATERIALIZED (
  SELECT id, CASE WHEN job.xmax = '0'::xid THEN false ELSE (
    SELECT CASE WHEN distance BETWEEN 1 AND 2147483647 AND distance < next_xid - 2
      THEN coalesce(pg_catalog.pg_xact_status((next_xid - distance)::text::xid8) = 'aborted', false) ELSE false END
    FROM (SELECT next_xid, (next_xid - job.xmax::text::bigint) & 4294967295 AS distance
      FROM (SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint AS next_xid) AS now
    ) AS widened
  ) END AS died FROM "outboxq"."job" AS job
  WHERE queue = 'ledger' AND state = 'ready'
    AND NOT EXISTS (SELECT FROM "outboxq"."queue" WHERE name = 'ledger' AND paused_at IS NOT NULL)
  ORDER BY (-priority), seq
  LIMIT 50
  FOR UPDATE SKIP LOCKED
)
SELECT id FROM picked;

--- clearing of marks
SELECT pg_catalog.count(*) FROM (SELECT FROM "outboxq"."job" WHERE id = ANY ('{00000000-0000-0000-0000-00000000000b}'::uuid[]) AND state IN ('ready', 'scheduled') FOR UPDATE SKIP LOCKED) AS cleared;

--- reaper
WITH lost AS MATERIALIZED (
  SELECT job.id, job.crashes >= 3 AS over FROM "outboxq"."job" AS job
  WHERE job.state = 'leased' AND NOT EXISTS (SELECT FROM "outboxq"."relay" AS owner WHERE owner.id = job.lease_owner AND owner.alive_until > pg_catalog.clock_timestamp())
  LIMIT 50 FOR UPDATE OF job SKIP LOCKED
), back AS (
  UPDATE "outboxq"."job" AS job SET state = 'suspect', lease_owner = NULL, lease_token = greatest(job.lease_token, 0) % 9223372036854775806 + 1, seq = DEFAULT,
    attempt = greatest(job.attempt, 1) - 1, crashes = job.crashes, errors = pg_catalog.jsonb_path_query_array(job.errors, '$[last - 23 to last]')
  || pg_catalog.jsonb_build_array(pg_catalog.jsonb_build_object(
    'attempt', job.attempt, 'type', 'outboxq.RelayDied', 'message', 'its relay died or stalled while the job ran'::text, 'where', '[]'::jsonb,
    'at', pg_catalog.clock_timestamp()))
  FROM lost WHERE job.id = lost.id AND NOT lost.over
  RETURNING job.id, job.queue, job.kind, job.crashes
), gone AS (
  DELETE FROM "outboxq"."job" AS job USING lost WHERE job.id = lost.id AND lost.over RETURNING job.*
), dead AS (
  INSERT INTO "outboxq"."dead_job" (id, queue, kind, args, headers, priority, attempt, max_attempts, crashes, unique_key, group_key,
    errors, reason, created_at)
  SELECT CASE WHEN EXISTS (SELECT FROM "outboxq"."dead_job" AS earlier WHERE earlier.id = job.id
      AND (earlier.queue, earlier.kind) <> (job.queue, job.kind)) THEN pg_catalog.gen_random_uuid() ELSE job.id END,
    job.queue, job.kind, job.args, job.headers, job.priority, greatest(job.attempt, 1) - 1,
    job.max_attempts, job.crashes, job.unique_key, job.group_key, pg_catalog.jsonb_path_query_array(job.errors, '$[last - 23 to last]')
  || pg_catalog.jsonb_build_array(pg_catalog.jsonb_build_object(
    'attempt', job.attempt, 'type', 'outboxq.RelayDied', 'message', 'its relay died or stalled while the job ran'::text, 'where', '[]'::jsonb,
    'at', pg_catalog.clock_timestamp())),
    'crashed ' || job.crashes::text || ' of ' || 3::text || ' times while it ran alone', job.created_at
  FROM gone AS job
  ON CONFLICT (id) DO UPDATE SET queue = excluded.queue, kind = excluded.kind, args = excluded.args,
    headers = excluded.headers, priority = excluded.priority, attempt = excluded.attempt,
    max_attempts = excluded.max_attempts, crashes = excluded.crashes, unique_key = excluded.unique_key,
    group_key = excluded.group_key, errors = excluded.errors, reason = excluded.reason,
    created_at = excluded.created_at, died_at = pg_catalog.clock_timestamp()
  RETURNING id, queue, kind, crashes
)
SELECT id, queue, kind, crashes, false FROM back UNION ALL SELECT id, queue, kind, crashes, true FROM dead;

--- reaper of one
WITH lost AS MATERIALIZED (
  SELECT job.id, job.crashes >= 32768 AS over FROM "outboxq"."job" AS job
  WHERE job.state = 'leased' AND job.state = 'leased' AND job.id = '0000000000000000000000000000000b'::uuid AND NOT EXISTS (SELECT FROM "outboxq"."relay" AS owner WHERE owner.id = job.lease_owner AND owner.alive_until > pg_catalog.clock_timestamp())
  LIMIT 1 FOR UPDATE OF job SKIP LOCKED
), back AS (
  UPDATE "outboxq"."job" AS job SET state = 'suspect', lease_owner = NULL, lease_token = greatest(job.lease_token, 0) % 9223372036854775806 + 1, seq = DEFAULT,
    attempt = greatest(job.attempt, 1) - 1, crashes = job.crashes, errors = pg_catalog.jsonb_path_query_array(job.errors, '$[last - 23 to last]')
  || pg_catalog.jsonb_build_array(pg_catalog.jsonb_build_object(
    'attempt', job.attempt, 'type', 'outboxq.RelayDied', 'message', 'its relay died or stalled while the job ran'::text, 'where', '[]'::jsonb,
    'at', pg_catalog.clock_timestamp()))
  FROM lost WHERE job.id = lost.id AND NOT lost.over
  RETURNING job.id, job.queue, job.kind, job.crashes
), gone AS (
  DELETE FROM "outboxq"."job" AS job USING lost WHERE job.id = lost.id AND lost.over RETURNING job.*
), dead AS (
  INSERT INTO "outboxq"."dead_job" (id, queue, kind, args, headers, priority, attempt, max_attempts, crashes, unique_key, group_key,
    errors, reason, created_at)
  SELECT CASE WHEN EXISTS (SELECT FROM "outboxq"."dead_job" AS earlier WHERE earlier.id = job.id
      AND (earlier.queue, earlier.kind) <> (job.queue, job.kind)) THEN pg_catalog.gen_random_uuid() ELSE job.id END,
    job.queue, job.kind, job.args, job.headers, job.priority, greatest(job.attempt, 1) - 1,
    job.max_attempts, job.crashes, job.unique_key, job.group_key, pg_catalog.jsonb_path_query_array(job.errors, '$[last - 23 to last]')
  || pg_catalog.jsonb_build_array(pg_catalog.jsonb_build_object(
    'attempt', job.attempt, 'type', 'outboxq.RelayDied', 'message', 'its relay died or stalled while the job ran'::text, 'where', '[]'::jsonb,
    'at', pg_catalog.clock_timestamp())),
    'crashed ' || job.crashes::text || ' of ' || 32768::text || ' times while it ran alone', job.created_at
  FROM gone AS job
  ON CONFLICT (id) DO UPDATE SET queue = excluded.queue, kind = excluded.kind, args = excluded.args,
    headers = excluded.headers, priority = excluded.priority, attempt = excluded.attempt,
    max_attempts = excluded.max_attempts, crashes = excluded.crashes, unique_key = excluded.unique_key,
    group_key = excluded.group_key, errors = excluded.errors, reason = excluded.reason,
    created_at = excluded.created_at, died_at = pg_catalog.clock_timestamp()
  RETURNING id, queue, kind, crashes
)
SELECT id, queue, kind, crashes, false FROM back UNION ALL SELECT id, queue, kind, crashes, true FROM dead;

--- lost to the dead letters
WITH picked AS MATERIALIZED (
  SELECT job.id FROM "outboxq"."job" AS job WHERE job.id = '0000000000000000000000000000000b'::uuid AND job.state = 'leased' AND job.id = '0000000000000000000000000000000b'::uuid AND NOT EXISTS (SELECT FROM "outboxq"."relay" AS owner WHERE owner.id = job.lease_owner AND owner.alive_until > pg_catalog.clock_timestamp()) FOR UPDATE OF job SKIP LOCKED
), gone AS (
  DELETE FROM "outboxq"."job" AS job USING picked WHERE job.id = picked.id RETURNING job.*
), dead AS (
  INSERT INTO "outboxq"."dead_job" (id, queue, kind, args, headers, priority, attempt, max_attempts, crashes, unique_key, group_key,
    errors, reason, created_at)
  SELECT CASE WHEN EXISTS (SELECT FROM "outboxq"."dead_job" AS earlier WHERE earlier.id = job.id)
      THEN pg_catalog.gen_random_uuid() ELSE job.id END,
    job.queue, job.kind, job.args, job.headers, job.priority, job.attempt, job.max_attempts, job.crashes,
    job.unique_key, job.group_key, job.errors, 'lost', job.created_at
  FROM gone AS job
  RETURNING id, queue, kind, crashes
)
SELECT id, queue, kind, crashes, true FROM dead;

--- lost jobs
SELECT job.id FROM "outboxq"."job" AS job WHERE job.state = 'leased' AND NOT EXISTS (SELECT FROM "outboxq"."relay" AS owner WHERE owner.id = job.lease_owner AND owner.alive_until > pg_catalog.clock_timestamp()) ORDER BY pg_catalog.random() LIMIT 50;

--- jobs under a lease
SELECT id::text, lease_token FROM "outboxq"."job" WHERE state = 'leased' AND lease_owner = '000000000000000000000000000000aa'::uuid;

--- postponing
UPDATE "outboxq"."job" SET state = 'scheduled', run_at = pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => 300) WHERE id = (SELECT job.id FROM "outboxq"."job" AS job WHERE job.id = '0000000000000000000000000000000b'::uuid AND job.state IN ('ready', 'scheduled') FOR UPDATE SKIP LOCKED) RETURNING id;

--- queues with suspects
SELECT wanted.name FROM pg_catalog.unnest('{ledger}'::text[]) AS wanted (name) WHERE EXISTS (SELECT FROM "outboxq"."job" WHERE queue = wanted.name AND state = 'suspect');

--- poll
SELECT wanted.name, ready.found, due.seconds, suspect.found FROM pg_catalog.unnest('{ledger}'::text[]) AS wanted (name)
LEFT JOIN LATERAL (SELECT true AS found FROM "outboxq"."job" WHERE queue = wanted.name AND state = 'ready'
  ORDER BY (-priority), seq LIMIT 1) AS ready ON true
LEFT JOIN LATERAL (SELECT extract(epoch FROM run_at - pg_catalog.clock_timestamp())::float8 AS seconds FROM "outboxq"."job"
  WHERE queue = wanted.name AND state = 'scheduled' ORDER BY run_at LIMIT 1) AS due ON true
LEFT JOIN LATERAL (SELECT true AS found FROM "outboxq"."job" WHERE queue = wanted.name AND state = 'suspect'
  ORDER BY seq LIMIT 1) AS suspect ON true
WHERE (ready.found OR due.seconds IS NOT NULL OR suspect.found)
  AND NOT EXISTS (SELECT FROM "outboxq"."queue" WHERE name = wanted.name AND paused_at IS NOT NULL);

