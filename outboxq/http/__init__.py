"""The Idempotency-Key header for HTTP: a request is executed once, and its retries get the stored response.

Responses are stored in table `effect`. Nothing here needs a web framework; `outboxq.http.starlette` has the dependency
for Starlette and FastAPI.
"""

from outboxq.http.endpoint import Idempotency as Idempotency
from outboxq.http.endpoint import idempotency_of as idempotency_of
from outboxq.http.keys import by_authorization as by_authorization
from outboxq.http.keys import nobody as nobody
from outboxq.http.middleware import IdempotencyMiddleware as IdempotencyMiddleware

__all__ = ["Idempotency", "IdempotencyMiddleware", "by_authorization", "idempotency_of", "nobody"]
