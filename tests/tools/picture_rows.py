"""Rows that make the pictures of the documentation look like a day of work, beside those that tests stage."""

from sqlalchemy import Engine, text

from tests.support.dashboard import stage_actions

_JOBS = """
INSERT INTO outboxq.job (id, queue, kind, args, state, run_at, created_at, attempt, priority)
SELECT CAST('01929e1c-5a7e-7cc3-9a55-' || lpad(to_hex(7919 * i), 12, '0') AS uuid),
  (ARRAY['mail', 'accounts', 'webhooks', 'reports'])[1 + i % 4],
  (ARRAY['send_receipt', 'credit', 'deliver_webhook', 'monthly_report'])[1 + i % 4],
  jsonb_build_object('order_id', 7000 + i, 'customer', 'customer-' || i % 9), state,
  now() + CASE state WHEN 'ready' THEN make_interval(secs => -7 * i) ELSE make_interval(secs => 97 * i) END,
  now() - make_interval(secs => 7 * i), CASE state WHEN 'ready' THEN 0 ELSE 1 + i % 3 END,
  CASE WHEN i % 9 = 0 THEN 10 ELSE 0 END
FROM (SELECT i, CASE WHEN i % 3 = 0 THEN 'scheduled' ELSE 'ready' END AS state FROM generate_series(1, 36) AS i) AS v"""
_DEAD = """
INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, priority, attempt, max_attempts, crashes, errors, reason,
  created_at, died_at)
SELECT CAST('01929e1c-5a7f-7cc3-9a55-' || lpad(to_hex(7919 * i), 12, '0') AS uuid), v.queue, v.kind,
  jsonb_build_object('order_id', 6000 + i), '{}', 0, 5, 5, 0,
  jsonb_build_array(jsonb_build_object('attempt', 5, 'at', to_char(now(), 'YYYY-MM-DD"T"HH24:MI:SS"Z"'), 'type', v.type,
    'message', v.message, 'where', jsonb_build_array(v.place), 'chain', jsonb_build_array())),
  'gave up after 5 of 5 attempts: ' || v.type || ': ' || v.message,
  now() - make_interval(mins => 9 * i + 20), now() - make_interval(mins => 9 * i)
FROM generate_series(1, 14) AS i JOIN (VALUES
  (0, 'webhooks', 'deliver_webhook', 'ConnectTimeout', 'hooks.example.com did not answer in 10 s',
   'shop/webhooks.py:41 in deliver_webhook'),
  (1, 'mail', 'send_receipt', 'SMTPRecipientsRefused', 'the mailbox is full', 'shop/mail.py:28 in send_receipt'),
  (2, 'webhooks', 'deliver_webhook', 'HTTPStatusError', '410 Gone', 'shop/webhooks.py:47 in deliver_webhook')
) AS v (place_in, queue, kind, type, message, place) ON v.place_in = i % 3"""
_DONE = """
INSERT INTO outboxq.done_job (id, queue, kind, outcome, attempt, created_at, finished_at, seconds, args, headers,
  result, expires_at)
SELECT CAST('01929e1c-5a80-7cc3-9a55-' || lpad(to_hex(7919 * i), 12, '0') AS uuid), 'reports', 'monthly_report',
  CASE WHEN i % 6 = 0 THEN 'discarded' ELSE 'done' END, 1, now() - make_interval(mins => 3 * i + 2),
  now() - make_interval(mins => 3 * i), 1 + i * 0.37, jsonb_build_object('customer', 'customer-' || i), '{}',
  jsonb_build_object('pages', 3 + i % 5), now() + interval '7 days'
FROM generate_series(1, 14) AS i"""
_EFFECTS = """
INSERT INTO outboxq.effect (scope, key, status, in_doubt, provider_key, attempts, lock_token, locked_until,
  first_called_at, changed_at, error)
SELECT 'twilio-sms', 'order-' || 7000 + i, CASE WHEN i = 3 THEN 'retryable' ELSE 'done' END, false, gen_random_uuid(),
  1 + i % 2, gen_random_uuid(), now() - interval '1 hour', now() - make_interval(mins => 11 * i + 1),
  now() - make_interval(mins => 11 * i), CASE WHEN i = 3 THEN 'HTTPStatusError: 429 Too Many Requests' END
FROM generate_series(1, 9) AS i"""
_INBOX = """
INSERT INTO outboxq.inbox (consumer, message_id, seen_at, expires_at)
SELECT 'shipments', 'msg-' || substr(md5(CAST(i AS text)), 1, 12), now() - make_interval(mins => 2 * i),
  now() + interval '30 days' FROM generate_series(1, 9) AS i"""
# Jobs that ran faster and slower, a little in each minute.
_STAT = """
UPDATE outboxq.stat AS s SET
  done = 200 + abs(90 * sin(minute / 9.0)) + minute * 7 % 23, retried = minute % 5,
  wait = ARRAY(SELECT
    CAST(greatest(0, 60 * exp(-power(b - 5.5 - 2 * sin(minute / 7.0 + length(s.kind)), 2) / 3)) AS bigint)
    FROM generate_series(1, 20) AS b),
  run = ARRAY(SELECT CAST(greatest(0, 60 * exp(-power(b - 4 - 1.5 * sin(minute / 11.0), 2) / 4)) AS bigint)
    FROM generate_series(1, 20) AS b)
FROM (
  SELECT at, queue, kind, grain, CAST(extract(epoch FROM at) / 60 AS bigint) % 1000 AS minute FROM outboxq.stat
) AS v
WHERE (s.at, s.queue, s.kind, s.grain) = (v.at, v.queue, v.kind, v.grain)"""
_GAUGE = """
UPDATE outboxq.gauge SET ready = 60 + 50 * sin(extract(epoch FROM at) / 700) + extract(epoch FROM at) / 60 % 7"""
_RELAYS = """
UPDATE outboxq.relay_status SET queues = queues || '{webhooks,reports}',
  kinds = kinds || '{send_receipt,deliver_webhook,monthly_report}' WHERE host IN ('worker-1', 'worker-2')"""
_AUDIT = """
INSERT INTO outboxq.audit (id, at, actor, role, via, db_user, action, target, reason, changed, held, finished_at)
SELECT CAST('01929e1c-5a81-7cc3-9a55-' || lpad(to_hex(i), 12, '0') AS uuid), now() - make_interval(mins => 47 * i),
  (ARRAY['anna', 'bob', 'carl'])[1 + i % 3], 'operator', (ARRAY['web', 'cli'])[1 + i % 2], 'app',
  (ARRAY['job.change', 'dead.retry', 'queue.set'])[1 + i % 3],
  (ARRAY['01929e1c-5a7e-7cc3-9a55-000000001eef', NULL, 'webhooks'])[1 + i % 3],
  (ARRAY['before the release', 'the provider is up again', 'no more than it takes'])[1 + i % 3],
  (ARRAY[1, 37, 1])[1 + i % 3], 0, now() - make_interval(mins => 47 * i) FROM generate_series(1, 8) AS i"""
# Relays that live, as if they were seen just now.
_SEEN = """
UPDATE outboxq.relay_status SET seen_at = clock_timestamp() - interval '2 seconds' WHERE host <> 'worker-3'"""
_QUEUES = """
INSERT INTO outboxq.queue (name) VALUES ('webhooks'), ('reports'), ('accounts') ON CONFLICT DO NOTHING"""


def stage_pictures(engine: Engine) -> None:
    """Fill a database with something for every page."""
    stage_actions(engine)
    with engine.begin() as connection:
        for statement in (_JOBS, _DEAD, _DONE, _EFFECTS, _INBOX, _STAT, _GAUGE, _RELAYS, _AUDIT, _QUEUES):
            connection.execute(text(statement))


def freshen(engine: Engine) -> None:
    """Let the relays that live have been seen just now, however long the pictures before took."""
    with engine.begin() as connection:
        connection.execute(text(_SEEN))
