"""The settings. No other module reads the environment."""

import os
from dataclasses import dataclass, field


class SettingMissing(Exception):
    """A variable is not set."""


@dataclass(frozen=True)
class Settings:
    """What differs from one installation to the next.

    Args:
        database_url: The application's database, as SQLAlchemy reads it, for a role that row level security binds.
    """

    database_url: str = field(repr=False)


def read_settings() -> Settings:
    """Read the settings from the environment.

    Raises:
        SettingMissing: a variable is not set.
    """
    url = os.environ.get("DOCUMENTS_DATABASE_URL")
    if not url:
        raise SettingMissing(
            "DOCUMENTS_DATABASE_URL is not set: export it, for example as "
            "postgresql+psycopg://documents:documents@localhost:5433/documents"
        )
    return Settings(database_url=url)
