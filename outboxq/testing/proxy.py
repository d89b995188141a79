"""A TCP proxy before PostgreSQL that recognises a COMMIT: for tests of lost connections.

The proxy listens on loopback, without TLS. It can cut off a client that commits, before COMMIT reaches the server or
after it did, keep the client waiting for the answer, or leave it on a connection that is open and dead.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self, TypeAlias

from sqlalchemy import URL, make_url

from outboxq.testing.wire import TransactionWatcher, answers_commit, frames, read_startup

_CONNECT_SECONDS = 10.0
_JOIN_SECONDS = 5.0
_Address: TypeAlias = "tuple[str, int] | str"


class Trap:
    """A fault at the next COMMITs that the proxy receives: it cuts their connection, or freezes it until `release()`.

    Attributes:
        reached: Set when the fault has happened: the connection is cut, or frozen. If COMMIT was passed on, the server
            has answered it by then.
        count: The number of COMMITs that the trap has caught.
        cuts: True if the trap cuts the connection, False if it freezes the connection.
        lets_commit_through: True if COMMIT is passed on, and the fault happens after the server's answer; False if it
            happens before COMMIT is passed on.
    """

    def __init__(self, times: int, containing: str, *, cuts: bool, lets_commit_through: bool) -> None:
        self.reached = threading.Event()
        self.count = 0
        self.cuts = cuts
        self.lets_commit_through = lets_commit_through
        self._times_left = times
        self._containing = containing.lower()
        self.released = threading.Event()
        self._lock = threading.Lock()

    def release(self) -> None:
        """End the freezing, so that the held bytes are passed on, and catch no further COMMITs."""
        with self._lock:
            self._times_left = 0
        self.released.set()

    @property
    def is_spent(self) -> bool:
        """True if the trap catches no more COMMITs, because it has caught as many as it should or was released."""
        return self._times_left == 0

    def catches(self, statements: list[str]) -> bool:
        """Return True if the trap catches the COMMIT of a transaction with these statements; it is then counted."""
        with self._lock:
            if self._times_left == 0 or not any(self._containing in statement.lower() for statement in statements):
                return False
            self._times_left -= 1
            self.count += 1
            return True


class CommitProxy:
    """A proxy before the server of `database_url`, listening on loopback within a `with` block.

    A trap, which a method such as `cut_after_commit` sets, catches the next `times` COMMITs of any connection. It
    ignores transactions that have written no rows, and those without a statement that contains the text `containing`
    (in upper or lower case). Literals sent as parameters are not searched.

        with CommitProxy(database_url) as proxy, Session(create_engine(proxy.url)) as session:
            trap = proxy.cut_after_commit()
            session.add(...)
            with pytest.raises(OperationalError):
                session.commit()
            assert trap.reached.wait(5)
    """

    def __init__(self, database_url: str | URL) -> None:
        url = make_url(database_url)
        self._server = _server_address(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._address: tuple[str, int] = self._listener.getsockname()
        query = {name: value for name, value in url.query.items() if name not in ("host", "port", "sslmode")}
        own = url.set(host=self._address[0], port=self._address[1], query=query).update_query_dict(
            {"sslmode": "disable", "gssencmode": "disable"}
        )
        self.url = own.render_as_string(hide_password=False)
        self._lock = threading.Lock()
        self._traps: list[Trap] = []
        self._links: set[_Link] = set()
        self._is_closed = False
        self._flows = threading.Event()
        self._flows.set()
        self._thread = threading.Thread(target=self._accept, name="outboxq-proxy", daemon=True)
        self._thread.start()

    def cut_before_commit(self, times: int = 1, *, containing: str = "") -> Trap:
        """Cut the connection instead of passing COMMIT on: nothing is committed, but the client cannot know that."""
        return self._set(Trap(times, containing, cuts=True, lets_commit_through=False))

    def cut_after_commit(self, times: int = 1, *, containing: str = "") -> Trap:
        """Pass COMMIT on, and cut the connection after the server's answer, so that the client never reads it."""
        return self._set(Trap(times, containing, cuts=True, lets_commit_through=True))

    def hold_reply(self, times: int = 1, *, containing: str = "") -> Trap:
        """Pass COMMIT on, but pass the server's answer on only after `release()` of the trap."""
        return self.freeze_at_commit(times, arrives=True, containing=containing)

    def freeze_at_commit(self, times: int = 1, *, arrives: bool = False, containing: str = "") -> Trap:
        """At COMMIT, stop passing bytes in either direction; both sides keep an open connection.

        The freezing ends with the trap's `release()`, after which all held bytes are passed on late, or with the
        proxy's `cut()`.

        Args:
            arrives: True if COMMIT is still passed on, and the freezing begins with the server's answer.
        """
        return self._set(Trap(times, containing, cuts=False, lets_commit_through=arrives))

    def freeze(self) -> None:
        """Pass no more bytes on, for any connection, until `thaw()`: both sides see an open connection that is dead."""
        self._flows.clear()

    def thaw(self) -> None:
        """End `freeze()`; bytes that were held back arrive late."""
        self._flows.set()

    def cut(self) -> int:
        """Cut every connection now, and return the number of cut connections."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.cut()
        return len(links)

    def close(self) -> None:
        """Cut every connection, release every trap, and stop listening."""
        with self._lock:
            self._is_closed = True
            traps = list(self._traps)
        self._listener.close()
        # A blocked accept() does not notice on every platform that its socket was closed.
        with contextlib.suppress(OSError):
            socket.create_connection(self._address, timeout=0.2).close()
        self.cut()
        for trap in traps:
            trap.release()
        self._flows.set()
        self._thread.join(_JOIN_SECONDS)
        with self._lock:
            links = list(self._links)
        for link in links:
            link.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _set(self, trap: Trap) -> Trap:
        with self._lock:
            self._traps = [*(kept for kept in self._traps if not kept.is_spent), trap]
        return trap

    def _find_trap(self, statements: list[str]) -> Trap | None:
        with self._lock:
            traps = list(self._traps)
        return next((trap for trap in traps if trap.catches(statements)), None)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:
                return
            with self._lock:
                if self._is_closed:
                    client.close()
                    return
                link = _Link(client, self._server, self._flows, self._find_trap, self._forget)
                self._links.add(link)
            link.start()

    def _forget(self, link: "_Link") -> None:
        with self._lock:
            self._links.discard(link)


class _Link:
    """One client's connection: one thread passes its bytes on to the server, another passes the answers back."""

    def __init__(
        self,
        client: socket.socket,
        server_address: _Address,
        flows: threading.Event,
        find_trap: Callable[[list[str]], Trap | None],
        forget: "Callable[[_Link], None]",
    ) -> None:
        self._client = client
        self._server: socket.socket | None = None
        self._server_address = server_address
        self._flows = flows
        self._find_trap = find_trap
        self._forget = forget
        self._is_cut = threading.Event()
        self._trap: Trap | None = None
        self._watcher = TransactionWatcher()
        self._upward = threading.Thread(target=self._run, name="outboxq-proxy-up", daemon=True)
        self._downward = threading.Thread(target=self._run_downward, name="outboxq-proxy-down", daemon=True)

    def start(self) -> None:
        self._upward.start()

    def cut(self) -> None:
        """Shut down the sockets of the client and the server, so that both threads stop waiting, and end."""
        self._is_cut.set()
        for end in (self._client, self._server):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        for thread in (self._upward, self._downward):
            if thread.ident is not None:
                thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        try:
            self._pump_upward()
        except OSError:
            # One side is gone, and the other will be in a moment.
            self._is_cut.set()
        finally:
            self.cut()
            if self._downward.ident is not None:
                self._downward.join()
            for end in (self._client, self._server):
                if end is not None:
                    end.close()
            self._forget(self)

    def _run_downward(self) -> None:
        try:
            self._pump_downward()
        except OSError:
            self._is_cut.set()
        finally:
            self.cut()

    def _pump_upward(self) -> None:
        startup = read_startup(self._client)
        self._wait_until_it_flows()
        self._server = _connect(self._server_address)
        self._server.sendall(startup)
        self._downward.start()
        for kind, frame in frames(self._client):
            self._wait_until_it_flows()
            if self._watcher.sees_commit(kind, frame) and not self._spring():
                return
            self._server.sendall(frame)

    def _spring(self) -> bool:
        """Apply the trap that catches this COMMIT, if any: now or, if the trap lets COMMIT through, after the answer.

        Return False if the connection has ended, so that the COMMIT must not be passed on.
        """
        trap = self._find_trap(self._watcher.statements)
        if trap is None:
            return True
        if trap.lets_commit_through:
            self._trap = trap
            return True
        return self._act(trap)

    def _pump_downward(self) -> None:
        assert self._server is not None
        answered, held = False, b""
        for kind, frame in frames(self._server):
            self._wait_until_it_flows()
            self._watcher.note_answer(kind, frame)
            if self._trap is None:
                self._client.sendall(frame)
                continue
            held += frame
            answered = answered or answers_commit(kind, frame)
            if kind == b"Z" and answered:
                trap, self._trap = self._trap, None
                if not self._act(trap):
                    return
                self._client.sendall(held)
                answered, held = False, b""

    def _act(self, trap: Trap) -> bool:
        """Cut the connection, or freeze it until the trap is released; return False if the connection has ended."""
        if trap.cuts:
            self.cut()
            trap.reached.set()
            return False
        trap.reached.set()
        while not trap.released.wait(0.02):
            if self._is_cut.is_set():
                return False
        return not self._is_cut.is_set()

    def _wait_until_it_flows(self) -> None:
        while not self._flows.wait(0.05):
            if self._is_cut.is_set():
                raise ConnectionAbortedError("the proxy cut this connection, as requested")


def _connect(address: _Address) -> socket.socket:
    if isinstance(address, str):
        server = socket.socket(socket.AF_UNIX)
        server.settimeout(_CONNECT_SECONDS)
        server.connect(address)
    else:
        server = socket.create_connection(address, timeout=_CONNECT_SECONDS)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server.settimeout(None)
    return server


def _server_address(url: URL) -> _Address:
    named = url.host or url.query.get("host") or "localhost"
    host = named if isinstance(named, str) else named[0]
    port = url.port or int(str(url.query.get("port") or 5432))
    return f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port)
