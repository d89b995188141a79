"""The origin of a request: the hosts that are answered, and forms that are the dashboard's own.

Three checks of their own keep other sites from acting through the browser of a user who is logged in: the browser's
Sec-Fetch-Site, its Origin, and a token that only our pages have. Browsers leave the first one out on plain http.
"""

import ipaddress
from collections.abc import Collection, Mapping

from starlette.requests import Request

from outboxq.dashboard.roles import User
from outboxq.dashboard.sessions import Session, Sessions

TOKEN_FIELD, TOKEN_HEADER = "csrf", "x-csrf-token"
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def host_of(given: str) -> str:
    """The name in a Host header, without its port."""
    if given.startswith("["):
        return given[: given.find("]") + 1].lower()
    return given.rpartition(":")[0].lower() if ":" in given else given.lower()


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach an address; a name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_served(given: str, hosts: Collection[str]) -> bool:
    """Return True if a Host header names this dashboard: a site whose name points here by DNS rebinding has another.

    Args:
        hosts: Names; with `*`, any IP address too: a server that listens on all addresses does not know them.
    """
    host = host_of(given)
    if host in _LOOPBACK or host in hosts:
        return True
    if "*" not in hosts:
        return False
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def why_foreign(
    request: Request,
    form: Mapping[str, str],
    sessions: Sessions,
    session: Session | None,
    user: User | None,
    origins: Collection[str],
) -> str | None:
    """The reason why a request that changes something is refused; None if one of our own pages has sent it.

    Args:
        origins: Origins that count as our own, in addition to the one that the request was sent to.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None and site != "same-origin":
        return "the browser says that another site sent it"
    origin = request.headers.get("origin")
    if origin is None:
        return "it has no Origin header"
    if origin != f"{request.url.scheme}://{request.headers.get('host', '')}" and origin not in origins:
        return "its Origin is another site"
    token = form.get(TOKEN_FIELD) or request.headers.get(TOKEN_HEADER)
    if session is None or not token or not sessions.is_token(session, user, token):
        return "its token is missing, or is that of another session: load the page again"
    return None
