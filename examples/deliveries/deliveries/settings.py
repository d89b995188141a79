"""The settings. No other module reads the environment."""

import os
from dataclasses import dataclass, field

EXAMPLES = {
    "DELIVERIES_DATABASE_URL": "postgresql+psycopg://deliveries:deliveries@localhost:5433/deliveries",
    "DELIVERIES_SECRET": "$(openssl rand -base64 24)",
}


class SettingMissing(Exception):
    """A variable is not set."""


@dataclass(frozen=True)
class Settings:
    """The settings that differ from one installation to the next.

    Args:
        database_url: The application's database, as SQLAlchemy reads it.
    """

    database_url: str = field(repr=False)


def read_settings() -> Settings:
    """Read the settings of every process.

    Raises:
        SettingMissing: a variable is not set.
    """
    return Settings(_read("DELIVERIES_DATABASE_URL"))


def read_master_secret() -> str:
    """Read the secret from which those of the endpoints are derived; only a relay needs it.

    Raises:
        SettingMissing: the variable is not set.
    """
    return _read("DELIVERIES_SECRET")


def _read(name: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        raise SettingMissing(f"{name} is not set: export it, for example as {EXAMPLES[name]}")
    return value
