"""PostgreSQL's wire protocol (version 3), as far as is needed to find the COMMITs of transactions that wrote rows."""

import re
import socket
import struct
from collections.abc import Iterator

from outboxq.database.sql_text import without_literals

_RECEIVE_BYTES = 65_536
# The number of statements that the filter `containing` can search; a transaction may send more.
_REMEMBERED_STATEMENTS = 200

_ENCRYPTION_REQUESTS = (80877103, 80877104)  # SSLRequest and GSSENCRequest
_COMMIT = re.compile(r"(?:^|;)\s*(?:COMMIT|END)(?:\s+(?:WORK|TRANSACTION))?\s*(?:;|$)", re.IGNORECASE)
_WRITES = re.compile(r"(?:INSERT 0|UPDATE|DELETE|MERGE|COPY) (?!0$)\d+")
# A CTE that writes and returns its rows to a SELECT has the command tag SELECT.
_READS = re.compile(r"SELECT (?!0$)\d+")
_WRITING_CTE = re.compile(r"\s*WITH\b.*\b(?:INSERT|UPDATE|DELETE|MERGE)\b", re.IGNORECASE | re.DOTALL)
_WRITING_SCRIPT = re.compile(r"\b(?:INSERT|UPDATE|DELETE|MERGE|COPY)\b", re.IGNORECASE)


class TransactionWatcher:
    """Follows the messages of one connection, to know whether its open transaction has written rows.

    Attributes:
        statements: The first 200 statements of the open transaction.
    """

    def __init__(self) -> None:
        self.statements: list[str] = []
        self._prepared: dict[bytes, str] = {}
        self._portals: dict[bytes, str] = {}
        self._has_written = False
        self._may_write = False

    def sees_commit(self, kind: bytes, frame: bytes) -> bool:
        """Record a message of the client; return True if it is the COMMIT of a transaction that has written rows."""
        sql = self._sql_of(kind, frame[5:])
        if sql is None:
            return False
        # A word in literals and comments is no statement.
        bare = without_literals(sql)
        self._may_write = self._may_write or _WRITING_CTE.match(bare) is not None
        if len(self.statements) < _REMEMBERED_STATEMENTS:
            self.statements.append(sql)
        if _COMMIT.search(bare) is None:
            return False
        return self._has_written or _WRITING_SCRIPT.search(bare) is not None

    def _sql_of(self, kind: bytes, body: bytes) -> str | None:
        """Return the SQL text that a client's message executes, if any; remember texts that it prepares or binds."""
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

    def note_answer(self, kind: bytes, frame: bytes) -> None:
        """Record a message of the server: that a statement has written rows, or that the transaction has ended."""
        if kind == b"C":
            tag = frame[5:-1].decode(errors="replace")
            self._has_written = self._has_written or bool(_WRITES.match(tag) or (self._may_write and _READS.match(tag)))
        elif kind == b"Z" and frame[5:6] == b"I":
            # Before the client reads it and sends its next statement.
            self.statements.clear()
            self._has_written = self._may_write = False


def answers_commit(kind: bytes, frame: bytes) -> bool:
    """Return True if this message of the server is the answer to a COMMIT, or an error instead of it."""
    return kind == b"E" or (kind == b"C" and frame[5:-1] in (b"COMMIT", b"ROLLBACK"))


def read_startup(client: socket.socket) -> bytes:
    """Return the client's startup message; requests for encryption that come before it are declined."""
    while True:
        head = _read(client, 8)
        length, code = struct.unpack("!ii", head)
        if code not in _ENCRYPTION_REQUESTS:
            return head + _read(client, length - 8)
        client.sendall(b"N")


def frames(source: socket.socket) -> Iterator[tuple[bytes, bytes]]:
    """Yield the protocol's messages from a socket, each as its type and all of its bytes, until the connection ends."""
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
