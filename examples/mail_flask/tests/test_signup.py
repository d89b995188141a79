"""Sign-ups, relays and a real mail server: one mail for each user, whatever is killed, or a person who decides."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from sqlalchemy import Engine, text

from outboxq import CallNotApplied, CallRefused, Relay, RelayConfig
from outboxq.fault_points import EffectFaultPoint
from outboxq.postgres import Database
from outboxq.testing import RelayProcess
from signup.jobs import SENDER, jobs
from signup.mail import Mailer
from signup.mailbox import Mailbox, serve

PROJECT = Path(__file__).parents[1]
LIMIT_SECONDS = 60
# What died is taken over soon: a second after the relay's last sign of life, half a second after the call's.
QUICK = RelayConfig(lease_seconds=1, effect_lease_seconds=0.5, poll_seconds=0.1)
ADA = {"name": "Ada", "email": "ada@example.org"}


def test_a_sign_up_sends_one_mail(
    client: FlaskClient, outboxq_database: Database, engine: Engine, mailbox: Mailbox
) -> None:
    """The answer comes before the mail; the relay sends it, with the Message-ID that the effect's key gives."""
    answer = client.post("/users", json=ADA)
    assert (answer.status_code, answer.json) == (201, {"id": 1, "name": "Ada", "is_welcomed": False})
    assert mailbox.mails == []

    with relay_at_work(outboxq_database.url):
        ended(engine)

    assert [mail.to for mail in mailbox.mails] == ["ada@example.org"]
    assert mailbox.mails[0].message_id == message_id(engine)
    assert client.get("/users/1").json == {"id": 1, "name": "Ada", "is_welcomed": True}


def test_a_sign_up_that_fails_sends_none(
    client: FlaskClient, outboxq_database: Database, engine: Engine, mailbox: Mailbox
) -> None:
    """An address that has signed up before is 409, and leaves no second user, job or mail."""
    assert client.post("/users", json=ADA).status_code == 201
    assert client.post("/users", json=ADA).status_code == 409
    assert client.post("/users", json={"name": "Ada"}).status_code == 422
    with relay_at_work(outboxq_database.url):
        ended(engine)

    assert len(mailbox.mails) == 1
    assert count(engine, 'SELECT count(*) FROM "user"') == 1


def test_a_mail_server_that_says_not_now_is_asked_again(
    client: FlaskClient, outboxq_database: Database, engine: Engine, mailbox: Mailbox
) -> None:
    """It has not taken the mail, and says so: the next attempt sends it, and it has come once."""
    mailbox.busy = 1
    client.post("/users", json=ADA)
    with relay_at_work(outboxq_database.url):
        ended(engine)

    assert len(mailbox.mails) == 1
    assert client.get("/users/1").json == {"id": 1, "name": "Ada", "is_welcomed": True}


def test_a_recipient_who_is_unknown_is_tried_once(
    client: FlaskClient, outboxq_database: Database, engine: Engine, mailbox: Mailbox
) -> None:
    """The refusal is final: the job is a dead letter after one attempt, and the user stays unwelcomed."""
    mailbox.unknown_recipients = ("ada@example.org",)
    client.post("/users", json=ADA)
    with relay_at_work(outboxq_database.url):
        ended(engine)

    assert count(engine, "SELECT attempt FROM outboxq.dead_job") == 1
    assert effects(engine) == ["failed"]
    assert client.get("/users/1").json == {"id": 1, "name": "Ada", "is_welcomed": False}


@pytest.mark.parametrize(
    ("kill_at", "mails", "status"),
    [
        pytest.param("before-call", 0, "unknown", id="before-call"),
        pytest.param("after-call", 1, "unknown", id="after-call"),
        pytest.param("after-record", 1, "done", id="after-record"),
    ],
)
def test_a_relay_that_is_killed_sends_no_second_mail(
    client: FlaskClient,
    outboxq_database: Database,
    engine: Engine,
    mailbox: Mailbox,
    kill_at: EffectFaultPoint,
    mails: int,
    status: str,
) -> None:
    """Before the result is recorded it is not known whether the mail was sent, and it is not sent again."""
    client.post("/users", json=ADA)
    kill_a_relay(outboxq_database.url, kill_at)
    with relay_at_work(outboxq_database.url):
        ended(engine)

    assert len(mailbox.mails) == mails
    assert effects(engine) == [status]
    is_known = status == "done"
    assert client.get("/users/1").json == {"id": 1, "name": "Ada", "is_welcomed": is_known}
    reason = "SELECT count(*) FROM outboxq.dead_job WHERE reason LIKE 'it is not known whether the mail was sent%'"
    assert count(engine, reason) == (0 if is_known else 1)


@pytest.mark.parametrize("kill_at", ["before-call", "after-call"])
def test_a_person_s_look_into_the_mail_log_settles_it(
    client: FlaskClient, outboxq_database: Database, engine: Engine, mailbox: Mailbox, kill_at: EffectFaultPoint
) -> None:
    """The Message-ID is in the log: resolved as applied, and no second mail. It is not: the mail is sent, once."""
    client.post("/users", json=ADA)
    kill_a_relay(outboxq_database.url, kill_at)
    with relay_at_work(outboxq_database.url):
        ended(engine)

    was_sent = message_id(engine) in [mail.message_id for mail in mailbox.mails]
    assert was_sent == (kill_at == "after-call")
    answer = ["--applied", "--result", "null"] if was_sent else ["--not-applied"]
    outboxq(outboxq_database, "effects", "resolve", "welcome-mail", "user-1", *answer)
    outboxq(outboxq_database, "dead", "retry", "--queue", "mail")
    with relay_at_work(outboxq_database.url):
        ended(engine)

    assert [mail.message_id for mail in mailbox.mails] == [message_id(engine)]
    assert client.get("/users/1").json == {"id": 1, "name": "Ada", "is_welcomed": True}


def test_an_answer_that_is_lost_is_not_taken_for_a_no(
    client: FlaskClient, outboxq_database: Database, engine: Engine, mailbox: Mailbox
) -> None:
    """The server has taken the mail, and hung up: the effect is unknown, and the mail is not sent again."""
    mailbox.lose_answers = 1
    client.post("/users", json=ADA)
    with relay_at_work(outboxq_database.url):
        ended(engine)

    assert len(mailbox.mails) == 1
    assert effects(engine) == ["unknown"]


def test_the_mailer_says_what_is_known_of_the_mail() -> None:
    """Not taken, refused or a guess: each failure is told apart."""
    mailbox = Mailbox(unknown_recipients=("nemo@example.org",), busy=1)
    with serve(mailbox) as address:
        mailer = Mailer(address, SENDER)
        with pytest.raises(CallNotApplied, match="451"):
            mailer.send("ada@example.org", "Welcome", "Dear Ada", "key")
        with pytest.raises(CallRefused, match="550"):
            mailer.send("nemo@example.org", "Welcome", "Dear Nemo", "key")
        mailbox.lose_answers = 1
        with pytest.raises(OSError):
            mailer.send("ada@example.org", "Welcome", "Dear Ada", "key")
        mailer.send("ada@example.org", "Welcome", "Dear Ada", "key")
    with pytest.raises(CallNotApplied, match="ConnectionRefused"):
        mailer.send("ada@example.org", "Welcome", "Dear Ada", "key")

    assert [mail.message_id for mail in mailbox.mails] == ["<key@example.org>"] * 2


def kill_a_relay(url: str, kill_at: EffectFaultPoint) -> None:
    """A relay that kills itself at a step of the call."""
    with RelayProcess("signup.jobs:jobs", url, QUICK, kill_at=kill_at) as relay:
        assert relay.wait(LIMIT_SECONDS) == -signal.SIGKILL, relay.log


@contextmanager
def relay_at_work(url: str) -> Iterator[None]:
    """A relay in a thread, within the block."""
    relay = Relay(url, jobs, QUICK)
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        yield
    finally:
        relay.stop()
        thread.join(LIMIT_SECONDS)
    assert not thread.is_alive(), "the relay did not stop"


def ended(engine: Engine) -> None:
    """Wait until no job is left."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while count(engine, "SELECT count(*) FROM outboxq.job"):
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def message_id(engine: Engine) -> str:
    """The Message-ID of the only mail there can be, by the key that its effect has."""
    with engine.connect() as connection:
        key = connection.execute(text("SELECT provider_key FROM outboxq.effect")).scalar_one()
    return f"<{key}@example.org>"


def effects(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(text("SELECT status FROM outboxq.effect")))


def count(engine: Engine, statement: str) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text(statement)).scalar_one())


def outboxq(database: Database, *words: str) -> None:
    """Run a command as an operator does."""
    command = [sys.executable, "-m", "outboxq", *words, "--database-url", database.url]
    subprocess.run(command, cwd=PROJECT, check=True, timeout=LIMIT_SECONDS)  # noqa: S603  # our own command lines
