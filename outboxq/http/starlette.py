"""The idempotency of a request for Starlette and FastAPI, as a function call or a dependency."""

try:
    from starlette.requests import Request
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "outboxq.http.starlette needs Starlette, which FastAPI brings along: pip install starlette", name=error.name
    ) from error

from outboxq.http.endpoint import Idempotency, idempotency_of


def idempotency(request: Request) -> Idempotency:
    """Return this request's idempotency: its key, and a way to record its response.

    Use it as `Depends(idempotency)` in FastAPI, and as `idempotency(request)` in Starlette.

    Raises:
        ConfigError: the request did not pass through IdempotencyMiddleware.
    """
    return idempotency_of(request.scope)
