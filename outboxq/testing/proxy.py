"""A TCP proxy before PostgreSQL that knows a COMMIT when it passes: for tests of what a lost connection leaves behind.

It understands as much of the wire protocol (version 3) as that takes, on loopback, without TLS. Whoever commits through
it can be cut off before COMMIT reaches the server or after it did, kept waiting for the answer, or left on a connection
that is open and dead.
"""

import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from types import TracebackType
from typing import Self, TypeAlias

from sqlalchemy import URL, make_url

from outboxq.database.sql_words import without_literals

_RECEIVE_BYTES = 65_536
_CONNECT_SECONDS = 10.0
_JOIN_SECONDS = 5.0
# What the filter `containing` can look at; a transaction may send any amount.
_REMEMBERED_STATEMENTS = 200

_PLAINTEXT_PLEASE = (80877103, 80877104)  # SSLRequest and GSSENCRequest
_COMMIT = re.compile(r"(?:^|;)\s*(?:COMMIT|END)(?:\s+(?:WORK|TRANSACTION))?\s*(?:;|$)", re.IGNORECASE)
_WRITES = re.compile(r"(?:INSERT 0|UPDATE|DELETE|MERGE|COPY) (?!0$)\d+")
# A CTE that writes and hands its rows to a SELECT says SELECT.
_READS = re.compile(r"SELECT (?!0$)\d+")
_WRITING_CTE = re.compile(r"\s*WITH\b.*\b(?:INSERT|UPDATE|DELETE|MERGE)\b", re.IGNORECASE | re.DOTALL)
_WRITING_SCRIPT = re.compile(r"\b(?:INSERT|UPDATE|DELETE|MERGE|COPY)\b", re.IGNORECASE)

_Address: TypeAlias = "tuple[str, int] | str"


class _Moment(Enum):
    CUT_BEFORE = "cut before COMMIT"
    CUT_AFTER = "cut after COMMIT"
    HOLD_REPLY = "hold the reply"
    FREEZE_BEFORE = "freeze before COMMIT"
    FREEZE_AFTER = "freeze after COMMIT"

    @property
    def lets_commit_through(self) -> bool:
        return self in (_Moment.CUT_AFTER, _Moment.HOLD_REPLY, _Moment.FREEZE_AFTER)


class Trap:
    """What waits for a COMMIT.

    Attributes:
        reached: Set when the fault has happened: the connection is cut, or stands still. Where COMMIT was let through,
            the server has answered it by then.
        count: How many COMMITs it has caught.
    """

    def __init__(self, moment: _Moment, times: int, containing: str) -> None:
        self.reached = threading.Event()
        self.count = 0
        self._moment = moment
        self._times_left = times
        self._containing = containing.lower()
        self._released = threading.Event()
        self._lock = threading.Lock()

    def release(self) -> None:
        """Let pass what is held, and catch nothing more."""
        with self._lock:
            self._times_left = 0
        self._released.set()

    def _catches(self, statements: list[str]) -> bool:
        with self._lock:
            if self._times_left == 0 or not any(self._containing in statement.lower() for statement in statements):
                return False
            self._times_left -= 1
            self.count += 1
            return True


class CommitProxy:
    """A proxy before the server of `database_url`, listening on loopback within a `with` block.

    A COMMIT counts where its transaction has written rows: the others decide nothing. Each trap catches the next
    `times` such COMMITs of any connection, if one of the transaction's statements holds the text `containing`
    (whatever its case). Literals sent as parameters are not looked at.

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
        port = self._listener.getsockname()[1]
        query = {name: value for name, value in url.query.items() if name not in ("host", "port", "sslmode")}
        own = url.set(host="127.0.0.1", port=port, query=query).update_query_dict(
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
        """Cut the connection instead of handing COMMIT on: nothing is committed, and the client cannot know."""
        return self._set(_Moment.CUT_BEFORE, times, containing)

    def cut_after_commit(self, times: int = 1, *, containing: str = "") -> Trap:
        """Hand COMMIT on, and cut the connection once the server has answered: the client never reads the answer."""
        return self._set(_Moment.CUT_AFTER, times, containing)

    def hold_reply(self, times: int = 1, *, containing: str = "") -> Trap:
        """Hand COMMIT on, and keep the server's answer back until `release()`."""
        return self._set(_Moment.HOLD_REPLY, times, containing)

    def freeze_at_commit(self, times: int = 1, *, arrives: bool = False, containing: str = "") -> Trap:
        """At COMMIT hand nothing on any more in either direction; both sides keep an open connection.

        Until `release()`, which lets everything arrive late, or `cut()`.

        Args:
            arrives: Whether COMMIT itself still reaches the server.
        """
        return self._set(_Moment.FREEZE_AFTER if arrives else _Moment.FREEZE_BEFORE, times, containing)

    def freeze(self) -> None:
        """Hand nothing on, of any connection, until `thaw()`: open, and dead."""
        self._flows.clear()

    def thaw(self) -> None:
        """End `freeze()`; what was held back arrives late."""
        self._flows.set()

    def cut(self) -> int:
        """Cut every connection now; returns how many."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.cut()
        return len(links)

    def close(self) -> None:
        """Cut everything and stop listening."""
        with self._lock:
            self._is_closed = True
            traps = list(self._traps)
        self._listener.close()
        # A blocked accept() does not notice on every platform that its socket was closed.
        with contextlib.suppress(OSError):
            socket.create_connection(self._own_address, timeout=0.2).close()
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _own_address(self) -> tuple[str, int]:
        url = make_url(self.url)
        assert url.port is not None
        return "127.0.0.1", url.port

    def _set(self, moment: _Moment, times: int, containing: str) -> Trap:
        trap = Trap(moment, times, containing)
        with self._lock:
            self._traps = [kept for kept in self._traps if kept._times_left] + [trap]  # noqa: SLF001  # ours
        return trap

    def _find_trap(self, statements: list[str]) -> Trap | None:
        with self._lock:
            traps = list(self._traps)
        return next((trap for trap in traps if trap._catches(statements)), None)  # noqa: SLF001  # ours

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
    """One client's connection: two threads, one for each direction."""

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
        self._prepared: dict[bytes, str] = {}
        self._portals: dict[bytes, str] = {}
        self._statements: list[str] = []
        self._has_written = False
        self._may_write = False
        self._upward = threading.Thread(target=self._run, name="outboxq-proxy-up", daemon=True)
        self._downward = threading.Thread(target=self._run_downward, name="outboxq-proxy-down", daemon=True)

    def start(self) -> None:
        self._upward.start()

    def cut(self) -> None:
        """End both connections; whoever waits in a thread of ours goes on, and ends."""
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
            # Either side is gone; so is the other in a moment.
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
        startup = self._read_startup()
        self._wait_until_it_flows()
        self._server = _connect(self._server_address)
        self._server.sendall(startup)
        self._downward.start()
        for kind, frame in _frames(self._client):
            self._wait_until_it_flows()
            if self._commits(kind, frame) and not self._spring():
                return
            self._server.sendall(frame)

    def _read_startup(self) -> bytes:
        while True:
            head = _read(self._client, 8)
            length, code = struct.unpack("!ii", head)
            if code not in _PLAINTEXT_PLEASE:
                return head + _read(self._client, length - 8)
            self._client.sendall(b"N")

    def _commits(self, kind: bytes, frame: bytes) -> bool:
        """Note what the client sends; whether it is a COMMIT that counts."""
        sql = self._sql_of(kind, frame[5:])
        if sql is None:
            return False
        # In literals and comments, a word is no statement.
        bare = without_literals(sql)
        self._may_write = self._may_write or _WRITING_CTE.match(bare) is not None
        if len(self._statements) < _REMEMBERED_STATEMENTS:
            self._statements.append(sql)
        if _COMMIT.search(bare) is None:
            return False
        return self._has_written or _WRITING_SCRIPT.search(bare) is not None

    def _sql_of(self, kind: bytes, body: bytes) -> str | None:
        """The statement that this message runs, if it runs one."""
        if kind == b"Q":
            return body.rstrip(b"\0").decode(errors="replace")
        if kind == b"P":
            name, sql, _ = body.split(b"\0", 2)
            self._prepared[name] = sql.decode(errors="replace")
        elif kind == b"B":
            portal, name, _ = body.split(b"\0", 2)
            self._portals[portal] = self._prepared.get(name, "")
        elif kind == b"E":
            return self._portals.get(body.split(b"\0", 1)[0], "")
        return None

    def _spring(self) -> bool:
        """Before a COMMIT is handed on: what a trap makes of it; False where the connection is over."""
        trap = self._find_trap(self._statements)
        if trap is None:
            return True
        if trap._moment.lets_commit_through:  # noqa: SLF001  # ours
            self._trap = trap
            return True
        if trap._moment == _Moment.CUT_BEFORE:  # noqa: SLF001  # ours
            self.cut()
            trap.reached.set()
            return False
        return self._stand_still(trap)

    def _pump_downward(self) -> None:
        assert self._server is not None
        answered, held = False, b""
        for kind, frame in _frames(self._server):
            self._wait_until_it_flows()
            self._note_answer(kind, frame)
            if self._trap is None:
                self._client.sendall(frame)
                continue
            held += frame
            answered = answered or kind == b"E" or (kind == b"C" and frame[5:-1] in (b"COMMIT", b"ROLLBACK"))
            if kind == b"Z" and answered:
                trap, self._trap = self._trap, None
                if not self._after_commit(trap):
                    return
                self._client.sendall(held)
                answered, held = False, b""

    def _note_answer(self, kind: bytes, frame: bytes) -> None:
        if kind == b"C":
            tag = frame[5:-1].decode(errors="replace")
            self._has_written = self._has_written or bool(_WRITES.match(tag) or (self._may_write and _READS.match(tag)))
        elif kind == b"Z" and frame[5:6] == b"I":
            # Before the client reads it and sends its next statement.
            self._statements.clear()
            self._has_written = self._may_write = False

    def _after_commit(self, trap: Trap) -> bool:
        """The server has answered a COMMIT; False where the connection is over."""
        if trap._moment == _Moment.CUT_AFTER:  # noqa: SLF001  # ours
            self.cut()
            trap.reached.set()
            return False
        return self._stand_still(trap)

    def _stand_still(self, trap: Trap) -> bool:
        trap.reached.set()
        while not trap._released.wait(0.02):  # noqa: SLF001  # ours
            if self._is_cut.is_set():
                return False
        return not self._is_cut.is_set()

    def _wait_until_it_flows(self) -> None:
        while not self._flows.wait(0.05):
            if self._is_cut.is_set():
                raise ConnectionAbortedError("the proxy was told to cut this connection")


def _frames(source: socket.socket) -> Iterator[tuple[bytes, bytes]]:
    """The protocol's messages: their type and all of their bytes, until the other side ends the connection."""
    buffer = bytearray()
    while chunk := source.recv(_RECEIVE_BYTES):
        buffer += chunk
        start = 0
        while len(buffer) - start >= 5:
            length = 1 + struct.unpack_from("!i", buffer, start + 1)[0]
            if len(buffer) - start < length:
                break
            yield bytes(buffer[start : start + 1]), bytes(buffer[start : start + length])
            start += length
        del buffer[:start]


def _read(source: socket.socket, length: int) -> bytes:
    found = b""
    while len(found) < length:
        chunk = source.recv(length - len(found))
        if not chunk:
            raise ConnectionAbortedError("the client went away while it connected")
        found += chunk
    return found


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
