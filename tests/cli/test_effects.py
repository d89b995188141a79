"""`outboxq effects`: looking at calls to the outside, and saying what became of those that nobody knows about."""

import json

import pytest
from sqlalchemy import Engine, text

from outboxq.postgres import Database
from tests.support.cli import call, run

ADD = text(
    "INSERT INTO outboxq.effect (scope, key, status, in_doubt, provider_key, lock_token, locked_until, result, error, "
    "expires_at) SELECT :scope, :key, :status, :in_doubt, gen_random_uuid(), gen_random_uuid(), "
    "clock_timestamp() + make_interval(secs => :locked_seconds), CAST(:result AS jsonb), :error, "
    "CASE WHEN :status IN ('done', 'failed') THEN clock_timestamp() + interval '1 day' END"
)
RESULT = '{"charge": "ch_42", "amount": 1.10}'


@pytest.fixture
def effects(engine: Engine) -> dict[str, str]:
    """One effect of each sort, by its key."""
    rows = {
        "paid": {"status": "done", "result": RESULT},
        "lost": {"status": "unknown", "error": "the call raised builtins.TimeoutError"},
        "running": {"status": "started", "locked_seconds": 60.0},
        "abandoned": {"status": "started", "locked_seconds": -60.0},
        "doubtful": {"status": "retryable", "in_doubt": True},
    }
    defaults = {"scope": "payments", "in_doubt": False, "locked_seconds": 0.0, "result": None, "error": None}
    with engine.begin() as connection:
        for key, row in rows.items():
            connection.execute(ADD, {**defaults, "key": key, **row})
        connection.execute(ADD, {**defaults, "scope": "mail", "key": "welcome", "status": "unknown"})
    return {key: str(row["status"]) for key, row in rows.items()}


def status_of(engine: Engine, key: str) -> str:
    with engine.connect() as connection:
        return str(
            connection.execute(text("SELECT status FROM outboxq.effect WHERE key = :key"), {"key": key}).scalar_one()
        )


def listed(*options: object, url: str) -> set[str]:
    return {row["key"] for row in call("effects", "list", "--json", *options, url=url).ok().json["effects"]}


def test_the_list_tells_what_became_of_each(outboxq_database: Database, effects: dict[str, str]) -> None:
    """Each effect stands there with its status, doubts and errors; none with its result, which is the users' data."""
    said = run("effects", "list", url=outboxq_database.url).ok().stdout
    lines = {key: line for line in said.splitlines() for key in effects if f"\t{key}\t" in line}
    assert "\tretryable\ttrue\t" in lines["doubtful"]
    assert "the call raised builtins.TimeoutError" in lines["lost"]
    assert set(lines) == set(effects)
    assert "ch_42" not in said
    assert "ch_42" not in call("effects", "list", "--json", url=outboxq_database.url).ok().stdout


def test_filters_narrow_the_list(outboxq_database: Database, effects: dict[str, str]) -> None:
    """Scope and status match exactly, and a status that does not exist is wrong usage."""
    url = outboxq_database.url
    assert listed("--status", "unknown", url=url) == {"lost", "welcome"}
    assert listed("--scope", "mail", url=url) == {"welcome"}
    assert listed("--scope", "payments", "--status", "started", url=url) == {"running", "abandoned"}
    assert listed("--scope", "pay", url=url) == set()
    assert call("effects", "list", "--status", "lost", url=url).exit_code == 2


def test_the_keys_of_the_list_stay(outboxq_database: Database, effects: dict[str, str]) -> None:
    """Programs rely on these keys, and learn that there are more than were asked for."""
    said = call("effects", "list", "--limit", 1, "--json", url=outboxq_database.url).ok().json
    assert said["more"] is True
    assert list(said["effects"][0]) == [
        "scope", "key", "status", "in_doubt", "provider_key", "attempts", "locked_until", "first_called_at",
        "changed_at", "expires_at", "error",
    ]  # fmt: skip
    assert "more than these 1" in call("effects", "list", "--limit", 1, url=outboxq_database.url).ok().stderr


def test_show_has_the_result_as_it_is_stored(outboxq_database: Database, effects: dict[str, str]) -> None:
    """For people below its name, for programs as JSON, digit by digit."""
    said = run("effects", "show", "payments", "paid", "--json", url=outboxq_database.url).ok()
    assert said.json["result"] == {"charge": "ch_42", "amount": 1.10}
    assert "1.10" in said.stdout
    assert (said.json["status"], said.json["is_locked"], said.json["fingerprint"]) == ("done", False, None)
    text_said = call("effects", "show", "payments", "paid", url=outboxq_database.url).ok().stdout
    assert '"charge": "ch_42"' in text_said
    assert said.json["provider_key"] in text_said
    assert [line.split() for line in text_said.splitlines() if "is_locked" in line] == [["is_locked", "false"]]
    assert call("effects", "show", "payments", "running", "--json", url=outboxq_database.url).ok().json["is_locked"]


def test_what_is_not_there_ends_with_1(outboxq_database: Database, effects: dict[str, str]) -> None:
    """An effect of another scope is another effect."""
    for words in (("show", "mail", "paid"), ("resolve", "mail", "paid", "--applied")):
        said = call("effects", *words, url=outboxq_database.url)
        assert said.exit_code == 1
        assert said.stderr == (
            "Error: no effect of scope 'mail' with key 'paid': it was never called, or is forgotten\n"
        )


def test_resolve_as_applied_keeps_the_result(
    outboxq_database: Database, engine: Engine, effects: dict[str, str]
) -> None:
    """What the operator gave is what callers get."""
    url = outboxq_database.url
    said = run("effects", "resolve", "payments", "lost", "--applied", "--result", RESULT, url=url).ok()
    assert said.stdout == ("effect 'payments', key 'lost', is resolved as applied: it will not be called again\n")
    assert said.stderr == ""
    assert call("effects", "show", "payments", "lost", "--json", url=url).ok().json["result"] == json.loads(RESULT)


def test_resolve_without_a_result_warns(outboxq_database: Database, engine: Engine, effects: dict[str, str]) -> None:
    """Whoever asks for the result will fail: that is said at once, and null is the way around."""
    url = outboxq_database.url
    said = call("effects", "resolve", "mail", "welcome", "--applied", url=url).ok()
    assert "has no result: a caller that asks for it fails" in said.stderr
    assert call("effects", "show", "mail", "welcome", "--json", url=url).ok().json["error"].endswith("without a result")
    said = call("effects", "resolve", "payments", "lost", "--applied", "--result", "null", url=url).ok()
    assert said.stderr == ""
    assert call("effects", "show", "payments", "lost", "--json", url=url).ok().json["error"] is None


@pytest.mark.parametrize("key", ["lost", "abandoned", "doubtful"])
def test_resolve_as_not_applied_lets_the_next_caller_call(
    outboxq_database: Database, engine: Engine, effects: dict[str, str], key: str
) -> None:
    """What is unknown, in doubt, or was never finished is free again, and remembered for as long as was said."""
    said = call(
        "effects", "resolve", "payments", key, "--not-applied", "--retention-days", 7, "--json",
        url=outboxq_database.url,
    ).ok()  # fmt: skip
    resolved = said.json["resolved"]
    assert (resolved["status"], resolved["in_doubt"]) == ("retryable", False)
    with engine.connect() as connection:
        kept = connection.execute(
            text("SELECT extract(day FROM expires_at - changed_at) FROM outboxq.effect WHERE key = :key"), {"key": key}
        ).scalar_one()
    assert kept in (6, 7)


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("key", "said"), [("paid", "it is done, so there is nothing to resolve"), ("running", "a call is under way")]
)
@pytest.mark.parametrize("verdict", ["--applied", "--not-applied"])
def test_what_is_settled_or_under_way_is_refused(
    outboxq_database: Database, engine: Engine, effects: dict[str, str], key: str, said: str, verdict: str
) -> None:
    """The exit code is 1, the message has the present status, and the effect is as it was."""
    refused = call("effects", "resolve", "payments", key, verdict, url=outboxq_database.url)
    assert refused.exit_code == 1
    assert refused.stdout == ""
    assert f"effect 'payments', key '{key}': {said}" in refused.stderr
    assert status_of(engine, key) == effects[key]


@pytest.mark.first_and_last
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "Give --applied or --not-applied"),
        (("--applied", "--not-applied"), "and not both"),
        (("--not-applied", "--result", "1"), "has no result"),
        (("--result", "1"), "Give --applied"),
        (("--applied", "--result", "{hunter2}"), "the result is not JSON"),
        (("--applied", "--retention-days", "0"), "--retention-days"),
    ],
)
def test_a_verdict_that_means_nothing_is_wrong_usage(
    outboxq_database: Database, engine: Engine, effects: dict[str, str], options: tuple[str, ...], said: str
) -> None:
    """Exit code 2, the effect is as it was, and what was given as a result is not repeated."""
    refused = call("effects", "resolve", "payments", "lost", *options, url=outboxq_database.url)
    assert refused.exit_code == 2
    assert said in refused.stderr
    assert "hunter2" not in refused.stderr
    assert status_of(engine, "lost") == "unknown"


def test_a_key_that_cannot_be_is_wrong_usage(outboxq_database: Database, effects: dict[str, str]) -> None:
    """Exit code 2 and what a key takes, without a traceback."""
    for key, expected in (
        ("x" * 513, "1 to 512 bytes, got 513"),
        ("", "1 to 512 bytes"),
        ("a\x1b", "control character"),
    ):
        said = call("effects", "show", "payments", key, url=outboxq_database.url)
        assert (said.exit_code, said.stderr.count("\n")) == (2, 1)
        assert expected in said.stderr


def test_a_key_that_draws_on_a_terminal_is_shown_harmless(outboxq_database: Database, engine: Engine) -> None:
    """Keys come from outside: none reaches the terminal as a control sequence or as markup."""
    with engine.begin() as connection:
        connection.execute(
            ADD,
            {
                "scope": "payments", "key": "\x1b[31m[bold]red", "status": "unknown", "in_doubt": False,
                "locked_seconds": 0.0, "result": '"\\u001b[0m"', "error": "\x1b]0;title",
            },
        )  # fmt: skip
    said = call("effects", "list", url=outboxq_database.url).ok().stdout
    assert "\x1b" not in said
    assert "\\x1b[31m[bold]red" in said


@pytest.mark.wide
def test_stats_counts_what_waits_for_an_operator(outboxq_database: Database, effects: dict[str, str]) -> None:
    """One number for programs, and for people a line that says where to look."""
    url = outboxq_database.url
    assert call("stats", "--json", url=url).ok().json["unknown_effects"] == 2
    assert (
        "2 effects wait for an operator: see `outboxq effects list --status unknown`"
        in call("stats", url=url).ok().stderr
    )
    for scope, key in (("payments", "lost"), ("mail", "welcome")):
        call("effects", "resolve", scope, key, "--not-applied", url=url).ok()
    assert call("stats", "--json", url=url).ok().json["unknown_effects"] == 0
    assert "effects" not in call("stats", url=url).ok().stderr


# Many at once


def test_a_dry_run_lists_what_has_no_known_outcome(
    outboxq_database: Database, engine: Engine, effects: dict[str, str]
) -> None:
    """Unknown, in doubt, or left by its caller; of that scope, and with that error, if one is given."""
    url, only = outboxq_database.url, ("--not-applied", "--dry-run", "--json")
    found = call("effects", "resolve", "payments", "--all", *only, url=url).ok().json
    assert {each["key"] for each in found["would_be_resolved"]} == {"lost", "abandoned", "doubtful"}
    found = call("effects", "resolve", "payments", "--error", "TimeoutError", *only, url=url).ok().json
    assert [each["key"] for each in found["would_be_resolved"]] == ["lost"]
    found = call("effects", "resolve", "payments", "--status", "started", *only, url=url).ok().json
    assert [each["key"] for each in found["would_be_resolved"]] == ["abandoned"]
    said = run("effects", "resolve", "payments", "--all", *only[:2], url=url).ok().stdout
    assert "dry run: 3 effects would be resolved as not applied" in said
    assert status_of(engine, "lost") == "unknown"


def test_many_are_resolved_by_one_verdict(outboxq_database: Database, engine: Engine, effects: dict[str, str]) -> None:
    """Those of other scopes, those that are settled and those that are being called stay; the audit names them."""
    url = outboxq_database.url
    refused = call("effects", "resolve", "payments", "--all", "--not-applied", url=url)
    assert refused.exit_code == 2
    assert "add --yes" in refused.stderr
    many = ("effects", "resolve", "payments", "--all", "--applied", "--yes")
    done = call(*many, "--result", "null", "--json", url=url).ok()
    assert done.json == {"resolved": 3, "left": 0}
    assert {key: status_of(engine, key) for key in (*effects, "welcome")} == {
        "paid": "done", "lost": "done", "running": "started", "abandoned": "done", "doubtful": "done",
        "welcome": "unknown",
    }  # fmt: skip
    [entry] = call("audit", "list", "--json", url=url).ok().json["audit"]
    assert (entry["action"], entry["changed"]) == ("effect.resolve", 3)


def test_what_another_transaction_holds_is_left(
    outboxq_database: Database, engine: Engine, effects: dict[str, str]
) -> None:
    """It is not waited for; the exit code says that not all were resolved."""
    with engine.begin() as connection:
        connection.execute(text("SELECT FROM outboxq.effect WHERE key = 'lost' FOR UPDATE"))
        done = call(*_ALL_OF, "--not-applied", "--yes", "--json", url=outboxq_database.url)
    assert done.exit_code == 1
    assert done.json == {"resolved": 2, "left": 1}


_ALL_OF = ("effects", "resolve", "payments", "--all")


def test_a_forgotten_key_resolves_nothing(outboxq_database: Database, engine: Engine, effects: dict[str, str]) -> None:
    """Many are resolved only if that is said, and one result is not that of many calls."""
    url = outboxq_database.url
    assert "Give KEY" in call("effects", "resolve", "payments", "--not-applied", "--yes", url=url).stderr
    told = call(*_ALL_OF, "--applied", "--result", RESULT, "--yes", url=url)
    assert told.exit_code == 2
    assert "one result is not that of many calls" in told.stderr
    assert status_of(engine, "lost") == "unknown"


def test_filters_are_for_many(outboxq_database: Database) -> None:
    said = call("effects", "resolve", "payments", "lost", "--not-applied", "--error", "x", url=outboxq_database.url)
    assert said.exit_code == 2
    assert "leave KEY out" in said.stderr
