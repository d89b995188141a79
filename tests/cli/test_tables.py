"""Tables at terminals of every width, and in pipes."""

import re
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, text

from outboxq.cli.tables import Column, print_table
from outboxq.codec.display import age, duration
from outboxq.postgres import Database
from tests.support.cli import call, run
from tests.support.staged import numbered, stage
from tests.support.terminal import run_at_terminal

LISTS = {
    "jobs list": "jobs",
    "dead list": "dead",
    "inbox list": "messages",
    "effects list": "effects",
    "queues list": "queues",
    "stats": "queues",
}
every_list = pytest.mark.parametrize("words", LISTS)
CODES = re.compile(r"\x1b\[[0-9;]*m")
IDS = ("id", "message_id", "consumer", "scope", "key", "provider_key")


@pytest.fixture
def url(outboxq_database: Database, engine: Engine) -> str:
    """A database with something of everything."""
    stage(engine)
    return outboxq_database.url


def shown(words: str, columns: int, url: str, *options: str) -> str:
    """What stands on a terminal so wide."""
    said = run_at_terminal(*words.split(), *options, columns=columns, url=url).ok()
    return CODES.sub("", said.stdout)


def rows(words: str, url: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = call(*words.split(), "--json", url=url).ok().json[LISTS[words]]
    return found


@pytest.mark.first_and_last
@every_list
def test_a_table_fits_the_terminal(words: str, url: str) -> None:
    """No line is longer than the terminal is wide, and no id is broken or cut."""
    found = rows(words, url)
    for columns in (80, 120, 200):
        screen = shown(words, columns, url)
        assert max(map(len, screen.splitlines())) <= columns
        assert not re.search(r"[─│┃━|+]", screen), "lines of a box"
        headings = screen.splitlines()[0].split()
        for row in found:
            for name in IDS:
                if name in row and name in headings:
                    assert re.search(rf"(^|\s){re.escape(str(row[name]))}(\s|$)", screen, re.MULTILINE), name
        assert "2026-" not in screen, "ages, and not times"


@pytest.mark.first_and_last
@every_list
def test_an_empty_column_is_left_out(words: str, url: str) -> None:
    """Each heading is a key of the JSON, whole, and at least one row has a value there; counts of jobs may be 0."""
    found = rows(words, url)
    keys = {name.removesuffix("_at").removesuffix("_seconds"): name for name in found[0]}
    for columns in (100, 200):
        for heading in shown(words, columns, url).partition("\n\n")[0].splitlines()[0].split():
            name = keys[heading]
            assert name in ("ready", "jobs", "dead") or any(row[name] for row in found), name


@pytest.mark.first_and_last
@every_list
def test_wide_shows_every_column(words: str, url: str) -> None:
    """However narrow the terminal is, each row is one line with whole values."""
    screen = shown(words, 60, url, "--wide")
    lines = screen.partition("\n\n")[0].splitlines()
    assert len(lines) == 1 + len(rows(words, url))
    piped = call(*words.split(), url=url).ok().stdout.splitlines()[0].split("\t")
    assert lines[0].split() == [name.removesuffix("_at").removesuffix("_seconds") for name in piped]
    assert "…" not in screen


@pytest.mark.first_and_last
@every_list
def test_a_pipe_gets_tabs_and_full_values(words: str, url: str) -> None:
    """A line for each row, a tab between the columns, whichever have a value; times in full, in UTC."""
    said = call(*words.split(), url=url).ok().stdout.partition("\n\n")[0]
    heading, *lines = (line.split("\t") for line in said.splitlines())
    found = rows(words, url)
    assert len(lines) == len(found)
    assert {len(line) for line in lines} == {len(heading)}
    for line, row in zip(lines, found, strict=True):
        for name, value in zip(heading, line, strict=True):
            assert name.endswith("_seconds") or value == _as_text(row[name]), name


def _as_text(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def test_the_more_room_the_more_columns(url: str) -> None:
    """What a narrow terminal leaves out, a wide one shows."""
    headings = [shown("jobs list", columns, url).splitlines()[0].split() for columns in (80, 100, 160)]
    assert headings[0] == ["id", "queue", "kind", "state", "run"]
    assert set(headings[0]) < set(headings[1]) < set(headings[2])


def test_a_job_is_told_by_its_age(url: str) -> None:
    """How long ago its time came, or when it will."""
    screen = shown("jobs list", 100, url)
    ends = {line.split()[0][-1]: line for line in screen.splitlines()[1:]}
    assert " 3 m" in ends["1"]
    assert " in 5 h" in ends["3"]
    assert " 25 m" in ends["4"]


def test_a_long_text_stands_below_its_row_where_there_is_no_room(url: str) -> None:
    """In one line, cut at the edge; `show` has all of it."""
    narrow, wide = shown("dead list", 80, url).splitlines(), shown("dead list", 200, url).splitlines()
    assert narrow[1] == "  reason"
    assert narrow[2].startswith(str(numbered(101)))
    assert narrow[3].startswith("  gave up after 1 of 1 attempts: ValueError: card")
    assert narrow[3].endswith("…")
    assert len(wide) == 3
    assert wide[1].endswith("card <number> was refused by the bank")


def test_counts_that_do_not_fit_are_told_in_words(url: str, engine: Engine) -> None:
    """A terminal of 80 columns has every count of each queue, whole."""
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET state = 'suspect' WHERE kind = 'credit'"))
    narrow = shown("stats", 80, url)
    assert "accounts: 1 scheduled, 1 due, 1 suspect, 1 dead; parked 1; oldest_waiting 25 m" in " ".join(narrow.split())
    assert "mail: 1 ready, 1 scheduled, 1 leased, 1 orphaned, 1 dead; oldest_waiting 3 m; paused 3 h" in " ".join(
        narrow.split()
    )
    assert shown("stats", 120, url).splitlines()[0].split()[:3] == ["queue", "ready", "scheduled"]


def test_names_are_cut_before_the_age_is_lost(url: str, engine: Engine) -> None:
    """Long kinds and queues give way, down to ten characters, and ids never do."""
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.job SET kind = repeat('k', 60), queue = repeat('q', 60)"))
    screen = shown("jobs list", 80, url)
    assert max(map(len, screen.splitlines())) <= 80
    assert re.search("q{9,10}…  k{9,10}…", screen)
    assert screen.splitlines()[0].split()[-1] == "run"
    assert all(str(numbered(number)) in screen for number in range(1, 8))


def test_an_id_that_is_longer_than_the_terminal_is_not_cut(url: str, engine: Engine) -> None:
    """It is printed whole, and the terminal breaks its line; the other rows keep their columns."""
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.inbox SET message_id = repeat('m', 200) WHERE message_id = 'evt_1Nq2'"))
    screen = shown("inbox list", 80, url)
    assert "m" * 200 in screen
    assert max(len(line) for line in screen.splitlines() if "mmm" not in line) <= 80


@pytest.mark.wide
@pytest.mark.parametrize(
    ("env", "expected"),
    [({}, {"\x1b[1m", "\x1b[31m", "\x1b[0m"}), ({"NO_COLOR": "1"}, {"\x1b[1m", "\x1b[0m"}), ({"TERM": "dumb"}, set())],
    ids=["colours", "NO_COLOR", "a dumb terminal"],
)
def test_colours_read_on_light_and_dark(env: dict[str, str], expected: set[str], url: str) -> None:
    """Bold headings and red states, on the terminal's own background; no colour if NO_COLOR is set."""
    screen = run_at_terminal("jobs", "list", columns=80, url=url, env=env).ok().stdout
    assert set(CODES.findall(screen)) == expected


@pytest.mark.first_and_last
@every_list
def test_nothing_found_is_said(words: str, outboxq_database: Database) -> None:
    """On standard error, so that a pipe has nothing but the heading."""
    said = call(*words.split(), url=outboxq_database.url).ok()
    assert len(said.stdout.splitlines()) == 1
    assert re.fullmatch(r"no (jobs|dead letters|messages|effects|queues) found\n", said.stderr)


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    "words",
    [
        ("jobs", "show", numbered(4)),
        ("dead", "show", numbered(101)),
        ("effects", "show", "stripe-charge", "order-1002"),
        ("inbox", "show", "payments", "evt_1Nq2"),
        ("roles",),
        ("doctor",),
    ],
    ids=lambda words: " ".join(map(str, words[:2])),
)
def test_texts_are_broken_between_words(words: tuple[object, ...], url: str) -> None:
    """No line is longer than the terminal, and every word that a pipe gets stands there whole."""
    screen = run_at_terminal(*words, columns=80, url=url).stdout
    assert max(map(len, screen.splitlines())) <= 80
    words_of = re.compile(r"\S+")
    # Ages go on between the two.
    numbers = re.compile(r"\d+")
    piped = run(*words, url=url).stdout
    assert words_of.findall(numbers.sub("", screen)) == words_of.findall(numbers.sub("", piped))


def test_a_place_in_a_traceback_stays_in_one_piece(url: str, engine: Engine) -> None:
    """However long its path is, so that it can be copied; other lines are broken."""
    path = f"/srv/{'long/' * 20}jobs.py"
    with engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE outboxq.dead_job SET errors = jsonb_set(errors, '{0,chain,0,frames}', CAST(:frames AS jsonb))"
            ),
            {"frames": f'[["{path}", 3, "charge"]]'},
        )
    screen = run_at_terminal("dead", "show", numbered(101), columns=80, url=url).ok().stdout
    assert f'      File "{path}", line 3, in charge' in screen.splitlines()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0 s"), (42, "42 s"), (119, "119 s"), (120, "2 m"), (3_600, "60 m"), (7_200, "2 h"), (86_400, "24 h"),
     (172_800, "2 d"), (86_400 * 4_000, "4,000 d")],
)  # fmt: skip
def test_ages_are_short(seconds: float, expected: str) -> None:
    """One number and one unit; what lies ahead is `in` so long."""
    now = datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert duration(seconds) == age(now - timedelta(seconds=seconds), now) == expected
    if seconds:
        assert age(now + timedelta(seconds=seconds), now) == f"in {expected}"


def test_wide_characters_keep_the_columns_in_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A character that takes two columns counts twice."""

    class Row:
        def __init__(self, name: str) -> None:
            self.name, self.state = name, "ready"

    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    print_table((Column("name", "name"), Column("state")), [Row("漢字"), Row("abcd")])
    lines = CODES.sub("", capsys.readouterr().out).splitlines()
    assert lines[1:] == ["漢字  ready", "abcd  ready"]
