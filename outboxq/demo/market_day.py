"""A running market for a dashboard to show: customers, and two relays, one of which is killed and replaced."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession
from outboxq.config import RelayConfig
from outboxq.demo.customers import CUSTOMERS, PRODUCTS, CardDeclined, PlannedOrder, place_order, plan_orders
from outboxq.demo.market import charge_card, import_price, make_report
from outboxq.demo.story import check_runs, described, prepared, wait_until_it_serves
from outboxq.postgres import start_embedded
from outboxq.testing.relay_process import RelayProcess

RELAYS = 2
KILL_SECONDS = 45.0
_TARGET = "outboxq.demo.market:jobs"
_SLOTS_PER_QUEUE = 2
_SUPPLIERS = ("Ada & Sons", "Lovelace Ltd", "Hopper Imports")
# Products that the shop does not know yet: inserting a row into shop.product solves it.
NEW_PRODUCTS = ("golden kettle", "golden teapot", "silver spoon")
_MONTHS = ("2026-01", "2026-02", "2026-03")
# An order every quarter of a second, a price list every second, a report every minute.
_ORDER_SECONDS, _ORDERS_PER_LIST, _ORDERS_PER_REPORT = 0.25, 4, 240
_STOP_SECONDS = 15.0


class Market:
    """A market of the demo: a shop's database and relays, with methods to start and kill relays and to place orders.

    Attributes:
        url: The address of the database.
        engine: An engine for the database.
        relays: The living relays, in the order of their starts.
    """

    def __init__(self, url: str, engine: Engine, say: Callable[[str], None], stack: ExitStack) -> None:
        self.url, self.engine = url, engine
        self.relays: list[RelayProcess] = []
        self._say, self._stack = say, stack
        self._sessions = sessionmaker(engine, class_=OutboxSession)
        self._started = 0
        self._dice = random.Random()

    def start_relay(self) -> RelayProcess:
        """Start a relay for all queues, without waiting until it runs jobs."""
        self._started += 1
        config = RelayConfig(slots_per_queue=_SLOTS_PER_QUEUE)
        relay = RelayProcess(_TARGET, self.url, config, name=f"relay {self._started}")
        self._stack.callback(relay.close)
        self.relays.append(relay)
        return relay

    def kill_relay(self) -> RelayProcess:
        """Kill the relay that was started last, with SIGKILL."""
        relay = self.relays.pop()
        relay.kill()
        self._say(f"{relay.name} (pid {relay.pid}) was killed with SIGKILL: look at the relays and at what it ran.")
        return relay

    def trade(self, order: PlannedOrder, number: int) -> None:
        """Place an order, and add the job that charges its card; every few orders add jobs for a price or a report.

        `number`: the order's number, which decides if such jobs are added.
        """
        try:
            place_order(self._sessions, CUSTOMERS[number % len(CUSTOMERS)], order)
        except CardDeclined:
            return
        with self._sessions.begin() as session:
            session.add_job(charge_card, order_id=number)
            if number % _ORDERS_PER_LIST == 0:
                sku, price = self._dice.choice((*PRODUCTS, *NEW_PRODUCTS)), self._dice.randint(1, 99)
                session.add_job(import_price, supplier=self._dice.choice(_SUPPLIERS), sku=sku, price=price)
            if number % _ORDERS_PER_REPORT == 0:
                session.add_job(make_report, month=self._dice.choice(_MONTHS))


@contextmanager
def open_market(say: Callable[[str], None]) -> Iterator[Market]:
    """Run the block with a market on a PostgreSQL server of its own, with two relays; then delete the server.

    Raises:
        DemoFailed: a relay did not start.
        PostgresUnavailable: the embedded server does not run here.
    """
    with start_embedded(durable=True) as server, prepared(server) as (url, engine), ExitStack() as stack:
        say(f"Server: {described(server)}, started for this run alone (pid {server.pid}).")
        market = Market(url, engine, say, stack)
        for _ in range(RELAYS):
            market.start_relay()
        for relay in market.relays:
            wait_until_it_serves(engine, relay, slots=1)
        yield market
        for relay in market.relays:
            relay.ask_to_stop()
        for relay in market.relays:
            relay.wait(_STOP_SECONDS)


@contextmanager
def trading(market: Market, kill_seconds: float = KILL_SECONDS) -> Iterator[None]:
    """Place orders while the block runs; after `kill_seconds`, kill a relay and start another one in its place.

    Raises:
        DemoFailed: a relay ended by itself.
    """
    stopping = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="market") as pool:
        end = pool.submit(_trade, market, stopping, kill_seconds)
        try:
            yield
        finally:
            stopping.set()
        end.result()


def _trade(market: Market, stopping: threading.Event, kill_seconds: float) -> None:
    orders = plan_orders(10_000, random.randrange(1_000_000))
    kill_at = int(kill_seconds / _ORDER_SECONDS)
    number = 0
    while not stopping.wait(_ORDER_SECONDS):
        number += 1
        market.trade(orders[number % len(orders)], number)
        if number == kill_at:
            market.kill_relay()
            market.start_relay()
        for relay in market.relays:
            check_runs(relay)
