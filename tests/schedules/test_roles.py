"""What the roles of `outboxq roles` may do with schedules."""

import threading
from datetime import timedelta

import pytest
from sqlalchemy import Engine

from outboxq import Context, Jobs, Relay, RelayConfig, schedules
from outboxq.errors import ConfigError
from outboxq.statements.render import quote_identifier
from tests.admin.test_roles import Cast, role_engine
from tests.admin.test_roles import roles as roles
from tests.conftest import StartRelay
from tests.support.scheduled import due_since, put
from tests.support.waiting import wait_until


def every_minute(ran: threading.Event) -> Jobs:
    jobs = Jobs()

    @jobs.schedule("* * * * *")
    @jobs.handler(queue="ticks")
    def tick(ctx: Context) -> None:
        ran.set()

    return jobs


def test_a_relay_declares_and_fires(roles: Cast, engine: Engine, start_relay: StartRelay) -> None:
    """With what `outboxq roles` gives it, and no more."""
    ran = threading.Event()
    with start_relay(every_minute(ran), RelayConfig(heartbeat_seconds=0.1), engine=roles.url("relay")):
        wait_until(lambda: names(engine), "the schedule")
        due_since(engine, "tick", timedelta(0))
        assert ran.wait(60)


def test_an_operator_changes_schedules(roles: Cast, engine: Engine) -> None:
    """A reader lists them; a producer and a receiver do nothing with them."""
    put(engine)
    with role_engine(roles.url("operator")) as operator:
        put(operator, "mine")
        with operator.begin() as connection:
            schedules.pause(connection, "mine")
            schedules.resume(connection, "mine")
            schedules.run_now(connection, "mine")
            schedules.remove(connection, "mine")
    assert roles.call("reader", "schedules", "show", "tick", "--json").json["name"] == "tick"
    for part in ("producer", "receiver", "reader"):
        roles.refuses(part, "UPDATE outboxq.schedule SET paused_at = now()", "DELETE FROM outboxq.schedule")


def test_a_relay_that_may_not_declare_says_what_to_run(roles: Cast, engine: Engine) -> None:
    """It does not start: its schedules would not be there."""
    with engine.begin() as connection:
        connection.exec_driver_sql(f"REVOKE INSERT ON outboxq.schedule FROM {quote_identifier(roles.groups['relay'])}")
    with pytest.raises(ConfigError, match="outboxq roles --sql"):
        Relay(roles.url("relay"), every_minute(threading.Event())).drain()


def names(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return [found.name for found in schedules.list_schedules(connection)]
