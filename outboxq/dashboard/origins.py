"""Checks of a request's origin: that its host is one of the dashboard's, and that its form comes from the dashboard.

Three independent checks keep other sites from acting through the browser of a logged-in user. Two are of the headers
Sec-Fetch-Site and Origin, which the browser sets; the third is of a token that only the dashboard's pages have. On
plain http browsers do not send Sec-Fetch-Site.
"""

import ipaddress
from collections.abc import Collection, Mapping

from starlette.requests import Request

from outboxq.dashboard.roles import User
from outboxq.dashboard.sessions import Session, Sessions

TOKEN_FIELD, TOKEN_HEADER = "csrf", "x-csrf-token"
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def host_of(given: str) -> str:
    """Return the name in a Host header, in lower case, without its port."""
    if given.startswith("["):
        return given[: given.find("]") + 1].lower()
    return given.rpartition(":")[0].lower() if ":" in given else given.lower()


def is_loopback(host: str) -> bool:
    """Return True if a host can be reached only from this machine: a loopback address, or the name localhost."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_served(given: str, hosts: Collection[str]) -> bool:
    """Return True if a Host header has a name of this dashboard.

    Other names are refused: another site may let its name point to this machine (DNS rebinding), to read the pages.

    Args:
        given: The value of the Host header.
        hosts: The names that are served in addition to this machine's loopback names. `*` allows any IP address
            too, because a server that listens on all addresses does not know them.
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
    """Return the reason to refuse a request that changes something; None if a page of this dashboard has sent it.

    Args:
        origins: The dashboard's own origins, in addition to the one that the request was sent to.
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
