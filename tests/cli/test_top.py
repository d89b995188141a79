"""`outboxq top`: the screen under a pilot and in tmux, and the plain tables."""

import asyncio
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from outboxq.admin.snapshot import Snapshot
from outboxq.cli.top import TopOptions
from outboxq.cli.top_screen import Detail, Top
from outboxq.postgres import Database
from outboxq.testing import RelayProcess
from tests.admin.test_roles import Cast
from tests.admin.test_roles import roles as roles
from tests.support.cli import call, command, environment
from tests.support.dashboard import stage_dashboard
from tests.support.ledger import rows
from tests.support.staged import stage
from tests.support.terminal import run_at_terminal
from tests.support.waiting import PATIENCE, wait_until

# Whole programs.
pytestmark = pytest.mark.large

_JOB = "INSERT INTO outboxq.job (id, queue, kind, args) VALUES (gen_random_uuid(), :queue, 'k', '{}')"


def watch(url: str, act: Callable[[Top, Pilot[None]], Awaitable[None]]) -> None:
    """Run the screen without a terminal, act on it once it has looked, and end it."""

    async def run() -> None:
        top = Top(TopOptions(database_url=url, every_seconds=0.1))
        async with top.run_test(size=(140, 40)) as pilot:
            await until(pilot, lambda: table(top, "queues").row_count > 0, "a first look")
            await act(top, pilot)

    asyncio.run(run())


async def until(pilot: Pilot[None], condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await pilot.pause(0.02)
    assert condition(), what


def table(top: Top, view: str) -> DataTable[object]:
    found: DataTable[object] = top.query_one(f"#{view} DataTable", DataTable)
    return found


def shown(top: Top, view: str) -> list[list[str]]:
    found = table(top, view)
    return [[str(cell) for cell in found.get_row_at(place)] for place in range(found.row_count)]


def is_shown(top: Top) -> bool:
    """True if the detail is there with its text: a screen is pushed before its widgets are."""
    return isinstance(top.screen, Detail) and bool(top.screen.query(Static))


def detail(top: Top) -> str:
    return str(top.screen.query_one(Static).render())


@pytest.mark.wide
def test_the_screen_shows_queues_and_what_they_died_of(engine: Engine, outboxq_database: Database) -> None:
    """A tab for each view, filled anew with each look."""
    stage(engine)

    async def act(top: Top, pilot: Pilot[None]) -> None:
        assert [row[0] for row in shown(top, "queues")] == sorted(row[0] for row in shown(top, "queues"))
        assert any("ValueError" in row for row in shown(top, "dead_groups"))
        with engine.begin() as connection:
            connection.execute(text(_JOB), {"queue": "another"})
        await until(pilot, lambda: "another" in [row[0] for row in shown(top, "queues")], "the new queue")
        await until(pilot, lambda: "Looking" not in str(top.query_one("#findings", Static).render()), "the doctor")

    watch(outboxq_database.url, act)


@pytest.mark.wide
def test_names_are_text_and_never_markup(engine: Engine, outboxq_database: Database) -> None:
    """A queue that is named like markup."""
    with engine.begin() as connection:
        connection.execute(text(_JOB), {"queue": "[red]x[/red]"})

    async def act(top: Top, pilot: Pilot[None]) -> None:
        assert shown(top, "queues")[0][0] == "[red]x[/red]"
        await pilot.press("enter")
        await until(pilot, lambda: is_shown(top), "the detail")
        assert "[red]x[/red]" in detail(top)

    watch(outboxq_database.url, act)


@pytest.mark.wide
def test_keys_sort_filter_and_freeze(engine: Engine, outboxq_database: Database) -> None:
    """The cursor stays on its row, and a frozen screen stays as it is."""
    with engine.begin() as connection:
        for queue in ("a", "b", "b", "c"):
            connection.execute(text(_JOB), {"queue": queue})

    async def act(top: Top, pilot: Pilot[None]) -> None:
        await pilot.press("s", "r")
        assert [row[0] for row in shown(top, "queues")] == ["c", "b", "a"]
        await pilot.press("s")
        assert [row[:2] for row in shown(top, "queues")][-1] == ["b", "2"]
        await pilot.press("slash", "b", "enter")
        assert [row[0] for row in shown(top, "queues")] == ["b"]
        await pilot.press("escape")
        assert len(shown(top, "queues")) == 3
        await pilot.press("space")
        assert top.is_frozen

    watch(outboxq_database.url, act)


@pytest.mark.wide
def test_a_queue_is_explained_and_paused_after_a_question(engine: Engine, outboxq_database: Database) -> None:
    """Any other answer than y changes nothing."""
    with engine.begin() as connection:
        connection.execute(text(_JOB), {"queue": "mail"})
    paused = "SELECT paused_at IS NOT NULL FROM outboxq.queue"

    async def act(top: Top, pilot: Pilot[None]) -> None:
        await pilot.press("e")
        await until(pilot, lambda: is_shown(top), "the explanation")
        assert "no-relay" in detail(top) or "relay" in detail(top)
        await pilot.press("q")
        await pilot.press("p")
        assert "Pause queue mail?" in detail(top)
        await pilot.press("n")
        assert rows(engine, paused) == []
        await pilot.press("p", "y")
        await until(pilot, lambda: rows(engine, paused) == [(True,)], "the pause")
        await until(pilot, lambda: top.rows("queues")[0].paused_at is not None, "the next look")
        assert rows(engine, "SELECT action, via FROM outboxq.audit") == [("queue.pause", "cli")]
        await pilot.press("p", "y")
        await until(pilot, lambda: rows(engine, paused) in ([], [(False,)]), "the end of the pause")

    watch(outboxq_database.url, act)


def test_a_look_that_ends_while_the_screen_is_taken_down_is_left_out(
    engine: Engine, outboxq_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads that look go on until they are told, and what they show comes after the last line is gone."""
    with engine.begin() as connection:
        connection.execute(text(_JOB), {"queue": "mail"})

    async def act(top: Top, pilot: Pilot[None]) -> None:
        looks: list[Snapshot] = []
        showing = top.show_snapshot

        def show(snapshot: Snapshot) -> None:
            showing(snapshot)
            looks.append(snapshot)

        monkeypatch.setattr(top, "show_snapshot", show)
        await top.screen.remove_children()
        await until(pilot, lambda: len(looks) > 1, "a look that has no lines")

    watch(outboxq_database.url, act)


@pytest.mark.wide
@pytest.mark.parametrize("actor", ["anna", "x" * 1_000])
def test_what_is_refused_is_said_and_the_screen_goes_on(
    engine: Engine, roles: Cast, monkeypatch: pytest.MonkeyPatch, actor: str
) -> None:
    """As to a role that may only read, or to an actor without a name that fits."""
    said: list[str] = []
    monkeypatch.setenv("OUTBOXQ_ACTOR", actor)
    monkeypatch.setattr(Top, "notify", lambda _top, message, **_: said.append(message))
    with engine.begin() as connection:
        connection.execute(text(_JOB), {"queue": "mail"})

    async def act(top: Top, pilot: Pilot[None]) -> None:
        await pilot.press("p", "y")
        await until(pilot, lambda: bool(said), "the refusal")
        assert ("permission denied" if actor == "anna" else "actor") in said[0]
        with engine.begin() as connection:
            connection.execute(text(_JOB), {"queue": "later"})
        await until(pilot, lambda: "later" in [row[0] for row in shown(top, "queues")], "the next look")

    watch(roles.url("reader"), act)
    assert rows(engine, "SELECT FROM outboxq.queue WHERE paused_at IS NOT NULL") == []


def test_a_database_that_goes_is_said_and_asked_again(engine: Engine, outboxq_database: Database) -> None:
    """The screen stays, and shows the database when it is back."""
    with engine.begin() as connection:
        connection.execute(text(_JOB), {"queue": "mail"})
    end = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'outboxq cli' "
        "AND datname = current_database()"
    )

    async def act(top: Top, pilot: Pilot[None]) -> None:
        rows(engine, end)
        await until(pilot, lambda: "looking again" in str(top.query_one("#summary", Static).render()), "the trouble")
        with engine.begin() as connection:
            connection.execute(text(_JOB), {"queue": "later"})
        await until(pilot, lambda: "later" in [row[0] for row in shown(top, "queues")], "the next look")

    watch(outboxq_database.url, act)


def test_tables_are_printed_once_without_a_terminal(engine: Engine, outboxq_database: Database) -> None:
    """And as JSON; at a terminal with --once."""
    stage(engine)
    url = outboxq_database.url
    plain = call("top", url=url).ok().stdout
    assert "Queues:" in plain
    assert "Dead letters, by what they died of:" in plain
    found = call("top", "--once", "--json", url=url).ok().json
    assert {queue["queue"] for queue in found["queues"]} >= {"accounts", "mail"}
    assert found["dead_groups"][0]["error"] == "ValueError"
    assert "Queues:" in run_at_terminal("top", "--once", url=url).stdout


def test_jobs_that_wait_for_a_connection_are_counted(engine: Engine, outboxq_database: Database) -> None:
    """By relay, beside the slots that work and that are free; the long-running one says that it waits."""
    stage_dashboard(engine)
    with engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE outboxq.relay_status SET slots = 1000, busy = 812, seen_at = clock_timestamp(), running = "
                """jsonb_set(running, '{0}', running -> 0 || '{"waits": {"calls": 37, "connections": 20}}') """
                "WHERE host = 'worker-1'"
            )
        )
    plain = call("top", url=outboxq_database.url).ok().stdout
    assert "813 of 1,004 slots busy, 37 jobs wait for a connection" in " ".join(plain.split())
    line = next(line for line in plain.splitlines() if "worker-1" in line and "export_report for" in line)
    assert [word for word in line.split("\t") if word.isdecimal()][1:] == ["812", "1000", "188", "37"]
    running = next(line for line in plain.splitlines() if "export_report\t" in line and "worker-1" in line)
    assert "a connection" in running.split("\t")
    found = call("relays", "list", url=outboxq_database.url).ok().stdout
    listed = next(line for line in found.splitlines() if "worker-1" in line)
    assert listed.split("\t")[4:8] == ["812", "1000", "188", "37"]


@pytest.fixture
def tmux() -> Iterator[Callable[..., str]]:
    """Runs commands of tmux on a server of its own, which ends with the test."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed: the screen was not tried in a real terminal")
    name = f"outboxq-{uuid4()}"

    def run(*words: str, env: dict[str, str] | None = None) -> str:
        given = ["tmux", "-L", name, *words]
        return subprocess.run(given, env=env, capture_output=True, text=True, check=True).stdout

    yield run
    subprocess.run(["tmux", "-L", name, "kill-server"], check=False, capture_output=True)


@pytest.mark.wide
@pytest.mark.usefixtures("fresh_processes")
def test_a_killed_relay_is_seen_in_a_real_terminal(
    engine: Engine, outboxq_database: Database, tmux: Callable[..., str]
) -> None:
    """In tmux: a relay that serves, is killed and has been silent for a minute is shown as dead. q ends the screen."""
    url = outboxq_database.url
    env = {**environment(url), "TERM": "screen-256color", "LANG": "C.UTF-8"}
    tmux("new-session", "-d", "-s", "top", "-x", "120", "-y", "40", *command("top", "--every", "0.5"), env=env)

    def screen() -> str:
        return tmux("capture-pane", "-p", "-t", "top")

    with RelayProcess("tests.support.app:jobs", url) as relay:
        wait_until(lambda: "1 relay lives" in screen(), "the relay on the screen", seconds=2 * PATIENCE)
        relay.kill()
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.relay_status SET seen_at = seen_at - interval '1 minute'"))
    wait_until(lambda: "1 relay is dead" in screen(), "the dead relay")
    tmux("send-keys", "-t", "top", "q")
    wait_until(lambda: "no server running" in _sessions(tmux), "the end of the screen")


def _sessions(tmux: Callable[..., str]) -> str:
    try:
        return tmux("list-sessions")
    except subprocess.CalledProcessError as error:
        return f"no server running {error.stderr}"
