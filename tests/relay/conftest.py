"""The state of one slot alone, and the dispatchers and the gate of tests of calls."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from sqlalchemy import Engine

from outboxq.relay.dispatcher import Dispatcher
from outboxq.relay.state import RelayState
from tests.support.calls import Gate, note_dispatchers
from tests.support.slots import relay_state


@pytest.fixture
def make_state(engine: Engine) -> Iterator[Callable[..., RelayState]]:
    """A function that makes the state that the slots of some queues share; closed at the end of the test."""
    with ExitStack() as stack:

        def make(*queues: str, **settings: object) -> RelayState:
            state = relay_state(engine, queues, **settings)
            stack.callback(state.effect_runners.dispose, lambda _: None)
            return state

        yield make


@pytest.fixture
def gate() -> Iterator[Gate]:
    """What handlers wait for, until the test opens it, or ends."""
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Dispatcher]:
    """The dispatchers of the test's relays."""
    return note_dispatchers(monkeypatch)
