"""Whatever strangers and users' programs give us is read in time linear in its length."""

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from outboxq.codec.values import encode_value
from outboxq.doctor.formatting import identifier
from outboxq.doctor.server import seconds_of
from outboxq.errors import ArgumentError, ConfigError, InvalidKey
from outboxq.execution.failure import kept_errors
from outboxq.http.asgi import declared_bytes
from outboxq.http.keys import read_key
from outboxq.http.middleware import _check_documentation
from outboxq.names import check_name
from outboxq.testing import wire
from tests.support.growth import LINEAR, growth


def _key(text: str) -> None:
    with suppress(InvalidKey):
        read_key([text.encode()])


def _argument(text: str) -> None:
    with suppress(ArgumentError):
        encode_value("x", text)


def _name(text: str) -> None:
    with suppress(ArgumentError):
        check_name("queue", text)


def _documentation(text: str) -> None:
    with suppress(ConfigError):
        _check_documentation(text)


def _length(text: str) -> None:
    declared_bytes([(b"content-length", text.encode())])


READERS: dict[str, tuple[Callable[[str], object], tuple[tuple[str, str, str], ...]]] = {
    "Idempotency-Key": (_key, (('"', "a", ""), ('"', '\\"', ""), ('"', "\\", '"'), ("", "a", ","), (" ", " ", "a "))),
    "Content-Length": (_length, (("", "9", ""), ("", "0", "1"), ("", "1", "x"))),
    "an argument with NUL": (_argument, (("", "\\", ""), ("", "\\u0000", ""), ("", "\\\\", "u0000"), ("", "\0", ""))),
    "a queue's name": (_name, (("", "a", ","), ("", " ", "a"), ("", "\1", ""))),
    "a stored history": (kept_errors, (("[", "1,", "1]"), ("", "[", ""), ("[", '"\\', ""))),
    "a documentation URL": (_documentation, (("", "a", " "), ("https://", "%", "\n"))),
    "a server setting": (seconds_of, (("", "1", "!"), ("1", " ", "!"), ("1", ".", "kB!"), ("", " ", ""))),
    "a name in a finding": (identifier, (("", "a", " "), ("", '"', ""))),
    "a COMMIT": (wire._COMMIT.search, (("", ";", ""), ("; COMMIT", " ", "x"), ("", "; END ", "x"), ("", "\n", ""))),
    "a CTE that writes": (wire._WRITING_CTE.match, (("WITH", " x", ""), ("", " ", "x"), ("", "WITH ", ""))),
    "a script that writes": (wire._WRITING_SCRIPT.search, (("", "INSERTS ", ""), ("", "_", "INSERT"))),
    "a command's tag": (wire._WRITES.match, (("UPDATE ", "1", "x"), ("INSERT 0 ", "0", "1"))),
}
CASES = [
    pytest.param(read, *hostile, id=f"{name} {number}")
    for name, (read, texts) in READERS.items()
    for number, hostile in enumerate(texts)
]


@pytest.mark.parametrize(("read", "before", "unit", "after"), CASES)
def test_what_is_given_to_us_is_read_in_linear_time(
    read: Callable[[str], object], before: str, unit: str, after: str
) -> None:
    """32 times the text takes about 32 times as long, whatever it is made of, and none is an error of ours."""
    assert growth(read, lambda size: before + unit * size + after, 300) < LINEAR


def test_a_length_of_thousands_of_digits_is_over_every_cap() -> None:
    """Python's int() refuses to read it, which would be an error of the server's."""
    assert declared_bytes([(b"content-length", b"9" * 5_000)]) > 2**60
    assert declared_bytes([(b"content-length", b"0" * 5_000 + b"12")]) == 12


def test_a_message_of_any_length_passes_the_proxy_in_linear_time() -> None:
    """One frame that comes in thousands of pieces is not copied for each of them."""

    def pass_on(size: int) -> None:
        ours, theirs = socket.socketpair()
        data = b"d" + struct.pack("!i", size + 4) + b"x" * size
        sender = threading.Thread(target=lambda: (theirs.sendall(data), theirs.close()))
        sender.start()
        assert [len(frame) for _, frame in wire.frames(ours)] == [size + 5]
        sender.join()
        ours.close()

    # So much as a processor's cache holds: 64 MB took up to 320 times as long as 2, copied once.
    assert growth(pass_on, lambda size: size, 100_000) < LINEAR
