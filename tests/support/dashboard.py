"""The dashboard under test: a database with something for every screen, and clients that know its forms."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from sqlalchemy import Engine, text
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from outboxq.admin.actions import Actions, Actor, RetryDead, preview
from outboxq.admin.audit import Journal
from outboxq.admin.dead_letters import DeadFilter
from outboxq.dashboard import Role, User
from outboxq.dashboard.logins import Auth
from outboxq.dashboard.route import Action, Screen
from outboxq.dashboard.routes import ACTIONS, ROUTES
from outboxq.dashboard.segments import as_segment
from outboxq.statements.paging import database_clock
from tests.support.staged import numbered, stage

ORIGIN = "http://ops.test"
_TOKEN = re.compile(r'name="csrf" value="([0-9a-f]+)"')


def stage_dashboard(engine: Engine, seconds_ago: float = 4_000.0) -> None:
    """Fill a database with something for every screen."""
    stage(engine)
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE outboxq.relay_status, outboxq.stat, outboxq.gauge, outboxq.audit"))
        connection.execute(_RELAYS, {"job": str(numbered(6))})
        connection.execute(_STAT, {"seconds": seconds_ago})
        connection.execute(_GAUGE, {"seconds": seconds_ago})
        connection.execute(
            text("INSERT INTO outboxq.paused_kind (queue, kind) VALUES ('mail', 'remind') ON CONFLICT DO NOTHING")
        )
        Actions(Actor("anna"), "the provider is down").pause_queues(connection, ["accounts"])
        Actions(Actor("anna"), "it is up again").resume_queues(connection, ["accounts"])
    with engine.connect() as connection:
        wanted = preview(connection, RetryDead(DeadFilter(kind="nothing_of_this_kind")))
    Actions(Actor("bob", "operator", "web"), "try again").run(engine.begin, wanted)


_RELAYS = text("""
INSERT INTO outboxq.relay_status (id, host, pid, version, schema_step, state, queues, kinds, slots, busy, free, listens,
  running, flush, seen_at, started_at)
SELECT gen_random_uuid(), host, pid, '0.9.0', 11, state, queues, '{send_welcome,credit,charge,export_report}', slots,
  busy, queues, true, CAST(running AS jsonb), 1, clock_timestamp() - ago, clock_timestamp() - interval '5 hours'
FROM (VALUES
  ('worker-1', 812, 'serving', '{accounts,mail}'::text[], 8, 5, interval '2 seconds',
   '[{"id": "' || :job || '", "queue": "mail", "kind": "export_report", "attempt": 1, "seconds": 74.2, "pid": 99}]'),
  ('worker-2', 907, 'draining', '{mail}', 4, 1, interval '4 seconds', '[]'),
  ('worker-3', 13, 'serving', '{mail}', 4, 4, interval '10 minutes', '[]')
) AS v (host, pid, state, queues, slots, busy, ago, running)""")
_STAT = text("""
INSERT INTO outboxq.stat (grain, at, queue, kind, done, retried, died, wait, run, wait_seconds, run_seconds)
SELECT 60, date_trunc('minute', now()) - make_interval(mins => m), queue, kind,
  done + (m * 37 % 50), m % 7, CASE WHEN m % 13 = 0 THEN 1 ELSE 0 END,
  ARRAY[0,0,5,9,20,20,9,4,2,1,0,0,0,0,0,0,0,0,0,0]::bigint[],
  ARRAY[9,9,20,20,5,4,2,1,1,0,0,0,0,0,0,0,0,0,0,0]::bigint[],
  3.5, 1.5
FROM generate_series(0, CAST(:seconds AS int) / 60) AS m
CROSS JOIN (VALUES ('accounts', 'credit', 240), ('accounts', 'charge', 60), ('mail', 'send_welcome', 120))
  AS k (queue, kind, done)
""")
_GAUGE = text("""
INSERT INTO outboxq.gauge (at, queue, ready, scheduled, due, leased, suspect, dead, exact, oldest_seconds)
SELECT date_trunc('minute', now()) - make_interval(mins => m), queue, 40 + (m * 31 % 70), 12,
  m % 3, 4, 0, 3,
  true, 4
FROM generate_series(0, CAST(:seconds AS int) / 60) AS m
CROSS JOIN (VALUES ('accounts'), ('mail')) AS q (queue)""")


def as_user(role: Role | None, name: str = "anna") -> Auth:
    """A way of logging in that lets everybody in as this user; None: nobody."""
    return lambda request: None if role is None else User(name, role)


@contextmanager
def client_of(app: ASGIApp, headers: Mapping[str, str] | None = None) -> Iterator[TestClient]:
    """A browser without scripts, whose requests have what a browser sends."""
    with TestClient(app, base_url=ORIGIN, headers=dict(headers or {}), follow_redirects=False) as client:
        yield client


class HasText(Protocol):
    """An answer, of whichever client."""

    @property
    def text(self) -> str: ...


def token_of(answer: HasText) -> str:
    """The token of the first form of a page."""
    found = _TOKEN.search(answer.text)
    assert found is not None, "the page has no form"
    return found[1]


# What each action is tried with: what its path names, by the rows of `stage`, and its fields.
ACTION_PATHS: dict[str, str | Mapping[str, str]] = {
    "{job_id}": {"jobs": str(numbered(3)), "dead": str(numbered(101)), "done": str(numbered(302))},
    "{queue}": "accounts",
    "{kind}": "credit",
    "{name}": "report-7",
    "{scope}": "stripe-charge",
    "{key}": "order-1002",
    "{consumer}": "payments",
    "{message_id}": "evt_1Nq2",
    "{entry}": str(numbered(501)),
}
ACTION_FIELDS: dict[str, dict[str, str]] = {
    "jobs/{job_id}/cancel": {"outcome": "dead"},
    "jobs/{job_id}/terminate": {"outcome": "discard"},
    "jobs/{job_id}/run-now": {},
    "jobs/{job_id}/priority": {"priority": "7"},
    "jobs/{job_id}/run-at": {"run_at": "2030-01-31T08:00:00+01:00"},
    "jobs/{job_id}/args": {"args": '{"account": 8}', "unchecked": "true"},
    "dead/{job_id}/retry": {},
    "dead/{job_id}/retry-with": {"args": '{"account": 8}', "unchecked": "true"},
    "dead/{job_id}/discard": {},
    "done/{job_id}/run-again": {},
    "queues/{queue}/pause": {},
    "queues/{queue}/resume": {},
    "queues/{queue}/limits": {"limit": "4", "rate": "100/min"},
    "queues/{queue}/keep-dead": {"keep_dead": "30d"},
    "kinds/{kind}/pause": {"queue": "accounts"},
    "kinds/{kind}/resume": {"queue": "accounts"},
    "schedules/{name}/pause": {},
    "schedules/{name}/resume": {},
    "schedules/{name}/run-now": {},
    "effects/{scope}/{key}/resolve": {"verdict": "applied", "result": '{"charge": "ch_43"}'},
    "inbox/{consumer}/{message_id}/forget": {},
    "audit/{entry}/stop": {},
    "audit/{entry}/resume": {},
    "bulk/apply": {},
}


def stage_actions(engine: Engine) -> None:
    """Fill a database with something for every action: also a change of many rows that was cut off."""
    stage_dashboard(engine)
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE outboxq.paused_kind, outboxq.cancel_request"))
        # A queue and a kind that can be resumed, and a schedule.
        connection.execute(text("INSERT INTO outboxq.paused_kind (queue, kind) VALUES ('accounts', 'credit_account')"))
        journal = Journal(Actor("carl"), "before the release")
        wanted = {"kind": "charge", "died_before": database_clock(connection)}
        journal.write(connection, numbered(501), "dead.retry", None, wanted, None, {"expected": 1}, finished=False)


def action_path(
    action: Action, database: str = "orders", names: Mapping[str, str | Mapping[str, str]] = ACTION_PATHS
) -> str:
    """The path of an action, with something that is there."""
    path = action.path
    for name, value in names.items():
        path = path.replace(name, value if isinstance(value, str) else value.get(path.partition("/")[0], ""))
    return f"/{database}/{path}"


def action_fields(action: Action, client: TestClient, token: str) -> dict[str, str]:
    """The fields with which an action is done, if it may be; those of a preview are that of its page."""
    given = {**ACTION_FIELDS[action.path], "reason": "as agreed", "csrf": token}
    if action.path == "bulk/apply":
        given["intent"] = preview_of(client, token, what="dead.retry", kind="charge").get("intent", "")
    return given


def preview_of(client: TestClient, token: str, **asked: str) -> dict[str, Any]:
    """What a preview of a change of many rows says, as a program sees it."""
    headers = {"origin": ORIGIN, "accept": "application/json"}
    answer = client.post("/orders/bulk/preview", data={**asked, "csrf": token}, headers=headers)
    found: dict[str, Any] = answer.json()
    return found


def token_for(client: TestClient) -> str:
    """The token of a browser, as programs ask for it."""
    return str(client.get("/token").json()["token"])


def checksums(engine: Engine) -> dict[str, str]:
    """A checksum of every table."""
    with engine.connect() as connection:
        names = connection.execute(text("SELECT tablename FROM pg_catalog.pg_tables WHERE schemaname = 'outboxq'"))
        count = "SELECT md5(string_agg(t::text, '' ORDER BY t::text)) FROM outboxq.{} t"
        return {name: str(connection.execute(text(count.format(name))).scalar()) for name in names.scalars().all()}


def screens() -> list[Screen]:
    """Every screen of the table of routes that a reader may look at."""
    return [route for route in ROUTES if isinstance(route, Screen) and route.needs == Role.READER]


def form_pages() -> list[Screen]:
    """The page of every form."""
    return [action.screen for action in ACTIONS if action.form is not None]


def path_of(screen: Screen, engine: Engine, database: str) -> str:
    """The path of a screen, with something that is there."""
    with engine.connect() as connection:

        def one(statement: str) -> tuple[str, ...]:
            return tuple(str(each) for each in connection.execute(text(statement)).one())

        path = screen.path
        if "{job_id}" in path:
            table = {"dead": "dead_job", "done": "done_job"}.get(screen.section, "job")
            path = path.replace("{job_id}", one(f"SELECT id FROM outboxq.{table} ORDER BY id LIMIT 1")[0])
        if "{scope}" in path:
            scope, key = one("SELECT scope, key FROM outboxq.effect ORDER BY scope, key LIMIT 1")
            path = path.replace("{scope}", as_segment(scope)).replace("{key}", as_segment(key))
        if "{consumer}" in path:
            consumer, message = one("SELECT consumer, message_id FROM outboxq.inbox ORDER BY 1, 2 LIMIT 1")
            path = path.replace("{consumer}", as_segment(consumer)).replace("{message_id}", as_segment(message))
        if "{entry}" in path:
            path = path.replace("{entry}", one("SELECT id FROM outboxq.audit ORDER BY id LIMIT 1")[0])
        if "{batch_id}" in path:
            path = path.replace("{batch_id}", one("SELECT id FROM outboxq.batch ORDER BY id LIMIT 1")[0])
        if "{name}" in path:
            path = path.replace("{name}", as_segment(one("SELECT name FROM outboxq.schedule ORDER BY 1 LIMIT 1")[0]))
    return f"/{database}/{path.replace('{queue}', 'accounts').replace('{kind}', 'credit')}"
