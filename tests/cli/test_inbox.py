"""`outboxq inbox`: looking at the messages that were accepted, and forgetting them."""

from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession
from outboxq.inbox import Inbox
from outboxq.postgres import Database
from tests.support.cli import call, run

payments, mail = Inbox("payments"), Inbox("mail")


@pytest.fixture
def messages(sessions: sessionmaker[OutboxSession]) -> None:
    """Three accepted messages of one consumer, and one of another with an id of the first's."""
    with sessions.begin() as session:
        payments.accept(session, "evt_1", payload={"card": "hunter2"})
        payments.accept(session, "evt_2")
        payments.accept(session, "evt_3")
        mail.accept(session, "evt_1")


def accepts(sessions: sessionmaker[OutboxSession], inbox: Inbox, message_id: str) -> bool:
    with sessions() as session:
        return inbox.accept(session, message_id)


def listed(*options: object, url: str) -> list[tuple[str, str]]:
    found = call("inbox", "list", "--json", *options, url=url).ok().json["messages"]
    return [(row["consumer"], row["message_id"]) for row in found]


@pytest.mark.wide
@pytest.mark.usefixtures("messages")
def test_the_list_has_the_latest_first(outboxq_database: Database, engine: Engine) -> None:
    """By consumer and by time, in UTC."""
    url = outboxq_database.url
    assert listed("--consumer", "payments", url=url) == [("payments", f"evt_{number}") for number in (3, 2, 1)]
    assert listed("--consumer", "mail", url=url) == [("mail", "evt_1")]
    assert listed("--consumer", "pay", url=url) == []
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE outboxq.inbox SET seen_at = '2026-01-31 08:00:00+00' WHERE message_id <> 'evt_2'")
        )
        connection.execute(
            text("UPDATE outboxq.inbox SET seen_at = '2026-01-31 07:59:59+00' WHERE message_id = 'evt_1'")
        )
    consumer = ("--consumer", "payments")
    assert listed(*consumer, "--since", "2026-01-31T08:00:00", url=url) == [
        ("payments", "evt_3"),
        ("payments", "evt_2"),
    ]
    assert len(listed(*consumer, "--since", "2026-01-31", url=url)) == 3
    far_east = run("inbox", "list", "--since", "2026-01-31T08:00:00", "--json", url=url, env={"TZ": "Asia/Tokyo"}).ok()
    assert len(far_east.json["messages"]) == 2
    said = run("inbox", "list", url=url).ok().stdout
    assert "2026-01-31T07:59:59Z" in said
    assert "hunter2" not in said


@pytest.mark.usefixtures("messages")
def test_a_time_is_taken_as_it_was_printed(outboxq_database: Database) -> None:
    """What --json prints, and any other ISO 8601, finds the message that it was printed for, and none before it."""
    url = outboxq_database.url
    said = call("inbox", "list", "--json", url=url).ok().json["messages"]
    (second,) = [row["seen_at"] for row in said if row["message_id"] == "evt_2"]
    assert second.endswith("Z")
    in_kathmandu = datetime.fromisoformat(second).astimezone(timezone(timedelta(hours=5, minutes=45)))
    for moment in (second, second.replace("Z", "+00:00"), in_kathmandu.isoformat()):
        found = listed("--consumer", "payments", "--since", moment, url=url)
        assert found == [("payments", "evt_3"), ("payments", "evt_2")]
    assert listed("--consumer", "payments", "--since", "30d", url=url)
    assert len(listed("--consumer", "payments", "--since", "9999d", url=url)) == 3
    refused = call("inbox", "list", "--since", "yesterday", url=url)
    assert (refused.exit_code, "'yesterday' is no time" in refused.stderr) == (2, True)


@pytest.mark.usefixtures("messages")
def test_the_keys_stay(outboxq_database: Database) -> None:
    """Programs rely on these keys, and learn that there are more than were asked for."""
    url = outboxq_database.url
    said = call("inbox", "list", "--limit", 1, "--json", url=url).ok().json
    assert said["more"] is True
    keys = ["consumer", "message_id", "fingerprint", "seen_at", "expires_at"]
    assert list(said["messages"][0]) == keys
    assert list(call("inbox", "show", "payments", "evt_1", "--json", url=url).ok().json) == keys
    assert "more than these 1" in call("inbox", "list", "--limit", 1, url=url).ok().stderr


@pytest.mark.usefixtures("messages")
def test_show_has_one_message(outboxq_database: Database) -> None:
    """With the fingerprint of its content, where it has one; what is not there ends with 1."""
    url = outboxq_database.url
    found = call("inbox", "show", "payments", "evt_1", "--json", url=url).ok().json
    assert len(found["fingerprint"]) == 64
    assert found["fingerprint"] in run("inbox", "show", "payments", "evt_1", url=url).ok().stdout
    assert call("inbox", "show", "mail", "evt_1", "--json", url=url).ok().json["fingerprint"] is None
    missing = call("inbox", "show", "mail", "evt_2", url=url)
    assert missing.exit_code == 1
    assert missing.stderr.startswith("Error: consumer 'mail' has no message 'evt_2'")


@pytest.mark.usefixtures("messages")
def test_a_forgotten_message_is_accepted_again(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession]
) -> None:
    """Of its consumer alone, and the command says what it means."""
    url = outboxq_database.url
    assert not accepts(sessions, payments, "evt_1")
    said = run("inbox", "forget", "payments", "evt_1", "evt_2", url=url).ok()
    assert said.stdout == "forgot 2 messages: accepted again when delivered again\n"
    assert accepts(sessions, payments, "evt_1")
    assert not accepts(sessions, payments, "evt_3")
    assert not accepts(sessions, mail, "evt_1")


@pytest.mark.usefixtures("messages")
def test_what_could_not_be_forgotten_ends_with_1(
    outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """A message that is not there, and one that another transaction holds: named, and not waited for."""
    url = outboxq_database.url
    with engine.connect() as holder:
        holder.execute(text("SELECT FROM outboxq.inbox WHERE message_id = 'evt_1' FOR UPDATE"))
        said = call("inbox", "forget", "payments", "evt_1", "evt_2", "evt_9", "--json", url=url)
        assert said.exit_code == 1
        assert said.json == {"forgotten": ["evt_2"], "held": ["evt_1"], "not_found": ["evt_9"]}
        assert "no message 'evt_9' of consumer 'payments'" in said.stderr
        assert "another transaction holds it: 'evt_1'" in said.stderr
    nothing = call("inbox", "forget", "payments", "evt_9", url=url)
    assert (nothing.exit_code, nothing.stdout) == (1, "forgot nothing\n")


@pytest.mark.usefixtures("messages")
def test_an_id_that_cannot_be_forgets_nothing(outboxq_database: Database) -> None:
    """One wrong id among right ones is an error before anything is deleted."""
    said = call("inbox", "forget", "payments", "evt_1", "x" * 513, url=outboxq_database.url)
    assert said.exit_code == 2
    assert "1 to 512 bytes, got 513" in said.stderr
    call("inbox", "show", "payments", "evt_1", url=outboxq_database.url).ok()
    assert call("inbox", "forget", "payments", url=outboxq_database.url).exit_code == 2
