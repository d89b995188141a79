"""The settings. No other module reads the environment."""

import os
from dataclasses import dataclass, field

EXAMPLES = {
    "WEBHOOKS_DATABASE_URL": "postgresql+psycopg://webhooks:webhooks@localhost:5433/webhooks",
    "WEBHOOKS_SECRETS": "whsec_$(openssl rand -base64 24)",
}


class SettingMissing(Exception):
    """A variable is not set."""


@dataclass(frozen=True)
class Settings:
    """What differs from one installation to the next.

    Args:
        database_url: The application's database, as SQLAlchemy reads it.
    """

    database_url: str = field(repr=False)


def read_settings() -> Settings:
    """Read what every process needs.

    Raises:
        SettingMissing: a variable is not set.
    """
    return Settings(_read("WEBHOOKS_DATABASE_URL"))


def read_secrets() -> tuple[str, ...]:
    """Read the secrets that senders may sign with, the newest first; only the two HTTP sides need them.

    Raises:
        SettingMissing: the variable is not set.
    """
    return tuple(_read("WEBHOOKS_SECRETS").split())


def _read(name: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        raise SettingMissing(f"{name} is not set: export it, for example as {EXAMPLES[name]}")
    return value
