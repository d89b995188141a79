"""The other side: one server that plays the endpoints of all customers, slow ones if it is asked to.

    python -m deliveries.endpoints --port 9000 --seconds 1

| Request | What it does |
|---|---|
| `POST /endpoints/7` | takes a message, and answers after so many seconds |
| `GET /counts` | how many messages came, to how many endpoints, and how many at most were in work at the same time |
| `POST /admin` | changes how it behaves from now on: any of the fields of `Behaviour` |
"""

import argparse
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# An answer that is held back for longer than this is sent after all, so that no thread stays for ever.
_HOLD_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """The behaviour of the endpoints.

    Args:
        seconds: How long each takes to answer.
        held: Endpoints that do not answer until they are taken out of here.
        gone: Endpoints that answer 410: they want no more messages.
        unavailable: Endpoints that answer their next message with 503.
    """

    seconds: float = 0.0
    held: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    unavailable: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """A message as it came."""

    headers: dict[str, str]
    body: bytes


@dataclass
class Endpoints:
    """All endpoints, and their behaviour at the moment.

    Attributes:
        messages: How often each message came to each endpoint: by the endpoint's number and the message's id.
        accepted: Likewise, of those that were answered with 200.
        last: The message that came last.
        at_work: Messages that were not answered yet.
    """

    behaviour: Behaviour = field(default_factory=Behaviour)
    messages: Counter[tuple[int, str]] = field(default_factory=Counter)
    accepted: Counter[tuple[int, str]] = field(default_factory=Counter)
    last: Request | None = None
    at_work: int = 0
    most_at_work: int = 0

    def __post_init__(self) -> None:
        self._changed = threading.Condition()

    def take(self, endpoint: int, request: Request) -> int:
        """Take a message in; the status to answer with, after the time that this endpoint takes."""
        message_id = request.headers.get("webhook-id", "")
        with self._changed:
            self.last = request
            self.messages[endpoint, message_id] += 1
            self.at_work += 1
            self.most_at_work = max(self.most_at_work, self.at_work)
            seconds = self.behaviour.seconds
        time.sleep(seconds)
        with self._changed:
            self._changed.wait_for(lambda: endpoint not in self.behaviour.held, _HOLD_SECONDS)
            self.at_work -= 1
            if endpoint in self.behaviour.gone:
                return 410
            if endpoint in self.behaviour.unavailable:
                rest = tuple(each for each in self.behaviour.unavailable if each != endpoint)
                self.behaviour = replace(self.behaviour, unavailable=rest)
                return 503
            self.accepted[endpoint, message_id] += 1
            return 200

    def counts(self) -> dict[str, int]:
        """The messages so far."""
        with self._changed:
            return {
                "messages": self.messages.total(),
                "endpoints": len({endpoint for endpoint, _ in self.messages}),
                "most_at_work": self.most_at_work,
            }

    def behave(self, changes: Mapping[str, object]) -> dict[str, object]:
        """Change the behaviour; held answers go out if their endpoints are held no more."""
        if unknown := sorted(changes.keys() - {each.name for each in fields(Behaviour)}):
            raise ValueError(f"no such behaviour: {', '.join(unknown)}")
        with self._changed:
            self.behaviour = replace(self.behaviour, **changes)  # type: ignore[arg-type]  # JSON of our own
            self._changed.notify_all()
            return asdict(self.behaviour)


class _Handler(BaseHTTPRequestHandler):
    """HTTP around `Endpoints`."""

    endpoints: Endpoints

    def do_GET(self) -> None:
        if self.path == "/counts":
            self._send(200, self.endpoints.counts())
        else:
            self._send(404, {"error": "there is /counts"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if self.path == "/admin":
                self._send(200, self.endpoints.behave(json.loads(body)))
            else:
                number = int(self.path.removeprefix("/endpoints/"))
                headers = {name.lower(): value for name, value in self.headers.items()}
                self._send(self.endpoints.take(number, Request(headers, body)), {})
        except ValueError as error:
            self._send(400, {"error": f"cannot read the request: {error}"})

    def _send(self, status: int, answer: object) -> None:
        body = json.dumps(answer).encode()
        # The caller may be gone: killed, in the tests.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name that http.server gives it
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # Their end is awaited, so that none outlives its test.
    request_queue_size = 512


@contextmanager
def serve(endpoints: Endpoints, port: int = 0) -> Iterator[str]:
    """Serve on loopback, a thread for each message, within the block; the address. Port 0: any that is free."""
    handler = type("Handler", (_Handler,), {"endpoints": endpoints})
    with _Server(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            endpoints.behave({"held": ()})
            server.shutdown()
            thread.join()


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description="Endpoints to practise with.")
    parser.add_argument("--port", type=int, default=0, help="where to listen on loopback; 0: any that is free")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long each takes to answer")
    given = parser.parse_args()
    with serve(Endpoints(Behaviour(seconds=given.seconds)), given.port) as address:
        print(address, flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
