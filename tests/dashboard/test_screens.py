"""Every screen answers, as a page and as JSON, with something in the database and with nothing."""

import re

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from outboxq.dashboard import Link, Role, TokenLogin, create_app
from outboxq.dashboard.route import Screen
from outboxq.migrations.runner import migrate
from outboxq.postgres import Database
from tests.support.dashboard import ORIGIN, as_user, client_of, path_of, screens, stage_dashboard, token_of
from tests.support.staged import numbered

SCREENS = screens()
_IDS = [screen.path or "overview" for screen in SCREENS]
LISTS = [each for each in SCREENS if "{" not in each.path]
_INLINE = re.compile(r"<script(?![^>]*\ssrc=)|\sstyle=|\son[a-z]+=|javascript:", re.IGNORECASE)


@pytest.fixture
def staged(engine: Engine) -> Engine:
    stage_dashboard(engine)
    return engine


@pytest.mark.first_and_last
@pytest.mark.parametrize("screen", SCREENS, ids=_IDS)
def test_a_screen_is_a_page_and_the_same_as_json(screen: Screen, staged: Engine) -> None:
    """With something of everything in the database, nothing is missing, and nothing is inline."""
    app = create_app({"orders": staged}, auth=as_user(Role.READER))
    path = path_of(screen, staged, "orders")
    with client_of(app) as client:
        page = client.get(path, headers={"accept": "text/html"})
        document = client.get(path, headers={"accept": "application/json"})
    assert (page.status_code, document.status_code) == (200, 200), (page.text[-500:], document.text)
    assert "<h1>" in page.text
    assert not _INLINE.search(page.text)
    assert "not_known" not in document.json()


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    "screen", [each for each in SCREENS if "{" not in each.path], ids=lambda s: s.path or "overview"
)
def test_an_empty_database_has_screens_that_say_what_to_do(screen: Screen, engine: Engine) -> None:
    """Without a row in any table every list answers, and has no empty table."""
    app = create_app({"orders": engine}, auth=as_user(Role.READER))
    with client_of(app) as client:
        page = client.get(f"/orders/{screen.path}")
    assert page.status_code == 200, page.text[-500:]
    assert "<tbody></tbody>" not in page.text
    if screen.path not in ("doctor", "bulk"):
        assert 'class="empty"' in page.text


@pytest.mark.wide
@pytest.mark.parametrize("step", [0, 8, 10])
def test_a_screen_of_older_tables_names_what_mends_it(step: int, engine: Engine) -> None:
    """Or shows what there is; none ends in an error of its own."""
    with engine.begin() as connection:
        migrate(connection, to=step)
    app = create_app({"orders": engine}, auth=as_user(Role.READER))
    with client_of(app) as client:
        pages = {each.path: client.get(f"/orders/{each.path}") for each in LISTS}
    assert {path: page.status_code for path, page in pages.items() if page.status_code >= 500} == {}
    named = {path for path, page in pages.items() if "outboxq migrate" in page.text}
    assert (pages.keys() if step == 0 else {"audit", "done", "relays"}) - named == set()


@pytest.mark.wide
def test_an_async_engine_shows_the_same(staged: Engine, outboxq_database: Database) -> None:
    """Every screen with an async engine of the same database has the same JSON keys."""
    asynchronous = create_async_engine(outboxq_database.url, use_native_hstore=False)
    app = create_app({"orders": asynchronous}, auth=as_user(Role.READER))
    with client_of(app) as client:
        for screen in SCREENS:
            answer = client.get(path_of(screen, staged, "orders"), headers={"accept": "application/json"})
            assert answer.status_code == 200, (screen.path, answer.text)
        assert client.portal is not None
        client.portal.call(asynchronous.dispose)


@pytest.mark.wide
def test_a_locked_table_leaves_the_page_standing(staged: Engine) -> None:
    """A section that would wait for a lock says so, and the others are there."""
    app = create_app({"orders": staged}, auth=as_user(Role.READER))
    with staged.begin() as blocker, client_of(app) as client:
        blocker.execute(text("LOCK TABLE outboxq.dead_job IN ACCESS EXCLUSIVE MODE"))
        page = client.get("/orders/")
        listed = client.get("/orders/dead", headers={"accept": "application/json"})
        letters = client.get("/orders/dead")
    assert page.status_code == 200
    # What could not be read is not nothing.
    assert "Could not read dead letters" in letters.text
    assert "No dead letters" not in letters.text
    assert ">?</a>" in page.text
    assert "another session has locked a table" in page.text
    assert "worker-1" in client.get("/orders/relays").text
    assert [each["part"] for each in listed.json()["not_known"]] == ["dead letters", "the groups"]


@pytest.mark.wide
def test_looking_leaves_no_mark_in_any_row(staged: Engine) -> None:
    """No page locks a row: a lock that is rolled back would make a job a suspect."""
    app = create_app({"orders": staged}, auth=as_user(Role.ADMIN))

    def marks() -> list[tuple[str, ...]]:
        with staged.connect() as connection:
            found = connection.execute(text(
                "SELECT id::text, xmin::text, xmax::text FROM outboxq.job UNION ALL "
                "SELECT id::text, xmin::text, xmax::text FROM outboxq.dead_job UNION ALL "
                "SELECT scope || key, xmin::text, xmax::text FROM outboxq.effect ORDER BY 1"))  # fmt: skip
            return [tuple(row) for row in found]

    before = marks()
    with client_of(app) as client:
        for screen in SCREENS:
            assert client.get(path_of(screen, staged, "orders")).status_code == 200
    assert marks() == before


def test_several_databases_have_pages_of_their_own(staged: Engine) -> None:
    """The start lists them, and a name that is none is not found."""
    app = create_app({"orders": staged, "a/b name": staged}, auth=as_user(Role.READER))
    with client_of(app) as client:
        start = client.get("/")
        assert 'href="orders/"' in start.text
        segment = re.search(r'href="(~[\w-]+)/"', start.text)
        assert segment is not None
        assert client.get(f"/{segment[1]}/").status_code == 200
        assert client.get("/nowhere/").status_code == 404


def test_arguments_are_columns_of_the_list_of_jobs(staged: Engine) -> None:
    """Numbers as well as texts, and nothing for a job that has no such argument."""
    with client_of(create_app({"orders": staged}, auth=as_user(Role.READER))) as client:
        page = client.get("/orders/jobs?q=account:7&columns=account,nothing")
    assert page.status_code == 200, page.text
    assert '<td class="mono clip" title="7">7</td><td class="mono clip" title=""></td>' in page.text.replace("\n", "")


def test_a_path_that_is_none_is_a_page_that_says_so(staged: Engine) -> None:
    """For those who may look; strangers are asked who they are, and learn nothing of paths."""
    with client_of(create_app({"orders": staged}, auth=as_user(Role.READER))) as client:
        page = client.get("/orders/nothing/here")
        assert (page.status_code, "There is no such page." in page.text) == (404, True)
        assert "<h1>" in page.text
        assert client.get("/orders/nothing", headers={"accept": "application/json"}).json()["status"] == 404
    with client_of(create_app({"orders": staged}, auth=as_user(None))) as client:
        assert client.get("/orders/nothing").status_code == 401


def test_a_link_that_cannot_be_made_is_left_out(staged: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """The page of a job stands without the application's links."""
    app = create_app({"orders": staged}, auth=as_user(Role.READER), links=lambda _: [Link("trace", "javascript:x")])
    with client_of(app) as client:
        page = client.get(f"/orders/jobs/{numbered(1)}")
    assert page.status_code == 200
    assert "javascript:" not in page.text
    assert "links= failed" in caplog.text


def test_a_path_without_its_slash_leads_on_by_a_relative_link(staged: Engine) -> None:
    """Behind a proxy the address that the server knows is not the one of the browser."""
    with client_of(create_app({"orders": staged}, auth=as_user(Role.READER))) as client:
        answer = client.get("/orders")
        assert (answer.status_code, answer.headers["location"]) == (303, "orders/")
        assert client.get("/nowhere").status_code == 404
        for path in ("/orders/queues/", "/login/", "/orders/jobs//"):
            assert client.get(path).status_code == 404


def test_a_login_takes_a_short_form(staged: Engine) -> None:
    """Strangers send no megabytes."""
    with client_of(create_app({"orders": staged}, auth=TokenLogin("a token of some length"))) as client:
        form = {"csrf": token_of(client.get("/login")), "password": "x" * 8_200}
        assert client.post("/login", data=form, headers={"origin": ORIGIN}).status_code == 413


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("kinds?period=9h", "period does not know &#39;9h&#39;"),
        ("jobs?limit=many", "limit takes a whole number"),
        ("jobs?limit=-1", "limit takes a number from 1 on"),
        ("jobs?limit=9999", "limit takes a number up to 200"),
        ("jobs?before=7", "before takes an id"),
        (f"jobs?q={'x' * 300}", "q takes up to 200 characters"),
    ],
)
def test_what_a_page_does_not_take_is_said_in_plain_words(staged: Engine, path: str, says: str) -> None:
    """Without the names of types."""
    with client_of(create_app({"orders": staged}, auth=as_user(Role.ADMIN))) as client:
        found = client.get(f"/orders/{path}")
    assert found.status_code == 400
    assert says in found.text


def test_only_a_call_whose_outcome_or_result_is_not_known_is_offered_to_be_resolved(staged: Engine) -> None:
    """As `effects resolve` takes it: no other is changed by it."""
    cases = {
        "status = 'unknown'": True,
        "status = 'retryable', in_doubt = true": True,
        "status = 'retryable', in_doubt = false": False,
        "status = 'started', locked_until = now() - interval '1 minute'": True,
        "status = 'started', locked_until = now() + interval '1 hour'": False,
        "status = 'done', result = 'null'": False,
        "status = 'done', result = NULL": True,
        "status = 'failed'": False,
    }
    with client_of(create_app({"orders": staged}, auth=as_user(Role.ADMIN))) as client:
        for case, is_offered in cases.items():
            with staged.begin() as connection:
                change = f"UPDATE outboxq.effect SET expires_at = NULL, {case} WHERE key = 'order-1001'"
                connection.execute(text(change))
            page = client.get("/orders/effects/stripe-charge/order-1001")
            assert page.status_code == 200
            assert ("Resolve…" in page.text) is is_offered, case


_WAITS = text(
    "UPDATE outboxq.relay_status SET slots = 1000, busy = 812, running = jsonb_set(running, '{0}', running -> 0 || "
    """'{"pid": null, "waits": {"calls": 37, "connections": 20}}') WHERE host = 'worker-1'"""
)


@pytest.mark.wide
def test_the_relays_page_shows_calls_and_not_connections(staged: Engine) -> None:
    """Slots that work and are free, how many jobs wait for a connection, and which of the long-running ones do."""
    with staged.begin() as connection:
        connection.execute(_WAITS)
    app = create_app({"orders": staged}, auth=as_user(Role.READER))
    with client_of(app) as client:
        page = client.get("/orders/relays", headers={"accept": "text/html"}).text
        overview = client.get("/orders/", headers={"accept": "text/html"}).text
    row = page.partition("worker-1")[2].partition("</tr>")[0]
    assert '<span class="warn-text small">37 wait for a connection</span>' in row
    assert re.findall(r'<td class="n">(.*?)</td>', row) == ["1000", "812", "188"]
    assert page.count("waits for a connection") == 1
    assert "37 wait for a connection" in overview
