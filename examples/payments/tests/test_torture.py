"""The shop under faults: relays are killed at every step of a call, then the charges are counted.

A call can die before it, during it (the provider has charged and holds its reply back), after it but before its result
is recorded, and after that. The first three cannot be told apart from what is left in the database: they are the
*window*.
"""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest
from sqlalchemy.orm import sessionmaker

from outboxq import JobKind, OutboxSession, RelayConfig, SlotGroup
from outboxq.fault_points import EFFECT_FAULT_POINTS, EffectFaultPoint
from outboxq.postgres import Database
from outboxq.testing import RelayProcess
from payments.jobs import charge, charge_or_ask, charge_or_give_up
from payments.shop import place_order
from payments.testing import LIMIT_SECONDS, Books, Till, wait_until

ROUNDS = 2
# Each relay charges a few orders before the step at which it dies.
PASSING = 3
HELD = 4
ORDERS = 36
KILLED_IN_WINDOW = ROUNDS * (2 + HELD)

TARGET = "payments.jobs:jobs"


@dataclass(frozen=True)
class Scene:
    """One kind of provider, and relays that are killed while they call it."""

    url: str
    queue: str
    till: Till
    books: Books

    def config(self, slots: int = 1) -> RelayConfig:
        """Leases that do not run out by themselves: when a dead relay's work is taken over, the test decides."""
        return RelayConfig(
            groups=(SlotGroup((self.queue,), slots),),
            lease_seconds=120,
            heartbeat_seconds=0.2,
            effect_lease_seconds=120,
            poll_seconds=0.1,
            max_crashes=20,
        )

    def kill_at_every_step(self) -> None:
        """Kill a relay with one slot at each step, and one in the middle of several calls."""
        with ExitStack() as stack:
            for step in EFFECT_FAULT_POINTS:
                stack.enter_context(self.relay_that_dies(step))
        self.kill_during_calls()

    @contextmanager
    def relay_that_dies(self, step: EffectFaultPoint) -> Iterator[None]:
        """A relay that has killed itself at a step by the end of the block."""
        with RelayProcess(TARGET, self.url, self.config(), kill_at=step, passing=PASSING) as relay:
            yield
            assert relay.wait(LIMIT_SECONDS) == -signal.SIGKILL, f"it did not come to {step}: {relay.log}"

    def kill_during_calls(self) -> None:
        """Kill a relay while the provider has charged, and holds every reply back."""
        self.till.behave(hold_replies=HELD)
        with RelayProcess(TARGET, self.url, self.config(HELD)) as relay:
            wait_until(lambda: self.till.counts()["holding"] == HELD, "calls that the provider holds")
            relay.kill()
        self.till.behave(hold_replies=0)

    def let_leases_run_out(self) -> None:
        """Whatever died may be taken over now."""
        self.books.run("UPDATE outboxq.relay SET alive_until = clock_timestamp()")
        self.books.run("UPDATE outboxq.effect SET locked_until = clock_timestamp() WHERE status = 'started'")

    def finish(self) -> None:
        """Let relays that are not killed do all that is left."""
        self.let_leases_run_out()
        with RelayProcess(TARGET, self.url, self.config(4)), RelayProcess(TARGET, self.url, self.config(4)):
            wait_until(lambda: self.books.jobs() == 0, "the end of all jobs")


@pytest.fixture
def scene(
    request: pytest.FixtureRequest,
    outboxq_database: Database,
    sessions: sessionmaker[OutboxSession],
    till: Till,
    books: Books,
) -> Scene:
    """Orders that wait to be charged by the handler that the test names."""
    handler: JobKind[[int, int]] = request.param
    for number in range(ORDERS):
        with sessions.begin() as session:
            place_order(session, 100 + number, handler)
    return Scene(outboxq_database.url, handler.queue, till, books)


@pytest.mark.parametrize("scene", [charge], indirect=True)
def test_a_provider_that_honours_keys_charges_every_order_once(scene: Scene) -> None:
    """Killed at every step, and again while taking over: one charge for each order, and every order is paid."""
    for _ in range(ROUNDS):
        scene.kill_at_every_step()
        # From here on the next relays find what the earlier ones left, and are killed over it.
        scene.let_leases_run_out()
    scene.finish()

    orders = scene.books.orders()
    assert scene.till.charges_per_order() == dict.fromkeys(orders, 1)
    assert scene.till.counts()["calls"] > ORDERS, "nothing was called again, so nothing was at stake"
    assert set(scene.books.statuses()) == {"paid"}
    assert scene.books.effects("done") == ORDERS


@pytest.mark.parametrize("scene", [charge_or_ask], indirect=True)
def test_a_provider_that_can_be_asked_charges_every_order_once(scene: Scene) -> None:
    """It ignores keys: only the look-up stands between a call that died and a second charge."""
    scene.till.behave(honours_keys=False)
    for _ in range(ROUNDS):
        scene.kill_at_every_step()
        scene.let_leases_run_out()
    scene.finish()

    orders = scene.books.orders()
    assert scene.till.charges_per_order() == dict.fromkeys(orders, 1)
    assert set(scene.books.statuses()) == {"paid"}
    assert scene.books.effects("done") == ORDERS


@pytest.mark.parametrize("scene", [charge_or_give_up], indirect=True)
def test_what_cannot_be_known_is_counted_and_never_called_again(scene: Scene) -> None:
    """It ignores keys and cannot be asked: as many effects are unknown as calls were killed in the window."""
    scene.till.behave(honours_keys=False, answers_lookups=False)
    for _ in range(ROUNDS):
        scene.kill_at_every_step()
    scene.finish()

    # Of those killed before the call nothing was charged; only this test can know.
    assert scene.books.effects("unknown") == KILLED_IN_WINDOW
    assert scene.till.counts()["charges"] == ORDERS - ROUNDS
    assert max(scene.till.charges_per_order().values()) == 1
    assert scene.books.effects("done") == ORDERS - KILLED_IN_WINDOW
    assert scene.books.statuses().count("paid") == ORDERS - KILLED_IN_WINDOW
    assert scene.books.statuses().count("placed") == KILLED_IN_WINDOW
    assert scene.books.count("SELECT count(*) FROM outboxq.dead_job") == KILLED_IN_WINDOW
