"""`outboxq queues set`: limits and rates of queues, and `outboxq queues list`, which shows them."""

import pytest
from sqlalchemy import Engine, text

from outboxq.postgres import Database
from tests.support.cli import call, run

NOTHING = {"limit": None, "rate": None, "burst": None, "per_group": None}


def shown(url: str, queue: str = "mail") -> dict[str, object]:
    """What the list says of the limits of a queue."""
    (row,) = [row for row in call("queues", "list", "--json", url=url).ok().json["queues"] if row["queue"] == queue]
    return {name: row[name] for name in NOTHING}


@pytest.mark.wide
def test_limits_are_set_and_shown_and_taken_away(outboxq_database: Database, engine: Engine) -> None:
    """By the command of the shell: what is not given stays, and what is taken away is NULL again."""
    url = outboxq_database.url
    said = run("queues", "set", "mail", "--limit", "5", "--rate", "100/min", "--burst", "20", url=url).ok()
    assert said.stdout == "'mail' is limited: 5 at a time, 100/min with a burst of 20\n"
    assert shown(url) == {"limit": 5, "rate": "100/min", "burst": 20, "per_group": None}
    table = run("queues", "list", url=url).ok().stdout
    assert table.splitlines()[1].split() == ["mail", "0", "0", "5", "100/min", "20", "operator"]
    call("queues", "set", "mail", "--limit", "7", "--per-group", "2", url=url).ok()
    assert shown(url) == {"limit": 7, "rate": "100/min", "burst": 20, "per_group": 2}
    call("queues", "set", "mail", "--no-rate", url=url).ok()
    assert shown(url) == {"limit": 7, "rate": None, "burst": None, "per_group": 2}
    call("queues", "set", "mail", "--no-limit", "--no-per-group", url=url).ok()
    with engine.connect() as connection:
        rows = connection.execute(
            text("SELECT num_nulls(max_running, max_per_group, rate_jobs, rate_seconds, rate_burst) FROM outboxq.queue")
        )
        assert rows.scalars().all() == [5]


@pytest.mark.wide
def test_a_rate_without_a_burst_has_that_of_a_tenth_of_a_second(outboxq_database: Database) -> None:
    """A burst of before does not stay with another rate."""
    url = outboxq_database.url
    call("queues", "set", "mail", "--rate", "500/s", "--burst", "7", url=url).ok()
    call("queues", "set", "mail", "--rate", "200/s", url=url).ok()
    assert shown(url) == {**NOTHING, "rate": "200/s", "burst": 20}
    call("queues", "set", "mail", "--rate", "5/30s", url=url).ok()
    assert shown(url) == {**NOTHING, "rate": "5/30s", "burst": 1}


def test_limits_of_several_queues_are_set_at_once_and_said_one_by_one(outboxq_database: Database) -> None:
    """Those that were so already are named as such; in JSON all of it has its place."""
    url = outboxq_database.url
    call("queues", "set", "mail", "--limit", "2", url=url).ok()
    again = call("queues", "set", "mail", "post", "--limit", "2", "--json", url=url).ok()
    assert again.json == {"limited": ["post"], "unchanged": ["mail"], "unknown": ["mail", "post"]}
    assert call("queues", "set", "mail", "--limit", "2", url=url).ok().stdout == "'mail' was set so already\n"
    assert call("queues", "set", "mail", "--no-rate", url=url).ok().stdout == "'mail' was set so already\n"
    dropped = call("queues", "set", "mail", "--no-limit", url=url).ok()
    assert dropped.stdout == "'mail' has no limit of jobs at a time set any more\n"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--keep-dead", "30d"], "keeps dead letters for 30d"),
        (["--keep-dead", "forever"], "keeps dead letters for ever"),
        (
            ["--limit", "5", "--no-per-group", "--keep-dead", "36h"],
            "is limited: 5 at a time; has no limit of jobs of a group set any more; keeps dead letters for 36h",
        ),
    ],
)
def test_what_was_set_is_said(given: list[str], said: str, outboxq_database: Database) -> None:
    """And not that a queue is limited of which only the dead letters were spoken of."""
    assert call("queues", "set", "mail", *given, url=outboxq_database.url).ok().stdout == f"'mail' {said}\n"


@pytest.mark.wide
def test_a_queue_whose_settings_were_taken_away_is_not_listed(outboxq_database: Database, engine: Engine) -> None:
    """Nothing is known of it any more; with a job in it, it is."""
    url = outboxq_database.url
    call(
        "queues", "set", "mail", "--limit", "5", "--rate", "5/s", "--per-group", "2", "--keep-dead", "30d", url=url
    ).ok()
    call("queues", "pause", "mail", url=url).ok()
    for words in (["set", "mail", "--no-limit", "--no-rate", "--no-per-group"], ["set", "mail", "--no-keep-dead"]):
        call("queues", *words, url=url).ok()
        assert len(call("queues", "list", "--json", url=url).ok().json["queues"]) == 1
    said = call("queues", "resume", "mail", url=url).ok()
    assert said.stdout == "'mail' is resumed\n"
    assert call("queues", "list", "--json", url=url).ok().json["queues"] == []
    with engine.begin() as connection:
        connection.execute(
            text("INSERT INTO outboxq.job (id, queue, kind, args) VALUES (gen_random_uuid(), 'mail', 'send', '{}')")
        )
    assert [row["queue"] for row in call("queues", "list", "--json", url=url).ok().json["queues"]] == ["mail"]


def test_a_limit_of_an_unknown_queue_is_set_and_asked_about(outboxq_database: Database) -> None:
    """Its first job may come later; or its name was mistyped."""
    url = outboxq_database.url
    call("queues", "set", "mail", "--limit", "2", url=url).ok()
    said = call("queues", "set", "mial", "--limit", "2", url=url).ok()
    assert said.stdout == "'mial' is limited: 2 at a time\n"
    assert said.stderr == (
        "note: queue 'mial' has no job and no dead letter, and no relay serves it (known: none): was it meant?\n"
    )
    assert shown(url, "mial")["limit"] == 2


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--limit", "0"], "1 to 10,000, got 0: to stop a queue, pause it"),
        (["--limit", "10001"], "1 to 10,000, got 10001"),
        (["--limit", "many"], "Invalid value for '--limit'"),
        (["--per-group", "0"], "1 to 1,000, got 0"),
        (["--rate", "nonsense"], "such as 10/s, 100/min, 5/30s, 20/h, got 'nonsense'"),
        (["--rate", "0/s"], "1 to 1,000,000 jobs, got '0/s': to stop a queue, pause it"),
        (["--rate", "99999999/s"], "1 to 1,000,000 jobs, got '99999999/s': a queue that may be faster needs no rate"),
        (["--rate", "5/99day"], "1 second to 31 days, got '5/99day'"),
        (["--burst", "5"], "a burst needs a rate, such as 100/min, and only the burst 5 was given"),
        (["--rate", "5/s", "--burst", "0"], "the burst of a rate is 1 to 1,000,000, got 0"),
        (["--limit", "5", "--no-limit"], "--limit and --no-limit exclude one another"),
        (["--burst", "5", "--no-rate"], "--rate and --no-rate exclude one another"),
        (["--per-group", "5", "--no-per-group"], "--per-group and --no-per-group exclude one another"),
        ([], "no limit was given to set or to take away"),
    ],
)
def test_limits_that_cannot_be_are_refused_and_nothing_is_set(
    given: list[str], words: str, outboxq_database: Database
) -> None:
    """The message says what was expected and what came; a command with one fault sets nothing."""
    refused = call("queues", "set", "mail", *given, url=outboxq_database.url)
    assert refused.exit_code == 2, refused
    assert words in " ".join(refused.stderr.replace("│", " ").split())
    assert call("queues", "list", "--json", url=outboxq_database.url).ok().json["queues"] == []
