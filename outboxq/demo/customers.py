"""The demo's customers: threads that place orders, and roll some transactions and savepoints back."""

import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeAlias

from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from outboxq import JobHandle, OutboxSession
from outboxq.demo.shop import EnqueuedJob, GiftWrap, Order, Product, send_receipt, ship_order, wrap_gift

CUSTOMERS = ("Ada", "Grace", "Edsger", "Barbara")
# More customers than slots: jobs for one product wait for each other.
PRODUCTS = tuple(
    f"{colour} {thing}"
    for colour in ("black", "blue", "green", "red", "white")
    for thing in ("cup", "kettle", "lamp", "pillow", "spoon", "teapot")
)

# The fate of an order. Of ten, two are rolled back as a whole and one loses its gift wrap with a savepoint.
Fate: TypeAlias = Literal["plain", "gift", "no paper left", "card declined"]
_OF_TEN: dict[Fate, int] = {"plain": 5, "gift": 2, "no paper left": 1, "card declined": 2}
_JOBS: dict[Fate, int] = {"plain": 2, "gift": 3, "no paper left": 2, "card declined": 0}


@dataclass(frozen=True, slots=True)
class PlannedOrder:
    """An order that a customer will place, and how its transaction will end (`fate`)."""

    sku: str
    quantity: int
    fate: Fate

    @property
    def jobs(self) -> int:
        """The number of jobs that the order's transaction commits."""
        return _JOBS[self.fate]


class CardDeclined(Exception):
    """Raised in the transaction of an order to roll back all of it: the customer cannot pay."""


class NoPaperLeft(Exception):
    """Raised in the savepoint of a gift wrap to roll it back: the order itself goes on without the wrap."""


def plan_orders(jobs: int, seed: int) -> list[PlannedOrder]:
    """Return random orders that together commit `jobs` jobs, or up to two more; the same for the same `seed`."""
    dice = random.Random(seed)
    planned: list[PlannedOrder] = []
    while sum(order.jobs for order in planned) < jobs:
        fates = dice.sample(list(_OF_TEN), counts=list(_OF_TEN.values()), k=10)
        planned += [PlannedOrder(dice.choice(PRODUCTS), dice.randint(1, 5), fate) for fate in fates]
    while sum(order.jobs for order in planned) - planned[-1].jobs >= jobs:
        planned.pop()
    return planned


class Customers:
    """The threads that place the planned orders, one thread for each customer."""

    def __init__(self, engine: Engine, orders: Sequence[PlannedOrder]) -> None:
        self._sessions = sessionmaker(engine, class_=OutboxSession)
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(len(CUSTOMERS), thread_name_prefix="customer")
        self._ends: list[Future[None]] = [
            self._pool.submit(self._order_all, name, orders[number :: len(CUSTOMERS)])
            for number, name in enumerate(CUSTOMERS)
        ]

    def have_finished(self) -> bool:
        """Return True if every order was placed. If a thread has failed, raise its error."""
        for end in self._ends:
            if end.done():
                end.result()
        return all(end.done() for end in self._ends)

    def stop(self) -> None:
        """End the threads; each customer finishes the order that it is placing."""
        self._stopping.set()
        self._pool.shutdown()

    def _order_all(self, customer: str, orders: Sequence[PlannedOrder]) -> None:
        for order in orders:
            if self._stopping.is_set():
                return
            try:
                place_order(self._sessions, customer, order)
            except CardDeclined:
                continue


def add_products(engine: Engine) -> None:
    """Insert the shop's products."""
    with sessionmaker(engine).begin() as session:
        session.add_all(Product(sku=sku) for sku in PRODUCTS)


def place_order(sessions: sessionmaker[OutboxSession], customer: str, planned: PlannedOrder) -> None:
    """Insert an order and its jobs in one transaction: all of it is committed, or nothing.

    Raises:
        CardDeclined: the order was planned to fail, and nothing is committed.
    """
    with sessions.begin() as session:
        order = Order(customer=customer, sku=planned.sku, quantity=planned.quantity)
        session.add(order)
        product = session.get_one(Product, planned.sku)
        _note(session, session.add_job(ship_order, order=order, product=product))
        session.flush()
        _note(session, session.add_job(send_receipt, order_id=order.id, customer=customer))
        if planned.fate in ("gift", "no paper left"):
            _try_to_wrap(session, order, has_paper=planned.fate == "gift")
        session.flush()
        if planned.fate == "card declined":
            raise CardDeclined


def _try_to_wrap(session: OutboxSession, order: Order, *, has_paper: bool) -> None:
    try:
        with session.begin_nested():
            gift = GiftWrap(order_id=order.id)
            session.add(gift)
            _note(session, session.add_job(wrap_gift, gift=gift))
            session.flush()
            if not has_paper:
                raise NoPaperLeft
    except NoPaperLeft:
        # The order goes without gift wrap; the job inside the savepoint never existed.
        return


def _note(session: OutboxSession, job: JobHandle) -> None:
    session.add(EnqueuedJob(job_id=job.id, kind=job.kind))
