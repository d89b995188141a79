"""The provider does what the other tests rely on."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from payments.testing import LIMIT_SECONDS, Till, wait_until

PROJECT = Path(__file__).parents[1]


def charge(till: Till, order: int = 1, cents: int = 500, key: str = "a") -> httpx.Response:
    return till.http.post("/charges", json={"order": order, "cents": cents}, headers={"Idempotency-Key": key})


def test_a_key_that_is_honoured_charges_once(till: Till) -> None:
    """The second call gets the first one's charge; another request under the same key is refused."""
    first, again, other = charge(till), charge(till), charge(till, cents=501)

    assert (first.status_code, again.status_code, other.status_code) == (201, 201, 422)
    assert again.json() == first.json()
    assert (till.counts()["calls"], till.counts()["charges"]) == (3, 1)


@pytest.mark.parametrize("how", ["ignored", "forgotten"])
def test_a_key_that_is_ignored_or_forgotten_charges_again(till: Till, how: str) -> None:
    """Nothing but the key stands between a second call and a second charge."""
    if how == "ignored":
        till.behave(honours_keys=False)
    first = charge(till)
    if how == "forgotten":
        till.http.post("/admin/forget").raise_for_status()
    again = charge(till)

    assert again.json()["id"] != first.json()["id"]
    assert till.charges_per_order() == {1: 2}


def test_charges_are_looked_up_by_key_and_by_order(till: Till) -> None:
    """What is not there is an empty list; a provider that does not answer says 501."""
    made = charge(till).json()

    assert till.http.get("/charges", params={"idempotency_key": "a"}).json() == [made]
    assert till.http.get("/charges", params={"order": 1}).json() == [made]
    assert till.http.get("/charges", params={"idempotency_key": "b"}).json() == []
    till.behave(answers_lookups=False)
    assert till.http.get("/charges", params={"idempotency_key": "a"}).status_code == 501


def test_a_dropped_reply_is_a_charge_without_an_answer(till: Till) -> None:
    """The connection ends, and the money is taken; then it answers again."""
    till.behave(drop_replies=1)
    with pytest.raises(httpx.RemoteProtocolError):
        charge(till)

    assert till.charges_per_order() == {1: 1}
    assert charge(till).status_code == 201


def test_an_unavailable_or_declined_call_charges_nothing(till: Till) -> None:
    """503 and 402 come before anything happens."""
    till.behave(unavailable=1, declined_orders=[7])

    assert charge(till).status_code == 503
    assert charge(till, order=7).status_code == 402
    assert till.counts()["charges"] == 0


def test_a_held_reply_waits_until_it_is_let_go(till: Till) -> None:
    """The charge is made, the provider says that it holds one, and the reply comes when it may."""
    till.behave(hold_replies=1)
    with ThreadPoolExecutor(1) as thread:
        reply = thread.submit(charge, till)
        wait_until(lambda: till.counts()["holding"] == 1, "a reply that is held")
        assert till.counts()["charges"] == 1
        assert not reply.done()
        assert charge(till, order=2, key="b").status_code == 201, "one was to be held"
        till.behave(hold_replies=0)
        assert reply.result(LIMIT_SECONDS).status_code == 201


def test_what_it_does_not_know_is_refused(till: Till) -> None:
    """A misspelt behaviour would make a test pass that tests nothing."""
    assert till.http.post("/admin", json={"drop_reply": 1}).status_code == 400
    assert till.http.post("/charges", content=b"[]").status_code == 400
    assert till.http.get("/charges").status_code == 404


def test_it_runs_on_its_own() -> None:
    """`python -m payments.provider` prints its address, and serves there."""
    command = [sys.executable, "-m", "payments.provider", "--port", "0"]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603  # ours
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert httpx.get(f"{address}/counts", timeout=60).json()["charges"] == 0
        finally:
            process.terminate()
