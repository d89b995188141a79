"""For Starlette and FastAPI: the request's idempotency, called in an endpoint or given as a dependency."""

try:
    from starlette.requests import Request
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "outboxq.http.starlette needs Starlette, which FastAPI brings along: pip install starlette", name=error.name
    ) from error

from outboxq.http.endpoint import Idempotency, idempotency_of


def idempotency(request: Request) -> Idempotency:
    """The idempotency of this request: `Depends(idempotency)` in FastAPI, `idempotency(request)` in Starlette.

    Raises:
        ConfigError: the request did not pass through IdempotencyMiddleware.
    """
    return idempotency_of(request.scope)
