"""The settings. No other module reads the environment."""

import os
from dataclasses import dataclass, field

EXAMPLES = {
    "PAYMENTS_DATABASE_URL": "postgresql+psycopg://payments:payments@localhost:5433/payments",
    "PAYMENTS_PROVIDER_URL": "http://localhost:9000",
}


class SettingMissing(Exception):
    """A variable is not set."""


@dataclass(frozen=True)
class Settings:
    """What differs from one installation to the next.

    Args:
        database_url: The shop's database, as SQLAlchemy reads it.
    """

    database_url: str = field(repr=False)


def read_settings() -> Settings:
    """Read what every process needs.

    Raises:
        SettingMissing: a variable is not set.
    """
    return Settings(_read("PAYMENTS_DATABASE_URL"))


def read_provider_url() -> str:
    """Read where the payment provider is; only a relay needs it.

    Raises:
        SettingMissing: the variable is not set.
    """
    return _read("PAYMENTS_PROVIDER_URL")


def _read(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise SettingMissing(f"{name} is not set: export it, for example as {EXAMPLES[name]}")
    return value
