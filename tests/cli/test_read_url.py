"""`--read-url`: a hot standby serves those who look, its delay is shown, and changes go to the primary."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from sqlalchemy import Engine, NullPool, create_engine, text
from textual.widgets import Static

from outboxq import config
from outboxq.admin.queues import pause
from outboxq.admin.snapshot import take_snapshot
from outboxq.cli.top import TopOptions, summary
from outboxq.cli.top_screen import Top
from outboxq.dashboard import Role, create_app
from outboxq.dashboard.live import find_watched
from outboxq.dashboard.routes import ROUTES
from outboxq.doctor import run_checks
from outboxq.errors import ConfigError
from outboxq.postgres import Database
from outboxq.statements.server import standby_delay_seconds
from tests.cli.test_older_tables import NEEDS_LATER, WORKS
from tests.dashboard.test_command import running
from tests.support.cli import REPOSITORY, Outcome, call, run
from tests.support.dashboard import ORIGIN, as_user, client_of, screens, stage_dashboard, token_of
from tests.support.own_server import own_database
from tests.support.standby import Pair, primary_and_standby
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.large

# A port that nothing listens on.
_DOWN = "postgresql://postgres@127.0.0.1:1/postgres"


@dataclass(frozen=True)
class Both:
    """A database on both servers."""

    pair: Pair
    database: Database
    primary: Engine
    standby: Engine

    @property
    def standby_url(self) -> str:
        return self.pair.standby_url(self.database.url)

    def read(self, *words: object, url: str | None = None) -> Outcome:
        """A command that has the primary's URL, and reads on the standby."""
        return run(*words, url=url or self.database.url, env={"OUTBOXQ_READ_URL": self.standby_url})


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with primary_and_standby() as pair:
        yield pair


@pytest.fixture
def both(pair: Pair) -> Iterator[Both]:
    with own_database(pair.primary) as (database, primary):
        stage_dashboard(primary)
        pair.wait_for_replay()
        standby = create_engine(pair.standby_url(database.url))
        try:
            yield Both(pair, database, primary, standby)
        finally:
            standby.dispose()


def _standby_first(both: Both) -> str:
    ports = (both.pair.standby_port, both.primary.url.port)
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    return f"postgresql://{both.primary.url.username}@{hosts}/{both.database.name}"


@pytest.fixture
def stands_still(both: Both) -> Iterator[Both]:
    """The standby gets what the primary writes, and shows nothing of it."""
    both.pair.on_standby("SELECT pg_wal_replay_pause()")
    wait_until(lambda: both.pair.on_standby("SELECT pg_get_wal_replay_pause_state()") == "paused", "a pause")
    try:
        yield both
    finally:
        both.pair.on_standby("SELECT pg_wal_replay_resume()")
        both.pair.wait_for_replay()


@pytest.mark.wide
@pytest.mark.parametrize("words", [("stats",), ("stats", "--exact"), ("history",), ("top", "--once")], ids=" ".join)
def test_a_command_reads_on_the_standby_and_says_so(words: tuple[str, ...], both: Both) -> None:
    """Each has the standby's delay in its text and in its JSON; on the primary it is null there."""
    said = both.read(*words).ok()
    assert "read from a standby, 0.0 s behind" in said.stdout + said.stderr
    assert both.read(*words, "--json").ok().json["standby_delay_seconds"] == 0
    assert run(*words, "--json", url=both.database.url).ok().json["standby_delay_seconds"] is None


def test_a_database_that_an_option_names_is_read_itself(both: Both) -> None:
    """The replica of the environment is that of the environment's database; an option's is that of both."""
    named = ("stats", "--json", "--database-url", both.database.url)
    assert both.read(*named).ok().json["standby_delay_seconds"] is None
    assert run(*named, "--read-url", both.standby_url).ok().json["standby_delay_seconds"] == 0


def test_metrics_are_the_standbys_without_what_it_cannot_know(both: Both) -> None:
    """The delay is a gauge; sessions, locks and dead rows of the standby are not taken for the primary's."""
    said = both.read("metrics", "--once").ok().stdout
    assert re.search(r"^outboxq_standby_delay_seconds\{.*\} 0\.0$", said, re.MULTILINE)
    assert re.search(r"^outboxq_queue_jobs\{", said, re.MULTILINE)
    assert "outboxq_table_dead_rows{" not in said
    assert "outboxq_oldest_snapshot_seconds{" not in said
    assert 'outboxq_doctor_findings{code="server-is-standby"' not in said
    assert "outboxq_standby_delay_seconds{" not in run("metrics", "--once", url=both.database.url).ok().stdout


def test_a_standby_that_does_not_keep_up_says_how_far_it_is_behind(stands_still: Both) -> None:
    """A standby with something left to replay is as old as the last commit that it has shown."""
    with stands_still.primary.begin() as connection:
        pause(connection, ["mail"])
    with stands_still.standby.connect() as connection:

        def delay() -> float:
            return standby_delay_seconds(connection) or 0.0

        wait_until(lambda: delay() > 0, "something that was received, and not replayed")
        first = delay()
        assert summary(take_snapshot(connection)).endswith(" s behind")
        wait_until(lambda: delay() > first, "the delay to grow")


def test_a_reader_may_know_the_delay_of_a_standby_that_is_cut_off(both: Both) -> None:
    """A standby that is cut off has replayed all it received, and still reports its age, to a plain role too."""
    with both.primary.begin() as connection:
        connection.execute(text("CREATE ROLE plain_reader LOGIN"))
    both.pair.wait_for_replay()
    both.pair.on_standby("ALTER SYSTEM SET primary_conninfo = ''")
    both.pair.on_standby("SELECT pg_reload_conf()")
    try:
        with create_engine(both.standby.url.set(username="plain_reader"), poolclass=NullPool).connect() as connection:
            wait_until(lambda: (standby_delay_seconds(connection) or 0.0) > 0, "the receiver to end")
    finally:
        both.pair.on_standby("ALTER SYSTEM RESET primary_conninfo")
        both.pair.on_standby("SELECT pg_reload_conf()")
        with both.primary.begin() as connection:
            connection.execute(text("DROP ROLE plain_reader"))
        both.pair.wait_for_replay()


def test_the_doctor_says_that_it_looked_at_a_standby(both: Both) -> None:
    """It is worth to know, and no trouble."""
    found = {each.code: each for each in run_checks(both.standby.connect, use="reader")}
    assert found["server-is-standby"].severity == "info"
    assert "check-failed" not in found
    assert "server-is-standby" not in {each.code for each in run_checks(both.primary.connect, use="reader")}


@pytest.mark.wide
def test_every_page_is_served_by_a_standby(both: Both) -> None:
    """With the primary's engine out of reach, each says how old it is, as a page and as JSON."""
    unreachable = create_engine(_DOWN.replace("postgresql:", "postgresql+psycopg:"))
    app = create_app({"orders": unreachable}, auth=as_user(Role.READER), read_engine={"orders": both.standby})
    looked_at = [each.path for each in screens() if "{" not in each.path and each.method == "GET" and not each.examines]
    assert len(looked_at) > 10
    with client_of(app) as client:
        for path in looked_at:
            page = client.get(f"/orders/{path}")
            assert page.status_code == 200, (path, page.text)
            assert "read from a standby, 0.0 s behind" in page.text
            assert (
                client.get(f"/orders/{path}", headers={"accept": "application/json"}).json()["standby_delay_seconds"]
                == 0
            )


def test_an_action_is_done_on_the_primary_and_seen_on_the_page_after_it(stands_still: Both) -> None:
    """The form and the page after it are the primary's; later pages are the standby's, which does not know it yet."""
    app = create_app({"orders": stands_still.primary}, auth=as_user(Role.OPERATOR), read_engine=stands_still.standby)
    with client_of(app, {"origin": ORIGIN}) as client:
        form = client.get("/orders/queues/accounts/pause")
        assert "read from a standby" not in form.text
        fields = {"reason": "as agreed", "csrf": token_of(form)}
        done = client.post("/orders/queues/accounts/pause", data=fields)
        assert done.status_code == 303, done.text
        paused = text("SELECT count(*) FROM outboxq.queue WHERE name = 'accounts' AND paused_at IS NOT NULL")
        with stands_still.primary.connect() as primary, stands_still.standby.connect() as standby:
            assert primary.execute(paused).scalar_one() == 1
            assert standby.execute(paused).scalar_one() == 0
        # By the path that the form was sent to.
        after = client.get("/orders/queues/accounts")
        assert "read from a standby" not in after.text
        assert "read from a standby" in client.get("/orders/queues/accounts").text


def test_a_page_that_is_followed_keeps_its_delay_up_to_date(both: Both) -> None:
    """The delay that a live page sends replaces the one in the header."""
    app = create_app({"orders": both.primary}, auth=as_user(Role.READER), read_engine=both.standby)
    watched = find_watched(ROUTES, "queues", {})
    assert watched is not None
    event = asyncio.run(app.dashboard.pollers["orders"]._made(watched))
    assert 'id="standby" hx-swap-oob="true">read from a standby, 0.0 s behind<' in event


def test_a_key_of_top_acts_on_the_primary(both: Both) -> None:
    """The screen is the standby's, and says so; a pause is the primary's."""
    acts = "SELECT count(*) FROM outboxq.audit WHERE via = 'cli'"

    def number() -> int:
        with both.primary.connect() as connection:
            return int(connection.execute(text(acts)).scalar_one())

    async def watch() -> None:
        top = Top(TopOptions(database_url=both.database.url, read_url=[both.standby_url], every_seconds=0.5))
        async with top.run_test(size=(140, 40)) as pilot, asyncio.timeout(PATIENCE):
            while not top.rows("queues"):
                await pilot.pause(0.02)
            assert "read from a standby" in str(top.query_one("#summary", Static).render())
            before = number()
            await pilot.press("p", "y")
            while number() == before:
                await pilot.pause(0.02)

    asyncio.run(watch())


def test_a_replica_that_is_down_is_named_and_never_passed_over(both: Both) -> None:
    """Neither a command nor a page falls back to the primary: its load would come when it is least wanted."""
    for words in (("stats",), ("history",), ("top", "--once")):
        said = run(*words, "--read-url", _DOWN, url=both.database.url)
        assert said.exit_code == 1
        assert "--read-url" in said.stderr
        assert "127.0.0.1:1" in said.stderr
    down = create_engine(_DOWN.replace("postgresql:", "postgresql+psycopg:"))
    with client_of(create_app(both.primary, auth=as_user(Role.READER), read_engine=down)) as client:
        page = client.get(f"/{both.database.name}/queues")
    assert page.status_code == 503
    assert "The replica that pages are read at does not answer" in page.text


def test_a_replica_without_tables_is_named(both: Both) -> None:
    """A database of another installation, or one that is behind, is refused as the primary would be, and named."""
    said = run("stats", "--read-url", both.pair.standby_url(both.pair.primary.url), url=both.database.url)
    assert said.exit_code == 1
    assert "--read-url" in said.stderr
    assert "outboxq migrate" in said.stderr


@pytest.mark.wide
def test_a_url_of_several_hosts_reads_on_the_standby_and_works_on_the_primary(both: Both) -> None:
    """One URL does for both: of its hosts readers prefer a standby, and all others take the primary."""
    several = both.pair.url(both.database.url)
    said = run("stats", "--json", url=several, env={"OUTBOXQ_READ_URL": several}).ok()
    assert said.json["standby_delay_seconds"] == 0
    by_query = f"host=127.0.0.1:1&host=127.0.0.1:{both.pair.standby_port}&host=127.0.0.1:{both.primary.url.port}"
    forms = (
        several,
        f"{several}?target_session_attrs=read-write",
        f"postgresql+psycopg://{both.primary.url.username}@/{both.database.name}?{by_query}",
    )
    for url in forms:
        assert run("stats", "--json", url=url).ok().json["standby_delay_seconds"] is None
        run("migrate", url=url).ok()
        found = run("doctor", "--json", url=url).stdout
        assert not {"database-unreachable", "server-is-standby"} & set(re.findall(r'"code": "([^"]+)', found))
    said = run("stats", url="postgresql://postgres@127.0.0.1:1,127.0.0.1:2/postgres")
    assert "no connection to the database at 127.0.0.1:1, 127.0.0.1:2" in said.stderr


@pytest.mark.wide
def test_every_command_takes_the_primary_of_several_hosts(both: Both) -> None:
    """The URL names the standby first, which refuses writes."""
    several = _standby_first(both)
    said = {words: call(*words, url=several) for words in (*NEEDS_LATER, *WORKS, ("migrate",), ("doctor",))}
    wrong = ("SQLSTATE", "Traceback", "read-only", "no connection", "No such option")
    assert {words: each for words, each in said.items() if any(text in each.stderr for text in wrong)} == {}
    assert call("queues", "pause", "mail", url=both.standby_url).exit_code == 1, "the standby takes no writes"
    assert call("queues", "pause", "mail", url=several).exit_code == 0
    assert run("relay", "tests.support.app:jobs", "--drain", url=several, cwd=REPOSITORY).ok().stdout.startswith("done")


@pytest.mark.wide
def test_the_dashboard_takes_the_primary_of_several_hosts(both: Both) -> None:
    """It shows the primary's pages, and an action of its forms is written."""
    several = {"OUTBOXQ_DATABASE_URL": _standby_first(both)}
    with (
        running(both.database, "--role", "operator", **several) as (address, link),
        httpx.Client(base_url=address, follow_redirects=True, timeout=PATIENCE) as browser,
    ):
        assert browser.get(link).status_code == 200
        given = {"csrf": token_of(browser.get(f"/{both.database.name}/queues/mail")), "reason": "a look"}
        path = f"/{both.database.name}/queues/mail/pause"
        assert browser.post(path, data=given, headers={"origin": address}).status_code == 200
    queues = call("queues", "list", "--json", url=both.database.url).ok().json["queues"]
    assert {each["queue"]: each["paused_at"] is not None for each in queues}["mail"]


def test_as_many_replicas_as_databases() -> None:
    """In the same order; fewer would leave it open whose each is."""
    with pytest.raises(ConfigError, match="2 databases take as many URLs"):
        config.read_urls([_DOWN], ["orders", "mail"], by_environment=True)
