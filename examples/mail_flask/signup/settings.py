"""The settings. No other module reads the environment."""

import os
from dataclasses import dataclass, field

EXAMPLES = {
    "SIGNUP_DATABASE_URL": "postgresql+psycopg://signup:signup@localhost:5433/signup",
    "SIGNUP_SMTP": "localhost:8025",
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
    return Settings(_read("SIGNUP_DATABASE_URL"))


def read_mail_server() -> str:
    """Read the host and port of the mail server; only a relay needs it.

    Raises:
        SettingMissing: the variable is not set.
    """
    return _read("SIGNUP_SMTP")


def _read(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise SettingMissing(f"{name} is not set: export it, for example as {EXAMPLES[name]}")
    return value
