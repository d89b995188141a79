"""What each action does, the row that it writes into the audit, and what is shown if it is refused."""

from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, create_engine, text
from starlette.testclient import TestClient

from outboxq import Jobs
from outboxq.dashboard import Role, create_app
from outboxq.dashboard.route import Action, Screen
from outboxq.dashboard.routes import ACTIONS
from outboxq.postgres import Database
from tests.support.dashboard import (
    ORIGIN,
    action_fields,
    action_path,
    as_user,
    checksums,
    client_of,
    form_pages,
    stage_actions,
    token_for,
)
from tests.support.hostile import Tags
from tests.support.staged import numbered

_JOB, _DEAD = f"FROM outboxq.job WHERE id = '{numbered(3)}'", f"FROM outboxq.dead_job WHERE id = '{numbered(101)}'"
_BACK = f"FROM outboxq.job WHERE id = '{numbered(101)}'"
# What is true after an action, how many rows it says that it has changed, and its name in the audit if it is another.
_EFFECTS: dict[str, tuple[str, str]] = {
    "jobs/{job_id}/cancel": (f"NOT EXISTS (SELECT {_JOB})", "job.cancel_running"),
    "jobs/{job_id}/terminate": (f"NOT EXISTS (SELECT {_JOB})", "job.cancel_running"),
    "jobs/{job_id}/run-now": (f"(SELECT run_at <= now() {_JOB})", "job.change"),
    "jobs/{job_id}/priority": (f"(SELECT priority = 7 {_JOB})", "job.change"),
    "jobs/{job_id}/run-at": (f"(SELECT run_at = '2030-01-31 07:00Z' {_JOB})", "job.change"),
    "jobs/{job_id}/args": (f"""(SELECT args = '{{"account": 8}}' {_JOB})""", "job.change"),
    "dead/{job_id}/retry": (f"EXISTS (SELECT {_BACK}) AND NOT EXISTS (SELECT {_DEAD})", "dead.retry"),
    "dead/{job_id}/retry-with": (f"""(SELECT args = '{{"account": 8}}' {_BACK})""", "dead.retry"),
    "dead/{job_id}/discard": (f"NOT EXISTS (SELECT {_DEAD}) AND NOT EXISTS (SELECT {_BACK})", "dead.discard"),
    "done/{job_id}/run-again": (
        "EXISTS (SELECT FROM outboxq.job WHERE kind = 'make_report' AND args = '{\"month\": \"2026-01\"}')",
        "done.run_again",
    ),
    "queues/{queue}/pause": (
        "(SELECT paused_at IS NOT NULL FROM outboxq.queue WHERE name = 'accounts')",
        "queue.pause",
    ),
    "queues/{queue}/resume": ("(SELECT paused_at IS NULL FROM outboxq.queue WHERE name = 'accounts')", "queue.resume"),
    "queues/{queue}/limits": (
        "(SELECT max_running = 4 AND rate_jobs = 100 AND rate_seconds = 60 FROM outboxq.queue WHERE name = 'accounts')",
        "queue.set",
    ),
    "queues/{queue}/keep-dead": (
        "(SELECT keep_dead_seconds = 2592000 FROM outboxq.queue WHERE name = 'accounts')",
        "queue.keep_dead",
    ),
    "kinds/{kind}/pause": ("EXISTS (SELECT FROM outboxq.paused_kind WHERE kind = 'credit')", "kind.pause"),
    "kinds/{kind}/resume": ("NOT EXISTS (SELECT FROM outboxq.paused_kind WHERE kind = 'credit')", "kind.resume"),
    "schedules/{name}/pause": (
        "(SELECT paused_at IS NOT NULL FROM outboxq.schedule WHERE name = 'report-7')",
        "schedule.pause",
    ),
    "schedules/{name}/resume": (
        "(SELECT paused_at IS NULL FROM outboxq.schedule WHERE name = 'report-7')",
        "schedule.resume",
    ),
    "schedules/{name}/run-now": (
        "EXISTS (SELECT FROM outboxq.job WHERE kind = 'report' AND queue = 'reports')",
        "schedule.run_now",
    ),
    "effects/{scope}/{key}/resolve": (
        "(SELECT status = 'done' AND result = '{\"charge\": \"ch_43\"}' FROM outboxq.effect WHERE key = 'order-1002')",
        "effect.resolve",
    ),
    "inbox/{consumer}/{message_id}/forget": (
        "NOT EXISTS (SELECT FROM outboxq.inbox WHERE message_id = 'evt_1Nq2')",
        "message.forget",
    ),
    "audit/{entry}/stop": (
        f"(SELECT stopped_at IS NOT NULL FROM outboxq.audit WHERE id = '{numbered(501)}')",
        "bulk.stop",
    ),
    "audit/{entry}/resume": (
        f"(SELECT finished_at IS NOT NULL FROM outboxq.audit WHERE id = '{numbered(501)}') AND EXISTS (SELECT {_BACK})",
        "bulk.resume",
    ),
    "bulk/apply": (f"EXISTS (SELECT {_BACK}) AND NOT EXISTS (SELECT {_DEAD})", "dead.retry"),
}
_ENTRIES = "SELECT action, actor, role, via, reason FROM outboxq.audit WHERE actor = 'olga'"


@pytest.fixture
def staged(engine: Engine) -> Engine:
    stage_actions(engine)
    return engine


def _do(client: TestClient, action: Action, **changes: str) -> Any:
    fields = action_fields(action, client, token_for(client)) | changes
    return client.post(action_path(action), data=fields, headers={"origin": ORIGIN})


def _of(path: str) -> Action:
    return next(each for each in ACTIONS if each.path == path)


def _is(engine: Engine, condition: str) -> bool:
    with engine.connect() as connection:
        return bool(connection.execute(text(f"SELECT {condition}")).scalar_one())


@pytest.mark.first_and_last
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.path)
def test_an_action_does_what_it_says_and_the_audit_has_it(action: Action, staged: Engine) -> None:
    """With who, in which role, by which way and why; and the page that follows says what was done."""
    happened, name = _EFFECTS[action.path]
    if action.path.startswith(("queues/{queue}/resume", "kinds/{kind}/resume", "schedules/{name}/resume")):
        with client_of(create_app({"orders": staged}, auth=as_user(Role.ADMIN))) as client:
            assert _do(client, _of(action.path.replace("resume", "pause"))).status_code == 303
    assert not _is(staged, happened)
    with client_of(create_app({"orders": staged}, auth=as_user(Role.ADMIN, "olga"))) as client:
        answer = _do(client, action)
        assert answer.status_code == 303, answer.text
        page = client.get(str(httpx.URL(f"{ORIGIN}{action_path(action)}").join(answer.headers["location"])))
        assert page.status_code == 200
        assert 'role="status"' in page.text
    assert _is(staged, happened)
    with staged.connect() as connection:
        entries = [tuple(row) for row in connection.execute(text(_ENTRIES))]
    assert entries == [(name, "olga", "admin", "web", "as agreed")]


def test_each_effect_is_of_an_action() -> None:
    """None is left out above."""
    assert {action.path for action in ACTIONS} == _EFFECTS.keys()


_REFUSALS = {
    "the audit": "CREATE TRIGGER refuse BEFORE INSERT ON outboxq.audit EXECUTE FUNCTION refuse()",
    "the change": "CREATE TRIGGER refuse BEFORE INSERT OR UPDATE OR DELETE ON outboxq.{} EXECUTE FUNCTION refuse()",
}
_CHANGED = {
    "jobs/{job_id}/priority": "job",
    "dead/{job_id}/discard": "dead_job",
    "queues/{queue}/pause": "queue",
    "kinds/{kind}/pause": "paused_kind",
    "schedules/{name}/pause": "schedule",
    "effects/{scope}/{key}/resolve": "effect",
    "inbox/{consumer}/{message_id}/forget": "inbox",
    "bulk/apply": "dead_job",
}


@pytest.mark.first_and_last
@pytest.mark.parametrize("refused", _REFUSALS)
@pytest.mark.parametrize("path", _CHANGED)
def test_the_change_and_its_row_in_the_audit_are_rolled_back_together(path: str, refused: str, staged: Engine) -> None:
    """Neither is there without the other, whichever of the two the database refuses."""
    refuse = "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$"
    with staged.begin() as connection:
        connection.execute(text(refuse))
        connection.execute(text(_REFUSALS[refused].format(_CHANGED[path])))
    before = checksums(staged)
    with client_of(create_app({"orders": staged}, auth=as_user(Role.ADMIN))) as client:
        assert _do(client, _of(path)).status_code == 503
    assert checksums(staged) == before


@pytest.mark.first_and_last
@pytest.mark.parametrize("page", form_pages(), ids=lambda page: page.path)
def test_a_form_is_a_page_of_its_own(page: Screen, staged: Engine) -> None:
    """Without a script: it says what it does, has the fields that it takes, and JSON names them."""
    action = _of(page.path)
    with client_of(create_app({"orders": staged}, auth=as_user(Role.ADMIN))) as client:
        shown = client.get(action_path(action))
        named = client.get(action_path(action), headers={"accept": "application/json"}).json()
    assert shown.status_code == 200, shown.text
    assert not Tags(shown.text).problems
    for field in named["fields"]:
        assert f'name="{field["name"]}"' in shown.text
    assert named["fields"][-1]["name"] == "reason"


_WRONG = {
    "jobs/{job_id}/priority": ({"priority": "99999"}, "priority", "99999"),
    "jobs/{job_id}/run-at": ({"run_at": "tomorrow"}, "2026-01-31T08:00:00Z", "tomorrow"),
    "jobs/{job_id}/args": ({"args": "[1,"}, "JSON object", "[1,"),
    "dead/{job_id}/retry-with": ({"args": '{"a": 1}', "unchecked": ""}, "confirm", "&#34;a&#34;: 1"),
    "queues/{queue}/limits": ({"rate": "many"}, "10/s", "many"),
    "queues/{queue}/keep-dead": ({"keep_dead": "30 s"}, "30d, 12h or 90m", "30 s"),
    "effects/{scope}/{key}/resolve": ({"reason": ""}, "reason", "ch_43"),
}


@pytest.mark.first_and_last
@pytest.mark.parametrize("path", _WRONG)
def test_what_is_wrong_is_said_on_the_form_which_keeps_what_was_given(path: str, staged: Engine) -> None:
    """Nothing is lost, nothing is changed, and the page says what to do."""
    changes, said, kept = _WRONG[path]
    with client_of(create_app({"orders": staged}, auth=as_user(Role.ADMIN))) as client:
        token, before = token_for(client), checksums(staged)
        fields = action_fields(_of(path), client, token) | {"reason": "a reason of mine"} | changes
        answer = client.post(action_path(_of(path)), data=fields, headers={"origin": ORIGIN})
    assert answer.status_code == 400
    assert said in answer.text
    assert kept in answer.text
    assert ("a reason of mine" in answer.text) == ("reason" not in changes)
    assert checksums(staged) == before


def test_how_long_dead_letters_are_kept_is_set_seen_and_taken_away(staged: Engine) -> None:
    """Its form begins with what is set; without a time they are kept as the application declares."""
    action = _of("queues/{queue}/keep-dead")
    with client_of(create_app({"orders": staged}, auth=as_user(Role.OPERATOR))) as client:
        for given, kept in (("90m", 5_400), ("forever", 0), ("", None)):
            assert _do(client, action, keep_dead=given).status_code == 303
            assert f'name="keep_dead" value="{given}"' in client.get(action_path(action)).text
            with staged.connect() as connection:
                stored = text("SELECT keep_dead_seconds FROM outboxq.queue WHERE name = 'accounts'")
                assert connection.execute(stored).scalar_one() == kept
        again = _do(client, action, keep_dead="")
        assert "kept them so already" in client.get(str(again.url.join(again.headers["location"]))).text


def test_a_job_that_is_gone_is_not_found(staged: Engine) -> None:
    """By its form, and by what is sent."""
    with client_of(create_app({"orders": staged}, auth=as_user(Role.ADMIN))) as client:
        gone = f"/orders/jobs/{numbered(999)}/run-now"
        assert client.get(gone).status_code == 404
        token = token_for(client)
        assert client.post(gone, data={"csrf": token}, headers={"origin": ORIGIN}).status_code == 404


def test_a_job_that_runs_is_not_changed_and_says_so(staged: Engine) -> None:
    """One whose row a transaction holds is neither changed nor waited for; its cancellation is asked for."""
    with staged.begin() as relay, client_of(create_app({"orders": staged}, auth=as_user(Role.OPERATOR))) as client:
        relay.execute(text(f"DELETE {_JOB}"))
        answer = _do(client, _of("jobs/{job_id}/priority"))
        assert (answer.status_code, "It runs at this moment" in answer.text) == (409, True)
        assert _do(client, _of("jobs/{job_id}/cancel")).status_code == 303
        assert _is(staged, "EXISTS (SELECT FROM outboxq.cancel_request)")


def test_force_ends_the_session_that_runs_a_job(staged: Engine) -> None:
    """Its form says which others are rolled back; both steps are in the audit."""
    relay = staged.connect()
    relay.execute(text("SET search_path = outboxq"))
    relay.commit()
    relay.begin()
    relay.execute(text(f"DELETE {_JOB}"))
    with client_of(create_app({"orders": staged}, auth=as_user(Role.ADMIN, "olga"))) as client:
        action = _of("jobs/{job_id}/terminate")
        assert "It may be done by the time" in client.get(action_path(action)).text
        answer = _do(client, action)
        assert answer.status_code == 303, answer.text
    relay.invalidate()
    with staged.connect() as connection:
        actions = [row.action for row in connection.execute(text(_ENTRIES + " ORDER BY id"))]
    assert actions == ["job.cancel_running", "job.terminate"]


def test_force_without_the_right_to_end_sessions_is_refused_in_one_sentence(
    staged: Engine, outboxq_database: Database
) -> None:
    """The driver's own error, below SQLAlchemy; the request that goes before it stands."""
    role = f"limited_{outboxq_database.name}"
    with staged.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role}"))
        connection.execute(text(f"GRANT USAGE ON SCHEMA outboxq TO {role}"))
        connection.execute(text(f"GRANT ALL ON ALL TABLES IN SCHEMA outboxq TO {role}"))
        connection.execute(text(f"GRANT pg_read_all_stats TO {role}"))
    limited = create_engine(staged.url, connect_args={"options": f"-c role={role}"})
    try:
        with staged.connect() as relay, relay.begin() as transaction:
            relay.execute(text("SET LOCAL search_path = outboxq"))
            relay.execute(text(f"DELETE {_JOB}"))
            with client_of(create_app({"orders": limited}, auth=as_user(Role.ADMIN))) as client:
                answer = _do(client, _of("jobs/{job_id}/terminate"))
            assert (answer.status_code, "may not do this" in answer.text) == (403, True)
            transaction.rollback()
        assert _is(staged, "EXISTS (SELECT FROM outboxq.cancel_request)")
    finally:
        limited.dispose()
        with staged.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {role}"))
            connection.execute(text(f"DROP ROLE {role}"))


def _registry() -> Jobs:
    jobs = Jobs()

    @jobs.handler(queue="mail")
    def remind(ctx: object, account: int) -> None:
        """Remind a customer of an invoice."""

    return jobs


def test_arguments_have_to_fit_the_handler_that_is_known(staged: Engine) -> None:
    """With a registry nothing has to be confirmed, and what does not fit is refused with what does."""
    app = create_app({"orders": staged}, auth=as_user(Role.ADMIN), jobs=_registry())
    with client_of(app) as client:
        action = _of("jobs/{job_id}/args")
        assert 'name="unchecked"' not in client.get(action_path(action)).text
        wrong = _do(client, action, args='{"account": "seven"}', unchecked="")
        assert wrong.status_code == 400
        assert "account" in wrong.text
        assert _do(client, action, args='{"account": 9}', unchecked="").status_code == 303
        unknown = _do(client, _of("dead/{job_id}/retry-with"), args="{}", unchecked="true")
        assert unknown.status_code == 400
        assert "no handler for kind &#39;charge&#39;" in unknown.text
    assert _is(staged, f"""(SELECT args = '{{"account": 9}}' {_JOB})""")


@pytest.mark.wide
def test_a_registry_says_what_kinds_do_and_which_have_no_handler(staged: Engine) -> None:
    """By the pages of kinds and of a job."""
    app = create_app({"orders": staged}, auth=as_user(Role.READER), jobs={"orders": _registry()})
    with client_of(app) as client:
        assert "Remind a customer of an invoice." in client.get("/orders/kinds/remind").text
        for page in ("kinds/credit", f"jobs/{numbered(2)}"):
            assert "No handler of the application knows this kind" in client.get(f"/orders/{page}").text
        assert "The application has no handler for" in client.get("/orders/kinds").text
        assert client.get("/orders/kinds/credit", headers={"accept": "application/json"}).json()["no_handler"] is True


@pytest.mark.first_and_last
@pytest.mark.parametrize(("payloads", "is_shown"), [("shown", True), ("redacted", False), ("hidden", False)])
def test_a_form_begins_with_the_arguments_only_if_all_of_them_are_shown(
    payloads: str, is_shown: bool, staged: Engine
) -> None:
    """What is hidden would be written back as it is shown."""
    with staged.begin() as connection:
        connection.execute(
            text(f"""UPDATE outboxq.job SET args = '{{"password": "hunter22"}}' WHERE id = '{numbered(3)}'""")
        )
    app = create_app({"orders": staged}, auth=as_user(Role.ADMIN), payloads=payloads)  # type: ignore[arg-type]
    with client_of(app) as client:
        page = client.get(action_path(_of("jobs/{job_id}/args"))).text
    assert ("hunter22" in page) == is_shown
    assert "•••" not in page


def test_a_program_acts_with_a_token_that_it_asks_for(staged: Engine) -> None:
    """A GET gives the token and the session that it is bound to; errors are JSON too."""
    headers = {"origin": ORIGIN, "accept": "application/json"}
    with client_of(create_app({"orders": staged}, auth=as_user(Role.OPERATOR))) as client:
        given = client.get("/token").json()
        headers |= {given["header"]: given["token"]}
        done = client.post("/orders/queues/accounts/pause", data={"reason": "a program"}, headers=headers)
        assert (done.status_code, done.json()["paused"]) == (200, ["accounts"])
        wrong = client.post(f"/orders/jobs/{numbered(3)}/priority", data={"priority": "x"}, headers=headers)
        assert (wrong.status_code, wrong.json()["status"]) == (400, 400)
        small = client.post(f"/orders/dead/{numbered(101)}/discard", data={}, headers=headers)
        assert small.json() == {"error": "This takes the role admin, and yours is operator.", "status": 403}
