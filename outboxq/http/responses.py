"""Whole HTTP responses, and their form as JSON text, in which they are stored and replayed."""

import base64
from dataclasses import dataclass, replace
from typing import Annotated, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from outboxq.http.asgi import Headers, Send, header_values

REPLAYED, NOT_REPLAYABLE = (b"idempotent-replayed", b"true"), (b"idempotency-replayable", b"false")
KEY_IGNORED = (b"idempotency-key-ignored", b"request body too large")
RECORDED_LATE = (b"idempotency-warning", b"recorded after the endpoint's transaction")

# Headers of one connection (RFC 9110, section 7.6.1), and headers that set a session, which belongs to the first
# client.
_NOT_KEPT = frozenset(
    b"connection keep-alive proxy-authenticate proxy-connection te trailer transfer-encoding upgrade set-cookie".split()
)
_NO_BODY = (204, 304)

# Values that servers accept (RFC 9110, sections 5.1 and 5.5): for others they close the connection.
_Status: TypeAlias = Annotated[int, Meta(ge=200, le=599)]
_Name: TypeAlias = Annotated[str, Meta(pattern=r"\A[-!#$%&'*+.^_`|~0-9a-zA-Z]+\Z")]
_Value: TypeAlias = Annotated[str, Meta(pattern=r"\A[\t\x20-\x7e\x80-\xff]*\Z")]


class ResponseLike(Protocol):
    """A response that an endpoint can record: such as a Starlette or FastAPI `Response`, with its whole body."""

    status_code: int

    @property
    def raw_headers(self) -> list[tuple[bytes, bytes]]: ...

    @property
    def body(self) -> bytes | memoryview: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole HTTP response, which can be stored as JSON text, and sent to a client."""

    status: int
    headers: Headers
    body: bytes

    def says_the_same(self, other: "Answer") -> bool:
        """Return True if the other answer has the same status and body; other middleware may have added headers."""
        return (self.status, self.body) == (other.status, other.body)

    def marked(self, header: tuple[bytes, bytes]) -> "Answer":
        """Return this answer with one more header."""
        return replace(self, headers=(*self.headers, header))

    async def send_to(self, send: Send) -> None:
        """Send the answer to an ASGI server."""
        await send({"type": "http.response.start", "status": self.status, "headers": list(self.headers)})
        await send({"type": "http.response.body", "body": self.body})


class _Stored(msgspec.Struct, omit_defaults=True):
    status: _Status
    headers: list[tuple[_Name, _Value]]
    text: str | None = None
    base64: str | None = None


_decoder = msgspec.json.Decoder(_Stored)


def encode_answer(answer: Answer, max_bytes: int) -> tuple[str | None, str | None]:
    """Return (JSON text, None) for an answer that can be stored; otherwise (None, the reason)."""
    if len(answer.body) > max_bytes:
        return None, f"its response takes {len(answer.body):,} bytes, over the cap of {max_bytes:,}"
    stored = _Stored(
        answer.status, [(name.decode("latin-1"), value.decode("latin-1")) for name, value in _kept(answer)]
    )
    text = _as_text(answer.body)
    if text is None:
        stored.base64 = base64.b64encode(answer.body).decode()
    else:
        stored.text = text
    if any("\0" in value for pair in stored.headers for value in pair):
        return None, "a header of its response holds a NUL character"
    return msgspec.json.encode(stored).decode(), None


def decode_answer(result: str) -> Answer | None:
    """Return the answer in a stored text, marked as a replay; None if the text is no answer that a server can send.

    For example, an operator may have stored a free text.
    """
    try:
        stored = _decoder.decode(result.encode())
        body = (stored.text or "").encode()
        if stored.base64 is not None:
            body = base64.b64decode(stored.base64, validate=True)
    except ValueError:
        return None
    headers = tuple((name.encode("latin-1"), value.strip(" \t").encode("latin-1")) for name, value in stored.headers)
    answer = Answer(stored.status, headers, body)
    return replace(answer, headers=_kept(answer)).marked(REPLAYED) if _is_whole(answer) else None


def _is_whole(answer: Answer) -> bool:
    """Return True if the body has the length that status and Content-Length state; no server would send another one."""
    declared = set(header_values(answer.headers, b"content-length"))
    return declared <= {str(len(answer.body)).encode()} and not (answer.body and answer.status in _NO_BODY)


def _kept(answer: Answer) -> Headers:
    options = (option for value in header_values(answer.headers, b"connection") for option in value.split(b","))
    named = {option.strip().lower() for option in options}
    return tuple(pair for pair in answer.headers if pair[0].lower() not in _NOT_KEPT | named)


def _as_text(body: bytes) -> str | None:
    """Return the body as text that operators can read; None if it is not UTF-8, or has a NUL (invalid in jsonb)."""
    try:
        return None if b"\0" in body else body.decode()
    except UnicodeDecodeError:
        return None
