"""Fixtures of our own tests, on top of the ones that the package ships."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import sessionmaker

from outboxq import Jobs, OutboxSession, Relay, RelayConfig
from outboxq.events import Event
from outboxq.postgres import Database
from outboxq.relay.limits import RelayLimits
from tests.support import app
from tests.support.ledger import of
from tests.support.limits import many_at_once, with_limits


@pytest.fixture
def engine(outboxq_database: Database) -> Iterator[Engine]:
    """An engine on this test's own database, which has outboxq's tables."""
    # Without a look for the type hstore, which is half the time of an engine's first connection.
    engine = create_engine(outboxq_database.url, use_native_hstore=False)
    yield engine
    engine.dispose()


@pytest.fixture
def sessions(engine: Engine) -> sessionmaker[OutboxSession]:
    """Makes sessions with `add_job`."""
    return sessionmaker(engine, class_=OutboxSession)


@pytest.fixture(scope="session")
def outboxq_prepare() -> Callable[[str], None]:
    """Every test's database has outboxq's tables and those of `tests/support/app.py`."""
    return app.prepare


class RunningRelay:
    """A relay in a thread, with the events that it sent."""

    def __init__(self, relay: Relay, events: list[Event]) -> None:
        self.relay = relay
        self.events = events

    def of(self, kind: type[Event]) -> list[Event]:
        return of(self.events, kind)


StartRelay = Callable[..., AbstractContextManager[RunningRelay]]


@pytest.fixture
def relay_limits(request: pytest.FixtureRequest) -> RelayLimits:
    """The limits of this test's relays: users' own, or those of its mark `relay_limits`."""
    mark = request.node.get_closest_marker("relay_limits")
    return RelayLimits() if mark is None else mark.args[0]


@pytest.fixture
def start_relay(outboxq_database: Database, relay_limits: RelayLimits) -> StartRelay:
    """Runs a relay in a thread for the length of a `with` block; its error, if any, is raised at the end."""

    @contextmanager
    def start(jobs: Jobs = app.jobs, config: RelayConfig | None = None, **arguments: object) -> Iterator[RunningRelay]:
        events: list[Event] = []
        limits = arguments.pop("limits", relay_limits)
        engine, config = arguments.pop("engine", outboxq_database.url), many_at_once(jobs, config)
        relay = Relay(engine, jobs, config, hooks=[events.append], **arguments)
        with_limits(relay, limits)
        errors: list[BaseException] = []

        def run() -> None:
            try:
                relay.run()
            except BaseException as error:  # noqa: BLE001  # raised again at the end of the test
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield RunningRelay(relay, events)
        finally:
            relay.stop()
            thread.join(60)
        assert not thread.is_alive(), "the relay did not stop"
        if errors:
            raise errors[0]

    return start


@pytest.fixture
def drain(outboxq_database: Database, relay_limits: RelayLimits) -> Callable[..., list[Event]]:
    """Drains the test's database with the application's handlers; the events.

    Every slot and every agent opens a connection, so there is one slot of each queue, and nothing is pruned or added to
    the history, unless a test asks for it.
    """

    def run(jobs: Jobs = app.jobs, limits: RelayLimits = relay_limits, **settings: object) -> list[Event]:
        events: list[Event] = []
        config = RelayConfig(**{"slots_per_queue": 1, "prune_seconds": 0, "stats_seconds": 0, **settings})
        relay = Relay(outboxq_database.url, jobs, many_at_once(jobs, config), hooks=[events.append])
        with_limits(relay, limits).drain()
        return events

    return run
