"""A relay on a Citus coordinator: it starts only if its commits are in two phases."""

import logging
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, text

from outboxq.database.errors import describe_refusal
from outboxq.errors import ConfigError
from outboxq.events import Event
from outboxq.postgres import Database
from tests.conftest import StartRelay
from tests.support.citus import distribute, stand_in
from tests.support.cli import call
from tests.support.doctor import execute
from tests.support.waiting import wait_until

Drain = Callable[..., list[Event]]


@pytest.mark.large
def test_a_relay_without_the_guard_does_not_start(outboxq_database: Database, drain: Drain) -> None:
    """Beside distributed tables it would lose jobs: the error says so, and what to do; or it is allowed by name."""
    url = outboxq_database.url
    stand_in(url)
    drain()
    distribute(url)
    with pytest.raises(ConfigError, match=r"outboxq migrate.*allow_one_phase=True"):
        drain()
    refused = call("relay", "tests.support.app:jobs", "--drain", url=url)
    assert refused.exit_code == 2
    assert "--allow-one-phase" in refused.stderr
    call("relay", "tests.support.app:jobs", "--drain", "--allow-one-phase", url=url).ok()
    call("migrate", url=url).ok()
    drain()


def test_a_guard_that_is_not_whole_does_not_count(outboxq_database: Database, drain: Drain) -> None:
    """A trigger that an operator disabled is missing."""
    stand_in(outboxq_database.url)
    distribute(outboxq_database.url)
    call("migrate", url=outboxq_database.url).ok()
    execute(outboxq_database.url, "ALTER TABLE outboxq.effect DISABLE TRIGGER use_two_phase")
    with pytest.raises(ConfigError, match=r"\(effect\)"):
        drain()


def test_what_the_server_does_not_support_is_logged_in_its_words(
    outboxq_database: Database, start_relay: StartRelay, caplog: pytest.LogCaptureFixture
) -> None:
    """0A000 alone says nothing of what is wrong."""
    caplog.set_level(logging.WARNING, "outboxq.relay")
    execute(
        outboxq_database.url,
        "CREATE RULE away AS ON DELETE TO outboxq.job DO INSTEAD NOTHING",
        "SELECT outboxq.add_job('of_nobody', queue => 'ledger')",
    )
    with start_relay():
        wait_until(lambda: "the relay's statements fail" in caplog.text, "a claim to be refused")
    assert "(0A000): cannot perform DELETE RETURNING" in caplog.text


def test_what_a_function_of_users_raises_is_not_repeated(engine: Engine) -> None:
    """Its text may hold a value."""
    raising = text("DO $$ BEGIN RAISE feature_not_supported USING MESSAGE = 'secret'; END $$")
    with engine.connect() as connection, pytest.raises(Exception, match="secret") as raised:
        connection.execute(raising)
    assert describe_refusal(raised.value) == "FeatureNotSupported (0A000)"
