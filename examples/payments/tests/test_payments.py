"""The shop at work: orders, a relay, and a provider that does not always answer as one would like."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy.orm import sessionmaker

from outboxq import Applied, CallNotApplied, CallRefused, JobKind, NotApplied, OutboxSession, Unknown
from outboxq.postgres import Database
from payments.client import Charge, PaymentClient
from payments.jobs import charge, charge_or_ask, charge_or_give_up
from payments.shop import place_order
from payments.testing import LIMIT_SECONDS, Books, Till, relay_at_work, wait_until

PROJECT = Path(__file__).parents[1]
HANDLERS = [charge, charge_or_ask, charge_or_give_up]

Sessions = sessionmaker[OutboxSession]


def place(sessions: Sessions, kind: JobKind[[int, int]], cents: int = 500) -> int:
    """An order that is committed; its id."""
    with sessions.begin() as session:
        order = place_order(session, cents, kind)
        session.flush()
        return order.id


def run(database: Database, module: str, *arguments: str) -> str:
    """Run `outboxq`; what it prints."""
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "OUTBOXQ_DATABASE_URL": database.url}
    done = subprocess.run(  # noqa: S603  # our own command lines
        command, env=environment, cwd=PROJECT, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True
    )
    return done.stdout


def ended(books: Books) -> None:
    """Wait until no job is left."""
    wait_until(lambda: books.jobs() == 0, "the end of all jobs")


@pytest.mark.parametrize("handler", HANDLERS, ids=lambda handler: handler.kind)
def test_an_order_is_charged_once_and_paid(
    outboxq_database: Database, sessions: Sessions, till: Till, books: Books, handler: JobKind[[int, int]]
) -> None:
    """If nothing goes wrong, one call is one charge, whose id is in the order."""
    order_id = place(sessions, handler, cents=700)
    with relay_at_work(outboxq_database.url):
        ended(books)

    (made,) = till.http.get("/charges", params={"order": order_id}).json()
    assert made["cents"] == 700
    assert books.orders() == {order_id: ("paid", made["id"])}
    assert till.counts()["calls"] == 1


@pytest.mark.parametrize("handler", HANDLERS, ids=lambda handler: handler.kind)
def test_no_transaction_is_open_while_the_provider_is_called(
    outboxq_database: Database, sessions: Sessions, till: Till, books: Books, handler: JobKind[[int, int]]
) -> None:
    """No session of the relay is in a transaction, or holds a snapshot back, for as long as the call takes."""
    till.behave(hold_replies=1)
    place(sessions, handler)
    open_ones = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND (state = 'idle in transaction' OR backend_xmin IS NOT NULL)"
    )
    with relay_at_work(outboxq_database.url):
        wait_until(lambda: till.counts()["holding"] == 1, "the call")
        # The relay's own statements, a poll or a heartbeat, last for a moment.
        wait_until(lambda: books.count(open_ones) == 0, "a moment without a transaction")
        assert till.counts()["holding"] == 1
        till.behave(hold_replies=0)
        ended(books)
    assert books.statuses() == ["paid"]


def test_an_order_that_is_rolled_back_is_never_charged(
    outboxq_database: Database, sessions: Sessions, till: Till, books: Books
) -> None:
    """The job was part of the order's transaction, and went with it."""
    with sessions() as session:
        place_order(session, 500)
        session.flush()
        session.rollback()
    order_id = place(sessions, charge)
    with relay_at_work(outboxq_database.url):
        ended(books)

    assert till.charges_per_order() == {order_id: 1}


@pytest.mark.parametrize("handler", HANDLERS, ids=lambda handler: handler.kind)
def test_a_declined_card_is_asked_once(
    outboxq_database: Database, sessions: Sessions, till: Till, books: Books, handler: JobKind[[int, int]]
) -> None:
    """The refusal is recorded: a second job for the same order gets it without a call, even if the card is good now."""
    order_id = place(sessions, handler)
    till.behave(declined_orders=[order_id])
    with relay_at_work(outboxq_database.url):
        ended(books)
        till.behave(declined_orders=[])
        with sessions.begin() as session:
            session.add_job(handler, order_id, 500)
        ended(books)

    assert books.orders() == {order_id: ("declined", None)}
    assert (till.counts()["calls"], till.counts()["charges"]) == (1, 0)
    assert books.effects("failed") == 1


@pytest.mark.parametrize("handler", HANDLERS, ids=lambda handler: handler.kind)
def test_a_provider_that_is_away_is_called_again(
    outboxq_database: Database, sessions: Sessions, till: Till, books: Books, handler: JobKind[[int, int]]
) -> None:
    """503 says that nothing was done: even if it could not be told afterwards, it is safe to call again."""
    till.behave(unavailable=2)
    order_id = place(sessions, handler)
    with relay_at_work(outboxq_database.url):
        ended(books)

    assert books.statuses() == ["paid"]
    assert till.charges_per_order() == {order_id: 1}
    assert till.counts()["calls"] == 3


def test_a_lost_answer_is_fetched_with_the_same_key(
    outboxq_database: Database, sessions: Sessions, till: Till, books: Books
) -> None:
    """A provider that honours keys is called again, and gives the charge that it made the first time."""
    till.behave(drop_replies=1)
    order_id = place(sessions, charge)
    with relay_at_work(outboxq_database.url):
        ended(books)

    assert books.statuses() == ["paid"]
    assert till.charges_per_order() == {order_id: 1}
    assert till.counts()["calls"] == 2


def test_a_lost_answer_is_looked_up(outboxq_database: Database, sessions: Sessions, till: Till, books: Books) -> None:
    """A provider that ignores keys is asked what became of the call, and not called again."""
    till.behave(drop_replies=1, honours_keys=False)
    order_id = place(sessions, charge_or_ask)
    with relay_at_work(outboxq_database.url):
        ended(books)

    assert books.statuses() == ["paid"]
    assert till.charges_per_order() == {order_id: 1}
    assert till.counts()["calls"] == 1


@pytest.mark.parametrize("handler", [charge_or_ask, charge_or_give_up], ids=lambda handler: handler.kind)
def test_a_lost_answer_that_cannot_be_looked_up_is_left_to_a_person(
    outboxq_database: Database, sessions: Sessions, till: Till, books: Books, handler: JobKind[[int, int]]
) -> None:
    """No second call: the effect is `unknown`, the job a dead letter that says so, and the order stays as it is."""
    till.behave(drop_replies=1, honours_keys=False, answers_lookups=False)
    place(sessions, handler)
    with relay_at_work(outboxq_database.url):
        ended(books)

    assert till.counts()["calls"] == 1
    assert books.effects("unknown") == 1
    assert books.statuses() == ["placed"]
    assert books.count("SELECT count(*) FROM outboxq.dead_job WHERE reason LIKE '%not known%'") == 1


@pytest.mark.parametrize(
    ("was_charged", "answer"),
    [
        pytest.param(True, ["--applied", "--result", '{"id": "ch_1", "order": 1, "cents": 500}'], id="applied"),
        pytest.param(False, ["--not-applied"], id="not-applied"),
    ],
)
def test_a_person_s_answer_settles_what_was_not_known(
    outboxq_database: Database, sessions: Sessions, till: Till, books: Books, was_charged: bool, answer: list[str]
) -> None:
    """Applied: the order is paid with that charge, without a call. Not applied: it is called, once."""
    till.behave(drop_replies=1, honours_keys=False)
    order_id = place(sessions, charge_or_give_up)
    with relay_at_work(outboxq_database.url):
        ended(books)

    run(outboxq_database, "outboxq", "effects", "resolve", "charge", f"order-{order_id}", *answer)
    run(outboxq_database, "outboxq", "dead", "retry", "--queue", "payments-blind")
    with relay_at_work(outboxq_database.url):
        ended(books)

    assert books.statuses() == ["paid"]
    assert till.counts()["calls"] == (1 if was_charged else 2)
    assert (books.orders()[order_id][1] == "ch_1") == was_charged


def test_the_client_says_what_is_known_of_the_money(till: Till) -> None:
    """Not applied, refused or a guess: each failure of a call is told apart."""
    client = PaymentClient(till.address)
    till.behave(unavailable=1, declined_orders=[7])
    with pytest.raises(CallNotApplied):
        client.charge(1, 500, "a")
    with pytest.raises(CallRefused):
        client.charge(7, 500, "a")
    till.behave(drop_replies=1)
    with pytest.raises(OSError, match="closed connection without response"):
        client.charge(1, 500, "a")
    with pytest.raises(CallNotApplied, match="no connection"):
        PaymentClient("http://127.0.0.1:1").charge(1, 500, "a")
    till.behave(hold_replies=1)
    with pytest.raises(TimeoutError):
        PaymentClient(till.address, timeout_seconds=0.2).charge(2, 500, "b")


def test_the_client_takes_no_answer_for_a_no(till: Till) -> None:
    """Only a provider that answers, and knows of no charge, says NotApplied."""
    client = PaymentClient(till.address)
    made = client.charge(1, 500, "a")

    assert made == Charge(made.id, 1, 500)
    assert client.look_up("a") == Applied(made)
    assert client.look_up("b") == NotApplied()
    till.behave(answers_lookups=False)
    assert client.look_up("a") == client.look_up("b") == Unknown()
    assert PaymentClient("http://127.0.0.1:1").look_up("a") == Unknown()
