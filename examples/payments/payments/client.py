"""The provider's client. Its one difficult duty: to say of each failure what is known about the money.

- *Not applied*, for sure: no connection came about, or the provider said "not now" before it did anything.
- *Refused*: the provider said no, and will say so again.
- Everything else is left as it is: a timeout, a connection that ends without an answer, a 500. The money may have been
  taken.
"""

import json
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlencode, urlsplit

from outboxq import Applied, CallNotApplied, CallRefused, NotApplied, Unknown


@dataclass(frozen=True)
class Charge:
    """What the provider calls a charge."""

    id: str
    order: int
    cents: int


class UnexpectedAnswer(Exception):
    """The provider answered with something that says nothing about the money."""


class PaymentClient:
    """Calls the provider at `url`, a connection for each call."""

    def __init__(self, url: str, timeout_seconds: float = 10.0) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname or "", address.port
        self._timeout_seconds = timeout_seconds

    def charge(self, order_id: int, cents: int, idempotency_key: str) -> Charge:
        """Take the money for an order.

        Raises:
            CallNotApplied: nothing was taken, for sure.
            CallRefused: the card was declined.
            Exception: anything else; the outcome is not known.
        """
        body = json.dumps({"order": order_id, "cents": cents})
        status, answer = self._request("POST", "/charges", body, {"Idempotency-Key": idempotency_key})
        if status == 201:
            return _read_charge(json.loads(answer))
        if status == 402:
            raise CallRefused("the card was declined")
        if status in (429, 503):
            raise CallNotApplied(f"the provider answered {status}")
        raise UnexpectedAnswer(f"the provider answered {status}")

    def look_up(self, idempotency_key: str) -> Applied[Charge] | NotApplied | Unknown:
        """What became of an earlier call. An answer that says neither yes nor no is Unknown, never NotApplied."""
        try:
            status, answer = self._request("GET", f"/charges?{urlencode({'idempotency_key': idempotency_key})}")
        except (CallNotApplied, OSError, HTTPException):
            return Unknown()
        if status != 200:
            return Unknown()
        found = json.loads(answer)
        return Applied(_read_charge(found[0])) if found else NotApplied()

    def _request(
        self, method: str, path: str, body: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = HTTPConnection(self._host, self._port, timeout=self._timeout_seconds)
        try:
            try:
                connection.connect()
            except OSError as error:
                # Not a byte was sent. From the first byte on, an error says nothing.
                raise CallNotApplied(f"no connection to the provider ({type(error).__name__})") from error
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def _read_charge(answer: dict[str, Any]) -> Charge:
    return Charge(answer["id"], answer["order"], answer["cents"])
