"""The doctor looks at calls to the outside that wait for somebody."""

import pytest

from outboxq.postgres import Database
from outboxq.statements.doctor import effects
from tests.support.doctor import execute, named, only


def add(status: str, *, ago: str = "2 hours", in_doubt: bool = False, expires: str = "NULL", number: int = 1) -> str:
    return (
        "INSERT INTO outboxq.effect (scope, key, status, in_doubt, provider_key, lock_token, locked_until, changed_at, "
        f"expires_at) SELECT 'pay', gen_random_uuid()::text, '{status}', {in_doubt}, gen_random_uuid(), "
        f"gen_random_uuid(), now() - interval '{ago}', now() - interval '{ago}', {expires} "
        f"FROM generate_series(1, {number})"
    )


def test_unknown_effects_are_counted(outboxq_database: Database) -> None:
    """How many, for how long the oldest, and the commands that end it; everything else is somebody's business."""
    url = outboxq_database.url
    execute(
        url,
        add("done", expires="now() + interval '1 day'"),
        add("failed", expires="now() + interval '1 day'"),
        add("retryable", expires="now() + interval '1 day'"),
        add("started", ago="-30 seconds"),
    )
    assert named(url, "effects-unknown") == []
    execute(url, add("unknown", number=2), add("unknown", ago="3 hours"))
    found = only(url, "effects-unknown")
    assert (found["severity"], found["detail"]["effects"]) == ("warning", 3)
    assert 10_800 <= found["detail"]["oldest_seconds"] < 10_900
    assert found["title"].startswith("3 effects are unknown, the oldest for 3 h:")
    assert "outboxq effects list --status unknown" in found["advice"]
    assert "an HTTP request: look at the rows" in found["advice"]
    assert named(url, "effects-abandoned") == []


def test_calls_that_nobody_came_back_for_are_counted(outboxq_database: Database) -> None:
    """Started or left in doubt, with a lock that ran out over an hour ago."""
    url = outboxq_database.url
    execute(
        url,
        add("started", ago="59 minutes"),
        add("started", ago="-1 hour"),
        add("retryable", expires="now() + interval '1 day'"),
    )
    assert named(url, "effects-abandoned") == []
    execute(url, add("started", ago="61 minutes"))
    assert only(url, "effects-abandoned")["title"].startswith("1 effect was started, and nobody came back to finish")
    execute(url, add("retryable", in_doubt=True))
    found = only(url, "effects-abandoned")
    assert (found["severity"], found["detail"]["effects"]) == ("warning", 2)
    assert 7_200 <= found["detail"]["oldest_seconds"] < 7_300


def test_what_is_not_counted_to_the_end_says_so(outboxq_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The looks at the unknown and at the abandoned stop at a bound."""
    url = outboxq_database.url
    execute(url, add("unknown", number=3), add("started", number=3))
    monkeypatch.setattr(effects, "MAX_EFFECTS", 2)
    assert only(url, "effects-abandoned")["title"].startswith("2 or more effects were started")
    found = only(url, "effects-unknown")
    assert found["detail"]["effects"] == 2
    assert found["title"].startswith("2 or more effects are unknown")
