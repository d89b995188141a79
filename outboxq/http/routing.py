"""What Starlette's router, and so FastAPI's, leaves in the scope: whether it found an endpoint."""

from outboxq.http.keys import Scope

_NOT_FOUND, _METHOD_NOT_ALLOWED = 404, 405


def was_not_routed(scope: Scope, status: int) -> bool:
    """Whether the router answered, because nothing is there for this path, or not for this method.

    Positive evidence alone counts: of what another router answered, or an endpoint, this knows nothing.
    """
    if "router" not in scope:
        return False
    if status == _NOT_FOUND:
        # A mounted application that found nothing either is the last endpoint that was found.
        endpoint = scope.get("endpoint")
        return endpoint is None or endpoint is scope.get("app")
    methods = getattr(scope.get("route"), "methods", None)
    return status == _METHOD_NOT_ALLOWED and methods is not None and scope["method"] not in methods
