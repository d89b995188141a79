"""Converts the various spellings of PostgreSQL URLs to URLs for SQLAlchemy with psycopg."""

from urllib.parse import unquote

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError as SQLAlchemyArgumentError

from outboxq.errors import ConfigError


def psycopg_url(url: str | URL) -> URL:
    """Convert any spelling of a PostgreSQL URL (`postgres://`, `postgresql+asyncpg://`, ...) for psycopg.

    Several hosts may be named as libpq does (`//h1:5432,h2:5433/db`) or as SQLAlchemy does (`?host=h1:5432&host=h2`);
    the hosts become the parameters `host=h1,h2` and `port=5432,5433`, which libpq and SQLAlchemy understand.

    Raises:
        ConfigError: not a PostgreSQL URL. The message never holds the URL, which may hold a password.
    """
    try:
        parsed = _parse_hosts(url) if isinstance(url, str) else url
    except (SQLAlchemyArgumentError, ValueError) as error:
        raise ConfigError(
            "the database URL cannot be parsed: expected postgresql://user:password@host/database, or "
            "postgresql://user:password@host1:5432,host2:5432/database"
        ) from error
    if parsed.drivername.split("+")[0] not in ("postgres", "postgresql"):
        raise ConfigError(f"the database URL is for {parsed.drivername!r}: outboxq needs postgresql://...")
    return _join_hosts(parsed.set(drivername="postgresql+psycopg"))


def host_names(url: URL) -> tuple[str, ...]:
    """Return the hosts that a URL from `psycopg_url` names; empty if it names none, so that libpq's default applies."""
    given = url.query.get("host") or url.host or ()
    return tuple(given.split(",")) if isinstance(given, str) else given


def _parse_hosts(url: str) -> URL:
    """Parse a URL; several hosts become the parameter `host`, as SQLAlchemy's parser refuses a comma between them."""
    scheme, separator, rest = url.partition("://")
    authority_length = next((place for place, letter in enumerate(rest) if letter in "/?"), len(rest))
    user, at, hosts = rest[:authority_length].rpartition("@")
    if "," not in hosts:
        return make_url(url)
    parsed = make_url(f"{scheme}{separator}{user}{at}{rest[authority_length:]}")
    # As in libpq, the parameter wins over the host in front of the path.
    return parsed if "host" in parsed.query else parsed.update_query_dict({"host": hosts.split(",")})


def _join_hosts(url: URL) -> URL:
    given, ports = url.query.get("host"), url.query.get("port")
    if isinstance(given, tuple):
        if ports is not None:
            raise ConfigError("the database URL names its ports twice: give host=h1:5432&host=h2:5433, without port=")
        pairs = [_host_and_port(each) for each in given]
        given, ports = ",".join(host for host, _ in pairs), ",".join(port for _, port in pairs)
    if not isinstance(given, str) or "," not in given:
        return url
    listed = ports.split(",") if isinstance(ports, str) else list(ports or [""])
    hosts = given.count(",") + 1
    if len(listed) not in (1, hosts):
        raise ConfigError(f"the database URL names {hosts} hosts and {len(listed)} ports: give each host its port")
    # libpq accepts one port for all hosts, SQLAlchemy does not.
    ports = ",".join(listed * hosts if len(listed) == 1 else listed)
    return url.update_query_dict({"host": given, **({"port": ports} if ports.strip(",") else {})})


def _host_and_port(given: str) -> tuple[str, str]:
    """Split `host`, `host:port`, `[::1]:port` or `/socket/directory` into host and port.

    The port is "" if none is given, so that libpq's default applies.
    """
    host, bracket, rest = given.partition("]") if given.startswith("[") else ("", "", given)
    name, colon, port = rest.rpartition(":")
    if not colon:
        name, port = port, ""
    if colon and port and not port.isdecimal():
        # Not shown: in a badly assembled URL it may be a piece of the password.
        raise ConfigError("the database URL has a port that is not a number")
    return unquote(host.removeprefix("[") if bracket else name), port
