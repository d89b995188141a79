"""A payment provider to practise with: a real HTTP server that charges, forgets, refuses and hangs up as it is told.

    python -m payments.provider --port 9000

| Request | What it does |
|---|---|
| `POST /charges` | `{"order": 7, "cents": 500}` with an `Idempotency-Key`: charges the customer |
| `GET /charges?idempotency_key=...` or `?order=7` | the charges made under a key, or for an order |
| `GET /counts` | how often it was called, how many charges happened, and how many replies it holds back now |
| `POST /admin` | changes how it behaves from now on: any of the fields of `Behaviour` |
| `POST /admin/forget` | forgets all idempotency keys; the charges stay |
"""

import argparse
import json
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeAlias
from urllib.parse import parse_qs, urlsplit

# A reply that is held back for longer than this is sent after all, so that no thread stays for ever.
_HOLD_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """How the provider behaves.

    Args:
        honours_keys: Whether a second call with the same key returns the first one's charge, instead of charging again.
        answers_lookups: Whether charges can be looked up; if not, the answer is 501.
        unavailable: So many of the next calls are answered with 503, before anything happens.
        drop_replies: So many of the next charges happen, and the connection is closed without an answer.
        hold_replies: So many of the next charges happen, and their replies are held back until this is set to 0.
        declined_orders: Orders whose card is declined (402).
    """

    honours_keys: bool = True
    answers_lookups: bool = True
    unavailable: int = 0
    drop_replies: int = 0
    hold_replies: int = 0
    declined_orders: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reply:
    """What is sent back; `status` 0 stands for hanging up."""

    status: int
    body: object = None


Charge: TypeAlias = dict[str, object]
HANG_UP = Reply(0)


@dataclass
class Provider:
    """The books of the provider, and how it behaves at the moment."""

    behaviour: Behaviour = field(default_factory=Behaviour)
    calls: int = 0
    charges: list[Charge] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._by_key: dict[str, Charge] = {}
        self._held = 0

    def charge(self, order: int, cents: int, key: str) -> Reply:
        """Take the money, unless this behaviour has something against it."""
        with self._changed:
            self.calls += 1
            if self._take("unavailable"):
                return Reply(503, {"error": "come back later"})
            reply = self._charge(order, cents, key)
            if reply.status == 201 and self._take("drop_replies"):
                return HANG_UP
            if reply.status == 201 and self._held < self.behaviour.hold_replies:
                self._hold()
            return reply

    def look_up(self, key: str | None, order: str | None) -> Reply:
        """The charges made under a key, forgotten or not, or for an order."""
        with self._changed:
            if not self.behaviour.answers_lookups:
                return Reply(501, {"error": "charges cannot be looked up here"})
            return Reply(200, [each for each in self.charges if key == each["key"] or order == str(each["order"])])

    def counts(self) -> Reply:
        """What happened so far; always answered, so that a test can count."""
        with self._changed:
            per_order: dict[str, int] = {}
            for each in self.charges:
                per_order[str(each["order"])] = per_order.get(str(each["order"]), 0) + 1
            counts = {"calls": self.calls, "charges": len(self.charges), "holding": self._held}
            return Reply(200, {**counts, "charges_per_order": per_order})

    def behave(self, changes: Mapping[str, object]) -> Reply:
        """Change the behaviour; the held replies go out if nothing is to be held any more."""
        known = {each.name for each in fields(Behaviour)}
        if unknown := sorted(changes.keys() - known):
            return Reply(400, {"error": f"no such behaviour: {', '.join(unknown)} (known: {', '.join(sorted(known))})"})
        with self._changed:
            self.behaviour = replace(self.behaviour, **changes)  # type: ignore[arg-type]  # JSON of our own tests
            self._changed.notify_all()
            return Reply(200, asdict(self.behaviour))

    def forget(self) -> Reply:
        """Forget the keys, as providers do after a day or so."""
        with self._changed:
            self._by_key.clear()
            return Reply(200, {})

    def _charge(self, order: int, cents: int, key: str) -> Reply:
        known = self._by_key.get(key) if self.behaviour.honours_keys else None
        if known is not None:
            is_same = (known["order"], known["cents"]) == (order, cents)
            return Reply(201, known) if is_same else Reply(422, {"error": "this key came with another request"})
        if order in self.behaviour.declined_orders:
            return Reply(402, {"error": "the card was declined"})
        charge: Charge = {"id": f"ch_{len(self.charges) + 1}", "order": order, "cents": cents, "key": key}
        self.charges.append(charge)
        self._by_key[key] = charge
        return Reply(201, charge)

    def _take(self, name: str) -> bool:
        """Whether the next call is one of so many; then there is one less."""
        left: int = getattr(self.behaviour, name)
        if left > 0:
            self.behaviour = replace(self.behaviour, **{name: left - 1})  # type: ignore[arg-type]  # a number
        return left > 0

    def _hold(self) -> None:
        self._held += 1
        self._changed.wait_for(lambda: self.behaviour.hold_replies == 0, _HOLD_SECONDS)
        self._held -= 1


class _Handler(BaseHTTPRequestHandler):
    """HTTP around a `Provider`."""

    provider: Provider

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path == "/counts":
            self._send(self.provider.counts())
        elif url.path == "/charges" and query.keys() & {"idempotency_key", "order"}:
            self._send(self.provider.look_up(query.get("idempotency_key"), query.get("order")))
        else:
            self._send(Reply(404, {"error": "there is /charges?idempotency_key=, /charges?order= and /counts"}))

    def do_POST(self) -> None:
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            self._send(self._post(body))
        except (KeyError, TypeError, ValueError) as error:
            self._send(Reply(400, {"error": f"cannot read the request: {error!r}"}))

    def _post(self, body: dict[str, object]) -> Reply:
        if self.path == "/charges":
            key = self.headers["Idempotency-Key"] or uuid.uuid4().hex
            return self.provider.charge(int(str(body["order"])), int(str(body["cents"])), key)
        if self.path == "/admin":
            return self.provider.behave(body)
        return self.provider.forget() if self.path == "/admin/forget" else Reply(404, {"error": "no such path"})

    def _send(self, reply: Reply) -> None:
        if reply is HANG_UP:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        body = json.dumps(reply.body).encode()
        try:
            self.send_response(reply.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # The caller is gone: killed, in the tests.

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name that http.server gives it
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # Their end is awaited, so that none outlives its test.
    request_queue_size = 128


@contextmanager
def serve(provider: Provider, port: int = 0) -> Iterator[str]:
    """Serve on loopback, in threads, within the block; the address. Port 0: any that is free."""
    handler = type("Handler", (_Handler,), {"provider": provider})
    with _Server(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            provider.behave({"hold_replies": 0})
            server.shutdown()
            thread.join()


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description="A payment provider to practise with.")
    parser.add_argument("--port", type=int, default=0, help="where to listen on loopback; 0: any that is free")
    with serve(Provider(), parser.parse_args().port) as address:
        print(address, flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
