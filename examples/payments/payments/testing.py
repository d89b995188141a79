"""How tests look at the provider and at the shop, and run a relay."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

from outboxq import Relay, RelayConfig

from .jobs import jobs
from .models import Order

LIMIT_SECONDS = 60
# What died is taken over soon: a second after the relay's last sign of life, half a second after the call's.
QUICK = RelayConfig(lease_seconds=1, effect_lease_seconds=0.5, poll_seconds=0.1)


@dataclass(frozen=True)
class Till:
    """The provider as the test sees it, over HTTP."""

    address: str
    http: httpx.Client

    def behave(self, **changes: object) -> None:
        """Change how it behaves."""
        self.http.post("/admin", json=changes).raise_for_status()

    def counts(self) -> dict[str, Any]:
        """What happened so far."""
        counts: dict[str, Any] = self.http.get("/counts").json()
        return counts

    def charges_per_order(self) -> dict[int, int]:
        """How many charges each order has cost its customer."""
        return {int(order): charges for order, charges in self.counts()["charges_per_order"].items()}


@dataclass(frozen=True)
class Books:
    """The shop's database as the test sees it."""

    engine: Engine

    def orders(self) -> dict[int, tuple[str, str | None]]:
        """Each order's status and charge."""
        with Session(self.engine) as session:
            return {order.id: (order.status, order.charge_id) for order in session.scalars(select(Order))}

    def statuses(self) -> list[str]:
        """The orders' statuses, in the order in which they were placed."""
        return [status for _, (status, _) in sorted(self.orders().items())]

    def jobs(self) -> int:
        """How many jobs wait or run."""
        return self.count("SELECT count(*) FROM outboxq.job")

    def effects(self, status: str) -> int:
        """How many effects have a status."""
        return self.count("SELECT count(*) FROM outboxq.effect WHERE status = :status", status=status)

    def count(self, statement: str, **values: object) -> int:
        """The number that a query finds."""
        with self.engine.connect() as connection:
            return int(connection.execute(text(statement), values).scalar_one())

    def run(self, statement: str) -> None:
        """Run a statement of the test's own."""
        with self.engine.begin() as connection:
            connection.execute(text(statement))


def wait_until(reached: Callable[[], object], what: str) -> None:
    """Look again until it is so; `what` says what was waited for."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not reached():
        assert time.monotonic() < deadline, f"waited {LIMIT_SECONDS} s in vain for: {what}"
        time.sleep(0.02)


@contextmanager
def relay_at_work(url: str, config: RelayConfig = QUICK) -> Iterator[None]:
    """A relay in a thread, within the block."""
    relay = Relay(url, jobs, config)
    thread = threading.Thread(target=relay.run)
    thread.start()
    try:
        yield
    finally:
        relay.stop()
        thread.join(LIMIT_SECONDS)
    assert not thread.is_alive(), "the relay did not stop"
