"""The promises of docs/deploying.md about managed PostgreSQL: a token for each connection, refused options left out."""

import itertools
import re
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from sqlalchemy import Engine, create_engine, event, make_url, text

from outboxq import RelayConfig, SlotGroup
from outboxq.database.engines import make_engine
from outboxq.events import JobDone
from outboxq.postgres import Database
from tests.conftest import StartRelay
from tests.deploy.files import DEPLOY
from tests.support.ledger import enqueue, rows
from tests.support.waiting import wait_until

PAGE = DEPLOY.parent / "docs" / "deploying.md"
# As AWS's proxy answers a session with startup options.
REFUSAL = b"Feature not supported: RDS Proxy currently doesn't support command-line options."


def test_every_connection_of_a_relay_asks_its_engine_for_a_token(
    start_relay: StartRelay, engine: Engine, outboxq_database: Database
) -> None:
    """Slots, listener and lease: no connection was opened without a token of its own, and none with another's."""
    numbers = itertools.count(1)
    own = create_engine(outboxq_database.url, pool_size=20)

    @event.listens_for(own, "do_connect")
    def add_token(dialect: object, record: object, arguments: object, parameters: dict[str, object]) -> None:
        # The server lets everyone in: the name shows which token a session came with.
        parameters["application_name"] = f"token {next(numbers)}"

    with start_relay(engine=own, config=RelayConfig(groups=(SlotGroup(("ledger",), 3),))) as relay:
        enqueue(engine, ["a", "b", "c"], both_flavours=False)
        wait_until(lambda: len(relay.of(JobDone)) == 3, "the jobs")
        names = rows(
            engine,
            "SELECT application_name FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid() AND backend_type = 'client backend'",
        )
        # The pools of the test itself have no name.
        tokens = [name for (name,) in names if name]
        assert len(tokens) >= 3
        assert len(set(tokens)) == len(tokens)
        assert all(str(name).startswith("token ") for name in tokens)
    own.dispose()


class _Proxy(socketserver.BaseRequestHandler):
    """Refuses a session with startup options, and passes any other on to the server."""

    target: ClassVar[tuple[str, int]]
    seen: ClassVar[list[bool]]

    def handle(self) -> None:
        first = self.request.recv(65536)
        has_options = b"\0options\0" in first
        self.seen.append(has_options)
        if has_options:
            body = b"SFATAL\0VFATAL\0C0A000\0M" + REFUSAL + b"\0\0"
            self.request.sendall(b"E" + (len(body) + 4).to_bytes(4, "big") + body)
            return
        with socket.create_connection(self.target) as server:
            server.sendall(first)
            back = threading.Thread(target=_pass, args=(server, self.request))
            back.start()
            _pass(self.request, server)
            back.join()


def _pass(source: socket.socket, target: socket.socket) -> None:
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


@contextmanager
def proxy_without_options(url: str) -> Iterator[str]:
    """A proxy in front of the server of `url`; yields the same URL with the proxy's address."""
    parsed = make_url(url)
    _Proxy.target, _Proxy.seen = (parsed.host or "127.0.0.1", parsed.port or 5432), []
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Proxy) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            # Neither encryption is asked for first: the first packet is the one with the options.
            there = parsed.set(host="127.0.0.1", port=server.server_address[1])
            without = there.update_query_dict({"sslmode": "disable", "gssencmode": "disable"})
            yield without.render_as_string(hide_password=False)
        finally:
            server.shutdown()
            serving.join()


def test_options_that_rds_proxy_refuses_are_left_out(outboxq_database: Database) -> None:
    """Refused once, in its own words, and never sent again by the same engine."""
    with proxy_without_options(outboxq_database.url) as url:
        pooled = make_engine(url)
        for _ in range(2):
            with pooled.connect() as connection:
                assert connection.execute(text("SELECT 1")).scalar_one() == 1
            pooled.dispose()
        assert _Proxy.seen == [True, False, False]


def test_the_page_names_a_source_for_what_a_provider_says() -> None:
    """Each row about failover, and the sections on tokens and on the proxy, have an address of the provider's."""
    page = PAGE.read_text()
    rows_of_failover = re.findall(r"^\| (?:RDS|Aurora|Cloud SQL).*$", page, re.MULTILINE)
    assert len(rows_of_failover) == 4
    for row in [
        *rows_of_failover,
        *re.findall(r"^### (?:Passwords|RDS Proxy).*?(?=^##)", page, re.MULTILINE | re.DOTALL),
    ]:
        assert re.search(r"\(https://(?:docs\.)?(?:aws\.amazon|cloud\.google)\.com/", row), row


def test_what_was_not_tried_is_said() -> None:
    """A reader can tell what tests check from what a provider says: of the files, and of managed PostgreSQL."""
    page = PAGE.read_text()
    files, _, managed = page.partition("## Managed PostgreSQL")
    assert "Not tried" in files
    assert "Not tried" in managed
