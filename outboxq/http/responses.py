"""Answers: as they are stored and replayed, and the ones that are our own (problems, RFC 9457)."""

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec
from msgspec import Meta

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
Message: TypeAlias = Mapping[str, Any]

REPLAYED, NOT_REPLAYABLE = (b"idempotent-replayed", b"true"), (b"idempotency-replayable", b"false")
KEY_IGNORED = (b"idempotency-key-ignored", b"request body too large")
RECORDED_LATE = (b"idempotency-warning", b"recorded after the endpoint's transaction")

# Of one connection (RFC 9110, section 7.6.1), and what makes a session: it belongs to whoever was answered first.
_NOT_KEPT = frozenset(
    b"connection keep-alive proxy-authenticate proxy-connection te trailer transfer-encoding upgrade set-cookie".split()
)


_NO_BODY = (204, 304)

# What servers take (RFC 9110, sections 5.1 and 5.5): they end the connection of an answer that holds anything else.
_Status: TypeAlias = Annotated[int, Meta(ge=200, le=599)]
_Name: TypeAlias = Annotated[str, Meta(pattern=r"\A[-!#$%&'*+.^_`|~0-9a-zA-Z]+\Z")]
_Value: TypeAlias = Annotated[str, Meta(pattern=r"\A[\t\x20-\x7e\x80-\xff]*\Z")]


class ResponseLike(Protocol):
    """What an endpoint answers: a Starlette or FastAPI `Response` with its whole body."""

    status_code: int

    @property
    def raw_headers(self) -> list[tuple[bytes, bytes]]: ...

    @property
    def body(self) -> bytes | memoryview: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response."""

    status: int
    headers: Headers
    body: bytes

    def says_the_same(self, other: "Answer") -> bool:
        """Whether status and body are the same."""
        return (self.status, self.body) == (other.status, other.body)

    def marked(self, header: tuple[bytes, bytes]) -> "Answer":
        """The same with one more header."""
        return replace(self, headers=(*self.headers, header))

    def messages(self) -> tuple[Message, Message]:
        """As an ASGI server takes it."""
        return (
            {"type": "http.response.start", "status": self.status, "headers": list(self.headers)},
            {"type": "http.response.body", "body": self.body},
        )


class _Stored(msgspec.Struct, omit_defaults=True):
    status: _Status
    headers: list[tuple[_Name, _Value]]
    text: str | None = None
    base64: str | None = None


_decoder = msgspec.json.Decoder(_Stored)


def encode_answer(answer: Answer, max_bytes: int) -> tuple[str | None, str | None]:
    """The answer as JSON text, or None and why it cannot be kept."""
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
    """A stored answer, marked as a replay; None for what no server can send, such as a result that an operator gave."""
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
    """Whether the body is as long as the status and the headers have it."""
    declared = {value for name, value in answer.headers if name.lower() == b"content-length"}
    return declared <= {str(len(answer.body)).encode()} and not (answer.body and answer.status in _NO_BODY)


def _kept(answer: Answer) -> Headers:
    named = {
        option.strip().lower()
        for name, value in answer.headers
        if name.lower() == b"connection"
        for option in value.split(b",")
    }
    return tuple(pair for pair in answer.headers if pair[0].lower() not in _NOT_KEPT | named)


def _as_text(body: bytes) -> str | None:
    """The body where jsonb can hold it as text, so that operators can read it."""
    try:
        return None if b"\0" in body else body.decode()
    except UnicodeDecodeError:
        return None


@dataclass(frozen=True, slots=True)
class Problems:
    """The answers that are ours.

    Args:
        documentation: Where the API's own documentation explains idempotency keys; each problem points there.
    """

    documentation: str | None = None

    def missing(self) -> Answer:
        return self._problem(
            400, "key-missing", "Idempotency-Key is missing", "This operation requires an Idempotency-Key header."
        )

    def malformed(self, why: str) -> Answer:
        return self._problem(400, "key-malformed", "Idempotency-Key cannot be used", f"{why[:1].upper()}{why[1:]}.")

    def too_large(self, max_bytes: int) -> Answer:
        return self._problem(
            413,
            "request-too-large",
            "The request is too large for an Idempotency-Key",
            f"This operation requires an Idempotency-Key, and takes up to {max_bytes} bytes with one.",
        )

    def reused(self) -> Answer:
        return self._problem(
            422,
            "key-reused",
            "Idempotency-Key is already used",
            "The key was used for another request to this operation. A key stands for one request: its query, media "
            "type and body.",
        )

    def in_progress(self, retry_after_seconds: float = 1.0) -> Answer:
        answer = self._problem(
            409,
            "in-progress",
            "A request is outstanding for this Idempotency-Key",
            "A request with this key is being processed. Send the same request again later.",
        )
        return answer.marked((b"retry-after", str(max(math.ceil(retry_after_seconds), 1)).encode()))

    def not_kept(self) -> Answer:
        return self._problem(
            409,
            "response-not-kept",
            "The request was executed, and its response was not kept",
            "It is not executed again. Look at the resource to see what it came to.",
        )

    def unknown(self) -> Answer:
        return self._problem(
            409,
            "outcome-unknown",
            "Nobody knows whether the request was executed",
            "The server stopped while it processed the request. It is not executed again until an operator of this "
            "service has found out.",
        )

    def failed(self) -> Answer:
        return self._problem(
            500,
            "failed",
            "The request failed",
            "The server failed while it processed the request. It is not executed again for this key.",
        )

    def not_recorded(self) -> Answer:
        return self._problem(
            500,
            "not-recorded",
            "The request was executed, and its outcome could not be recorded",
            "It is not executed again for this key. Look at the resource to see what it came to.",
        )

    def rolled_back(self) -> Answer:
        return self._problem(
            500, "rolled-back", "The request was rolled back", "Nothing was changed. The request may be sent again."
        )

    def unavailable(self) -> Answer:
        answer = self._problem(
            503,
            "unavailable",
            "Idempotency keys cannot be checked now",
            "Nothing was done. Send the request again later.",
        )
        return answer.marked((b"retry-after", b"5"))

    def _problem(self, status: int, name: str, title: str, detail: str) -> Answer:
        kind = f"urn:outboxq:problem:{name}" if self.documentation is None else f"{self.documentation}#{name}"
        body = msgspec.json.encode({"type": kind, "title": title, "status": status, "detail": detail})
        headers: Headers = (
            (b"content-type", b"application/problem+json"),
            (b"content-language", b"en"),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
        )
        if self.documentation is not None:
            headers += ((b"link", f'<{self.documentation}>; rel="describedby"; type="text/html"'.encode("latin-1")),)
        return Answer(status, headers, body)
