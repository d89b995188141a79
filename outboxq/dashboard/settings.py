"""The settings of a dashboard."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypedDict
from urllib.parse import urlsplit
from uuid import UUID

from outboxq.config import check_schema
from outboxq.dashboard.payloads import Mode, Redact
from outboxq.errors import ConfigError

MIN_LIVE_SECONDS, MAX_LIVE_SECONDS = 2.0, 60.0

logger = logging.getLogger("outboxq.dashboard")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRef:
    """The job of a page, which the application's function `links` receives, to return links to other systems.

    Attributes:
        headers: The job's headers without secrets; empty if payloads are hidden.
    """

    id: UUID
    queue: str
    kind: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Link:
    """A link from a job's page to another system, such as its logs. The application's function `links` makes it.

    Raises:
        ConfigError: an address that is neither http nor https.
    """

    text: str
    url: str

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise ConfigError("a link of the dashboard leads to an http or https address")


Links: TypeAlias = Callable[[JobRef], Sequence[Link]]


class Options(TypedDict, total=False):
    """The options of `create_app`, each with a default.

    Attributes:
        schema: The schema of outboxq's tables.
        title: The title in the corner of each page.
        environment: The name shown on every page. In `production`, `prod` or `live`, users confirm changes of many rows
            by typing a word.
        payloads: `redacted` hides values of secret keys, `hidden` all arguments, headers, results and error texts, and
            `shown` nothing.
        redact: Called with a kind and its arguments; returns the arguments that may be seen.
        links: Called with the job of a page; returns links to other systems.
        hosts: Names that the Host header may have. None allows any name: the surrounding application then has to check
            the header.
        origins: The dashboard's origins in browsers, such as `https://ops.example.com`, if a proxy changes the scheme
            or the host.
        live_seconds: The interval at which open pages are made again, 2 to 60 seconds.
    """

    schema: str
    title: str
    environment: str | None
    payloads: Mode
    redact: Redact | None
    links: Links | None
    hosts: Sequence[str] | None
    origins: Sequence[str]
    live_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The checked options of `create_app`; `Options` describes them.

    Raises:
        ConfigError: an invalid value.
    """

    schema: str = "outboxq"
    title: str = "outboxq"
    environment: str | None = None
    payloads: Mode = "redacted"
    redact: Redact | None = None
    links: Links | None = None
    hosts: frozenset[str] | None = None
    origins: frozenset[str] = frozenset()
    live_seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.payloads not in ("redacted", "hidden", "shown"):
            raise ConfigError(f"payloads takes 'redacted', 'hidden' or 'shown', got {self.payloads!r}")
        if not MIN_LIVE_SECONDS <= self.live_seconds <= MAX_LIVE_SECONDS:
            raise ConfigError(
                f"live_seconds takes {MIN_LIVE_SECONDS:.0f} to {MAX_LIVE_SECONDS:.0f}, got {self.live_seconds}"
            )

    @classmethod
    def of(cls, options: Options) -> "Settings":
        """Return the settings for the options of `create_app`; an option that is not given has its default.

        Raises:
            ConfigError: an invalid value.
        """
        hosts = options.get("hosts")
        return cls(
            schema=check_schema(options.get("schema", "outboxq")),
            title=options.get("title", "outboxq"),
            environment=options.get("environment"),
            payloads=options.get("payloads", "redacted"),
            redact=options.get("redact"),
            links=options.get("links"),
            hosts=None if hosts is None else frozenset(map(str.lower, hosts)),
            origins=frozenset(options.get("origins", ())),
            live_seconds=options.get("live_seconds", 5.0),
        )

    def links_of(self, job: JobRef) -> Sequence[Link]:
        """Return the application's links for a job. If its function `links` fails, log the error and return none."""
        try:
            return () if self.links is None else tuple(self.links(job))
        except Exception:  # code of the application's
            logger.exception("links= failed: kind=%s", job.kind)
            return ()

    @property
    def is_production(self) -> bool:
        """Return True if the environment is `production`, `prod` or `live`.

        Users then confirm changes of many rows by typing a word.
        """
        return (self.environment or "").lower() in ("production", "prod", "live")
