"""The middleware's own error answers: problem details, RFC 9457."""

from dataclasses import dataclass

import msgspec

from outboxq.http.asgi import Headers
from outboxq.http.responses import Answer


@dataclass(frozen=True, slots=True)
class Problem:
    """A kind of error answer, such as a missing key; `detail` may have placeholders, such as `{why}`."""

    status: int
    name: str
    title: str
    detail: str
    retry_after_seconds: int | None = None


MISSING = Problem(
    400, "key-missing", "Idempotency-Key is missing", "This operation requires an Idempotency-Key header."
)
MALFORMED = Problem(400, "key-malformed", "Idempotency-Key cannot be used", "{why}.")
TOO_LARGE = Problem(
    413,
    "request-too-large",
    "The request is too large for an Idempotency-Key",
    "This operation requires an Idempotency-Key, and takes up to {max_bytes} bytes with one.",
)
REUSED = Problem(
    422,
    "key-reused",
    "Idempotency-Key is already used",
    "The key was used for another request to this operation. A key is for one request: its query, media type and body.",
)
IN_PROGRESS = Problem(
    409,
    "in-progress",
    "A request is outstanding for this Idempotency-Key",
    "A request with this key is being processed. Send the same request again later.",
    retry_after_seconds=1,
)
NOT_KEPT = Problem(
    409,
    "response-not-kept",
    "The request was executed, and its response was not kept",
    "It is not executed again. Look at the resource to see what it came to.",
)
UNKNOWN = Problem(
    409,
    "outcome-unknown",
    "It is not known if the request was executed",
    "The server stopped while it processed the request. It is not executed again until an operator of this service has "
    "found out.",
)
FAILED = Problem(
    500,
    "failed",
    "The request failed",
    "The server failed while it processed the request. It is not executed again for this key.",
)
NOT_RECORDED = Problem(
    500,
    "not-recorded",
    "The request was executed, and its outcome could not be recorded",
    "It is not executed again for this key. Look at the resource to see what it came to.",
)
ROLLED_BACK = Problem(
    500, "rolled-back", "The request was rolled back", "Nothing was changed. The request may be sent again."
)
UNAVAILABLE = Problem(
    503,
    "unavailable",
    "Idempotency keys cannot be checked now",
    "Nothing was done. Send the request again later.",
    retry_after_seconds=5,
)


@dataclass(frozen=True, slots=True)
class ProblemAnswers:
    """Makes HTTP answers from problems.

    Args:
        documentation: The URL at which the API's own documentation explains idempotency keys; each problem links to it.
    """

    documentation: str | None = None

    def answer(self, problem: Problem, **values: object) -> Answer:
        """Return the HTTP answer for a problem; `values` replace the placeholders in the problem's detail."""
        kind = f"urn:outboxq:problem:{problem.name}"
        if self.documentation is not None:
            kind = f"{self.documentation}#{problem.name}"
        detail = problem.detail.format(**values)
        body = msgspec.json.encode({"type": kind, "title": problem.title, "status": problem.status, "detail": detail})
        headers: Headers = (
            (b"content-type", b"application/problem+json"),
            (b"content-language", b"en"),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
        )
        if self.documentation is not None:
            headers += ((b"link", f'<{self.documentation}>; rel="describedby"; type="text/html"'.encode("latin-1")),)
        if problem.retry_after_seconds is not None:
            headers += ((b"retry-after", str(problem.retry_after_seconds).encode()),)
        return Answer(problem.status, headers, body)
