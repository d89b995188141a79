"""What slots share, for tests of one slot alone."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from sqlalchemy import Engine

from outboxq.relay.state import RelayState
from tests.support.slots import relay_state


@pytest.fixture
def make_state(engine: Engine) -> Iterator[Callable[..., RelayState]]:
    """Makes what the slots of some queues of the application share; closed at the end of the test."""
    with ExitStack() as stack:

        def make(*queues: str, **settings: object) -> RelayState:
            state = relay_state(engine, queues, **settings)
            stack.callback(state.effect_runners.dispose, lambda _: None)
            return state

        yield make
