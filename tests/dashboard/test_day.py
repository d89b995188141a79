"""An operator's whole day, on a market with two relays of which one is killed: with scripts, without, by keyboard."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import UUID

import pytest
from playwright.sync_api import Browser, expect
from sqlalchemy import Connection, Engine, text

from outboxq import OutboxSession
from outboxq.dashboard import Role, create_app
from outboxq.demo.customers import PRODUCTS
from outboxq.demo.market import ORDERS_PER_LOSS, charge_card, import_price, make_report
from outboxq.demo.market_day import Market, open_market
from outboxq.statements.relays import DEAD_SECONDS
from tests.support.browser import Watch, open_page
from tests.support.dashboard import as_user
from tests.support.hands import Keyboard, Pointer
from tests.support.http_server import serve
from tests.support.matrices import sampled
from tests.support.waiting import PATIENCE, wait_until

GOOD, BAD = 300, 5
NEW_PRODUCT = "golden kettle"


@contextmanager
def morning() -> Iterator[tuple[Market, UUID]]:
    """A market with a backlog, jobs that fail, a call whose answer is lost, and a report that takes all day."""
    said: list[str] = []
    with open_market(said.append) as market:
        with OutboxSession(market.engine) as session:
            report = session.add_job(make_report, month="2026-01", seconds=3_600.0)
            session.add_job(charge_card, order_id=ORDERS_PER_LOSS)
            for _ in range(BAD):
                session.add_job(import_price, supplier="Ada & Sons", sku=NEW_PRODUCT, price=9)
            for number in range(GOOD):
                session.add_job(import_price, supplier="Hopper", sku=PRODUCTS[number % len(PRODUCTS)], price=9)
            session.commit()
        yield market, report.id


def _asked(engine: Engine, question: str, wanted: object) -> Callable[[], bool]:
    def ask() -> bool:
        with engine.connect() as connection:
            return connection.execute(text(question)).scalar() == wanted

    return ask


def _mend(connection: Connection) -> None:
    """What a developer does once the operator has read the error."""
    connection.execute(text("INSERT INTO shop.product (sku) VALUES (:sku)"), {"sku": NEW_PRODUCT})


_HANDS = {"scripts": (Pointer, {}), "no scripts": (Pointer, {"java_script_enabled": False}), "keyboard": (Keyboard, {})}


@pytest.mark.wide
@pytest.mark.parametrize("how", sampled(_HANDS))
def test_an_operator_gets_through_the_day(how: str, browser: Browser) -> None:
    """From a backlog to an empty list of dead letters; every change is done, and is in the audit with its reason."""
    hands, settings = _HANDS[how]
    with morning() as (market, report):
        app = create_app({"market": market.engine}, auth=as_user(Role.ADMIN), live_seconds=2)
        with serve(app) as address, open_page(browser, **settings) as page:
            watch = Watch(page.context, address)
            operator = hands(page)
            page.goto(f"{address}/market/")
            _look_around(operator)
            killed = market.kill_relay()
            _pause_and_resume(operator, market.engine)
            _find_the_failing_kind(operator)
            with market.engine.begin() as connection:
                _mend(connection)
            _retry_one(operator, market.engine)
            _retry_all(operator, market.engine)
            _resolve(operator, market.engine)
            _cancel(operator, market.engine, report)
            _find_the_killed_relay(operator, killed.pid)
            _read_the_audit(operator)
            assert watch.problems == []


def _look_around(operator: Pointer) -> None:
    """The backlog, and that two relays work on it."""
    waiting = operator.page.locator(".figures div", has_text="Waiting").locator("dd")
    expect(waiting).to_have_text(re.compile(r"[1-9]\d*"))
    # A page without scripts stays as it was loaded, which may be before both have said that they serve.
    wait_until(lambda: _serving(operator) == 2, "two relays that serve")


def _serving(operator: Pointer) -> int:
    operator.screen("Relays")
    return operator.page.locator("tbody .tag.good").count()


def _pause_and_resume(operator: Pointer, engine: Engine) -> None:
    operator.screen("Queues")
    operator.follow("imports")
    operator.follow("Pause…")
    operator.write("Reason", "prices are wrong")
    operator.press("Pause")
    operator.told("imports is paused")
    assert _asked(engine, "SELECT paused_at IS NOT NULL FROM outboxq.queue WHERE name = 'imports'", True)()
    operator.follow("Resume…")
    operator.write("Reason", "they are right")
    operator.press("Resume")
    operator.told("imports runs again")


def _find_the_failing_kind(operator: Pointer) -> None:
    """The dead letters lead to the kind, to its error, and to the arguments that it had."""
    wait_until(lambda: _died(operator) == BAD, "all that fail to be dead letters")
    operator.follow("import_price", within=operator.read("UnknownProduct"))
    expect(operator.page.get_by_role("heading", level=1)).to_have_text("import_price")
    operator.page.go_back()
    operator.follow("UnknownProduct", exact=False)
    operator.follow("…", within=operator.page.get_by_role("row").nth(-1), exact=False)
    main = operator.page.get_by_role("main")
    expect(main).to_contain_text("sells a product that the shop does not know: <sku>")
    expect(main.get_by_label("Arguments")).to_contain_text(NEW_PRODUCT)


def _died(operator: Pointer) -> int:
    operator.screen("Dead letters")
    row = operator.page.get_by_role("row").filter(has_text="import_price").filter(has_text="UnknownProduct")
    return int(row.first.locator("td.n").inner_text()) if row.count() else 0


def _retry_one(operator: Pointer, engine: Engine) -> None:
    operator.follow("Retry…")
    operator.write("Reason", "the product is known now")
    operator.press("Retry")
    operator.told("It is a job again")
    left = "SELECT count(*) FROM outboxq.dead_job WHERE kind = 'import_price'"
    assert _asked(engine, left, BAD - 1)()


def _retry_all(operator: Pointer, engine: Engine) -> None:
    """By a filter: a preview, then the rest."""
    operator.screen("Dead letters")
    operator.write("Kind", "import_price")
    operator.press("Filter")
    bar = operator.page.locator(".row", has_text="All that match")
    operator.press("Retry all…", within=bar)
    expect(operator.page.get_by_role("main")).to_contain_text(f"{BAD - 1} match")
    operator.write("Reason", "all of them are")
    operator.press(f"Retry {BAD - 1}")
    operator.told("It has begun")
    done = "SELECT count(*) FROM outboxq.job WHERE kind = 'import_price'"
    wait_until(_asked(engine, "SELECT count(*) FROM outboxq.dead_job WHERE kind = 'import_price'", 0), "no dead letter")
    wait_until(_asked(engine, done, 0), "all prices to be imported")


def _resolve(operator: Pointer, engine: Engine) -> None:
    status = "SELECT status FROM outboxq.effect WHERE scope = 'card-charge'"
    wait_until(_asked(engine, status, "unknown"), "a call of unknown outcome")
    operator.screen("Effects")
    operator.follow(f"order-{ORDERS_PER_LOSS}")
    operator.follow("Resolve…")
    operator.choose("What became of it", "it was applied")
    operator.write("Its result", '{"charge": "ch_42"}')
    operator.write("Reason", "seen at the provider")
    operator.press("Resolve")
    operator.told("It is resolved as applied")
    assert _asked(engine, status, "done")()


def _cancel(operator: Pointer, engine: Engine, report: UUID) -> None:
    """A job that runs, also if the relay that ran it was killed and another one has begun it anew."""
    running = f"SELECT count(*) FROM outboxq.progress WHERE job_id = '{report}'"
    wait_until(_asked(engine, running, 1), "the report to run")
    operator.screen("Jobs")
    operator.write("Kind", "make_report")
    operator.press("Filter")
    operator.follow("…", within=operator.read("make_report"), exact=False)
    operator.follow("Cancel…")
    operator.write("Reason", "nobody needs it")
    operator.press("Cancel")
    expect(operator.page.get_by_role("status").first).to_be_visible()
    gone = f"SELECT count(*) FROM outboxq.job WHERE id = '{report}'"
    wait_until(_asked(engine, gone, 0), "the report to end")


def _find_the_killed_relay(operator: Pointer, pid: int) -> None:
    """Once it has said nothing for a minute."""

    def state() -> str:
        operator.screen("Relays")
        return operator.read(str(pid)).locator(".tag").inner_text()

    wait_until(lambda: "dead" in state(), "the killed relay to be told dead", DEAD_SECONDS + PATIENCE)


def _read_the_audit(operator: Pointer) -> None:
    """What was done, and why, the latest first."""
    operator.screen("Audit")
    reasons = operator.page.locator("tbody tr td:last-child").all_inner_texts()
    assert [each for each in reasons if each] == [
        "nobody needs it", "seen at the provider", "all of them are", "the product is known now",
        "they are right", "prices are wrong",
    ]  # fmt: skip
    operator.follow("effect.resolve")
    expect(operator.page.get_by_role("main")).to_contain_text("anna, as admin, by web")
